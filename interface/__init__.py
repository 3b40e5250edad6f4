"""Block-sparse attention for video diffusion and long-context language models."""

from sparse_atten.attention import check_selection, sparse_atten_func
from sparse_atten.contracts import BlockSelection, TokenSelection
from sparse_atten.prepare import PreparedSelection

__all__ = [
    "BlockSelection",
    "PreparedSelection",
    "TokenSelection",
    "check_selection",
    "sparse_atten_func",
]
__version__ = "0.1.0"
