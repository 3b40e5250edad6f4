"""tcgen05.mma: D = A B + D in tensor memory, exact sums rounded once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from emulator.convert import from_bf16, from_f16
from emulator.errors import EmulatorError
from emulator.link import Link, Step, op
from emulator.operands import Address, Operand, Vector
from emulator.swizzle import Matrix, addresses, decode, units_of
from emulator.tcgen05 import memory_of, pipe_of
from emulator.tmem import LANES, column_cells

K_BYTES = 32  # of a row of A or B that one instruction reads


class Shape(NamedTuple):
    """An instruction descriptor of kind::f16, decoded."""

    m: int
    n: int
    formats: tuple[int, int]  # of A and B: 0 fp16, 1 bf16
    negate: tuple[bool, bool]
    transposed: tuple[bool, bool]  # MN-major


def decode_shape(descriptor: int, pair: bool) -> Shape:
    """Decode 32 bits.

    Raises
    ------
    EmulatorError
        A field is illegal, or stands for a form that is not modelled.
    """
    formats = (descriptor >> 7 & 7, descriptor >> 10 & 7)
    n, m = (descriptor >> 17 & 63) * 8, (descriptor >> 24 & 31) * 16
    accumulator = descriptor >> 4 & 3
    if descriptor & 0xF or descriptor >> 6 & 1 or descriptor >> 23 & 1 or descriptor >> 29:
        raise EmulatorError("descriptor", f"instruction descriptor {descriptor:#010x}")
    if accumulator != 1 or any(f > 1 for f in formats):
        raise EmulatorError(
            "descriptor", f"{descriptor:#010x}: only fp16 and bf16 to float32 are modelled"
        )
    rows = (256,) if pair else (64, 128)
    step = {64: 8, 128: 16, 256: 16}.get(m, 0)
    if m not in rows or not 1 <= n <= 256 or n % step:
        raise EmulatorError("descriptor", f"{descriptor:#010x}: M {m}, N {n}, pair {pair}")
    return Shape(
        m,
        n,
        formats,
        (bool(descriptor >> 13 & 1), bool(descriptor >> 14 & 1)),
        (bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)),
    )


def widen(bits: np.ndarray, kind: int, *, negate: bool) -> np.ndarray:
    """Turn 16-bit operands into float64."""
    value = (from_bf16 if kind else from_f16)(bits).astype(np.float64)
    return -value if negate else value


def accumulate(a: np.ndarray, b: np.ndarray, d: Any, *, truncate: bool) -> np.ndarray:
    """Return float32 of a b^T + d: sums in float64, which holds the products exactly."""
    total = a @ b.T
    if d is not None:
        total += d
    result = total.astype(np.float32)
    if truncate:
        toward = np.where(np.abs(result.astype(np.float64)) > np.abs(total), True, False)
        result = np.where(toward, np.nextafter(result, np.float32(0)), result)
    return result


class Product:
    """One MMA: where its operands and its result are."""

    def __init__(self, group, shape: Shape, column: int, *, pair: bool) -> None:
        self.group = group
        self.machine = group.machine
        self.shape = shape
        self.column = column
        cluster = group.cta.cluster
        if pair:
            if group.cta.rank & 1:
                raise EmulatorError("tensor memory", "the even CTA of a pair issues its MMAs")
            self.ctas = cluster.ctas[group.cta.rank : group.cta.rank + 2]
        else:
            self.ctas = [group.cta]
        self.rows = shape.m // len(self.ctas)
        self.a: Matrix | int = 0  # a descriptor, or a column of tensor memory
        self.b: Matrix | None = None
        self.adds = False
        self.disabled: np.ndarray | None = None  # rows that are not written
        self.clock: Any = None
        for cta in self.ctas:
            self._memory(cta).check(column, shape.n)

    def _memory(self, cta: Any) -> Any:
        if cta.tmem is None:
            raise EmulatorError("tensor memory", f"CTA {cta.index} has allocated none")
        return cta.tmem

    def _matrix(self, cta: Any, matrix: Matrix, rows: int, which: int) -> np.ndarray:
        places = addresses(matrix, rows, 16, transposed=self.shape.transposed[which])
        shared = cta.shared
        if int(places.max()) + 2 > shared.size:
            shared.check_range(int(places.min()), int(places.max()) + 2)
        shared.check_valid(places >> 1, 2)
        if shared.shadow is not None:
            units = units_of(matrix, rows, 16, transposed=self.shape.transposed[which])
            shared.shadow.read_async(self.clock, units, 16)
        bits = shared.views[2][places >> 1]
        return widen(bits, self.shape.formats[which], negate=self.shape.negate[which])

    def _lanes(self) -> np.ndarray:
        """Return the lanes of D's rows in a CTA, where they are 64."""
        row = np.arange(self.rows)
        return 32 * (row // 16) + row % 16

    def _a(self, cta: Any) -> np.ndarray:
        if isinstance(self.a, Matrix):
            return self._matrix(cta, self.a, self.rows, 0)
        memory = self._memory(cta)
        memory.check(self.a, 8)
        if self.rows != 128:
            raise EmulatorError("descriptor", "A in tensor memory needs 128 rows here")
        memory.check_valid(slice(None), slice(self.a, self.a + 8))
        if memory.shadow is not None:
            memory.shadow.read_mma(self.clock, column_cells(self.rows, self.a, 8))
        words = np.ascontiguousarray(memory.words[:, self.a : self.a + 8])
        return widen(words.view(np.uint16), self.shape.formats[0], negate=self.shape.negate[0])

    def _cells(self, column: int, count: int) -> tuple[Any, Any]:
        if self.rows == LANES:
            return slice(None), slice(column, column + count)
        return self._lanes()[:, None], np.arange(column, column + count)[None, :]

    def perform(self) -> None:
        """Read, multiply, write."""
        n, share = self.shape.n, self.shape.n // len(self.ctas)
        b = np.concatenate([self._matrix(cta, self.b, share, 1) for cta in self.ctas])
        for cta in self.ctas:
            memory = self._memory(cta)
            a = self._a(cta)
            at = self._cells(self.column, n)
            if memory.shadow is not None:
                memory.shadow.write_mma(self.clock, column_cells(self.rows, self.column, n))
            old = None
            if self.adds:
                if not memory.valid[at].all():
                    memory.check_valid(slice(None), slice(self.column, self.column + n))
                old = memory.words[at].view(np.float32)
            new = accumulate(a, b, old, truncate=self.machine.options.truncate)
            if self.disabled is not None:
                keep = memory.words[at].view(np.float32)
                new = np.where(self.disabled[: self.rows, None], keep, new)
            memory.words[at] = new.view(np.uint32)
            memory.valid[at] = True


@op(
    r"tcgen05\.mma\.cta_group::(?P<g>[12])\.kind::f16"
    r"(\.collector::a::(fill|use|lastuse|discard))?"
)
def multiply(c: Link, m, d: Operand, a: Operand, b: Operand, *rest: Operand) -> Step:
    """Issue an MMA; each lane that runs issues one."""
    group, pair = c.group, m["g"] == "2"
    shape, *others = rest
    disabled = others.pop(0) if others and isinstance(others[0], Vector) else None
    adds = c.predicate(others.pop(0))
    if others:
        raise c.unknown("scale-input-d is not modelled")
    target, in_memory = c.address(d), isinstance(a, Address)
    first = c.address(a) if in_memory else c.read(a, "u64")
    second, kind = c.read(b, "u64"), c.read(shape, "u32")
    lanes_off = [c.read(x, "u32") for x in disabled.items] if disabled else []
    pipe_name = m["g"]

    def run() -> None:
        lanes = np.arange(c.lanes) if c.mask is None else np.flatnonzero(c.mask)
        for lane in lanes.tolist():
            memory_of(group, pipe_name)
            address = int(target()[lane])
            if address >> 16:
                raise EmulatorError("tensor memory", f"D starts in lane {address >> 16}")
            product = Product(
                group, decode_shape(int(kind[lane]), pair), address & 0xFFFF, pair=pair
            )
            product.a = int(first()[lane]) & 0xFFFF if in_memory else decode(int(first[lane]))
            product.b = decode(int(second[lane]))
            product.adds = bool(adds()[lane])
            words = np.array([row[lane] for row in lanes_off], np.uint32)
            if words.any():
                product.disabled = np.unpackbits(words.view(np.uint8), bitorder="little") != 0
            operands = product.shape.n + (0 if in_memory else product.shape.m)
            group.machine.agents.note(
                group,
                lane,
                mma_flop=2 * product.shape.m * product.shape.n * 16,
                operand_bytes=operands * K_BYTES,
            )
            _issue(c, product, pipe_of(group, pipe_name))

    return run


def _issue(c: Link, product: Product, pipe: tuple) -> None:
    group = c.group
    group.machine.agents.mma += 1
    if group.machine.races is not None:
        product.clock = group.machine.races.issue_mma(group, c.mask, pipe)
    group.machine.agents.issue(group, c.instruction, "tcgen05.mma", product.perform, pipe=pipe)
