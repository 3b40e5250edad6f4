"""Selections turned around: from the blocks of each query to the queries of each block."""

from sparse_atten.csr.build import build_k2q_csr, row_bound, transpose_block_lists
from sparse_atten.csr.device import preload
from sparse_atten.csr.reference import K2QCSR

__all__ = ["K2QCSR", "build_k2q_csr", "preload", "row_bound", "transpose_block_lists"]
