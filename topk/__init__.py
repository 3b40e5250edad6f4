"""Selection of the best-scoring blocks of each row."""

from sparse_atten.topk.reference import block_topk

__all__ = ["block_topk"]
