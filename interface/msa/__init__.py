"""MiniMax sparse attention: block-max index scores, per-token top-k, KV-outer attention (MSA)."""

from sparse_atten.msa.attention import minimax_flops, minimax_sparse_attention
from sparse_atten.msa.kv_outer import merge_partials, partial_attention
from sparse_atten.msa.scores import block_max_scores
from sparse_atten.msa.select import index_branch, select_blocks

__all__ = [
    "block_max_scores",
    "index_branch",
    "merge_partials",
    "minimax_flops",
    "minimax_sparse_attention",
    "partial_attention",
    "select_blocks",
]
