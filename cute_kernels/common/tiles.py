"""128 x 128 tiles of 16-bit elements in shared memory, the ring that they pass through, and TMA."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

ROWS, COLUMNS = 128, 128
TILE_BYTES = ROWS * COLUMNS * 2
HALF_BYTES = TILE_BYTES // 2  # 64 columns: one 128-byte swizzle atom wide
SWIZZLE_BYTES = 128


class Ring(NamedTuple):
    """Position in the K/V ring: slot, and parity of its current pass."""

    slot: Int32  # times 8
    phase: Int32

    def tile_offset(self) -> Int32:
        """Return where the slot's tile starts in the ring, bytes."""
        return self.slot * (TILE_BYTES // 8)


@cute.jit
def advance(ring: Ring, slots: cutlass.Constexpr) -> Ring:
    """Go on to the next slot."""
    wraps = ring.slot == 8 * (slots - 1)
    slot, phase = ring.slot + 8, ring.phase
    if wraps:
        slot, phase = Int32(0), phase ^ 1
    return Ring(slot, phase)


def tile_layout(dtype: type, columns: int = COLUMNS) -> cute.ComposedLayout:
    """Return the layout of a tile: parts of 64 columns, 128-byte rows, 128-byte swizzle."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (ROWS, columns), order=(0, 1))


def box_layout(rows: int, columns: int) -> cute.ComposedLayout:
    """Return the layout in shared memory of rows of 128 bytes with 128-byte swizzle.

    The swizzle is one of addresses, so that a box may start at any multiple of 128 bytes.
    """
    layout = cute.make_layout((rows, columns), stride=(columns, 1))
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)


def box_at(address: Int32, rows: int, dtype: Any) -> cute.Tensor:
    """View rows of 128 bytes from a shared address, a multiple of 128."""
    layout = box_layout(rows, SWIZZLE_BYTES * 8 // dtype.width)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=SWIZZLE_BYTES)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)


def tile_at(
    base: cute.Pointer, offset: Int32 | int, dtype: type, columns: int = COLUMNS
) -> cute.Tensor:
    """View the tile that starts `offset` bytes into shared memory."""
    layout = tile_layout(dtype, columns)
    pointer = cute.recast_ptr(base + offset, layout.inner, dtype=dtype)
    return cute.make_tensor(pointer, layout.outer)


def boxes(atom: cute.CopyAtom, tile: cute.Tensor, coordinates: cute.Tensor) -> tuple:
    """Cut a tile and its global coordinates into what one TMA instruction moves."""
    tile, coordinates = cute.group_modes(tile, 0, 2), cute.group_modes(coordinates, 0, 2)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), tile, coordinates)


def load_tile(
    atom: cute.CopyAtom, coordinates: cute.Tensor, tile: cute.Tensor, full: cute.Pointer
) -> None:
    """Issue the TMA loads of a tile; they count their bytes on the mbarrier `full`. One warp."""
    tile, coordinates = boxes(atom, tile, coordinates)
    cute.copy(atom, coordinates, tile, tma_bar_ptr=full)
