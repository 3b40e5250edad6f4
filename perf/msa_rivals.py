"""What a user of MSA would pick instead, each behind the same three questions.

A rival has a `name`, says why it cannot run here (`missing`), and turns a layer into a `Candidate`
(`prepare`), or raises `UnsupportedError`. Preparation is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from perf.msa_layer import BLOCK, HEAD_DIM, Layer
from perf.rivals import (
    SDPA_BACKENDS,
    UnsupportedError,
    expect_parameters,
    no_triton,
    not_installed,
)

FLEX_TOKENS = 32768  # a block of queries chooses nearly all blocks: it takes longer than dense


class Candidate(NamedTuple):
    """A call that returns the output [S, Hq, D], and the blocks that each token sees (None: all).

    `dense` says that its work is that of all causal pairs.
    """

    call: Callable[[], Tensor]
    lists: Tensor | None
    dense: bool = False


class Rival(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """What rows and `--rivals` call it."""

    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""

    def prepare(self, layer: Layer, lists: Tensor) -> Candidate:
        """Make tables and compile; `lists` are the blocks of each token, int32 [Hkv, S, K]."""


@dataclass(frozen=True)
class Fa4Causal:
    """FlashAttention-4, every key up to the query's own."""

    name: str = "fa4-dense"

    def missing(self) -> str | None:
        """It is a package of its own."""
        return not_installed("flash_attn.cute", "flash-attn-4")

    def prepare(self, layer: Layer, lists: Tensor) -> Candidate:
        """Nothing to prepare: it compiles at the first call."""
        from flash_attn.cute import flash_attn_func

        expect_parameters(flash_attn_func, ["causal"])
        q, k, v = (x[None] for x in layer.inputs)
        return Candidate(lambda: flash_attn_func(q, k, v, causal=True)[0][0], None, dense=True)


@dataclass(frozen=True)
class SdpaCausal:
    """torch's scaled_dot_product_attention; cuDNN's kernel where there is one."""

    name: str = "sdpa"

    def missing(self) -> str | None:
        """It is part of torch."""
        return None

    def prepare(self, layer: Layer, lists: Tensor) -> Candidate:
        """Nothing to prepare."""
        q, k, v = heads_first(layer)
        gqa = layer.group > 1

        def call() -> Tensor:
            with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
            return out[0].transpose(0, 1)

        return Candidate(call, None, dense=True)


@dataclass(frozen=True)
class FlexTokens:
    """torch's FlexAttention, compiled (Triton): blocks of 128 queries, masked token by token."""

    name: str = "flex"

    def missing(self) -> str | None:
        """Its kernels are Triton's, whose launchers are C."""
        return no_triton()

    def prepare(self, layer: Layer, lists: Tensor) -> Candidate:
        """Make the block mask and compile."""
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        if layer.tokens > FLEX_TOKENS:
            raise UnsupportedError(f"left out beyond {FLEX_TOKENS} tokens, to bound the run")
        table = choice_table(lists)
        group = layer.group
        partial, full = (
            tuple(x.repeat_interleave(group, 0)[None] for x in block_lists(kept))
            for kept in tiles_of(table)
        )
        mask = BlockMask.from_kv_blocks(
            *partial,
            *full,
            BLOCK_SIZE=BLOCK,
            mask_mod=lambda b, h, q, k: table[h // group, q, k // BLOCK] & (k <= q),
            seq_lengths=(layer.tokens, layer.tokens),
        )
        torch.compiler.reset()  # or the shapes before this one would count as recompilations
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = heads_first(layer)

        def call() -> Tensor:
            out = compiled(q, k, v, block_mask=mask, enable_gqa=group > 1)
            return out[0].transpose(0, 1)

        return Candidate(call, lists)


@dataclass(frozen=True)
class FlashMsa:
    """flash-msa's training forward: its own choice of blocks, and attention to them."""

    name: str = "flash-msa"

    def missing(self) -> str | None:
        """It is a package of its own."""
        return not_installed("flash_msa", "flash-msa")

    def prepare(self, layer: Layer, lists: Tensor) -> Candidate:
        """Take its choice, by which the output is judged."""
        from flash_msa import flash_msa_func
        from flash_msa.flash_msa import select_blocks

        expect_parameters(flash_msa_func, ["q_proxy", "k_proxy", "top_k", "scale"])
        blocks = -(-layer.tokens // BLOCK)
        if layer.tokens % BLOCK or layer.topk > min(blocks, 32):
            raise UnsupportedError("whole blocks of 128 tokens, and at most 32 of them a token")
        scale = 1 / math.sqrt(HEAD_DIM)
        q, k, v = (x.contiguous() for x in heads_first(layer))
        proxy = [x.transpose(0, 1)[None].contiguous() for x in (layer.q_idx, layer.k_idx)]
        choice = {"num_blocks": blocks, "top_k_blocks": layer.topk}
        own = select_blocks(*proxy, scale=scale, **choice)[0]
        past = own > torch.arange(layer.tokens, device=own.device)[:, None] // BLOCK

        def call() -> Tensor:
            out, _ = flash_msa_func(*proxy, q, k, v, top_k=layer.topk * BLOCK, scale=scale)
            return out.view(layer.q.shape)

        return Candidate(call, own.masked_fill(past, -1))


RIVALS: tuple[Rival, ...] = (Fa4Causal(), SdpaCausal(), FlexTokens(), FlashMsa())


def heads_first(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v as [1, H, S, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in layer.inputs)
    return q, k, v


def choice_table(lists: Tensor) -> Tensor:
    """Say which blocks each token chose, bool [Hkv, S, n]."""
    heads, tokens, _ = lists.shape
    blocks = -(-tokens // BLOCK)
    table = torch.zeros(heads, tokens, blocks + 1, dtype=torch.bool, device=lists.device)
    table.scatter_(2, lists.masked_fill(lists < 0, blocks).long(), value=True)
    return table[..., :blocks].contiguous()


def tiles_of(table: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles of 128 queries by 128 keys with a pair that is hidden, and those without, [Hkv, n, n].

    Tiles in which no query sees a key are in neither.
    """
    heads, tokens, blocks = table.shape
    missing = -tokens % BLOCK
    some, every = (
        pad(table, (0, 0, 0, missing), value=filled).view(heads, blocks, BLOCK, blocks)
        for filled in (False, True)
    )
    place = torch.arange(blocks, device=table.device)
    full = every.all(2) & (place < place[:, None])
    return some.any(2) & (place <= place[:, None]) & ~full, full


def block_lists(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list what is kept of each row, int32 [H, n] and [H, n, n]; the rest follows."""
    order = kept.byte().sort(dim=-1, descending=True, stable=True).indices
    return kept.sum(-1, dtype=torch.int32), order.int().contiguous()
