"""Selections turned around: from the blocks of each query to the queries of each block."""

from sparse_atten.csr.reference import (
    K2QCSR,
    build_k2q_csr,
    row_bound,
    transpose_block_lists,
)

__all__ = ["K2QCSR", "build_k2q_csr", "row_bound", "transpose_block_lists"]
