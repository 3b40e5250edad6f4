"""The reference backend: gathered attention in torch, on any device, with gradients.

Rows (see `rows`) are handled in chunks: their keys and values are gathered, so that the cost
follows the selected blocks, and long lists are folded in piece by piece with the online softmax, so
that memory stays under `max_workspace_bytes`. Softmax and products are float32 (float64 for float64
inputs). The backward pass recomputes the probabilities from the LSE, chunk by chunk.

On the CPU rows are ordered by the length of their lists and cut to it. On a device the counts stay
there: every row costs the width of the table, and nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparse_atten.contracts import Options, Selection
from sparse_atten.rows import Lists, Queries, Rows, rows_of

_CPU_WORKSPACE = 32 << 20  # bytes; a chunk about the size of a last-level cache is fastest
_DEVICE_WORKSPACE = 1 << 30  # bytes


class Result(NamedTuple):
    """Output in the layout of q, and the float32 natural-log LSEs ([B, Hq, Sq] or [Tq, Hq])."""

    out: Tensor
    lse: Tensor
    lse_t: Tensor | None


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    options: Options,
    *,
    out: Tensor | None = None,
    max_workspace_bytes: int | None = None,
) -> Result:
    """Attend over the selected blocks; arguments as validated by `contracts.validate`.

    No integer of the selection is trusted: ids, counts, sizes, lengths and pages outside their
    range are clamped or ignored, and duplicate ids count once for each occurrence. Gradients flow
    to q, k and v from the output and from both LSEs.
    """
    call = selection, options, workspace_bytes(q, max_workspace_bytes)
    with without_autocast(q):
        result = Result(*_Attention.apply(q, k, v, call))
    return result if out is None else result._replace(out=out.copy_(result.out))


def workspace_bytes(q: Tensor, max_workspace_bytes: int | None) -> int:
    """Bound on temporary memory: the caller's, or the backend's own."""
    if max_workspace_bytes is not None:
        return max_workspace_bytes
    return _CPU_WORKSPACE if q.device.type == "cpu" else _DEVICE_WORKSPACE


# A selection, the options, and the bound on temporary memory in bytes.
Call = tuple[Selection, Options, int]


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Keep float32 products float32 inside a caller's autocast region."""
    kind = x.device.type  # torch 2.11 cannot compile torch.amp.is_autocast_available(kind)
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Result:
        selection, options, max_bytes = call
        result = _forward(rows_of(q, k, v, selection), options, max_bytes)
        ctx.save_for_backward(q, k, v, *result)
        ctx.call = call
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *result = ctx.saved_tensors
        return *reference_backward((q, k, v), Result(*result), Result(*grads), ctx.call), None


def _forward(view: Rows, options: Options, max_bytes: int) -> Result:
    shape, device = (view.num_rows, view.row_height), view.v.device
    out = view.v.new_zeros(*shape, view.v.shape[-1])
    lse = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)
    lse_t = None if options.lse_temperature is None else lse.clone()
    for chunk in _chunks(view, max_bytes):
        part = _attend(view, chunk, options, max_bytes)
        out[chunk.rows] = part.out
        lse[chunk.rows] = part.lse
        if lse_t is not None and part.lse_t is not None:
            lse_t[chunk.rows] = part.lse_t
    return Result(
        view.assemble(out).contiguous(),
        view.assemble_stat(lse).contiguous(),
        None if lse_t is None else view.assemble_stat(lse_t).contiguous(),
    )


def _attend(view: Rows, chunk: Lists, options: Options, max_bytes: int) -> Result:
    """Fold the lists of a chunk of rows, a few blocks at a time, with the online softmax."""
    queries = view.queries(chunk.rows)
    scaled = _accumulator(queries.q) * options.softmax_scale
    shape = scaled.shape[:2]
    peak = scaled.new_full(shape, float("-inf"))  # of the scores so far
    total, total_t = scaled.new_zeros(shape), scaled.new_zeros(shape)
    weighted = scaled.new_zeros(*shape, view.v.shape[-1])
    empty = ~queries.valid
    sees_nothing = torch.ones_like(empty)
    for tile in _tiles(view, chunk, queries, options.causal, max_bytes):
        scores = _hide(scaled @ tile.k.transpose(1, 2), tile.hidden)
        new_peak = torch.maximum(peak, scores.amax(-1))
        shift = _finite_peak(new_peak)
        scores -= shift[..., None]
        if options.lse_temperature is not None:
            fade = (options.lse_temperature * (peak - shift)).exp()
            total_t = total_t * fade + (options.lse_temperature * scores).exp_().sum(-1)
        weights = scores.exp_()
        fade = (peak - shift).exp()
        total = total * fade + weights.sum(-1)
        weighted = weighted * fade[..., None] + weights @ tile.v
        peak = new_peak
        sees_nothing &= tile.hidden.all(-1)

    empty |= sees_nothing
    out = weighted / total.masked_fill(empty, 1)[..., None]
    out = out.masked_fill_(empty[..., None], 0).to(queries.q.dtype)
    shift = _finite_peak(peak)
    lse_t = None
    if options.lse_temperature is not None:
        lse_t = _lse(options.lse_temperature * shift, total_t, empty)
    return Result(out, _lse(shift, total, empty), lse_t)


def reference_backward(
    inputs: tuple[Tensor, Tensor, Tensor], result: Result, grads: Result, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from what `reference_attention` returned and its gradients."""
    with without_autocast(inputs[0]):
        return _backward(inputs, result, grads, call)


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor], result: Result, grads: Result, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    selection, options, max_bytes = call
    max_bytes //= 3  # a tile holds its gradients beside what the forward pass holds
    view = rows_of(*inputs, selection)
    scale, temperature = options.softmax_scale, options.lse_temperature
    dtype = accumulator_dtype(view.k)
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (view.k, view.v))
    dq = dk.new_zeros(view.num_rows, view.row_height, dk.shape[-1])
    for chunk in _chunks(view, max_bytes):
        rows, queries = chunk.rows, view.queries(chunk.rows)
        scaled = _accumulator(queries.q) * scale
        d_out = _accumulator(view.take(grads.out, rows))
        out = _accumulator(view.take(result.out, rows))
        lse, d_lse = (view.take_stat(x.lse, rows) for x in (result, grads))
        empty = ~queries.valid | (lse == float("-inf"))
        d_out = d_out.masked_fill(empty[..., None], 0)
        d_lse = d_lse.masked_fill(empty, 0)
        pull = (d_out * out).sum(-1) - d_lse  # d loss / d log of the normaliser
        for tile in _tiles(view, chunk, queries, options.causal, max_bytes):
            hidden = tile.hidden | empty[..., None]
            scores = scaled @ tile.k.transpose(1, 2)
            weights = (scores - lse[..., None]).exp().masked_fill(hidden, 0)
            d_scores = weights * (d_out @ tile.v.transpose(1, 2) - pull[..., None])
            if temperature is not None and result.lse_t is not None and grads.lse_t is not None:
                lse_t, d_lse_t = (view.take_stat(x, rows) for x in (result.lse_t, grads.lse_t))
                warm = (temperature * scores - lse_t[..., None]).exp().masked_fill(hidden, 0)
                d_scores += temperature * warm * d_lse_t.masked_fill(empty, 0)[..., None]
            dq[rows] += scale * (d_scores @ tile.k)
            dk.index_put_(tile.places, d_scores.transpose(1, 2) @ scaled, accumulate=True)
            dv.index_put_(tile.places, weights.transpose(1, 2) @ d_out, accumulate=True)
    q, k, v = inputs
    dk, dv = view.restore_kv(dk), view.restore_kv(dv)
    return view.assemble(dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Tile(NamedTuple):
    k: Tensor  # accumulator dtype [R, L, D]
    v: Tensor  # accumulator dtype [R, L, Dv]
    hidden: Tensor  # bool [R, M or 1, L]; keys that a query does not see
    places: tuple[Tensor, ...]


def _tiles(
    view: Rows, chunk: Lists, queries: Queries, causal: bool, max_bytes: int
) -> Iterator[_Tile]:
    """Gather the keys and values of a chunk, as many blocks at a time as the workspace holds."""
    step = max(1, max_bytes // (_bytes_per_block(view) * max(chunk.rows.numel(), 1)))
    for ids, live in zip(chunk.ids.split(step, 1), chunk.live.split(step, 1), strict=True):
        keys = view.keys(chunk.rows, ids, live)
        hidden = ~keys.valid[:, None, :]
        if causal:
            last_key = queries.last_key.masked_fill(~queries.valid, -1)  # padding sees nothing
            hidden = hidden | (keys.position[:, None, :] > last_key[..., None])
        # Keys that no query of the row sees may hold anything, NaN too: 0 * NaN would spread.
        unseen = hidden.all(1)
        k, v = (_clear(_accumulator(_gather(x, keys.places)), unseen) for x in (view.k, view.v))
        yield _Tile(k, v, hidden, keys.places)


def _chunks(view: Rows, max_bytes: int) -> list[Lists]:
    """Cut the rows into chunks that fit the workspace, on the CPU sorted and cut by length."""
    chunks = []
    for lists in view.lists():
        rows, ids, live = lists.rows, lists.ids, lists.live
        if rows.numel() == 0 or ids.shape[1] == 0:
            continue
        if rows.device.type == "cpu":
            live, slots = live.sort(dim=1, descending=True, stable=True)
            ids = ids.gather(1, slots)
            counts, order = live.sum(1).sort(descending=True, stable=True)
            rows, ids, live = rows[order], ids[order], live[order]
            lengths = counts.tolist()
        else:
            lengths = [ids.shape[1]] * rows.numel()
        start = 0
        while start < len(lengths) and lengths[start]:
            width = lengths[start]
            stop = start + max(1, max_bytes // (_bytes_per_block(view) * width))
            part = slice(start, min(stop, len(lengths)))
            chunks.append(Lists(rows[part], ids[part, :width], live[part, :width]))
            start = stop
    return chunks


def _bytes_per_block(view: Rows) -> int:
    """Workspace of one row and one KV block: gathered K and V, scores, weights, mask, address."""
    accumulator = accumulator_dtype(view.k).itemsize
    head_dims = view.k.shape[-1] + view.v.shape[-1]
    gathered = head_dims * (view.k.element_size() + accumulator)
    return view.block_size * (gathered + view.row_height * (2 * accumulator + 1) + 32)


def _gather(x: Tensor, places: tuple[Tensor, ...]) -> Tensor:
    """Gather x[places]; as rows of one matrix, which is faster, where the strides make it one."""
    width = x.shape[-1]
    if x.numel() == 0 or any(stride % width for stride in x.stride()[:-1]):
        return x[places]
    steps = [stride // width for stride in x.stride()[:-1]]
    num_rows = 1 + sum(step * (size - 1) for step, size in zip(steps, x.shape[:-1], strict=True))
    row = torch.zeros((), dtype=torch.long, device=x.device)
    for place, step in zip(places, steps, strict=True):
        row = row + place * step
    matrix = x.as_strided((num_rows, width), (width, 1))
    return matrix.index_select(0, row.flatten()).view(*row.shape, width)


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Dtype of softmax and products over x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _accumulator(x: Tensor) -> Tensor:
    return x.to(accumulator_dtype(x))


def _clear(x: Tensor, rows: Tensor) -> Tensor:
    """Zero rows in place; on the CPU at the cost of those rows alone."""
    if rows.device.type == "cpu":
        x.view(-1, x.shape[-1]).index_fill_(0, rows.flatten().nonzero().flatten(), 0)
        return x
    return x.masked_fill_(rows[..., None], 0)


def _hide(scores: Tensor, hidden: Tensor) -> Tensor:
    """Set scores [R, M, L] to -inf in place where `hidden`, bool [R, M or 1, L], says so."""
    if hidden.shape[1] == scores.shape[1]:
        return scores.masked_fill_(hidden, float("-inf"))
    # Hidden from all queries: these keys are zero, so that adding -inf is safe, and faster.
    if hidden.device.type == "cpu" and not hidden.any():
        return scores
    bias = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, float("-inf"))
    return scores.add_(bias)


def _finite_peak(peak: Tensor) -> Tensor:
    """Peak of the scores, 0 where there are none, so that exponents stay defined."""
    return peak.masked_fill(peak == float("-inf"), 0)


def _lse(shift: Tensor, total: Tensor, empty: Tensor) -> Tensor:
    lse = shift + total.masked_fill(empty, 1).log()
    return lse.masked_fill(empty, float("-inf")).float()
