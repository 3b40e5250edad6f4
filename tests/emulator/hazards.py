"""What the text of a block shows without running it."""

from __future__ import annotations

from collections.abc import Iterator

from emulator.operands import (
    Address,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    TensorAddress,
    Vector,
)


def unwaited_use(instructions: tuple) -> int | None:
    """Return the first instruction of a block that uses a loaded register before wait::ld."""
    loaded: set[Register] = set()
    for place, instruction in enumerate(instructions):
        if instruction.opcode.startswith("tcgen05.wait::ld"):
            loaded.clear()
        elif instruction.opcode.startswith("tcgen05.ld."):
            loaded.update(instruction.operands[0].items)
        elif loaded and any(r in loaded for r in registers(instruction.operands)):
            return place
    return None


def registers(operands: tuple[Operand, ...]) -> Iterator[Register]:
    """Yield the registers that operands name, those of addresses included."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Vector):
            yield from registers(operand.items)
        elif isinstance(operand, Address):
            yield from registers((operand.base,))
        elif isinstance(operand, TensorAddress):
            yield from registers((operand.base, *operand.coordinates))
        elif isinstance(operand, Pair):
            yield from registers((operand.first, operand.second))
        elif isinstance(operand, Not):
            yield operand.register


def words(operands: tuple[Operand, ...]) -> int:
    """Return the 32-bit registers that operands name, as bits of a number."""
    mask = 0
    for register in registers(operands):
        if register.kind == "b32":
            mask |= 1 << register.index
    return mask


def ordinary_words(instruction: Instruction) -> int:
    """Return the 32-bit registers of an instruction that is no wgmma."""
    return 0 if instruction.opcode.startswith("wgmma.") else words(instruction.operands)
