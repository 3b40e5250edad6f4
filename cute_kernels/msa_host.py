"""The host side of the MSA kernels: their TMA descriptors, and the values of a call."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_ptr

from sparse_atten.cute_kernels.common.edges import Tables
from sparse_atten.cute_kernels.common.tiles import SWIZZLE_BYTES, box_layout
from sparse_atten.cute_kernels.msa_arguments import BLOCK, HEAD_DIM, NO_ARGUMENTS


def make_maps(
    operands: tuple, strides: tuple, tables: Tables, group_size: int, key_tile: cute.ComposedLayout
) -> tuple:
    """Return a TMA atom and its coordinate tensor for each of q, k, v and o_partial.

    q is [Hq, D, Tq] and o_partial [Hq, D, chunk, K], in boxes of a token's group of heads and 128
    bytes. k and v are [rows, D, outer, Hkv] in tiles of 128 rows; rows outside read as 0.
    """
    num_kv_heads = tables.num_q_heads // group_size
    heads, chunk = tables.num_q_heads, tables.chunk
    keys = (tables.key_rows, HEAD_DIM, tables.key_outer, num_kv_heads)
    token, head = (cute.assume(stride, divby=8) for stride in strides[0])
    layouts = [cute.make_layout((heads, HEAD_DIM, tables.num_queries), stride=(head, 1, token))]
    for steps in strides[1:]:
        row, outer, head = (cute.assume(stride, divby=8) for stride in steps)
        layouts.append(cute.make_layout(keys, stride=(row, 1, outer, head)))
    token_stride = Int64(heads) * HEAD_DIM
    layouts.append(
        cute.make_layout(
            (heads, HEAD_DIM, chunk, tables.num_slots),
            stride=(HEAD_DIM, 1, token_stride, token_stride * chunk),
        )
    )
    maps = []
    for name, pointer, layout in zip("qkvo", operands, layouts, strict=True):
        op = cpasync.CopyBulkTensorTileS2GOp() if name == "o" else cpasync.CopyBulkTensorTileG2SOp()
        columns = SWIZZLE_BYTES * 8 // pointer.dtype.width
        tile, shape = box_layout(group_size, columns), (group_size, columns)
        if name in "kv":
            tile, shape = key_tile, (BLOCK, HEAD_DIM)
        tensor = cute.make_tensor(pointer, layout)
        info = cpasync.make_tiled_tma_atom(op, tensor, tile, shape)
        maps.append((info[0], info[1]))
    return tuple(maps)


def host_values(dtypes: tuple[type, type]) -> tuple:
    """Return what a host function is compiled with: operands, tables, strides, grid, stream.

    `dtypes` are those of q, k and v, and of o_partial.
    """

    def pointer(kind: type, align: int) -> Any:
        return make_ptr(kind, 0, cute.AddressSpace.gmem, assumed_align=align)

    arguments = NO_ARGUMENTS
    inputs = (arguments.q, arguments.k, arguments.v)
    *tables, _, _ = arguments.addresses
    *lengths, page_row, page = (Int64(x) for x in arguments.strides)
    return (
        (*(pointer(dtypes[0], 16) for _ in inputs), pointer(dtypes[1], 16)),
        Tables._make(
            [
                *(pointer(Int32, 4) for _ in tables),
                pointer(Float32, 4),
                pointer(Float32, 4),
                *lengths,
                (page_row, page),
                *(Int32(x) for x in arguments.scalars),
                Float32(arguments.scale_log2),
                Float32(arguments.scale_t_log2),
            ]
        ),
        tuple(tuple(Int64(x) for x in operand.strides) for operand in inputs),
        (Int32(1),) * 3,
        cuda.CUstream(0),
    )
