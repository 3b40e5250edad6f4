"""Which backend runs a call: capabilities as data, and a choice that can explain itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from sparse_atten.contracts import DTYPES, Problem
from sparse_atten.cute_kernels.common.target import device_capability

AUTO = "auto"


@dataclass(frozen=True)
class Backend:
    """What an implementation is capable of; None means any.

    `entry` names "module:function", imported when the backend first runs. The function takes
    ``(q, k, v, selection, options, *, out, max_workspace_bytes)`` and returns a `Result`.
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
    differentiable: bool = False

    def refusals(self, problem: Problem) -> list[str]:
        """Say everything about the problem that this backend lacks, with what it supports."""
        asked = (
            ("selection granularity", problem.granularity, self.granularities),
            ("dtype", problem.dtype, self.dtypes),
            ("head dim of q and k", problem.head_dim, self.head_dims),
            ("head dim of v", problem.value_dim, self.head_dims),
            ("block size", problem.block_size, self.block_sizes),
            ("query heads per KV head", problem.group_size, self.group_sizes),
            ("device capability", device_capability(problem.device), self.capabilities),
            ("causal", problem.causal, self.causal),
            ("paged KV", problem.paged, self.paged),
        )
        found = [
            f"{what} {got} (supported: {', '.join(map(str, supported))})"
            for what, got, supported in asked
            if supported is not None and got not in supported
        ]
        if problem.needs_grad and not self.differentiable:
            found.append("gradients (forward only)")
        return found

    def load(self) -> Callable:
        """Import the implementation."""
        module, function = self.entry.split(":")
        return getattr(import_module(module), function)


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why the ones that would come before it were passed over."""

    backend: Backend
    passed_over: dict[str, list[str]]


# In order of preference for backend="auto".
BACKENDS = (
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
            return Choice(backend, passed_over)
        passed_over[backend.name] = refusals
    if not passed_over:
        known = ", ".join(repr(known) for known in (AUTO, *(b.name for b in BACKENDS)))
        raise ValueError(f"backend must be one of {known}, got {name!r}")
    reasons = "; ".join(f"{name}: {', '.join(found)}" for name, found in passed_over.items())
    raise NotImplementedError(f"no backend can run this call: {reasons}")
