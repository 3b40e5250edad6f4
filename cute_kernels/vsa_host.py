"""What the VSA kernels are compiled with: TMA descriptors, and values in place of a call's."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from sparse_atten.cute_kernels.common.block_list import Tables
from sparse_atten.cute_kernels.vsa_arguments import BLOCK, HEAD_DIM, NO_ARGUMENTS


def make_maps(
    operands: tuple, strides: tuple, tables: Tables, tile_layout: cute.ComposedLayout
) -> tuple:
    """Return a TMA atom and its coordinate tensor for each of q, k, v and the output.

    q and the output are [Sq, D, Hq, B]. k and v are [128, D, Nkv, Hkv, B]: a row is addressed
    inside its block, so that a negative one is out of bounds and reads as 0. A partial block is
    loaded with its valid keys at the end of the tile, and no other key is read.
    """
    num_kv_blocks = (tables.num_keys + BLOCK - 1) // BLOCK
    num_kv_heads = tables.num_q_heads // tables.group_size
    maps = []
    for name, pointer, steps in zip("qkvo", operands, strides, strict=True):
        b, h, s = (cute.assume(stride, divby=8) for stride in steps)
        if name in "qo":
            queries = (tables.num_queries, HEAD_DIM, tables.num_q_heads, tables.batch)
            layout = cute.make_layout(queries, stride=(s, 1, h, b))
        else:
            keys = (BLOCK, HEAD_DIM, num_kv_blocks, num_kv_heads, tables.batch)
            layout = cute.make_layout(keys, stride=(s, 1, s * BLOCK, h, b))
        op = cpasync.CopyBulkTensorTileS2GOp() if name == "o" else cpasync.CopyBulkTensorTileG2SOp()
        tensor = cute.make_tensor(pointer, layout)
        info = cpasync.make_tiled_tma_atom(op, tensor, tile_layout, (BLOCK, HEAD_DIM))
        maps.append((info[0], info[1]))
    return tuple(maps)


def host_values(dtype: type) -> tuple:
    """Return what a host function is compiled with: operands, tables, strides, grid, stream."""

    def pointer(kind: type, align: int) -> Any:
        return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=align)

    arguments = NO_ARGUMENTS
    strides = [tuple(Int64(x) for x in table.strides) for table in arguments.tables]
    return (
        tuple(pointer(dtype, 16) for _ in range(4)),
        Tables._make(
            [
                *(pointer(Int32, 4) for _ in strides),
                pointer(Float32, 4),
                *strides[:3],
                strides[3][0],
                *(Int32(x) for x in arguments.scalars),
                Float32(arguments.scale_log2),
            ]
        ),
        tuple(tuple(Int64(0) for _ in range(3)) for _ in range(4)),
        (Int32(1),) * 3,
        cuda.CUstream(0),
    )
