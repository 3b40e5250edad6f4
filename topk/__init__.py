"""Selection of the best-scoring blocks of each row."""

from sparse_atten.topk.block_topk import block_topk, preload

__all__ = ["block_topk", "preload"]
