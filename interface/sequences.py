"""Where the sequences of a packed batch lie, safe to follow whatever the offsets hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_atten.contracts import TokenSelection


@dataclass(frozen=True, eq=False)
class Sequences:
    """Extents of the B sequences of a token selection.

    Parameters
    ----------
    q_start, q_length : Tensor, int64 [B]
        First query token of each sequence, and how many there are.
    k_start, k_length : Tensor, int64 [B]
        The same for keys. Paged sequences all start at 0.
    """

    q_start: Tensor
    q_length: Tensor
    k_start: Tensor
    k_length: Tensor

    def owners(self, num_queries: int, first_token: int = 0) -> Tensor:
        """Find the sequence of so many query tokens, int64; padding belongs to sequence B."""
        end = first_token + num_queries
        token = torch.arange(first_token, end, device=self.q_start.device)
        owner = torch.searchsorted(self.q_start + self.q_length, token, right=True)
        # Offsets that do not start at 0 leave tokens before the first sequence.
        first = self.q_start[:1] if self.q_start.shape[0] else end
        return owner.masked_fill(token < first, self.q_start.shape[0])

    def align_queries(self, num_queries: int, first_token: int = 0) -> tuple[Tensor, Tensor]:
        """Find the position of so many query tokens, and the numbers of keys of their sequences.

        Positions count keys, and the last query of a sequence is aligned with its last key
        (bottom-right): a query before the first key has a negative position. Padding tokens have
        position -1 and no keys. Both are int64 [num_queries].
        """
        end = first_token + num_queries
        token = torch.arange(first_token, end, device=self.q_start.device)
        owner = self.owners(num_queries, first_token)
        shifts, lengths = (
            torch.nn.functional.pad(x, (0, 1))  # sequence B has no keys
            for x in (self.k_length - self.q_length - self.q_start, self.k_length)
        )
        position = (token + shifts[owner]).masked_fill(owner == self.q_start.shape[0], -1)
        return position, lengths[owner]


def sequences_of(selection: TokenSelection, num_keys: int | None = None) -> Sequences:
    """Read the extents of a validated selection; nothing synchronises.

    Offsets are clamped to the tensors and made non-decreasing, lengths to what the sequence or its
    pages hold. `num_keys` is Tk of flat keys; None leaves flat lengths as they are.
    """
    q_offsets = _offsets(selection.cu_seqlens_q, selection.q2k_indices.shape[1])
    used, k_offsets = selection.seqused_k, selection.cu_seqlens_k
    if selection.page_table is not None and used is not None:
        capacity = selection.page_table.shape[1] * selection.block_size
        k_length = used.long().clamp(0, capacity)
        k_start = torch.zeros_like(k_length)
    else:
        assert k_offsets is not None  # validated
        k_offsets = _offsets(k_offsets, num_keys)
        k_start, k_length = k_offsets[:-1], k_offsets.diff()
        if used is not None:
            k_length = torch.minimum(used.long().clamp(min=0), k_length)
    return Sequences(q_offsets[:-1], q_offsets.diff(), k_start, k_length)


def _offsets(cu_seqlens: Tensor, length: int | None) -> Tensor:
    return cu_seqlens.long().clamp(0, length).cummax(0).values
