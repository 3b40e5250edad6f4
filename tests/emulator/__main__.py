"""Print what a tile step of a kernel costs: `cd tests && python -m emulator [KERNEL ...]`.

Kernels: fa4 (FlashAttention-4's dense SM100 forward, the rival; left out without flash-attn-4), vsa
and k1 (ours). A table of each, its work by role, then a row for each: the clocks that every unit of
an SM needs, and the bound. A model: counted on the emulator, never run on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable
from typing import Any

import torch

from emulator import launch, program_of, run
from emulator.counts import Cost, comparison

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


def _ranges(roles: Iterable[Any]) -> dict[str, range]:
    return {role.name: range(role.first, role.last + 1) for role in roles}


def fa4_cost() -> Cost:
    """Count FlashAttention-4 on 256 queries and 1024 keys: 16 tile steps."""
    import fa4

    variant = fa4.Variant(100)
    kernel = fa4.compiled(variant)
    q, k, v = _operands(256, 1024)
    out = torch.empty_like(q)
    made = fa4.launch_of(variant, kernel, (q, k, v, out))
    shared = 227 * 1024 - program_of(kernel.ptx).kernel.shared_bytes
    result = launch(kernel.ptx, None, made.grid, made.block, shared, made.parameters, counts=True)
    return Cost.of(result, ROLES_OF_FA4, 2 * 1024 / 128)


def vsa_cost() -> Cost:
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
    result = run(ptx, vsa_sm100.launch_plan(config, target, arguments), counts=True)
    return Cost.of(result, _ranges(vsa_sm100.SCHEDULE.roles), 2 * 8)


def k1_cost() -> Cost:
    """Count K1 of MSA on 128 tokens of 16 query heads that all choose a block: 16 tile steps."""
    from msa_k1_cases import Case, make_call

    from sparse_atten.cute_kernels import msa_k1_sm100
    from sparse_atten.cute_kernels.common.target import Target

    case = Case("counts", (128,), (128,), width=1, ids="first", keep=1.0)
    call, target = make_call(case), Target("sm_100a")
    partials = call.partials()
    plan = msa_k1_sm100.launch_plan(case.config, target, call.arguments(partials))
    result = run(msa_k1_sm100.compile_offline(case.config, target).ptx, plan, counts=True)
    return Cost.of(result, _ranges(msa_k1_sm100.SCHEDULE.roles), 16)


COSTS = {"fa4": fa4_cost, "vsa": vsa_cost, "k1": k1_cost}


def main() -> None:
    """Print the tables of the kernels that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(COSTS)}; all without one")
    names = parser.parse_args().kernels or list(COSTS)
    if unknown := set(names) - COSTS.keys():
        parser.error(f"kernels must be of {list(COSTS)}, got {sorted(unknown)}")
    if "fa4" in names and importlib.util.find_spec("flash_attn") is None:
        names.remove("fa4")
        print("fa4 is left out: flash-attn-4 is not installed\n")
    costs = {}
    for name in names:
        cost = costs[name] = COSTS[name]()
        print(f"{name}: a 128 x 128 x 128 tile step, prologue and epilogue included (model)")
        print(cost.table(), end="\n\n")
    print("Clocks of an SM for a tile step (model)")
    print(comparison(costs))


if __name__ == "__main__":
    main()
