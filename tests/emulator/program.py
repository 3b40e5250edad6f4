"""A kernel as basic blocks, with the linked groups that ran it kept for the next launch."""

from __future__ import annotations

from typing import NamedTuple

from emulator.group import Group
from emulator.link import handler_of
from emulator.operands import Instruction
from emulator.parser import Kernel, Module


class Block(NamedTuple):
    """Instructions that run one after the other."""

    start: int
    instructions: tuple[Instruction, ...]
    ends: bool  # its last instruction decides where to go
    converges: bool


class Program:
    """A kernel cut into blocks at labels, branches, waits and collectives."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module = module
        self.kernel = kernel
        self.leaders = self._leaders()
        self.has_wgmma = any(i.opcode.startswith("wgmma.mma") for i in kernel.instructions)
        self.blocks: dict[int, Block] = {}
        self.idle: dict[tuple, list[Group]] = {}

    def _leaders(self) -> set[int]:
        leaders = {0, *self.kernel.labels}
        for instruction in self.kernel.instructions:
            found = handler_of(instruction.opcode)
            if found is None:
                continue
            if found[0].converges or (found[0].ends and "bra" not in instruction.opcode):
                leaders.add(instruction.index)
            if found[0].ends:
                leaders.add(instruction.index + 1)
        return leaders

    def block_at(self, start: int) -> Block:
        """Return the block that begins with an instruction."""
        if start not in self.blocks:
            instructions = self.kernel.instructions
            end = start + 1
            while end < len(instructions) and end not in self.leaders:
                end += 1
            found = [handler_of(i.opcode) for i in instructions[start:end]]
            self.blocks[start] = Block(
                start,
                tuple(instructions[start:end]),
                ends=bool(found[-1] and found[-1][0].ends),
                converges=bool(found[0] and found[0][0].converges),
            )
        return self.blocks[start]

    def source(self, instruction: Instruction) -> str:
        """Return the source line of an instruction where the text has one."""
        number, _, line = instruction.source.partition(":")
        return f"{self.module.files.get(number, number)}:{line}" if line else ""

    def take_group(self, num_warps: int, first_warp: int, variant: str) -> Group:
        """Return a group that no CTA uses; its code stays linked.

        `variant` names what the linked code depends on besides the text. Warps of the same place in
        a CTA take the same group again, because they run the same code.
        """
        idle = self.idle.setdefault((num_warps, first_warp, variant), [])
        return idle.pop() if idle else Group(self, num_warps)

    def give_group(self, group: Group, variant: str) -> None:
        """Keep a group for the next CTA; the one that has ended need not stay in memory."""
        group.cta = group.machine = None
        group.pending.clear()
        self.idle[group.num_warps, group.first_warp, variant].append(group)
