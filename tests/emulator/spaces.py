"""The state spaces as a thread sees them: gather, scatter and update the values of some lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from emulator.errors import EmulatorError
from emulator.memory import LOCAL_BASE, PARAMETER_BASE, UNITS, Segment, window_of
from emulator.shared import OFFSET_MASK, RANK_SHIFT, SharedMemory

if TYPE_CHECKING:
    from emulator.group import Group

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Access:
    """An access of some lanes of a group; `kind` is plain, strong or atomic."""

    def __init__(self, group: Group, space: str, kind: str) -> None:
        self.group = group
        self.space = space
        self.strong = kind != "plain"

    def load(
        self, addresses: np.ndarray, lanes: np.ndarray | None, unit: int, count: int
    ) -> np.ndarray:
        """Return [lanes, count] units."""
        out = np.empty((len(addresses), count), UNITS[unit])
        for place, rows, offsets in self._parts(addresses, unit * count):
            actors = self._lanes(lanes, rows, len(addresses))
            out[rows] = self._gather(place, actors, offsets, unit, count)
            if place.shadow is not None:
                place.shadow.read(self.group, actors, offsets, unit * count, strong=self.strong)
            self._count(place, actors, offsets, unit * count, "ld")
        return out

    def _gather(
        self, place: object, lanes: np.ndarray, offsets: np.ndarray, unit: int, count: int
    ) -> np.ndarray:
        if isinstance(place, SharedMemory):
            return place.gather(offsets, unit, count)
        if isinstance(place, Local):
            return place.gather(lanes, offsets, unit, count)
        return place.view(unit)[_places(offsets, unit, count)]

    def store(self, addresses: np.ndarray, lanes: np.ndarray | None, values: np.ndarray) -> None:
        """Write [lanes, count] units."""
        unit, count = values.itemsize, values.shape[1]
        for place, rows, offsets in self._parts(addresses, unit * count):
            actors = self._lanes(lanes, rows, len(addresses))
            part = values[rows]
            if isinstance(place, SharedMemory):
                place.scatter(offsets, unit, part)
            elif isinstance(place, Local):
                place.scatter(actors, offsets, part)
            else:
                places = _places(offsets, unit, count)
                place.view(unit)[places] = part
                mark_written(place, offsets, unit * count)
            if place.shadow is not None:
                place.shadow.write(self.group, actors, offsets, unit * count, strong=self.strong)
            self._count(place, actors, offsets, unit * count, "st")

    def update(
        self, addresses: np.ndarray, lanes: np.ndarray | None, values: np.ndarray, change: Update
    ) -> np.ndarray:
        """Replace each lane's unit by change(old, value), lane after lane; returns the old ones."""
        old = np.empty_like(values)
        unit = values.itemsize
        order = -1 if self.group.machine.options.descending else 1
        for place, rows, offsets in self._parts(addresses, unit):
            if isinstance(place, SharedMemory):
                place.check_access(offsets, unit)
                place.check_valid(offsets // unit, unit)
                view = place.views[unit]
            else:
                view = place.view(unit)
                mark_written(place, offsets, unit)
            served = rows[::order]
            places = (offsets[::order] // unit).astype(np.intp)
            old[served] = _serve(view.view(values.dtype), places, values[served], change)
            actors = self._lanes(lanes, rows, len(addresses))
            if place.shadow is not None:
                place.shadow.update(self.group, actors, offsets, unit)
            self._count(place, actors, offsets, unit, "ld", "st")
        return old

    def _count(self, place: object, lanes: np.ndarray, offsets: np.ndarray, size: int, *names):
        traffic = self.group.machine.traffic
        if traffic is not None and isinstance(place, Segment):
            traffic.sectors(self.group, lanes, (place, offsets), size, *names)

    # ---- where addresses point

    def _lanes(self, lanes: np.ndarray | None, rows: np.ndarray, count: int) -> np.ndarray:
        if lanes is None:
            return rows
        return lanes if len(rows) == count else lanes[rows]

    def _parts(self, addresses: np.ndarray, size: int):
        """Yield (memory, rows, byte offsets there) for each memory that the addresses touch."""
        space = self.space
        if space == "generic":
            first = int(addresses[0])
            space, base = window_of(first)
            if any(window_of(int(a))[0] != space for a in (addresses.min(), addresses.max())):
                raise EmulatorError("out of bounds", "the lanes' addresses mix state spaces")
            if base and space != "local":
                addresses = addresses - np.uint64(base)
        every = np.arange(len(addresses))
        cta = self.group.cta
        if space == "global":
            for segment, rows in cta.machine.memory.split(addresses, size):
                yield segment, rows, (addresses[rows] - np.uint64(segment.start)).astype(np.int64)
        elif space == "local":
            offsets = (addresses.astype(np.uint64) - np.uint64(LOCAL_BASE)).astype(np.int64)
            yield Local(self.group), every, offsets
        elif space == "param":
            offsets = (addresses.astype(np.uint64) - np.uint64(PARAMETER_BASE)).astype(np.int64)
            yield cta.machine.parameters, every, offsets
        else:
            yield from self._shared_parts(addresses, every)

    def _shared_parts(self, addresses: np.ndarray, every: np.ndarray):
        cta = self.group.cta
        if len(cta.cluster.ctas) == 1:  # no rank in the addresses: what has one is out of bounds
            yield cta.shared, every, addresses.astype(np.int64)
            return
        ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
        first = int(ranks[0])
        offsets = (addresses & addresses.dtype.type(OFFSET_MASK)).astype(np.int64)
        if (ranks == first).all():
            yield cta.cluster.shared(first, cta, self.space), every, offsets
            return
        for rank in np.unique(ranks).tolist():
            rows = np.flatnonzero(ranks == rank)
            yield cta.cluster.shared(rank, cta, self.space), rows, offsets[rows]


def _places(offsets: np.ndarray, unit: int, count: int) -> np.ndarray:
    first = (offsets // unit)[:, None]
    return first if count == 1 else first + np.arange(count)


def mark_written(segment: object, offsets: np.ndarray, size: int) -> None:
    """Note which bytes of an output were written."""
    if segment.written is not None:
        segment.written[(offsets[:, None] + np.arange(size)).ravel()] = True


def add(old: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Change by adding."""
    return old + value


def _serve(view: np.ndarray, places: np.ndarray, values: np.ndarray, change: Update) -> np.ndarray:
    """Apply the changes in order, as if one after the other; returns what each one found."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    repeats = sorted_places[1:] == sorted_places[:-1]
    if not repeats.any():
        old = view[places]
        view[places] = change(old, values)
        return old
    old = np.empty_like(values)
    if change is add and values.dtype.kind in "iu":  # sums of those before at the same place
        amounts = values[order]
        before = np.cumsum(amounts, dtype=values.dtype) - amounts
        starts = np.flatnonzero(np.concatenate([[True], ~repeats]))
        lengths = np.diff(np.append(starts, len(order)))
        old[order] = view[sorted_places] + before - np.repeat(before[starts], lengths)
        np.add.at(view, places, values)
        return old
    for i, place in enumerate(places.tolist()):
        one = view[place : place + 1]
        old[i] = one[0]
        one[...] = change(one.copy(), values[i : i + 1])
    return old


class Local:
    """Local memory of a group's threads."""

    shadow = None
    written = None

    def __init__(self, group: Group) -> None:
        self.memory = group.local

    def _columns(self, offsets: np.ndarray, size: int) -> np.ndarray:
        if int(offsets.min()) < 0 or int(offsets.max()) + size > self.memory.shape[1]:
            raise EmulatorError("out of bounds", f"local bytes {int(offsets.max())} and more")
        if (offsets % size).any():
            raise EmulatorError("alignment", f"local addresses must be multiples of {size}")
        return offsets[:, None] + np.arange(size)

    def gather(self, lanes: np.ndarray, offsets: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Read."""
        columns = self._columns(offsets, unit * count)
        data = np.ascontiguousarray(self.memory[lanes[:, None], columns])
        return data.view(UNITS[unit])

    def scatter(self, lanes: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
        """Write."""
        columns = self._columns(offsets, values.itemsize * values.shape[1])
        self.memory[lanes[:, None], columns] = np.ascontiguousarray(values).view(np.uint8)
