"""Launch plans of others' CuTe-DSL kernels, read from the compiler's intermediate code.

`make_non_exec_tiled_tma_*` of the text carry a map's box, swizzle and the TMA dim of each mode of
its tensor; `launch_cfg` carries the launch. The tensors come from the caller, as views in the
order of their modes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch

_MAP = re.compile(
    r"(%[\w#:]+), %[\w#:]+ = cute_nvgpu\.atom\.make_non_exec_tiled_tma_(load|store|reduce)\(.*"
)
_CONFIG = re.compile(
    r"(%\w+) = cuda\.launch_cfg\.create<.*?> \(blockDim = \(([^)]*)\), .*?gridDim = \(([^)]*)\)"
)
_CLUSTER = re.compile(r"cuda\.launch_cfg\.(preferred_)?cluster_dim\[(%\w+)\] \(([^)]*)\)")
_LAUNCH = re.compile(r"cuda\.launch_ex @[\w$]+::@[\w$]+<(%\w+)> \(([^)]*)\)")
_SWIZZLES = {None: 0, 1: 32, 2: 64, 3: 128}
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32"}


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor, dims innermost first; strides in bytes for dims 1 and up."""

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class MapSpec:
    """A map of the text: its box, swizzle width in bytes, and the TMA dim of each mode.

    A mode of modes stands as its leaves.
    """

    kind: str
    box: tuple[int, ...]
    swizzle: int
    dims: tuple[int | None, ...]

    def bind(self, view: torch.Tensor) -> TensorMap:
        """Describe a tensor whose dims are the modes of the text.

        Raises
        ------
        ValueError
            The view has another rank, or its innermost TMA dim is not contiguous.
        """
        if view.dim() != len(self.dims):
            raise ValueError(f"view must have {len(self.dims)} dims, got {view.dim()}")
        mode_of = {dim: mode for mode, dim in enumerate(self.dims) if dim is not None}
        order = [mode_of[dim] for dim in range(len(self.box))]
        if view.stride(order[0]) != 1:
            raise ValueError(f"mode {order[0]} must be contiguous, got strides {view.stride()}")
        return TensorMap(
            view.data_ptr(),
            _DTYPES[view.dtype],
            tuple(view.shape[mode] for mode in order),
            tuple(view.stride(mode) * view.element_size() for mode in order[1:]),
            self.box,
            self.swizzle,
        )


@dataclass(frozen=True)
class LaunchSpec:
    """A launch of the text: what is constant of its dims, and of its arguments.

    `preferred` is the cluster that the hardware may use instead of `cluster`. An argument is a map,
    a number, a divisor (packed), or None for what is not known.
    """

    grid: tuple[int | None, ...]
    block: tuple[int | None, ...]
    cluster: tuple[int | None, ...]
    preferred: tuple[int | None, ...] | None
    arguments: tuple[MapSpec | float | bytes | None, ...]


def tensor_maps(text: str) -> list[MapSpec]:
    """Return the maps of a module in the order of its text."""
    return list(_maps(text).values())


def launches(text: str) -> list[LaunchSpec]:
    """Return the launches of a module in the order of its text."""
    known: dict[str, Any] = {
        name: int(number)
        for name, number in re.findall(r"(%\w+) = arith\.constant (-?\d+) : i\d+", text)
    }
    for name, number in re.findall(
        r"(%\w+) = arith\.constant (-?[\d.]+(?:[eE][-+]\d+)?) : f32", text
    ):
        known[name] = float(number)
    for name, of in re.findall(r"(%\w+) = cute\.fast_divmod\.create_divisor\((%\w+)\)", text):
        if of in known:
            known[name] = fast_divisor(known[of])

    def values(names: str) -> tuple:
        return tuple(known.get(name.strip()) for name in names.split(","))

    clusters = {(name, kind): values(dims) for kind, name, dims in _CLUSTER.findall(text)}
    configs = {name: (values(grid), values(block)) for name, block, grid in _CONFIG.findall(text)}
    known |= _maps(text)
    return [
        LaunchSpec(
            *configs[name],
            clusters.get((name, ""), (1, 1, 1)),
            clusters.get((name, "preferred_")),
            values(arguments),
        )
        for name, arguments in _LAUNCH.findall(text)
    ]


def _maps(text: str) -> dict[str, MapSpec]:
    """Return the maps by their names, in the order of the text."""
    aliases = dict(re.findall(r"^(![\w.]+) = (.*)$", text, re.MULTILINE))
    found = {}
    for match in _MAP.finditer(text):
        line = re.sub(r"![\w.]+", lambda m: aliases.get(m[0], m[0]), match[0])
        swizzle = re.search(r'composed_layout<"S<(\d),\d,\d>', line)
        basis = re.search(r'tma_gbasis = <"([^"]*):', line)[1]
        box = [prod(int(n) for n in re.findall(r"\d+", mode)) for mode in _modes(basis)]
        shared_by = re.search(r"num_multicast = (\d+)", line)
        strides = _leaves(re.findall(r'coord_tensor<"[^"]*", "([^"]*)"', line)[-1].split(":")[1])
        dims = [re.fullmatch(r"1@(\d+)", stride) for stride in strides]
        found[match[1]] = MapSpec(
            match[2],
            _shares(box, int(shared_by[1]) if shared_by else 1),
            _SWIZZLES[int(swizzle[1]) if swizzle else None],
            tuple(int(m[1]) if m else None for m in dims),
        )
    return found


def _shares(box: list[int], ctas: int) -> tuple[int, ...]:
    """Divide a box among CTAs that multicast their shares to each other, from its last dim on."""
    for dim in reversed(range(len(box))):
        share = gcd(box[dim], ctas)
        box[dim] //= share
        ctas //= share
    return tuple(box)


def _leaves(text: str) -> list[str]:
    """Return the leaves of a tuple of tuples in their order."""
    return re.findall(r"[^(),]+", text)


def _modes(text: str) -> list[str]:
    """Split (a,(b,c),d) at its top level."""
    modes, depth, start = [], 0, 1
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if (character == "," and depth == 1) or (character == ")" and depth == 0):
            modes.append(text[start:position])
            start = position + 1
    return modes


def packed(*values: int) -> bytes:
    """Pack 32-bit extents, as a dynamic coordinate tensor is passed."""
    return struct.pack(f"<{len(values)}i", *values)


def fast_divisor(divisor: int) -> bytes:
    """Pack CuTe-DSL's divisor: the number, a multiplier and two shifts.

    With s = ceil(log2 d) and m = floor(2^32 (2^s - d) / d) + 1, n // d is
    (((n - h) >> min(s, 1)) + h) >> max(s - 1, 0), h being the high word of n m.
    """
    shift = (divisor - 1).bit_length()
    multiplier = (((1 << shift) - divisor) << 32) // divisor + 1
    return struct.pack(
        "<IIBBxx", divisor, multiplier & 0xFFFFFFFF, min(shift, 1), max(shift - 1, 0)
    )
