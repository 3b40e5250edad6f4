"""A selection seen as rows: a row is a set of queries that share one list of KV blocks.

For a BlockSelection a row is a query block of one head, for a TokenSelection one token's heads of a
GQA group. What the rows say is safe to follow: ids, counts, sizes, lengths and pages outside their
range have become keys that are not valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparse_atten.contracts import BlockSelection, Selection, TokenSelection
from sparse_atten.sequences import sequences_of


@dataclass(frozen=True, eq=False)
class Lists:
    """Some rows and their KV blocks; ids that are not live count for nothing."""

    rows: Tensor  # int64 [R]
    ids: Tensor  # int64 [R, K]
    live: Tensor  # bool [R, K]


class Queries(NamedTuple):
    """The queries of some rows."""

    q: Tensor  # [R, M, D], padding zeroed
    valid: Tensor  # bool [R, M]
    last_key: Tensor  # int64 [R, M]; position of the last key that a causal query sees


class Keys(NamedTuple):
    """Where the keys of some rows lie."""

    places: tuple[Tensor, ...]  # index that picks [R, L] rows of k and of v
    valid: Tensor  # bool [R, L]
    position: Tensor  # int64 [R, L]


class Rows(Protocol):
    """What the gathered form needs to know of a selection and its tensors."""

    k: Tensor
    v: Tensor
    block_size: int
    num_rows: int
    row_height: int  # M, queries of a row

    def lists(self) -> list[Lists]:
        """Return the rows in groups of equal table width; rows that see nothing may be absent."""

    def queries(self, rows: Tensor) -> Queries:
        """Gather the queries of some rows."""

    def keys(self, rows: Tensor, ids: Tensor, live: Tensor) -> Keys:
        """Address the keys of block ids [R, k]."""

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gather [R, M, ...] from a tensor in q's order of dims."""

    def take_stat(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gather [R, M] from a tensor in the LSE's order of dims."""

    def assemble(self, values: Tensor) -> Tensor:
        """Turn [num_rows, M, X] into q's order of dims."""

    def assemble_stat(self, values: Tensor) -> Tensor:
        """Turn [num_rows, M] into the LSE's order of dims."""

    def restore_kv(self, x: Tensor) -> Tensor:
        """Turn a tensor in the order of `k` and `v` here into the caller's order."""


def rows_of(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Rows:
    """See a validated selection and its tensors as rows."""
    if isinstance(selection, BlockSelection):
        return _BlockRows(q, k, v, selection)
    return _TokenRows(q, k, v, selection)


class _BlockRows:
    """Rows of a BlockSelection: row = (batch, head, query block)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> None:
        q, k, v = (_bhsd(x, selection) for x in (q, k, v))
        self.q, self.k, self.v, self.selection = q, k, v, selection
        self.block_size = self.row_height = selection.block_size
        self.batch, self.num_heads, self.num_q_blocks = selection.q2k_counts.shape
        self.num_rows = self.batch * self.num_heads * self.num_q_blocks
        self.num_kv_blocks = -(-k.shape[2] // self.block_size)
        self.group = self.num_heads // max(k.shape[1], 1)
        self.slots = torch.arange(self.block_size, device=q.device)

        self.q_sizes = self._sizes(selection.q_block_sizes, q.shape[2])  # [Nq]
        self.kv_sizes = self._sizes(selection.kv_block_sizes, k.shape[2]).expand(self.batch, -1)
        # Positions count valid tokens only; the last query is aligned with the last key.
        self.q_starts = self.q_sizes.cumsum(0) - self.q_sizes
        self.kv_starts = self.kv_sizes.cumsum(1) - self.kv_sizes
        self.offset = self.kv_sizes.sum(1) - self.q_sizes.sum()  # [B]

    def _sizes(self, sizes: Tensor | None, length: int) -> Tensor:
        """Valid tokens of each block, clamped to the block and to the rows that are left."""
        starts = torch.arange(0, length, self.block_size, device=self.q.device)
        rows_left = (length - starts).clamp(max=self.block_size)
        return rows_left if sizes is None else torch.minimum(sizes.clamp(min=0), rows_left)

    def _coordinates(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        block = rows % self.num_q_blocks
        head = rows // self.num_q_blocks % self.num_heads
        return rows // (self.num_q_blocks * self.num_heads), head, block

    def lists(self) -> list[Lists]:
        selection, device = self.selection, self.q.device
        rows = torch.arange(self.num_rows, device=device).view(
            self.batch, self.num_heads, self.num_q_blocks
        )
        dense = rows[..., : selection.dense_rows].flatten()
        every = torch.arange(self.num_kv_blocks, device=device).expand(dense.numel(), -1)
        sparse = slice(selection.dense_rows, None)
        ids = selection.q2k_indices[:, :, sparse].flatten(0, 2).long()
        counts = selection.q2k_counts[:, :, sparse].flatten()
        live = torch.arange(ids.shape[1], device=device) < counts[:, None]
        return [
            self._group(dense, every, torch.ones_like(every, dtype=torch.bool)),
            self._group(rows[..., sparse].flatten(), ids, live),
        ]

    def _group(self, rows: Tensor, ids: Tensor, live: Tensor) -> Lists:
        """Drop what adds nothing: ids out of range, empty KV blocks, rows that are all padding."""
        if self.num_kv_blocks == 0:
            return Lists(rows[:0], ids[:0], live[:0])
        batch, _, block = self._coordinates(rows)
        live = live & (ids >= 0) & (ids < self.num_kv_blocks)
        ids = ids.masked_fill(~live, 0)
        live &= (self.kv_sizes[batch[:, None], ids] > 0) & (self.q_sizes[block] > 0)[:, None]
        return Lists(rows, ids, live)

    def queries(self, rows: Tensor) -> Queries:
        batch, _, block = self._coordinates(rows)
        valid = self.slots < self.q_sizes[block][:, None]
        position = self.q_starts[block][:, None] + self.slots
        q = self._pick(self.q, rows).masked_fill(~valid[..., None], 0)
        return Queries(q, valid, position + self.offset[batch][:, None])

    def keys(self, rows: Tensor, ids: Tensor, live: Tensor) -> Keys:
        batch, head, _ = self._coordinates(rows)
        size = self.kv_sizes[batch[:, None], ids]
        valid = live[..., None] & (self.slots < size[..., None])
        position = self.kv_starts[batch[:, None], ids][..., None] + self.slots
        token = (ids[..., None] * self.block_size + self.slots).clamp(max=self.k.shape[2] - 1)
        places = (batch[:, None], head[:, None] // self.group, token.flatten(1))
        return Keys(places, valid.flatten(1), position.flatten(1))

    def _pick(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gather from [B, H, S, ...]; slots past the last token repeat it."""
        batch, head, block = self._coordinates(rows)
        token = block[:, None] * self.block_size + self.slots
        return x[batch[:, None], head[:, None], token.clamp(max=x.shape[2] - 1)]

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._pick(_bhsd(x, self.selection), rows)

    def take_stat(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._pick(x, rows)

    def assemble(self, values: Tensor) -> Tensor:
        return _bhsd(self.assemble_stat(values), self.selection)

    def assemble_stat(self, values: Tensor) -> Tensor:
        num_slots = self.num_q_blocks * self.block_size
        values = values.reshape(self.batch, self.num_heads, num_slots, *values.shape[2:])
        return values[:, :, : self.q.shape[2]]

    def restore_kv(self, x: Tensor) -> Tensor:
        return _bhsd(x, self.selection)


class _TokenRows:
    """Rows of a TokenSelection: row = (KV head, query token), its queries are a GQA group."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, selection: TokenSelection) -> None:
        self.q, self.k, self.v, self.selection = q, k, v, selection
        self.block_size = selection.block_size
        self.num_kv_heads, self.num_tokens, _ = selection.q2k_indices.shape
        self.num_rows = self.num_kv_heads * self.num_tokens
        self.row_height = q.shape[1] // max(self.num_kv_heads, 1)
        self.slots = torch.arange(self.block_size, device=q.device)

        extents = sequences_of(selection, k.shape[0])
        num_sequences = extents.q_start.shape[0]
        owner = extents.owners(self.num_tokens)
        self.in_sequence = owner < num_sequences
        self.sequence = owner.clamp(max=max(num_sequences - 1, 0))  # [Tq]
        self.last_key, _ = extents.align_queries(self.num_tokens)  # causal, bottom-right
        self.kv_starts, self.kv_lengths = extents.k_start, extents.k_length

    def lists(self) -> list[Lists]:
        rows = torch.arange(self.num_rows, device=self.q.device)
        ids = self.selection.q2k_indices.flatten(0, 1).long()
        if self.kv_lengths.numel() == 0 or self.k.numel() == 0:
            return []
        token = rows % max(self.num_tokens, 1)
        blocks = (self.kv_lengths + self.block_size - 1) // self.block_size
        live = (ids >= 0) & (ids < blocks[self.sequence[token]][:, None])
        live &= self.in_sequence[token][:, None]
        return [Lists(rows, ids.masked_fill(~live, 0), live)]

    def queries(self, rows: Tensor) -> Queries:
        token = rows % max(self.num_tokens, 1)
        valid = self.in_sequence[token][:, None].expand(-1, self.row_height)
        last_key = self.last_key[token][:, None].expand(-1, self.row_height)
        return Queries(self.take(self.q, rows), valid, last_key)

    def keys(self, rows: Tensor, ids: Tensor, live: Tensor) -> Keys:
        num_tokens = max(self.num_tokens, 1)
        head, token = rows // num_tokens, rows % num_tokens
        sequence = self.sequence[token]
        position = ids[..., None] * self.block_size + self.slots
        valid = live[..., None] & (position < self.kv_lengths[sequence][:, None, None])
        page_table = self.selection.page_table
        if page_table is None:
            token = position + self.kv_starts[sequence][:, None, None]
            token = token.clamp(max=self.k.shape[0] - 1).flatten(1)
            return Keys((token, head[:, None]), valid.flatten(1), position.flatten(1))
        page = page_table[sequence[:, None], ids].long()
        num_pages = self.k.shape[0]
        valid = valid & ((page >= 0) & (page < num_pages))[..., None]
        page = page.clamp(0, num_pages - 1)[..., None].expand_as(position).flatten(1)
        slot = self.slots.expand_as(position).flatten(1)
        hnd = self.selection.kv_layout == "hnd"
        places = (page, head[:, None], slot) if hnd else (page, slot, head[:, None])
        return Keys(places, valid.flatten(1), position.flatten(1))

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        grouped = x.unflatten(1, (self.num_kv_heads, self.row_height))
        num_tokens = max(self.num_tokens, 1)
        return grouped[rows % num_tokens, rows // num_tokens]

    def take_stat(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.take(x, rows)

    def assemble(self, values: Tensor) -> Tensor:
        grouped = values.unflatten(0, (self.num_kv_heads, self.num_tokens))
        return grouped.transpose(0, 1).flatten(1, 2)

    def assemble_stat(self, values: Tensor) -> Tensor:
        return self.assemble(values)

    def restore_kv(self, x: Tensor) -> Tensor:
        return x


def _bhsd(x: Tensor, selection: BlockSelection) -> Tensor:
    """Swap sequence and head where the layout is "bshd"; its own inverse."""
    return x.transpose(1, 2) if selection.layout == "bshd" else x
