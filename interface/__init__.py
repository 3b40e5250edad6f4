"""Block-sparse attention for video diffusion and long-context language models.

One entry, `sparse_atten_func`, takes a selection (which KV blocks each query sees) and runs the
best backend for the device. `sparse_atten.vsa`, `sparse_atten.msa` and `sparse_atten.nsa` hold the
front ends that make selections; importing any of them needs no GPU, no driver and no compiler.
"""

from sparse_atten.attention import check_selection, preload, sparse_atten_func
from sparse_atten.contracts import BlockSelection, TokenSelection
from sparse_atten.explanation import Explanation, explain
from sparse_atten.preparation import PreparedSelection, prepare

__all__ = [
    "BlockSelection",
    "Explanation",
    "PreparedSelection",
    "TokenSelection",
    "check_selection",
    "explain",
    "preload",
    "prepare",
    "sparse_atten_func",
]
__version__ = "0.1.0"
