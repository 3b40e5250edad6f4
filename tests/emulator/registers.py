"""Registers of a group of warps: one row of lanes for each register, seen as any type."""

from __future__ import annotations

import numpy as np

from emulator.operands import SIZES

POISON = 0xA5  # every byte of a register that nothing has written
DTYPES = {
    "u8": np.uint8,
    "s8": np.int8,
    "b8": np.uint8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "f16": np.float16,
    "bf16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f64": np.float64,
    "f32x2": np.uint64,
    "pred": np.bool_,
}
_BASES = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


class RegisterFile:
    """Rows of `lanes` values; b128 registers are rows of two 64-bit words a lane."""

    def __init__(self, counts: dict[str, int], lanes: int) -> None:
        self.lanes = lanes
        self.rows = {k: np.empty((counts.get(k, 0), lanes), t) for k, t in _BASES.items()}
        self.rows["b128"] = np.empty((counts.get("b128", 0), lanes, 2), np.uint64)
        self.views: dict[tuple[str, int, str], np.ndarray] = {}

    def clear(self) -> None:
        """Poison everything."""
        for kind, rows in self.rows.items():
            if kind == "pred":
                rows[...] = False
            else:
                rows.view(np.uint8)[...] = POISON

    def view(self, kind: str, index: int, type_name: str) -> np.ndarray:
        """Return the row as a type that is as wide, or its low part as a narrower one."""
        key = (kind, index, type_name)
        if key not in self.views:
            row = self.rows[kind][index]
            if type_name == "words":  # 32-bit words of each lane
                row = row.view(np.uint32).reshape(self.lanes, -1)
            elif type_name == "f32x2 lanes":
                row = row.view(np.float32).reshape(self.lanes, 2)
            elif kind not in ("pred", "b128"):
                dtype = DTYPES[type_name]
                wide = row.itemsize // SIZES[type_name]
                if wide == 0:
                    raise ValueError(f"a {kind} register is too narrow for {type_name}")
                row = row.view(dtype)
                row = row.reshape(self.lanes, wide)[:, 0] if wide > 1 else row
            self.views[key] = row
        return self.views[key]
