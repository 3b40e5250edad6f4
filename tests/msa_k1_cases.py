"""Calls of the MSA partial-attention kernel, and what they must give in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from sparse_atten.contracts import TokenSelection
from sparse_atten.csr import row_bound
from sparse_atten.cute_kernels import msa_k1_sm100
from sparse_atten.cute_kernels.msa_arguments import Arguments, Partials, arguments_of
from sparse_atten.scheduler import build_csr_and_schedule

BLOCK, HEAD_DIM = 128, 128
LENGTHS = (1, 127, 128, 129, 400, 0)


@dataclass(frozen=True)
class Case:
    """One call: sequences of `queries` and `keys` tokens, lists of `width` blocks."""

    name: str
    queries: tuple[int, ...] = LENGTHS
    keys: tuple[int, ...] = LENGTHS
    group: int = 16
    kv_heads: int = 1
    width: int = 4
    keep: float = 0.8  # of the entries of a list; the others are -1
    # "random"; "hot": all choose block 1; "first": all choose block 0 and no other; "none";
    # "repeated"; "local": all choose their own block.
    ids: str = "random"
    causal: bool = False
    layout: str | None = None  # of pages
    used: tuple[int, ...] | None = None  # seqused_k of flat keys
    lost_pages: bool = False  # some page ids lie outside the pool
    strided: bool = False  # no stride is the natural one
    padding: int = 0  # query tokens after the last sequence
    scale: float = 1.0
    softmax_scale: float | None = None
    dtype: str = "bf16"
    fp32: bool = False
    temperature: float | None = None
    spoil: bool = False  # keys that nobody sees are NaN
    chunk: tuple[int, int] | None = None  # first token and number of tokens
    num_sms: int = 148  # that the schedule is made for
    persistent: str = "clc"
    verified: bool = False  # what can be proved
    residents: tuple[int, ...] = (4,)

    @property
    def config(self) -> msa_k1_sm100.Config:
        """What the kernel is compiled with."""
        return msa_k1_sm100.Config(
            dtype=self.dtype,
            group_size=self.group,
            causal=self.causal,
            paged=self.layout is not None,
            fp32_partials=self.fp32,
            temperature=self.temperature is not None,
            persistent="static" if self.verified else self.persistent,
            shuffled_maximum=self.verified,
        )


@dataclass
class Call:
    """A case with its tensors."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    selection: TokenSelection
    flat: tuple[list[torch.Tensor], list[torch.Tensor]]  # K and V of each sequence [L, Hkv, D]
    csr: Any = None
    schedule: Any = None

    @property
    def first(self) -> int:
        """First query token of the chunk."""
        return self.case.chunk[0] if self.case.chunk else 0

    @property
    def chunk(self) -> int:
        """Query tokens of the chunk."""
        return self.case.chunk[1] if self.case.chunk else self.q.shape[0]

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.case.softmax_scale or HEAD_DIM**-0.5

    def lengths(self) -> list[int]:
        """Keys in use of each sequence."""
        used = self.case.used or self.case.keys
        return [max(0, min(a, b)) for a, b in zip(self.case.keys, used, strict=True)]

    def partials(self) -> Partials:
        """Poisoned outputs."""
        shape = (self.case.width, self.chunk, self.q.shape[1])
        o_dtype = torch.float32 if self.case.fp32 else self.q.dtype
        o = torch.full((*shape, HEAD_DIM), math.nan, dtype=o_dtype)
        lse = torch.full(shape, math.nan)
        return Partials(o, lse, None if self.case.temperature is None else lse.clone())

    def arguments(self, partials: Partials) -> Arguments:
        """The call as numbers."""
        return arguments_of(
            self.q,
            self.k,
            self.v,
            partials,
            self.selection,
            csr=self.csr,
            schedule=self.schedule,
            softmax_scale=self.softmax_scale,
            lse_temperature=self.case.temperature,
            first_token=self.first,
        )


def offsets(lengths: Any) -> torch.Tensor:
    """Running sums, int32 [B + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def make_ids(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Block lists [Hkv, Tq, K], -1 in any place."""
    rows = []
    used = case.used or case.keys
    for num_queries, num_keys in zip(case.queries, map(min, case.keys, used), strict=True):
        blocks = -(-num_keys // BLOCK)
        noise = torch.rand(case.kv_heads, num_queries, blocks, generator=generator)
        ids = torch.nn.functional.pad(noise.argsort(-1), (0, case.width), value=-1)
        ids = ids[..., : case.width]
        if case.ids == "repeated" and blocks:
            ids = torch.randint(0, blocks, ids.shape, generator=generator)
        dropped = torch.rand(ids.shape, generator=generator) > case.keep
        ids = ids.masked_fill(dropped, -1)
        if case.ids == "none":
            ids[:] = -1
        if case.ids == "first":
            ids[:] = -1
        if case.ids in ("hot", "first"):
            chosen = min(int(case.ids == "hot"), blocks - 1)
            ids[ids == chosen] = -1
            ids[..., 0] = chosen
        if case.ids == "local" and blocks:
            last = (torch.arange(num_queries) + num_keys - num_queries).clamp(0) // BLOCK
            ids[ids == last[:, None]] = -1
            ids[..., 0] = last
        order = torch.rand(ids.shape, generator=generator).argsort(-1)
        rows.append(ids.gather(-1, order))
    ids = torch.cat(rows, 1)
    return torch.nn.functional.pad(ids, (0, 0, 0, case.padding), value=1).to(torch.int32)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Copy into memory where neighbours along each dim but the last lie far apart."""
    dims = list(range(tensor.dim() - 1))
    room = torch.full([tensor.shape[d] * 2 + 1 for d in reversed(dims)] + [192], math.nan)
    view = room.to(tensor.dtype).permute(*reversed(dims), len(dims))
    view = view[tuple(slice(0, 2 * tensor.shape[d], 2) for d in dims)][..., :HEAD_DIM]
    view.copy_(tensor)
    return view


def make_call(case: Case) -> Call:
    """Make the tensors of a case, and the CSR and the schedule of its chunk."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float16 if case.dtype == "fp16" else torch.bfloat16

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * case.scale).to(dtype)

    num_queries = sum(case.queries) + case.padding
    q = randn(num_queries, case.kv_heads * case.group, HEAD_DIM)
    k, v = (randn(sum(case.keys), case.kv_heads, HEAD_DIM) for _ in range(2))
    ids = make_ids(case, generator)
    cu_q, cu_k = offsets(case.queries), offsets(case.keys)
    if case.strided:
        cu_q, cu_k = (torch.stack((x, x * 0 - 5), 1)[:, 0] for x in (cu_q, cu_k))
    flat = tuple([x[cu_k[b] : cu_k[b + 1]].clone() for b in range(len(case.keys))] for x in (k, v))
    used = None if case.used is None else torch.tensor(case.used, dtype=torch.int32)
    selection = TokenSelection(ids, cu_q, cu_k, max(case.queries), max(case.keys), seqused_k=used)
    if case.layout:
        k, v, selection = paged(case, k, v, selection)
    if case.strided:
        q, k, v = (spread(x) for x in (q, k, v))
    call = Call(case, q, k, v, selection, flat)
    if case.spoil:
        spoil(call)
    call.csr, call.schedule = prepare_chunk(call)
    return call


def paged(case: Case, k: torch.Tensor, v: torch.Tensor, flat: TokenSelection) -> tuple:
    """Move keys into shuffled pages, other ones of other content for V; the rest is NaN."""
    blocks = [-(-length // BLOCK) for length in case.keys]
    starts = flat.cu_seqlens_k.tolist()
    order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.full((len(case.keys), max(blocks) + 1), -7, dtype=torch.int32)
    pools = []
    for x in (k, v):
        pool = torch.full((len(order), BLOCK, *x.shape[1:]), math.nan, dtype=x.dtype)
        pages = iter(order)
        for b, count in enumerate(blocks):
            for j in range(count):
                page = table[b, j] = next(pages)
                rows = x[starts[b] + j * BLOCK : starts[b] + min((j + 1) * BLOCK, case.keys[b])]
                pool[page, : rows.shape[0]] = rows
        pools.append(pool if case.layout == "nhd" else pool.transpose(1, 2).contiguous())
    if case.lost_pages:
        table[-2, 1], table[-2, 2] = len(order), -1
    return (
        *pools,
        TokenSelection(
            flat.q2k_indices,
            flat.cu_seqlens_q,
            None,
            flat.max_seqlen_q,
            flat.max_seqlen_k,
            page_table=table.t().contiguous().t(),
            seqused_k=torch.tensor(case.keys, dtype=torch.int32),
            kv_layout=case.layout,
        ),
    )


def spoil(call: Call) -> None:
    """Make NaN of the flat keys past the used length, which lie before those of the next."""
    starts = call.selection.cu_seqlens_k.tolist()
    for b, length in enumerate(call.lengths()):
        for x in (call.k, call.v):
            x[starts[b] + length : starts[b + 1]] = math.nan


def prepare_chunk(call: Call) -> tuple[Any, Any]:
    """Build CSR and schedule of the chunk's rows of the table."""
    selection, first, chunk = call.selection, call.first, call.chunk
    pages = selection.page_table
    return build_csr_and_schedule(
        selection.q2k_indices[:, first : first + chunk].contiguous(),
        (selection.cu_seqlens_q - first).clamp(0, chunk),
        selection.cu_seqlens_k,
        num_q_heads=call.q.shape[1],
        num_sms=call.case.num_sms,
        num_rows=row_bound(len(call.case.keys), BLOCK, total_k=call.k.shape[0])
        if pages is None
        else row_bound(len(call.case.keys), BLOCK, max_seqlen_k=selection.max_seqlen_k),
        block_size=BLOCK,
        seqused_k=selection.seqused_k,
        key_capacity=call.k.shape[0] if pages is None else pages.shape[1] * BLOCK,
    )


def edges(call: Call):
    """Yield (slot, token, sequence, KV head, block, keys seen) of each edge of the chunk.

    From the table of lists alone: an edge's slot is its rank among the legal ones of its list.
    """
    starts = offsets(call.case.queries).tolist()
    lengths = call.lengths()
    for b, num_keys in enumerate(lengths):
        for token in range(starts[b], starts[b + 1]):
            if not call.first <= token < call.first + call.chunk:
                continue
            position = token - starts[b + 1] + num_keys
            visible = min(num_keys, position + 1) if call.case.causal else num_keys
            for head in range(call.case.kv_heads):
                slot = 0
                for block in call.selection.q2k_indices[head, token].tolist():
                    if 0 <= block < -(-num_keys // BLOCK):
                        seen = min(max(visible - block * BLOCK, 0), BLOCK)
                        if call.case.lost_pages and b == len(lengths) - 2 and block in (1, 2):
                            seen = 0
                        yield slot, token, b, head, block, seen
                        slot += 1


def oracle(call: Call, precision: str = "exact") -> tuple[torch.Tensor, ...]:
    """Partial o, LSE, temperature LSE by their definition; NaN where no edge writes.

    "exact" is float64; "plain" rounds P and o to the kernel's types, all else being float32.
    """
    case, group = call.case, call.case.group
    work = torch.float64 if precision == "exact" else torch.float32
    shape = (case.width, call.chunk, call.q.shape[1])
    o = torch.full((*shape, HEAD_DIM), math.nan, dtype=work)
    lse, lse_t = (torch.full(shape, math.nan, dtype=work) for _ in range(2))
    for slot, token, b, head, block, seen in edges(call):
        at = (slot, token - call.first, slice(head * group, (head + 1) * group))
        rows = slice(block * BLOCK, block * BLOCK + seen)
        k, v = (x[b][rows, head].to(work) for x in call.flat)
        scores = call.q[token, at[2]].to(work) @ k.T * call.softmax_scale
        lse[at] = scores.logsumexp(-1)
        lse_t[at] = (scores * (case.temperature or 1.0)).logsumexp(-1)
        weights = scores.softmax(-1)
        if precision == "plain":
            weights = weights.to(call.q.dtype).to(work)
        value = weights @ v
        o[at] = value if precision == "exact" or case.fp32 else value.to(call.q.dtype).to(work)
    return o, lse, lse_t
