"""Which kernels of short.cu and long.cu run for a request, with which grids and parameters.

Nothing here needs a GPU. A launch's parameters are the tensors' pointers, moved on by `offsets`,
then `plan` (struct Plan of rows.cu) and `scalars`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.topk.reference import Request

MAX_BLOCKS = 1 << 30

_FOLDER = Path(__file__).parent
_PLAN = struct.Struct("@4q3q3q3qq3I3i2ii96i0q")
_MAX_SPANS = 32
_KEEP = -1
_MAX_ROWS = 1 << 30  # of one launch: row indices and grids have 32 bits
_ROW_DIMS = 3
_MIN_COLUMNS = 16  # adjacent rows that make reading 32 of them together worth while
_PART_BLOCKS = 8192  # of a long row that thread blocks share, at least
_THREAD_BLOCKS = 264  # fewer rows than this leave multiprocessors idle: long rows are shared


class Config(NamedTuple):
    """The constants that short.cu or long.cu is compiled with.

    Attributes
    ----------
    columns : int
        1 where adjacent rows, not adjacent blocks of a row, are adjacent in memory.
    forced : int
        1 where blocks may be chosen whatever their scores.
    regions : int
        1 where a row may have several spans.
    group, items : int
        Short kernel: lanes of a row, and blocks that each holds in registers.
    threads : int
        Threads of a thread block; for the short kernel's columns, 32 rows of lanes.
    tile, digit_bits, stage : int
        Long kernels: rows of a thread block, bits of a histogram's digit, and how many blocks of
        one digit are ranked instead of counted again.
    """

    columns: int = 0
    forced: int = 0
    regions: int = 0
    group: int = 0
    items: int = 0
    threads: int = 0
    tile: int = 0
    digit_bits: int = 0
    stage: int = 0

    @property
    def row_blocks(self) -> int:
        """Blocks of a span that the short kernel takes."""
        return self.group * self.items

    def shared_bytes(self, capacity: int = 512) -> int:
        """Dynamic shared memory, for the long kernels to choose up to `capacity` blocks a span."""
        if not self.tile:
            return self.columns * 4 * 32 * (self.row_blocks + 1)
        ranks = 8 * self.tile * (capacity + self.stage)
        return ranks + 32 * self.tile + 4 * self.tile * (1 << self.digit_bits)


_SHORT = ((8, 8), (8, 16), (8, 32), (16, 32), (32, 24), (32, 32))
_ROW_THREADS = 128
_KINDS = ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0))
_LONG = Config(threads=256, tile=1, digit_bits=11, stage=512)
_LONG_WIDE = _LONG._replace(threads=1024)  # for rows of more than _PART_BLOCKS blocks
_LONG_COLUMNS = Config(columns=1, threads=1024, tile=32, digit_bits=8, stage=128)
CONFIGS = (
    *(Config(*kind, *shape, _ROW_THREADS) for kind in _KINDS[:3] for shape in _SHORT),
    *(Config(*kind, *shape, 32 * shape[0]) for kind in _KINDS[3:] for shape in _SHORT),
    *(Config(1, 0, 1, *shape, 32 * shape[0]) for shape in _SHORT[:-2]),  # the others would spill
    _LONG,
    _LONG_WIDE,
    _LONG_COLUMNS,
)


class Launch(NamedTuple):
    """One kernel launch, without its pointers.

    Attributes
    ----------
    config, kernel : Config, str
        What runs.
    grid, block : (int, int, int)
        Thread blocks and threads.
    shared_bytes : int
        Dynamic shared memory.
    plan : bytes
        struct Plan.
    scalars : tuple of int
        Parameters after the plan.
    offsets : (int, int, int, int)
        Elements to add to scores, valid counts and local blocks; rows to add to the outputs.
    """

    config: Config
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    plan: bytes
    scalars: tuple[int, ...]
    offsets: tuple[int, int, int, int]


SIGNATURES = {
    "block_topk_short": f"PPPPP{_PLAN.size}s",
    "block_topk_long": f"PPPPP{_PLAN.size}si",
    "block_topk_parts": f"PPPP{_PLAN.size}sii",
    "block_topk_merge": f"PPP{_PLAN.size}sii",
}


class Plan(NamedTuple):
    """All launches of a request, in order, and the bytes of workspace that they share."""

    launches: tuple[Launch, ...]
    workspace_bytes: int


class _Dim(NamedTuple):
    """An axis of the rows: its extent, and the strides of scores, counts, local blocks, outputs."""

    size: int
    strides: tuple[int, int, int, int]


@cache
def program(config: Config) -> Program:
    """rows.cu and the kernels of a config, with its constants."""
    kernels = "short.cu" if config.group else "long.cu"
    source = "".join((_FOLDER / name).read_text() for name in ("rows.cu", kernels))
    layout = {"COLUMNS": config.columns, "FORCED": config.forced, "REGIONS": config.regions}
    sizes = {name.upper(): value for name, value in config._asdict().items() if value}
    return Program(kernels, source, tuple(sorted({**layout, **sizes}.items())))


def make_plan(
    request: Request,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    *,
    valid: tuple[tuple[int, ...], tuple[int, ...]] | None,
    local: tuple[tuple[int, ...], tuple[int, ...]] | None,
    first_blocks: int,
    last_blocks: int,
) -> Plan:
    """Plan the launches for checked arguments.

    Parameters
    ----------
    request : Request
        What competes for what.
    shape, strides : tuple of int
        Of the scores; no extent of a row axis is 0.
    valid, local : (shape, strides) or None
        Of the tensors of one number a row, broadcastable to the rows.
    first_blocks, last_blocks : int
        Forced blocks at the ends of each row.
    """
    dim, num_blocks = request.dim, shape[request.dim]
    rows = shape[:dim] + shape[dim + 1 :]
    out_strides = [prod(rows[i + 1 :]) for i in range(len(rows))]
    dims = _merged(
        zip(
            rows,
            zip(
                strides[:dim] + strides[dim + 1 :],
                _broadcast(valid, len(rows)),
                _broadcast(local, len(rows)),
                out_strides,
                strict=True,
            ),
            strict=True,
        )
    )
    block_stride = strides[dim]
    columns = block_stride != 1 and any(d.strides[0] == 1 and d.size >= _MIN_COLUMNS for d in dims)
    if columns:
        dims.sort(key=lambda d: d.strides[0] == 1 and d.size >= _MIN_COLUMNS)
    ends = min(first_blocks, num_blocks), min(last_blocks, num_blocks)
    forced = any(ends) or local is not None
    spans = _sorted_spans(request)
    launches: list[Launch] = []
    workspace_bytes = 0
    for piece, offsets in _pieces(dims, (0, 0, 0, 0)):
        for i in range(0, len(spans), _MAX_SPANS):
            parameters = _pack(
                piece,
                block_stride,
                request.width,
                sizes=(num_blocks, *ends),
                ends=(i > 0, i + _MAX_SPANS >= len(spans)),
                spans=spans[i : i + _MAX_SPANS],
            )
            made = _launches(piece, request, columns=columns, forced=forced, plan=parameters)
            launches += [launch._replace(offsets=offsets) for launch in made]
            if made[0].kernel == "block_topk_parts":
                parts_bytes = 8 * prod(made[0].grid) * request.width
                workspace_bytes = max(workspace_bytes, parts_bytes)
    return Plan(tuple(launches), workspace_bytes)


def _launches(
    dims: Sequence[_Dim], request: Request, *, columns: bool, forced: bool, plan: bytes
) -> list[Launch]:
    """Launches for one piece of the rows and one batch of spans."""
    regions = int(len(request.spans) != 1 or request.num_kept > 0)
    scored = request.spans[: len(request.spans) - request.num_kept]
    longest = max((stop - start for start, stop, _ in scored), default=0)
    capacity = max((budget for *_, budget in scored), default=1)
    rows = prod(d.size for d in dims)
    for config in CONFIGS:
        kind = config.columns, config.forced, config.regions
        if kind == (columns, forced, regions) and longest <= config.row_blocks:
            blocks = _tiles(dims, 32) if columns else -(-rows * config.group // config.threads)
            grid, block, shared = (blocks, 1, 1), (config.threads, 1, 1), config.shared_bytes()
            return [Launch(config, "block_topk_short", grid, block, shared, plan, (), (0,) * 4)]
    parts = min(-(-longest // _PART_BLOCKS), _THREAD_BLOCKS // rows)
    if parts > 1 and not regions:
        config = _LONG_WIDE
        part_blocks = -(-longest // parts)
        shared, block = config.shared_bytes(capacity), (config.threads, 1, 1)
        return [
            Launch(config, f"block_topk_{name}", grid, block, shared, plan, scalars, (0,) * 4)
            for name, grid, scalars in (
                ("parts", (rows, parts, 1), (capacity, part_blocks)),
                ("merge", (rows, 1, 1), (capacity, parts)),
            )
        ]
    config = _LONG_COLUMNS if columns else _LONG_WIDE if longest > _PART_BLOCKS else _LONG
    grid, block = (_tiles(dims, config.tile), 1, 1), (config.threads, 1, 1)
    shared = config.shared_bytes(capacity)
    return [Launch(config, "block_topk_long", grid, block, shared, plan, (capacity,), (0,) * 4)]


def _sorted_spans(request: Request) -> list[tuple[int, int, int]]:
    """Spans by ascending id as the kernels take them; at least one, so that rows are written."""
    scored = len(request.spans) - request.num_kept
    spans = [
        (start, stop, budget if i < scored else _KEEP)
        for i, (start, stop, budget) in enumerate(request.spans)
        if start < stop
    ]
    return sorted(spans) or [(0, 0, 1)]


def _tiles(dims: Sequence[_Dim], tile: int) -> int:
    """Thread blocks that take `tile` rows each along the last axis."""
    if not dims:
        return 1
    return prod(d.size for d in dims[:-1]) * -(-dims[-1].size // tile)


def _broadcast(
    tensor: tuple[tuple[int, ...], tuple[int, ...]] | None, rank: int
) -> tuple[int, ...]:
    """Strides of a tensor broadcast to the rows."""
    if tensor is None:
        return (0,) * rank
    strides = tuple(0 if n == 1 else stride for n, stride in zip(*tensor, strict=True))
    return (0,) * (rank - len(strides)) + strides


def _merged(dims: Iterator[tuple[int, tuple[int, int, int, int]]]) -> list[_Dim]:
    """Axes without those of extent 1; neighbours that are one axis in every tensor are one."""
    merged: list[_Dim] = []
    for size, strides in dims:
        if size == 1:
            continue
        if merged and merged[-1].strides == tuple(size * stride for stride in strides):
            merged[-1] = _Dim(merged[-1].size * size, strides)
        else:
            merged.append(_Dim(size, strides))
    return merged


def _pieces(
    dims: list[_Dim], offsets: tuple[int, int, int, int]
) -> Iterator[tuple[list[_Dim], tuple[int, int, int, int]]]:
    """Parts of the rows that one launch can take, each with the offsets of its first row."""
    if len(dims) > _ROW_DIMS:
        pieces = [(dims[1:], i) for i in range(dims[0].size)]
        at, (_, strides) = 0, dims[0]
    elif prod(d.size for d in dims) > _MAX_ROWS:
        at = max(range(len(dims)), key=lambda i: dims[i].size)
        size, strides = dims[at]
        half = size // 2
        pieces = [
            ([*dims[:at], _Dim(part, strides), *dims[at + 1 :]], start)
            for part, start in ((half, 0), (size - half, half))
        ]
    else:
        yield dims, offsets
        return
    for piece, index in pieces:
        moved = [offset + index * stride for offset, stride in zip(offsets, strides, strict=True)]
        yield from _pieces(piece, (moved[0], moved[1], moved[2], moved[3]))


def _pack(
    dims: Sequence[_Dim],
    block_stride: int,
    width: int,
    *,
    sizes: tuple[int, int, int],
    ends: tuple[bool, bool],
    spans: Sequence[tuple[int, int, int]],
) -> bytes:
    """Struct Plan of rows.cu."""
    full = [_Dim(1, (0, 0, 0, 0))] * (_ROW_DIMS - len(dims)) + list(dims)
    scores, valid, local, out = zip(*(d.strides for d in full), strict=True)
    flat = [field for span in spans for field in span]
    flat += [0] * (3 * _MAX_SPANS - len(flat))
    strides = (*scores, block_stride, *valid, *local, *out)
    return _PLAN.pack(*strides, width, *(d.size for d in full), *sizes, *ends, len(spans), *flat)
