"""Which backend runs a call: capabilities as data, and a choice that can explain itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from sparse_atten.contracts import DTYPES, Problem

AUTO = "auto"


class Report(NamedTuple):
    """What a backend says of a call to `explain`: lines by title, and its workspace in bytes."""

    lines: dict[str, str]
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Backend:
    """What an implementation is capable of; None means any.

    `entry`, `preload` and `report` name "module:function", imported when first used:

    - ``entry(q, k, v, selection, options, *, out, max_workspace_bytes)`` runs a validated call and
      returns a `Result`;
    - ``preload(q, selection, options)`` compiles and loads what such a call needs;
    - ``report(q, k, v, selection, problem, *, max_workspace_bytes)`` returns a `Report` for
      `explain`.

    Backends of one name serve different granularities. With `takes_prepared` the selection of
    `entry` and `report` may be a `PreparedSelection`; with `takes_key` `entry` is given ``key``,
    all of a call but its addresses, where that is known.
    """

    name: str
    entry: str
    granularities: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    group_sizes: tuple[int, ...] | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None
    causal: tuple[bool, ...] = (False, True)
    paged: tuple[bool, ...] = (False, True)
    lse_temperature: tuple[bool, ...] = (False, True)
    differentiable: bool = False
    takes_prepared: bool = False
    takes_key: bool = False
    package: str | None = None  # an importable package that must be installed
    preload: str | None = None
    report: str | None = None

    def refusals(self, problem: Problem) -> list[str]:
        """Say everything about the problem that this backend lacks, with what it supports."""
        capability = None if problem.target is None else problem.target.capability
        asked = (
            ("selection granularity", problem.granularity, self.granularities),
            ("dtype", problem.dtype, self.dtypes),
            ("head dim of q and k", problem.head_dim, self.head_dims),
            ("head dim of v", problem.value_dim, self.head_dims),
            ("block size", problem.block_size, self.block_sizes),
            ("query heads per KV head", problem.group_size, self.group_sizes),
            ("device capability", capability, self.capabilities),
            ("causal", problem.causal, self.causal),
            ("paged KV", problem.paged, self.paged),
            ("lse_temperature", problem.lse_temperature, self.lse_temperature),
        )
        found = [
            f"{what} {got} (supported: {', '.join(map(str, supported))})"
            for what, got, supported in asked
            if supported is not None and got not in supported
        ]
        if problem.needs_grad and not self.differentiable:
            found.append("gradients (forward only)")
        if not found and self.package is not None and not is_installed(self.package):
            found.append(f"the package {self.package}, which is not installed")
        return found

    def load(self) -> Callable:
        """Import the implementation."""
        return load(self.entry)


@cache
def load(name: str) -> Callable:
    """Import "module:function"."""
    module, function = name.split(":")
    return getattr(import_module(module), function)


@cache
def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return find_spec(package) is not None


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why the ones that would come before it were passed over."""

    backend: Backend
    passed_over: dict[str, list[str]]


_BLOCKS = Backend(
    name="sm100",
    entry="sparse_atten.vsa.device:attention",
    granularities=("block",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(128,),
    block_sizes=(128,),
    capabilities=((10, 0), (10, 3)),
    causal=(False,),
    paged=(False,),
    lse_temperature=(False,),
    takes_key=True,
    package="cutlass",
    preload="sparse_atten.vsa.device:preload",
    report="sparse_atten.vsa.device:report",
)
_TOKENS = Backend(
    name="sm100",
    entry="sparse_atten.msa.device:attention",
    granularities=("token",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(128,),
    block_sizes=(128,),
    group_sizes=(1, 2, 4, 8, 16),
    capabilities=((10, 0), (10, 3)),
    takes_prepared=True,
    package="cutlass",
    preload="sparse_atten.msa.device:preload",
    report="sparse_atten.msa.report:report",
)

# In order of preference for backend="auto".
BACKENDS = (
    _BLOCKS,
    _TOKENS,
    replace(_BLOCKS, name="sm90", capabilities=((9, 0),)),
    replace(_TOKENS, name="sm90", capabilities=((9, 0),)),
    Backend(
        name="reference",
        entry="sparse_atten.reference:reference_attention",
        granularities=("block", "token"),
        dtypes=DTYPES,
        differentiable=True,
    ),
)


def choose(problem: Problem, name: str) -> Choice:
    """Pick the backend of a validated problem.

    Raises
    ------
    ValueError
        No backend has this name.
    NotImplementedError
        The backend asked for lacks something; an explicit choice never falls back.
    """
    passed_over: dict[str, list[str]] = {}
    for backend in BACKENDS:
        if name not in (AUTO, backend.name):
            continue
        refusals = backend.refusals(problem)
        if not refusals:
            passed_over.pop(backend.name, None)
            return Choice(backend, passed_over)
        # Of backends with one name the one for this granularity speaks.
        if backend.name not in passed_over or problem.granularity in backend.granularities:
            passed_over[backend.name] = refusals
    if not passed_over:
        names = dict.fromkeys((AUTO, *(b.name for b in BACKENDS)))
        known = ", ".join(map(repr, names))
        raise ValueError(f"backend must be one of {known}, got {name!r}")
    reasons = "; ".join(f"{name}: {', '.join(found)}" for name, found in passed_over.items())
    raise NotImplementedError(f"no backend can run this call: {reasons}")
