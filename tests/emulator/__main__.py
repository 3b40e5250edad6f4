"""Print what a tile step of a kernel costs: `cd tests && python -m emulator [KERNEL ...]`.

Kernels: fa4 (FlashAttention-4's dense SM100 forward, the rival; needs flash-attn-4) and vsa (ours).
A model: counted on the emulator, never run on a GPU.
"""

from __future__ import annotations

import argparse
import math

import torch

from emulator import launch, program_of, run
from emulator.counts import table, work_of

ROLES_OF_FA4 = {
    "softmax": range(8),
    "correction": range(8, 12),
    "mma": range(12, 13),
    "store": range(13, 14),
    "load": range(14, 15),
    "idle": range(15, 16),
}


def _operands(queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, tokens, 1, 128, generator=generator).bfloat16()
        for tokens in (queries, keys, keys)
    )


def fa4_table() -> str:
    """Count FlashAttention-4 on 256 queries and 1024 keys: 16 tile steps."""
    import fa4

    variant = fa4.Variant(100)
    kernel = fa4.compiled(variant)
    q, k, v = _operands(256, 1024)
    out = torch.empty_like(q)
    made = fa4.launch_of(variant, kernel, (q, k, v, out))
    shared = 227 * 1024 - program_of(kernel.ptx).kernel.shared_bytes
    result = launch(kernel.ptx, None, made.grid, made.block, shared, made.parameters)
    return table(work_of(result, ROLES_OF_FA4), per=2 * 1024 / 128)


def vsa_table() -> str:
    """Count the VSA kernel on the same work, every block chosen."""
    from sparse_atten.contracts import BlockSelection
    from sparse_atten.cute_kernels import vsa_sm100
    from sparse_atten.cute_kernels.common.target import Target
    from sparse_atten.cute_kernels.vsa_arguments import arguments_of

    q, k, v = (t.transpose(1, 2) for t in _operands(256, 1024))
    blocks = torch.arange(8, dtype=torch.int32).expand(1, 1, 2, 8).contiguous()
    selection = BlockSelection(blocks, torch.full((1, 1, 2), 8, dtype=torch.int32), layout="bhsd")
    target, config = Target("sm_100a"), vsa_sm100.Config()
    out = torch.empty_like(q)
    arguments = arguments_of(q, k, v, out, selection, softmax_scale=1 / math.sqrt(128))
    ptx = vsa_sm100.compile_offline(config, target).ptx
    result = run(ptx, vsa_sm100.launch_plan(config, target, arguments))
    roles = {r.name: range(r.first, r.last + 1) for r in vsa_sm100.SCHEDULE.roles}
    return table(work_of(result, roles), per=2 * 8)


TABLES = {"fa4": fa4_table, "vsa": vsa_table}


def main() -> None:
    """Print the tables of the kernels that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", choices=[[], *TABLES], default=list(TABLES))
    for name in parser.parse_args().kernels:
        print(f"{name}: a 128 x 128 x 128 tile step, prologue and epilogue included (model)")
        print(TABLES[name](), end="\n\n")


if __name__ == "__main__":
    main()
