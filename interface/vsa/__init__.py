"""Video sparse attention: 3-D tiles, mean routing, block-sparse attention (VSA)."""

from sparse_atten.vsa.attention import (
    VideoAttentionDetails,
    coarse_attention,
    video_sparse_attention,
)
from sparse_atten.vsa.layout import VideoLayout
from sparse_atten.vsa.pool import pool_blocks
from sparse_atten.vsa.route import region_budget, route, route_scores

__all__ = [
    "VideoAttentionDetails",
    "VideoLayout",
    "coarse_attention",
    "pool_blocks",
    "region_budget",
    "route",
    "route_scores",
    "video_sparse_attention",
]
