"""What the integers of a selection must be: the value checks.

They read tensor values, so that on a device they synchronise: `check_selection` runs them there on
request only, while CPU tensors are checked at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_atten.contracts import EMPTY, BlockSelection, Problem, Selection, TokenSelection


def check_values(selection: Selection, problem: Problem) -> None:
    """Raise ValueError that names the first entry of a validated selection that breaks a rule."""
    if isinstance(selection, BlockSelection):
        _check_blocks(selection, problem)
    else:
        _check_tokens(selection, problem)


def _check_blocks(selection: BlockSelection, problem: Problem) -> None:
    block = selection.block_size
    num_kv_blocks = -(-problem.num_keys // block)
    width = problem.table_width
    sparse = slice(selection.dense_rows, None)
    counts = selection.q2k_counts[:, :, sparse]
    ids = selection.q2k_indices[:, :, sparse]
    first = (0, 0, selection.dense_rows, 0)
    _check_range("q2k_counts", counts, 0, width, first, note=" (K)")
    live = torch.arange(width, device=ids.device) < counts[..., None]
    last_id = num_kv_blocks - 1
    _check_range("q2k_indices", ids, 0, last_id, first, note=" (Nkv - 1)", where=live)
    _check_duplicates("q2k_indices", ids, live, first)
    for name, sizes, length in (
        ("kv_block_sizes", selection.kv_block_sizes, problem.num_keys),
        ("q_block_sizes", selection.q_block_sizes, problem.num_queries),
    ):
        if sizes is not None:
            starts = torch.arange(0, length, block, device=sizes.device)
            rows_left = (length - starts).clamp(max=block)
            _check_range(name, sizes, 0, rows_left.expand_as(sizes))


def _check_tokens(selection: TokenSelection, problem: Problem) -> None:
    starts_q = selection.cu_seqlens_q
    _check_offsets("cu_seqlens_q", starts_q, problem.num_queries)
    lengths_q = starts_q.diff()
    _check_bound("max_seqlen_q", selection.max_seqlen_q, lengths_q, "query tokens")
    lengths_k = _key_lengths(selection, problem)
    _check_bound("max_seqlen_k", selection.max_seqlen_k, lengths_k, "keys")
    blocks = (lengths_k + selection.block_size - 1) // selection.block_size  # [B]
    if selection.page_table is not None:
        pages = selection.page_table
        used = torch.arange(pages.shape[1], device=pages.device) < blocks[:, None]
        num_pages = problem.num_keys // selection.block_size
        _check_range("page_table", pages, 0, num_pages - 1, where=used)

    num_owned = int(starts_q[-1])  # the tokens after the last sequence are padding
    ids = selection.q2k_indices[:, :num_owned]
    last_id = torch.repeat_interleave(blocks - 1, lengths_q, output_size=num_owned)
    bound = last_id[:, None].expand_as(ids)
    live = ids != EMPTY
    _check_range("q2k_indices", ids, 0, bound, note=" or -1", where=live)
    _check_duplicates("q2k_indices", ids, live)
    if selection.head_indices is not None:
        _check_group_heads(selection.head_indices[:num_owned], problem.group_size)


def _key_lengths(selection: TokenSelection, problem: Problem) -> Tensor:
    """Check cu_seqlens_k and seqused_k; return the keys of each sequence, [B]."""
    used, offsets = selection.seqused_k, selection.cu_seqlens_k
    if selection.page_table is not None:
        assert used is not None  # validated
        capacity = selection.page_table.shape[1] * selection.block_size
        _check_range("seqused_k", used, 0, capacity, note=" (pages * block_size)")
        return used
    assert offsets is not None  # validated
    _check_offsets("cu_seqlens_k", offsets, problem.num_keys)
    lengths = offsets.diff()
    if used is None:
        return lengths
    _check_range("seqused_k", used, 0, lengths, note=" (the sequence's keys)")
    return used


def _check_range(
    name: str,
    values: Tensor,
    low: int,
    high: int | Tensor,
    first: tuple[int, ...] = (),
    *,
    note: str = "",
    where: Tensor | None = None,
) -> None:
    """Check low <= values <= high; `first` is where values[0, 0, ...] lies in the user's tensor."""
    bad = (values < low) | (values > high)
    if where is not None:
        bad &= where
    index = _first(bad)
    if index is not None:
        top = high if isinstance(high, int) else int(high[index])
        place = _place(index, first)
        raise ValueError(f"{name}[{place}] must be in {low}..{top}{note}, got {int(values[index])}")


def _check_duplicates(name: str, ids: Tensor, live: Tensor, first: tuple[int, ...] = ()) -> None:
    """Check that no list holds a live id twice."""
    unused = torch.iinfo(torch.int32).max
    ordered = ids.masked_fill(~live, unused).sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != unused)
    index = _first(repeated)
    if index is not None:
        place = _place(index[:-1], first[:-1])
        raise ValueError(
            f"{name}[{place}] must list each block once, got block {int(ordered[index])} twice"
        )


def _check_offsets(name: str, offsets: Tensor, length: int) -> None:
    if int(offsets[0]) != 0:
        raise ValueError(f"{name}[0] must be 0, got {int(offsets[0])}")
    index = _first(offsets.diff() < 0)
    if index is not None:
        before, after = offsets[index[0] : index[0] + 2].tolist()
        raise ValueError(
            f"{name}[{index[0] + 1}] must be at least the offset before it, {before}, got {after}"
        )
    if int(offsets[-1]) > length:
        raise ValueError(
            f"{name}[-1] must be at most the {length} tokens of the tensor, got {int(offsets[-1])}"
        )


def _check_bound(name: str, bound: int, lengths: Tensor, unit: str) -> None:
    index = _first(lengths > bound)
    if index is not None:
        raise ValueError(
            f"{name} must be at least the length of every sequence, got {bound}, "
            f"but sequence {index[0]} has {int(lengths[index])} {unit}"
        )


def _check_group_heads(indices: Tensor, group: int) -> None:
    """Check that the heads of a GQA group list the same blocks, in whatever order."""
    if group < 2:
        return
    grouped = indices.sort(-1).values.unflatten(1, (-1, group))
    index = _first((grouped != grouped[:, :, :1]).any(-1))
    if index is not None:
        token, leader, member = index
        head = leader * group + member
        raise ValueError(
            f"head_indices[{token}, {head}] must list the blocks of its group's first head, "
            f"got {indices[token, head].tolist()} for {indices[token, leader * group].tolist()}"
        )


def _first(bad: Tensor) -> tuple[int, ...] | None:
    """Index of the first True, in row-major order."""
    if not bool(bad.any()):
        return None
    flat = int(bad.flatten().to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), bad.shape))


def _place(index: tuple[int, ...], first: tuple[int, ...]) -> str:
    origin = first[: len(index)] or (0,) * len(index)
    return ", ".join(str(i + o) for i, o in zip(index, origin, strict=True))
