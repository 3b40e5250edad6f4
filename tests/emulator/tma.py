"""Tensor copies by TMA: boxes of a tensor map between global and shared memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.memory import Segment
from emulator.operands import SIZES, Operand, TensorAddress
from emulator.shared import OFFSET_MASK, RANK_SHIFT, SharedMemory
from emulator.spaces import mark_written
from emulator.swizzle import swizzled

if TYPE_CHECKING:
    from emulator.group import Group

_NAMES = {"bf16": 2, "fp16": 2, "f16": 2, "f32": 4, "fp32": 4}


def element_bytes(tensor_map: Any) -> int:
    """Return the size of an element of a map."""
    return _NAMES.get(tensor_map.dtype) or SIZES[tensor_map.dtype]


def box_bytes(tensor_map: Any) -> int:
    """Return the bytes of a box, those out of bounds included."""
    return int(np.prod(tensor_map.box)) * element_bytes(tensor_map)


@functools.lru_cache(maxsize=256)
def _check_map(tensor_map: Any) -> None:
    size, rank = element_bytes(tensor_map), len(tensor_map.dims)
    inner = tensor_map.box[0] * size
    problems = [
        (not 1 <= rank <= 5, f"rank {rank}"),
        (len(tensor_map.box) != rank, "box of another rank"),
        (any(not 1 <= b <= 256 for b in tensor_map.box), f"box {tensor_map.box}"),
        (inner % 16 != 0, f"{inner} bytes of an inner box row are no multiple of 16"),
        (tensor_map.address % 16 != 0, "address is no multiple of 16"),
        (any(s % 16 for s in tensor_map.strides), f"strides {tensor_map.strides}"),
        (tensor_map.swizzle not in (0, 32, 64, 128), f"swizzle {tensor_map.swizzle}"),
        (
            tensor_map.swizzle and inner > tensor_map.swizzle,
            f"an inner box row of {inner} bytes is wider than the swizzle",
        ),
    ]
    for wrong, what in problems:
        if wrong:
            raise EmulatorError("descriptor", f"tensor map: {what}")


@functools.lru_cache(maxsize=256)
def _layout(tensor_map: Any) -> np.ndarray:
    """Return how far each element of a box lies behind its first one, in bytes."""
    _check_map(tensor_map)
    offsets = np.zeros(1, np.int64)
    strides = (element_bytes(tensor_map), *tensor_map.strides)
    for extent, stride in zip(tensor_map.box, strides, strict=True):
        offsets = (np.arange(extent)[:, None] * stride + offsets).reshape(-1)
    return offsets


class Box:
    """Where the elements of a box lie in global memory: byte addresses of those inside it."""

    def __init__(self, tensor_map: Any, coordinates: tuple[int, ...]) -> None:
        offsets = _layout(tensor_map)
        self.size = element_bytes(tensor_map)
        self.count = len(offsets)
        strides = (self.size, *tensor_map.strides)
        first = sum(c * s for c, s in zip(coordinates, strides, strict=True))
        self.address = offsets + (tensor_map.address + first)
        self.inside: Any = slice(None)
        shape = tensor_map.box, tensor_map.dims
        if not all(0 <= c <= d - b for c, b, d in zip(coordinates, *shape, strict=True)):
            self.inside = self._inside(tensor_map, coordinates)
            self.address = self.address[self.inside]
        self.any = len(self.address) > 0

    def _inside(self, tensor_map: Any, coordinates: tuple[int, ...]) -> np.ndarray:
        inside = np.ones(1, bool)
        for start, extent, size in zip(coordinates, tensor_map.dims, tensor_map.box, strict=True):
            at = start + np.arange(size)
            inside = (((at >= 0) & (at < extent))[:, None] & inside).reshape(-1)
        return inside

    def segment(self, machine: Any) -> tuple[Segment, np.ndarray]:
        """Return the tensor's memory, and the element index there of each element inside."""
        # No stride is negative: the first element has the lowest address, the last the highest.
        low, high = int(self.address[0]), int(self.address[-1]) + self.size
        segment = machine.memory.segment_of(low, high)
        return segment, (self.address - segment.start) // self.size


def _chunks(target: int, num_bytes: int, width: int) -> np.ndarray:
    """Return the 16-byte units of shared memory that a box fills, in its own order."""
    return swizzled(target + 16 * np.arange(num_bytes // 16), width) >> 4


def _shared_units(shared: SharedMemory) -> np.ndarray:
    return shared.views[8].reshape(-1, 2)


class Transfer:
    """One box on its way."""

    def __init__(
        self, group: Group, lane: int, tensor_map: Any, coordinates: tuple[int, ...]
    ) -> None:
        self.warp = group.first_warp + lane // 32
        self.machine = group.machine
        self.map = tensor_map
        self.coordinates = coordinates
        self.num_bytes = box_bytes(tensor_map)

    def __str__(self) -> str:
        return f"TMA box {self.map.box} at {self.coordinates} of {self.map.dims}"

    def _check_place(self, shared: SharedMemory, offset: int) -> None:
        if offset % 128:
            raise EmulatorError("alignment", f"shared address {offset:#x} is no multiple of 128")
        shared.check_range(offset, offset + self.num_bytes)

    def load(self, targets: list[tuple[Any, int]], clock: Any) -> None:
        """Fill the same place of some CTAs; elements outside the tensor are 0."""
        box = Box(self.map, self.coordinates)
        data = np.zeros(box.count, f"u{box.size}")
        if box.any:
            segment, places = box.segment(self.machine)
            data[box.inside] = segment.view(box.size)[places]
            if segment.shadow is not None:
                segment.shadow.read_async(clock, places * box.size, box.size)
            if self.machine.traffic is not None:
                self.machine.traffic.box(self.warp, (segment, places * box.size), box.size, "ld")
        for cta, offset in targets:
            shared = cta.shared
            self._check_place(shared, offset)
            units = _chunks(offset, self.num_bytes, self.map.swizzle)
            if shared.shadow is not None:
                shared.shadow.write_async(clock, units * 16, 16)
            _shared_units(shared)[units] = data.view(np.uint64).reshape(-1, 2)
            shared.valid.reshape(-1, 16)[units] = True

    def store(self, cta: Any, offset: int, clock: Any, change: Any = None) -> None:
        """Write the elements inside the tensor, or combine them with what is there."""
        shared = cta.shared
        self._check_place(shared, offset)
        units = _chunks(offset, self.num_bytes, self.map.swizzle)
        shared.check_valid(2 * units, 8)
        if shared.shadow is not None:
            shared.shadow.read_async(clock, units * 16, 16)
        box = Box(self.map, self.coordinates)
        if not box.any:
            return
        data = np.ascontiguousarray(_shared_units(shared)[units]).view(f"u{box.size}").reshape(-1)
        segment, places = box.segment(self.machine)
        if segment.shadow is not None:
            segment.shadow.write_async(clock, places * box.size, box.size, atomic=bool(change))
        view = segment.view(box.size)
        values = data[box.inside]
        view[places] = values if change is None else change(view[places], values)
        mark_written(segment, places * box.size, box.size)
        if self.machine.traffic is not None:
            names = ("st",) if change is None else ("ld", "st")
            self.machine.traffic.box(self.warp, (segment, places * box.size), box.size, *names)


def _lanes(c: Link) -> np.ndarray:
    return np.arange(c.lanes) if c.mask is None else np.flatnonzero(c.mask)


def _source(c: Link, operand: TensorAddress):
    """Return a function for the map and coordinates that a lane names."""
    if not isinstance(operand, TensorAddress):
        raise c.unknown("a tensor address is expected")
    base = c.read(operand.base, "u64")
    rows = [c.read(x, "s32") for x in operand.coordinates]
    group = c.group

    def source(lane: int) -> tuple[Any, tuple[int, ...]]:
        address = int(base[lane])
        if address not in group.machine.tensor_maps:
            raise EmulatorError("descriptor", f"no tensor map at {address:#x}")
        return group.machine.tensor_maps[address], tuple(int(row[lane]) for row in rows)

    return source


_L2 = r"(?P<hint>\.L2::cache_hint)?"


@op(
    r"cp\.async\.bulk\.tensor\.(?P<n>[1-5])d\.shared::(?P<window>cta|cluster)\.global(\.tile)?"
    r"\.mbarrier::complete_tx::bytes(?P<cast>\.multicast::cluster)?"
    r"(?P<hint>\.L2::cache_hint)?(\.cta_group::(?P<g>[12]))?"
)
def load(c: Link, m, target: Operand, tensor: Operand, barrier: Operand, *extra: Operand) -> Step:
    """Fill shared memory, and count the bytes on an mbarrier."""
    to, signal, source, group = c.address(target), c.address(barrier), _source(c, tensor), c.group
    if len(tensor.coordinates) != int(m["n"]) or len(extra) != bool(m["cast"]) + bool(m["hint"]):
        raise c.unknown("wrong number of operands")
    ranks = c.read(extra[0], "u16") if m["cast"] else None
    pair = m["g"] == "2"

    def run() -> None:
        for lane in _lanes(c).tolist():
            tensor_map, coordinates = source(lane)
            place, at = int(to()[lane]), int(signal()[lane])
            mask = None if ranks is None else int(ranks[lane])
            transfer = Transfer(group, lane, tensor_map, coordinates)
            group.machine.agents.note(group, lane, tma_bytes_in=transfer.num_bytes)
            _issue_load(c, transfer, place, at, (mask, pair))

    return run


def _issue_load(
    c: Link, transfer: Transfer, place: int, at: int, cast: tuple[int | None, bool]
) -> None:
    group, (mask, pair) = c.group, cast
    cluster, own = group.cta.cluster, group.cta
    offset = place & OFFSET_MASK
    if mask is None:
        destinations = [cluster.cta_at(place)]
        barriers = [own.mbarrier(at)]
    else:
        destinations = [cta for cta in cluster.ctas if mask >> cta.rank & 1]
        parity = at >> RANK_SHIFT & 1
        barriers = []
        for cta in destinations:
            rank = cta.rank & ~1 | parity if pair else cta.rank
            barriers.append(own.mbarrier(rank << RANK_SHIFT | at & OFFSET_MASK))
    machine = group.machine
    machine.agents.tma += 1
    clock = machine.races.fork(group, c.mask) if machine.races is not None else None

    def perform() -> None:
        transfer.load([(cta, offset) for cta in destinations], clock)
        for barrier in barriers:
            if machine.races is not None:
                machine.races.publish(clock, barrier)
            barrier.complete(transfer.num_bytes, f"TMA of {group.name(0)}")

    machine.agents.issue(group, c.instruction, str(transfer), perform)


@op(rf"cp\.async\.bulk\.prefetch\.tensor\.(?P<n>[1-5])d\.L2\.global(\.tile)?{_L2}")
def prefetch(c: Link, m, tensor: Operand, *extra: Operand) -> Step:
    """Bring a box into L2, which nothing shows; it must be a legal one."""
    source = _source(c, tensor)
    if len(tensor.coordinates) != int(m["n"]) or len(extra) != bool(m["hint"]):
        raise c.unknown("wrong number of operands")

    def run() -> None:
        for lane in _lanes(c).tolist():
            Box(*source(lane))

    return run


_REDUCE = {
    "add": lambda old, value: old + value,
    "min": np.minimum,
    "max": np.maximum,
}


@op(
    r"cp\.(?P<reduce>reduce\.)?async\.bulk\.tensor\.(?P<n>[1-5])d\.global\.shared::cta"
    rf"(\.(?P<o>add|min|max))?(\.tile)?\.bulk_group{_L2}"
)
def store(c: Link, m, tensor: Operand, place: Operand, *extra: Operand) -> Step:
    """Write global memory from shared memory, as part of the thread's bulk group."""
    if bool(m["reduce"]) != bool(m["o"]) or len(extra) != bool(m["hint"]):
        raise c.unknown("wrong form")
    start, source, group = c.address(place), _source(c, tensor), c.group

    def run() -> None:
        seen = set()
        for lane in _lanes(c).tolist():
            tensor_map, coordinates = source(lane)
            at = int(start()[lane])
            key = (id(tensor_map), coordinates, at)
            if key in seen and not m["reduce"]:  # lanes that store the same box once more
                continue
            seen.add(key)
            transfer = Transfer(group, lane, tensor_map, coordinates)
            group.machine.agents.note(group, lane, tma_bytes_out=transfer.num_bytes)
            _issue_store(c, transfer, at, m["o"])

    return run


def _issue_store(c: Link, transfer: Transfer, at: int, name: str | None) -> None:
    group = c.group
    change = None
    if name is not None:
        dtype = {"f32": np.float32, "s32": np.int32, "u32": np.uint32}.get(transfer.map.dtype)
        if dtype is None:
            raise c.unknown(f"a reduction of {transfer.map.dtype} is not modelled")

        def change(old: np.ndarray, value: np.ndarray) -> np.ndarray:
            return _REDUCE[name](old.view(dtype), value.view(dtype)).view(old.dtype)

    machine, cta = group.machine, group.cta.cluster.cta_at(at)
    machine.agents.tma += 1
    clock = machine.races.fork(group, c.mask) if machine.races is not None else None
    piece = machine.agents.issue(
        group,
        c.instruction,
        str(transfer),
        lambda: transfer.store(cta, at & OFFSET_MASK, clock, change),
    )
    piece.clock = clock
    group.pending.setdefault("bulk", []).append(piece)


@op(r"cp\.async\.bulk\.commit_group")
def commit(c: Link, m) -> Step:
    """Close the bulk group."""
    group, mask = c.group, c.mask

    def run() -> None:
        if mask is None or mask.any():
            groups = group.pending.setdefault("bulk groups", [])
            groups.append(group.pending.pop("bulk", []))

    return run


@op(r"cp\.async\.bulk\.wait_group(?P<read>\.read)?")
def wait(c: Link, m, number: Operand) -> Step:
    """Complete all but the latest groups (with .read at least their reads)."""
    group, left, mask = c.group, int(number.text, 0), c.mask

    def run() -> None:
        if mask is not None and not mask.any():
            return
        groups = group.pending.setdefault("bulk groups", [])
        while len(groups) > left:
            for piece in groups.pop(0):
                group.machine.agents.force(piece)
                if group.machine.races is not None:
                    group.machine.races.join(group, mask, piece.clock)

    return run
