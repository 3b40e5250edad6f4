"""Video sparse attention: 3-D tiles, mean routing, block-sparse attention (VSA)."""

from sparse_atten.vsa.attention import (
    VideoAttentionDetails,
    coarse_attention,
    video_sparse_attention,
)
from sparse_atten.vsa.fused import pack_and_pool, unpack_gated
from sparse_atten.vsa.layout import VideoLayout
from sparse_atten.vsa.pool import pool_blocks
from sparse_atten.vsa.route import region_budget, route, route_scores

__all__ = [
    "VideoAttentionDetails",
    "VideoLayout",
    "coarse_attention",
    "pack_and_pool",
    "pool_blocks",
    "region_budget",
    "route",
    "route_scores",
    "unpack_gated",
    "video_sparse_attention",
]
