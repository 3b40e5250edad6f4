"""Bind instructions to the registers of a group: each becomes a callable without arguments.

A handler is registered for a pattern of opcodes and returns the callable; an opcode that matches no
pattern, down to its last modifier, is unknown. Handlers that end a block (branches, waits) return
the index of the next instruction, or `HANDLED` when they have placed the fragment themselves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from emulator.errors import EmulatorError
from emulator.operands import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from emulator.parser import immediate_bits
from emulator.registers import DTYPES

if TYPE_CHECKING:
    from emulator.group import Group

HANDLED = -1
Step = Callable[[], Any]


class Handler:
    """A pattern of opcodes and the function that binds such an instruction."""

    def __init__(self, pattern: str, bind: Callable, *, ends: bool, converges: bool) -> None:
        self.pattern = re.compile(pattern)
        self.bind = bind
        self.ends = ends  # ends a block: a branch, or an instruction that may wait
        self.converges = converges  # needs all lanes of its warp, or those of its mask


_HANDLERS: list[Handler] = []


def op(pattern: str, *, ends: bool = False, converges: bool = False) -> Callable:
    """Register a handler `bind(c, match, *operands)` for the opcodes that match a pattern."""

    def register(bind: Callable) -> Callable:
        _HANDLERS.append(Handler(pattern, bind, ends=ends, converges=converges))
        return bind

    return register


@functools.cache
def handler_of(opcode: str) -> tuple[Handler, re.Match] | None:
    """Find the handler of an opcode; two that match are a mistake of ours."""
    found = [(h, m) for h in _HANDLERS if (m := h.pattern.fullmatch(opcode))]
    if len(found) > 1:
        raise AssertionError(f"{opcode} matches {[h.pattern.pattern for h, _ in found]}")
    return found[0] if found else None


class Link:
    """What a handler sees: the group, the instruction, and how to reach its operands.

    `mask` is None where every lane of the group runs the instruction, else the lanes that do, valid
    while the callable runs.
    """

    def __init__(self, group: Group, instruction: Instruction, *, masked: bool) -> None:
        self.group = group
        self.instruction = instruction
        self.lanes = group.lanes
        self.masked = masked
        self.mask, self.prepare = self._mask()

    def _mask(self) -> tuple[np.ndarray | None, Step | None]:
        guard = self.instruction.guard
        group = self.group
        if guard is None:
            return (group.active, None) if self.masked else (None, None)
        predicate = group.file.view("pred", guard.index, "pred")
        guarded = group.guarded
        if not self.masked:
            if not self.instruction.guard_negated:
                return predicate, None
            return guarded, partial(np.logical_not, predicate, guarded)
        if self.instruction.guard_negated:
            return guarded, partial(np.greater, group.active, predicate, guarded)
        return guarded, partial(np.logical_and, group.active, predicate, guarded)

    def unknown(self, why: str) -> EmulatorError:
        """Return the error for a form that is not modelled."""
        return EmulatorError("unknown instruction", why, self.group.where(self.instruction))

    # ---- operands

    def read(self, operand: Operand, type_name: str) -> np.ndarray:
        """Return the array that holds an operand as a type whenever the callable runs."""
        group = self.group
        if isinstance(operand, Register):
            return group.file.view(operand.kind, operand.index, type_name)
        if isinstance(operand, Immediate):
            return self.constant(operand.text, type_name)
        if isinstance(operand, Special):
            return group.special(operand.name, type_name)
        if isinstance(operand, Symbol):
            return group.symbol(operand, type_name)
        raise self.unknown(f"operand {operand} cannot be read")

    def constant(self, text: str, type_name: str) -> np.ndarray:
        """Return an immediate in all lanes."""
        if type_name == "pred":
            return np.full(self.lanes, int(text, 0) != 0)
        dtype = np.dtype(DTYPES[type_name])
        bits = immediate_bits(text, type_name) & ((1 << 8 * dtype.itemsize) - 1)
        raw = bits.to_bytes(dtype.itemsize, "little")
        return np.full(self.lanes, np.frombuffer(raw, dtype)[0])

    def write(self, operand: Operand, type_name: str) -> np.ndarray:
        """Return the array that takes a result."""
        if isinstance(operand, Sink):
            return np.empty(self.lanes, DTYPES[type_name])
        if isinstance(operand, Register):
            return self.group.file.view(operand.kind, operand.index, type_name)
        raise self.unknown(f"operand {operand} cannot be written")

    def predicate(self, operand: Operand) -> Callable[[], np.ndarray]:
        """Return a function for the value of p, !p or a constant."""
        if isinstance(operand, Not):
            return partial(np.logical_not, self.read(operand.register, "pred"))
        value = self.read(operand, "pred")
        return lambda: value

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """Return the elements of a vector, or the operand alone."""
        return operand.items if isinstance(operand, Vector) else (operand,)

    def scalar(self, operand: Operand, type_name: str) -> Callable[[], int]:
        """Return a function for the value in the first lane that runs."""
        value, mask = self.read(operand, type_name), self.mask
        if mask is None:
            return lambda: int(value[0])
        return lambda: int(value[int(mask.argmax())])

    def address(self, operand: Operand) -> Callable[[], np.ndarray]:
        """Return a function for the addresses of [base + offset]: 32 bits wrap, 64 do too."""
        if not isinstance(operand, Address):
            raise self.unknown(f"operand {operand} is no address")
        base = operand.base
        wide = (isinstance(base, Register) and base.kind == "b64") or (
            isinstance(base, Symbol) and base.space in ("param", "global", "local")
        )
        type_name = "u64" if wide or isinstance(base, Immediate) else "u32"
        value = self.read(base, type_name)
        if operand.offset == 0:
            return lambda: value
        dtype = DTYPES[type_name]
        limit = 1 << 8 * np.dtype(dtype).itemsize
        offset = np.full(self.lanes, operand.offset % limit, dtype)
        return partial(np.add, value, offset)

    # ---- callables

    def elementwise(self, function: Callable, out: np.ndarray, *values: np.ndarray) -> Step:
        """Apply a ufunc lane by lane."""
        if self.mask is None:
            return partial(function, *values, out=out)
        return partial(function, *values, out=out, where=self.mask)

    def assign(self, out: np.ndarray, compute: Callable[[], np.ndarray]) -> Step:
        """Store what a function computes for all lanes, in the lanes that run."""
        mask = self.mask
        if mask is None:

            def run() -> None:
                out[...] = compute()

        elif out.ndim > 1:
            column = mask[:, None]

            def run() -> None:
                np.copyto(out, compute(), where=column, casting="unsafe")

        else:

            def run() -> None:
                np.copyto(out, compute(), where=mask, casting="unsafe")

        return run

    def active_warps(self) -> list[int]:
        """Return which warps of the group run now: all of their places."""
        if self.mask is None:
            return list(range(self.group.num_warps))
        return np.flatnonzero(self.mask.reshape(-1, 32).any(1)).tolist()


def bind(group: Group, instruction: Instruction, *, masked: bool) -> Step:
    """Bind one instruction.

    Raises
    ------
    EmulatorError
        The opcode or the form of an operand is unknown.
    """
    link = Link(group, instruction, masked=masked)
    found = handler_of(instruction.opcode)
    if found is None:
        raise link.unknown(f"opcode {instruction.opcode} is not modelled")
    handler, match = found
    try:
        step = handler.bind(link, match, *instruction.operands)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise link.unknown(f"operands are not understood ({error!r})") from error
    prepare = link.prepare
    if prepare is None or step is None:
        return step
    return _chain(prepare, step)


def _chain(first: Step, second: Step) -> Step:
    def run() -> Any:
        first()
        return second()

    return run
