"""The case list that drives every backend, and how its tensors are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparse_atten import BlockSelection, TokenSelection
from sparse_atten.contracts import Options

Inputs = tuple[Tensor, Tensor, Tensor]
Counts = Literal["all", "random", "one", "zero", "alternate"]
Sizes = Literal["full", "vector", "matrix", "zero-first"]


@dataclass(frozen=True)
class BlockCase:
    """A call with a BlockSelection; sizes are small so that the definition is cheap."""

    name: str
    batch: int = 1
    heads: tuple[int, int] = (2, 2)  # Hq, Hkv
    lengths: tuple[int, int] = (64, 64)  # Sq, Skv
    head_dims: tuple[int, int] = (16, 16)
    block: int = 16
    width: int = 3
    counts: Counts = "random"
    kv_sizes: Sizes = "full"
    pad_queries: bool = False
    dense_rows: int = 0
    layout: Literal["bhsd", "bshd"] = "bhsd"
    causal: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    duplicates: bool = False

    def build(self, seed: int = 0) -> tuple[Inputs, BlockSelection, Options]:
        """Make the tensors of the case."""
        make = torch.Generator().manual_seed(seed)
        num_q, num_kv = (-(-n // self.block) for n in self.lengths)
        rows = (self.batch, self.heads[0], num_q)
        ids = torch.rand(*rows, max(num_kv, 1), generator=make).argsort(-1)[..., : self.width]
        if self.duplicates:
            ids = torch.randint(0, num_kv, (*rows, self.width), generator=make)
        counts = _counts(self.counts, rows, ids.shape[-1], make)
        selection = BlockSelection(
            ids.int(),
            counts.int(),
            layout=self.layout,
            block_size=self.block,
            kv_block_sizes=self._kv_block_sizes(num_kv, make),
            q_block_sizes=self._sizes((num_q,), self.lengths[0], make)
            if self.pad_queries
            else None,
            dense_rows=self.dense_rows,
        )
        inputs = []
        for heads, length, dim in (
            (self.heads[0], self.lengths[0], self.head_dims[0]),
            (self.heads[1], self.lengths[1], self.head_dims[0]),
            (self.heads[1], self.lengths[1], self.head_dims[1]),
        ):
            shape = (self.batch, heads, length, dim)
            if self.layout == "bshd":
                shape = (self.batch, length, heads, dim)
            inputs.append((self.scale * torch.randn(*shape, generator=make)).to(self.dtype))
        q, k, v = inputs
        return (q, k, v), selection, Options(self.causal, self.head_dims[0] ** -0.5)

    def _kv_block_sizes(self, num_kv: int, make: torch.Generator) -> Tensor | None:
        if self.kv_sizes == "full":
            return None
        shape = (self.batch, num_kv) if self.kv_sizes == "matrix" else (num_kv,)
        sizes = self._sizes(shape, self.lengths[1], make)
        if self.kv_sizes == "zero-first":
            sizes[..., 0] = 0
        return sizes

    def _sizes(self, shape: tuple[int, ...], length: int, make: torch.Generator) -> Tensor:
        sizes = torch.randint(0, self.block + 1, shape, generator=make)
        rows_left = (length - torch.arange(shape[-1]) * self.block).clamp(max=self.block)
        return torch.minimum(sizes, rows_left).int()


def _counts(kind: Counts, rows: tuple[int, ...], width: int, make: torch.Generator) -> Tensor:
    if kind == "random":
        return torch.randint(0, width + 1, rows, generator=make)
    if kind == "alternate":
        return (torch.arange(rows[-1]) % 2 * width).expand(rows)
    return torch.full(rows, {"all": width, "one": 1, "zero": 0}[kind])


BLOCK_CASES = (
    BlockCase("all-kept", width=4, counts="all"),
    BlockCase("random-counts"),
    BlockCase("one-block", counts="one"),
    BlockCase("nothing", counts="zero"),
    BlockCase("alternating-empty-rows", counts="alternate"),
    BlockCase("dense-prefix", dense_rows=2),
    BlockCase("dense-everything", dense_rows=4, width=1),
    BlockCase("ragged-ends", lengths=(61, 77)),
    BlockCase("odd-blocks", lengths=(48, 80)),
    BlockCase("short-sequence", lengths=(3, 5), width=1),
    BlockCase("sizes", kv_sizes="vector", batch=2),
    BlockCase("sizes-per-batch", kv_sizes="matrix", batch=3, lengths=(40, 72)),
    BlockCase("first-block-empty", kv_sizes="zero-first", counts="all", width=4),
    BlockCase("padded-queries", pad_queries=True, kv_sizes="vector", lengths=(64, 70)),
    BlockCase("gqa-4", heads=(8, 2)),
    BlockCase("mqa", heads=(4, 1), layout="bshd"),
    BlockCase("bshd", layout="bshd", batch=2, lengths=(50, 34)),
    BlockCase("value-dim", head_dims=(16, 24)),
    BlockCase("odd-head-dim", head_dims=(3, 5)),
    BlockCase("tile-64", block=64, lengths=(130, 200), width=2),
    BlockCase("tile-128", block=128, lengths=(300, 260), width=2, dtype=torch.bfloat16),
    BlockCase("tile-256", block=256, lengths=(257, 511), width=2, heads=(1, 1)),
    BlockCase("causal", causal=True, counts="all", width=4),
    BlockCase("causal-more-keys", causal=True, lengths=(37, 80), dense_rows=1),
    BlockCase("causal-more-queries", causal=True, lengths=(80, 37), counts="all"),
    BlockCase("causal-sizes", causal=True, kv_sizes="matrix", pad_queries=True, batch=2, width=4),
    BlockCase("duplicates", duplicates=True, width=5, counts="all"),
    BlockCase("bfloat16", dtype=torch.bfloat16),
    BlockCase("float16", dtype=torch.float16, heads=(4, 2)),
    BlockCase("float64", dtype=torch.float64),
    BlockCase("scale-16", scale=16.0, dtype=torch.bfloat16),
    BlockCase("scale-100", scale=100.0),
    BlockCase("no-queries", lengths=(0, 32)),
    BlockCase("no-keys", lengths=(32, 0), counts="zero", width=1),
    BlockCase("no-table", width=0),
)


@dataclass(frozen=True)
class TokenCase:
    """A call with a TokenSelection."""

    name: str
    queries: tuple[int, ...] = (20, 33)
    keys: tuple[int, ...] = (40, 33)
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 16)
    block: int = 16
    width: int = 2
    keep: float = 0.8  # chance that a slot is used
    causal: bool = True
    paging: Literal["flat", "hnd", "nhd"] = "flat"
    used: bool = False  # shorten flat sequences by seqused_k
    spare_queries: int = 0  # tokens after the last sequence
    dtype: torch.dtype = torch.float32
    scale: float = 1.0
    duplicates: bool = False
    temperature: float | None = None

    def build(self, seed: int = 0) -> tuple[Inputs, TokenSelection, Options]:
        """Make the tensors of the case."""
        make = torch.Generator().manual_seed(seed)
        num_tokens = sum(self.queries) + self.spare_queries
        lengths = list(self.keys)
        if self.used:
            lengths = [int(torch.randint(0, n + 1, (), generator=make)) for n in self.keys]
        indices = torch.full((self.heads[1], num_tokens, self.width), -1, dtype=torch.int32)
        token = 0
        for queries, length in zip(self.queries, lengths, strict=True):
            blocks = -(-length // self.block)
            for t in range(token, token + queries):
                for head in range(self.heads[1]):
                    indices[head, t] = self._list(blocks, make)
            token += queries
        kv, selection = self._kv(indices, lengths, make)
        q = self._random(num_tokens, self.heads[0], self.head_dims[0], make=make)
        options = Options(self.causal, self.head_dims[0] ** -0.5, self.temperature)
        return (q, *kv), selection, options

    def _list(self, blocks: int, make: torch.Generator) -> Tensor:
        row = torch.full((self.width,), -1)
        if blocks:
            ids = torch.randint(0, blocks, (self.width,), generator=make)
            if not self.duplicates:
                ids = torch.rand(blocks, generator=make).argsort()[: self.width]
            row[: len(ids)] = ids
        row[torch.rand(self.width, generator=make) > self.keep] = -1
        return row.int()

    def _random(self, *shape: int, make: torch.Generator) -> Tensor:
        return (self.scale * torch.randn(*shape, generator=make)).to(self.dtype)

    def _kv(
        self, indices: Tensor, lengths: list[int], make: torch.Generator
    ) -> tuple[tuple[Tensor, Tensor], TokenSelection]:
        flat = TokenSelection(
            indices,
            _offsets(self.queries),
            _offsets(self.keys),
            max(self.queries, default=0),
            max(lengths, default=0),
            block_size=self.block,
            seqused_k=torch.tensor(lengths, dtype=torch.int32) if self.used else None,
        )
        if self.paging == "flat":
            k, v = (
                self._random(sum(self.keys), self.heads[1], dim, make=make)
                for dim in self.head_dims
            )
            return (k, v), flat
        pages = [-(-length // self.block) for length in lengths]
        pool = sum(pages) + 2
        order = torch.randperm(pool, generator=make).int()
        table = torch.full((len(lengths), max(pages, default=0)), -7, dtype=torch.int32)
        for sequence, count in enumerate(pages):
            table[sequence, :count], order = order[:count], order[count:]
        inner = (self.heads[1], self.block)
        if self.paging == "nhd":
            inner = (self.block, self.heads[1])
        k, v = (self._random(pool, *inner, dim, make=make) for dim in self.head_dims)
        paged = replace(
            flat,
            cu_seqlens_k=None,
            page_table=table,
            seqused_k=torch.tensor(lengths, dtype=torch.int32),
            kv_layout=self.paging,
        )
        return (k, v), paged


def _offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


TOKEN_CASES = (
    TokenCase("causal"),
    TokenCase("bidirectional", causal=False),
    TokenCase("all-blocks", width=3, keep=1.1),
    TokenCase("nothing", keep=-1.0),
    TokenCase("more-queries", queries=(40, 9), keys=(20, 33)),
    TokenCase("lengths", queries=(1, 15, 16, 17, 0, 5), keys=(1, 15, 16, 17, 8, 0)),
    TokenCase("used-keys", used=True, queries=(9, 9, 9), keys=(40, 33, 5)),
    TokenCase("paged-hnd", paging="hnd"),
    TokenCase("paged-nhd", paging="nhd", queries=(5, 20, 7), keys=(3, 50, 32)),
    TokenCase("spare-queries", spare_queries=6),
    TokenCase("no-group", heads=(2, 2)),
    TokenCase("gqa-16", heads=(16, 1), queries=(12,), keys=(50,)),
    TokenCase("value-dim", head_dims=(16, 8)),
    TokenCase("duplicates", duplicates=True, width=4),
    TokenCase("temperature", temperature=0.5),
    TokenCase("bfloat16", dtype=torch.bfloat16),
    TokenCase("scale-100", scale=100.0, dtype=torch.float16),
    TokenCase("block-128", block=128, queries=(30,), keys=(300,)),
    TokenCase("no-sequence", queries=(), keys=()),
    TokenCase("no-keys", queries=(4,), keys=(0,)),
    TokenCase("no-table", width=0),
)
