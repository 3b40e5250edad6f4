"""Block-max scores by the Hopper kernel, where it can serve a scoring call.

A launch is laid out once for tensors of some shapes and strides; later calls give addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels
from sparse_atten.cute_kernels.common.steps import Address
from sparse_atten.cute_kernels.common.target import device_capability
from sparse_atten.cute_kernels.msa_scores_arguments import (
    BLOCK,
    HEAD_DIMS,
    arguments_of,
    is_aligned,
    most_tokens,
)
from sparse_atten.dispatch import is_installed
from sparse_atten.vsa.device import DTYPES, device_target, planned

if TYPE_CHECKING:
    from sparse_atten.msa.scores import BlockScorer

_KERNEL = "sparse_atten.cute_kernels.msa_scores_sm90"
_CAPABILITY = (9, 0)
_launches: Memo[Callable[..., None]] = Memo()


def can_score(scorer: BlockScorer) -> bool:
    """Whether the kernel serves a call: device, dtype, head dim, block size and alignment."""
    q, k = scorer.q, scorer.k
    return (
        q.dtype in DTYPES
        and q.shape[2] in HEAD_DIMS
        and scorer.selection.block_size == BLOCK
        and q.numel() > 0
        and k.numel() > 0
        and runs_kernels(q)
        and device_capability(q.device) == _CAPABILITY
        and is_installed("cutlass")
        and is_aligned(q)
        and is_aligned(k)
        and tokens_at_once(scorer) > 0
    )


def tokens_at_once(scorer: BlockScorer) -> int:
    """Return how many query tokens a launch can score; 0 where there is nothing to score."""
    blocks, batch = scorer.num_blocks, scorer.sequences.q_start.shape[0]
    return most_tokens(batch, scorer.q.shape[1], blocks) if blocks and batch else 0


def score_tokens(scorer: BlockScorer, scores: Tensor, first_token: int) -> None:
    """Score some query tokens on the current stream of q's device.

    Parameters
    ----------
    scorer : BlockScorer
        The call; `can_score` says yes.
    scores : Tensor, float32 [Hidx, n, C]
        The output, for C tokens from `first_token`; tokens are adjacent in memory. What it holds
        stays where a token sees no key of a block, or becomes -inf.
    """
    q, k, selection = scorer.q, scorer.k, scorer.selection
    lengths = selection.cu_seqlens_q, selection.cu_seqlens_k, selection.seqused_k
    tensors = (q, k, *lengths, selection.page_table, scores)
    key = key_of(*tensors, selection.kv_layout, scorer.causal, scorer.scale, first_token)
    launch = _launches.find(key)
    if launch is None:
        launch = _launches.keep(key, _laid_out(scorer, scores, first_token))
    launch(*[0 if x is None else x.data_ptr() for x in tensors])


def _laid_out(scorer: BlockScorer, scores: Tensor, first_token: int) -> Callable[..., None]:
    from sparse_atten.cute_kernels.msa_scores_sm90 import Config

    arguments = arguments_of(
        scorer.q,
        scorer.k,
        scores,
        scorer.selection,
        causal=scorer.causal,
        scale=scorer.scale,
        first_token=first_token,
    )
    device = scorer.q.device
    config = Config(dtype=DTYPES[scorer.q.dtype], head_dim=scorer.q.shape[2])
    places = [Address(number) for number in range(7)]
    return planned(_KERNEL, config, device_target(scorer.q), device, arguments.at(places))
