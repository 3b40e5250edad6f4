"""Hostile token selections, and a way to launch kernels on them under a PTX emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch
from emulation import emulator
from torch import Tensor

from sparse_atten.csr import K2QCSR, row_bound
from sparse_atten.csr.device import Bind, Run, Tables
from sparse_atten.cute_kernels.common.nvrtc import Program
from sparse_atten.cute_kernels.common.steps import Step
from sparse_atten.scheduler import Schedule

EDGE_LENGTHS = (1, 127, 128, 129, 0, 300)
CSR_TENSORS = ("row_ptr", "q_indices", "edge_ids", "row_coords", "num_bad_edges")
SCHEDULE_TENSORS = ("work_items", "num_items", "split_slot", "split_counts")
CASES: dict[str, Callable[[torch.Generator], Tables]] = {}


def case(make: Callable[[torch.Generator], Tables]) -> Callable[[torch.Generator], Tables]:
    CASES[make.__name__] = make
    return make


def tables_of(name: str) -> Tables:
    return CASES[name](torch.Generator().manual_seed(len(name)))


def on_cuda(tables: Tables) -> Tables:
    """The same tables on the GPU; strides are kept."""
    q2k = tables.q2k_indices
    storage = torch.empty_strided(q2k.shape, q2k.stride(), dtype=q2k.dtype, device="cuda")
    if q2k.numel():
        storage.as_strided_((extent(q2k),), (1,)).copy_(q2k.as_strided((extent(q2k),), (1,)))
    others = (None if x is None else x.cuda() for x in tables[1:4])
    return Tables(storage.as_strided(q2k.shape, q2k.stride()), *others, *tables[4:])


def extent(x: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(lengths: tuple[int, ...] | list[int]) -> Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])


def random_ids(
    generator: torch.Generator, shape: tuple[int, int, int], low: int, high: int
) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def packed(
    generator: torch.Generator,
    q_lengths: tuple[int, ...] | list[int],
    k_lengths: tuple[int, ...] | list[int],
    *,
    heads: int = 2,
    width: int = 16,
    low: int = -1,
    spare_blocks: int = 0,
    padding: int = 0,
    num_rows: int | None = None,
) -> Tables:
    """Draw lists over the blocks of the longest sequence: many name no block of a shorter one."""
    blocks = max((-(-n // 128) for n in k_lengths), default=0)
    shape = (heads, sum(q_lengths) + padding, width)
    ids = random_ids(generator, shape, low, max(blocks + spare_blocks, low + 1))
    if num_rows is None:
        num_rows = row_bound(len(k_lengths), total_k=sum(k_lengths))
    return Tables(ids, offsets(q_lengths), offsets(k_lengths), None, 128, num_rows)


def add_edge_lengths() -> None:
    for width in (1, 3, 16, 32, 40):

        def edge_lengths(generator: torch.Generator, width: int = width) -> Tables:
            q_lengths = EDGE_LENGTHS[-2:] + EDGE_LENGTHS[:4]
            return packed(generator, q_lengths, EDGE_LENGTHS, heads=3, width=width, padding=5)

        edge_lengths.__name__ = f"edge_lengths_k{width}"
        case(edge_lengths)


add_edge_lengths()


@case
def short_sequences(generator: torch.Generator) -> Tables:
    q_lengths, k_lengths = [b % 3 for b in range(512)], [5 * b % 260 for b in range(512)]
    return packed(generator, q_lengths, k_lengths, width=3)


@case
def more_sequences_than_threads(generator: torch.Generator) -> Tables:
    q_lengths, k_lengths = [b % 2 for b in range(2500)], [b % 2 for b in range(2500)]
    tables = packed(generator, q_lengths, k_lengths, width=2, num_rows=1000)
    return tables._replace(seqused_k=int32([b % 5 - 1 for b in range(2500)]))


@case
def no_sequence(generator: torch.Generator) -> Tables:
    return Tables(random_ids(generator, (2, 70, 3), -2, 3), int32([0]), int32([0]), None, 128, 5)


@case
def every_slot_unused(generator: torch.Generator) -> Tables:
    tables = packed(generator, [700], [1000])
    return tables._replace(q2k_indices=torch.full_like(tables.q2k_indices, -1))


@case
def duplicates(generator: torch.Generator) -> Tables:
    return packed(generator, [150, 60], [256, 250], width=16)


@case
def wild_ids(generator: torch.Generator) -> Tables:
    tables = packed(generator, [200, 100], [700, 300], low=-3, spare_blocks=3, padding=9)
    wild = int32([-(2**31), 2**31 - 1, 2**31 - 2, 2**30, -7])
    at = torch.rand(tables.q2k_indices.shape, generator=generator) < 0.2
    pick = torch.randint(0, 5, tables.q2k_indices.shape, generator=generator)
    return tables._replace(q2k_indices=torch.where(at, wild[pick], tables.q2k_indices))


@case
def wild_offsets(generator: torch.Generator) -> Tables:
    tables = packed(generator, [100, 100, 100, 100], [300, 300, 300, 300])
    q = int32([-9, 150, 90, 2**31 - 1, 320])
    k = int32([-(2**31), 2**31 - 1, 0, 500, 300])
    return tables._replace(cu_seqlens_q=q, cu_seqlens_k=k, num_rows=40)


@case
def wild_offsets_under_a_capacity(generator: torch.Generator) -> Tables:
    tables = wild_offsets(generator)
    k = int32([-50, 400, 300, 900, 2000])
    used = int32([2**31 - 1, 5, -3, 1200])
    return tables._replace(cu_seqlens_k=k, seqused_k=used, key_capacity=1100)


@case
def offsets_begin_late(generator: torch.Generator) -> Tables:
    tables = packed(generator, [120, 100, 80], [300, 129, 400])
    return tables._replace(cu_seqlens_q=int32([37, 90, 90, 251]))


@case
def extreme_lengths(generator: torch.Generator) -> Tables:
    ids = random_ids(generator, (2, 300, 4), -1, 4)
    ids[:, ::7, 0] = 2**24 - 1
    ids[:, 1::7, 1] = 2**24
    ids[:, 2::7, 2] = 2**31 - 1
    used = int32([2**31 - 1, -(2**31), 2**31 - 1])
    return Tables(ids, offsets([100, 100, 100]), None, used, 128, 2**11 + 7)


@case
def blocks_of_one_key(generator: torch.Generator) -> Tables:
    ids = random_ids(generator, (1, 300, 8), -1, 900)
    ids[:, ::9, 3] = 2**31 - 1
    used = int32([2**31 - 1, 700, 2**31 - 1])
    return Tables(ids, offsets([100, 100, 100]), None, used, 1, 800)


@case
def paged_under_a_capacity(generator: torch.Generator) -> Tables:
    ids = random_ids(generator, (2, 300, 8), -1, 6)
    used = int32([600, 700, -5, 5000])
    return Tables(ids, offsets([100, 100, 0, 100]), None, used, 128, 24, 640)


@case
def one_hot_block(generator: torch.Generator) -> Tables:
    tables = packed(generator, [2500], [3000], width=3)
    tables.q2k_indices[..., 1] = 7
    return tables


@case
def every_slot_one_block(generator: torch.Generator) -> Tables:
    tables = packed(generator, [1000], [3000], width=5)
    return tables._replace(q2k_indices=torch.full_like(tables.q2k_indices, 22))


@case
def too_few_rows(generator: torch.Generator) -> Tables:
    return packed(generator, [200, 200], [1000, 1000], num_rows=11)


@case
def one_row(generator: torch.Generator) -> Tables:
    return packed(generator, [200, 20], [100, 0], num_rows=1)


@case
def tiles_end_with_the_table(generator: torch.Generator) -> Tables:
    return packed(generator, [256], [2000], heads=3)


@case
def one_slot_past_a_tile(generator: torch.Generator) -> Tables:
    return packed(generator, [683], [2000], heads=3, width=3)


@case
def lists_longer_than_a_tile(generator: torch.Generator) -> Tables:
    return packed(generator, [2, 1], [700, 90_000], width=2049)


@case
def token_major_buffer(generator: torch.Generator) -> Tables:
    tables = packed(generator, [300, 100], [900, 700])
    buffer = torch.full((400, 2, 20), 99, dtype=torch.int32)
    buffer[:, :, 2:18] = tables.q2k_indices.transpose(0, 1)
    return tables._replace(q2k_indices=buffer[:, :, 2:18].transpose(0, 1))


@case
def lists_shared_by_heads(generator: torch.Generator) -> Tables:
    tables = packed(generator, [300, 100], [900, 700], heads=1)
    return tables._replace(q2k_indices=tables.q2k_indices.expand(3, -1, -1))


@case
def lanes_apart(generator: torch.Generator) -> Tables:
    tables = packed(generator, [300, 100], [900, 700], width=6)
    return tables._replace(
        q2k_indices=tables.q2k_indices.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    )


@case
def as_many_rows_as_one_pass_takes(generator: torch.Generator) -> Tables:
    return packed(generator, [300, 60], [1200 * 128, 80 * 128], num_rows=1280)


@case
def one_row_more_than_one_pass_takes(generator: torch.Generator) -> Tables:
    return packed(generator, [300, 60], [1200 * 128, 81 * 128], num_rows=1281, width=3)


@case
def two_passes(generator: torch.Generator) -> Tables:
    keys = [128 * 1500, 5, 128 * 1500]
    tables = packed(generator, [300, 20, 300], keys, width=7, padding=3, spare_blocks=9)
    tables.q2k_indices[:, 100:400, 2] = 1400
    return tables


@case
def three_passes(generator: torch.Generator) -> Tables:
    blocks = 2**19 + 10
    tables = packed(generator, [70, 70], [blocks, blocks], width=5, heads=1, num_rows=2**20 + 15)
    ids = random_ids(generator, (1, 140, 5), -1, blocks)
    ids[:, 20:120, 3] = blocks - 1
    return tables._replace(q2k_indices=ids, block_size=1)


def random_tables(seed: int) -> Tables:
    """A small random call; every argument varies."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(0, len(values), (), generator=generator))]

    batch = pick(1, 2, 5, 33)
    q_lengths = [pick(0, 1, 7, 128, 129) for _ in range(batch)]
    k_lengths = [pick(0, 1, 127, 128, 129, 4000) for _ in range(batch)]
    q_lengths[0] += 1
    tables = packed(
        generator,
        q_lengths,
        k_lengths,
        heads=pick(1, 2, 3),
        width=pick(1, 2, 3, 16, 31, 32, 33),
        low=pick(-3, -1, 0),
        spare_blocks=pick(0, 1, 4),
        padding=pick(0, 0, 3),
    )
    used = int32([pick(-1, 0, 128, 200, 4000) for _ in range(batch)])
    return tables._replace(
        num_rows=max(1, tables.num_rows + pick(0, 0, 5, -3)),
        seqused_k=used if pick(0, 1) else None,
        key_capacity=pick(0, 300, 10**6) if pick(0, 1) else None,
    )


@cache
def ptx_of(program: Program) -> str:
    return program.compile((9, 0)).ptx


@contextmanager
def emulated(program: Program, schedule: dict[str, int]) -> Iterator[Bind]:
    """Launch under the emulator; outputs and workspaces are poisoned and lie between guards."""
    emu = emulator()
    memory: list[Tensor] = []

    def allocate(like: Tensor, shape: object, fill: int, dtype: torch.dtype | None) -> Tensor:
        dtype = like.dtype if dtype is None else dtype
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory.append(torch.full((num_bytes + 256,), 0xA5, dtype=torch.uint8))
        inside = memory[-1][128 : 128 + num_bytes]
        inside.fill_(fill)
        return inside.view(dtype).view(shape)

    def bind(steps: Sequence[Step]) -> Run:
        def run(*bases: int) -> None:
            for step in steps:
                shape = step.grid, step.block, step.shared_bytes
                result = emu.run_ptx(
                    ptx_of(program), step.kernel, *shape, step.values(bases), **schedule
                )
                assert not result["warnings"], result["warnings"]

        return run

    with (
        mock.patch.object(
            Tensor, "new_empty", lambda x, shape, dtype=None: allocate(x, shape, 0x5A, dtype)
        ),
        mock.patch.object(
            Tensor, "new_zeros", lambda x, shape, dtype=None: allocate(x, shape, 0, dtype)
        ),
    ):
        yield bind
    assert memory
    for block in memory:
        assert (block[:128] == 0xA5).all()
        assert (block[-128:] == 0xA5).all()


def assert_gaps_untouched(*records: K2QCSR | Schedule) -> None:
    """Between the tensors of an emulated call, which share an allocation, its poison stands."""
    allocation = records[0]._allocation.view(torch.uint8)
    outside = torch.ones(allocation.shape, dtype=torch.bool)
    for record in records:
        for part in record._parts.values():
            outside[part.offset : part.end] = False
    assert (allocation[outside] == 0x5A).all()


def assert_same(found: object, expected: object, names: tuple[str, ...]) -> None:
    """Equal bit for bit; indices may be wider than they need be."""
    for name in names:
        got, want = getattr(found, name).cpu(), getattr(expected, name).cpu()
        assert got.shape == want.shape, name
        assert got.is_contiguous(), name
        assert torch.equal(got.to(want.dtype), want), (name, (got != want).nonzero()[:5].tolist())
