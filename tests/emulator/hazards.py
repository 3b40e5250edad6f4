"""What the text of a block shows without running it."""

from __future__ import annotations

from emulator.operands import Register, Vector


def unwaited_use(instructions: tuple) -> int | None:
    """Return the first instruction of a block that uses a loaded register before wait::ld."""
    loaded: set[Register] = set()
    for place, instruction in enumerate(instructions):
        if instruction.opcode.startswith("tcgen05.wait::ld"):
            loaded.clear()
        elif instruction.opcode.startswith("tcgen05.ld."):
            loaded.update(instruction.operands[0].items)
        elif loaded and any(r in loaded for r in _registers(instruction.operands)):
            return place
    return None


def _registers(operands: tuple):
    for operand in operands:
        if isinstance(operand, Register):
            yield operand
        elif isinstance(operand, Vector):
            yield from _registers(operand.items)
        elif hasattr(operand, "base"):
            yield from _registers((operand.base,))
