"""The CuTe-DSL kernels of the package, and the Configs that its calls can ask for.

A kernel module has ``ARCHITECTURES``, as the compiler names them, and ``SHIPPED``, its Configs.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from sparse_atten.cute_kernels.common.dsl import config_name
from sparse_atten.cute_kernels.common.target import Target

KERNELS = (
    "vsa_sm100",
    "vsa_sm90",
    "msa_k1_sm100",
    "msa_k1_sm90",
    "msa_k2",
    "msa_scores_sm90",
)


@dataclass(frozen=True)
class Shipped:
    """One kernel as it ships: module, Config and architecture."""

    kernel: str
    config: Any
    target: Target

    @property
    def module(self) -> str:
        """Import name of the kernel's module."""
        return f"{__package__}.{self.kernel}"

    @property
    def name(self) -> str:
        """Kernel, architecture, and the fields of the Config that are no default."""
        return f"{self.kernel} {self.target.arch} {config_name(self.config)}"


def shipped(architecture: str = "", only: str = "") -> list[Shipped]:
    """List what ships, for one architecture, and where the name contains `only`.

    Raises
    ------
    ValueError
        Nothing fits.
    """
    modules = {kernel: importlib.import_module(f"{__package__}.{kernel}") for kernel in KERNELS}
    every = [
        Shipped(kernel, config, Target(arch))
        for kernel, module in modules.items()
        for arch in module.ARCHITECTURES
        for config in module.SHIPPED
    ]
    found = [x for x in every if architecture in ("", x.target.arch) and only in x.name]
    if not found:
        raise ValueError(f"no kernel for architecture {architecture!r} has {only!r} in its name")
    return found
