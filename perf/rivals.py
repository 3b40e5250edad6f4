"""The kernels that a user would pick instead, each behind the same three questions.

A rival has a `name`, says why it cannot run here (`missing`), and turns a `Problem` into a callable
(`prepare`) that takes (q, k, v) and returns the output, all in the problem's order of dims. It
raises `UnsupportedError` where the problem is beyond it. Preparation is not timed: each rival gets
its tables in the form that it likes best. Parameters that are passed by name are looked for in the
signature first, so that another version of a package is refused with a reason.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from perf.masks import Inputs, block_sizes, explicit_lists
from sparse_atten import BlockSelection, explain, preload, sparse_atten_func

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

SDPA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # the first one first
MASK_BYTES = 1 << 30  # of a mask with an entry for each query and key


class UnsupportedError(Exception):
    """A rival cannot do what a problem asks for; the text says why."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be computed: a selection over q, k, v of `tokens` tokens each."""

    selection: BlockSelection
    tokens: int
    inputs: Inputs  # the first set; the others have the same shapes

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        head = 1 if self.selection.layout == "bhsd" else 2
        return self.inputs[0].shape[head] // self.inputs[1].shape[head]


class Rival(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """What rows and `--rivals` call it."""

    @property
    def dense(self) -> bool:
        """Whether it attends to every key."""

    def missing(self) -> str | None:
        """Why it cannot run here; None if it can."""

    def prepare(self, problem: Problem) -> Attend:
        """Make tables and compile; raise `UnsupportedError`."""


@dataclass(frozen=True)
class Ours:
    """The package at hand, through its public entry."""

    backend: str = "auto"
    name: str = "ours"
    dense: bool = False

    def missing(self) -> str | None:
        """Nothing is."""
        return None

    def prepare(self, problem: Problem) -> Attend:
        """Compile; the reference does not count as ours on a GPU."""
        selection, backend = problem.selection, self.backend
        try:
            chosen = preload(*problem.inputs, selection, backend=backend)
        except NotImplementedError as error:
            raise UnsupportedError(str(error)) from error
        if chosen == "reference":
            passed_over = explain(*problem.inputs, selection, backend=backend).passed_over
            raise UnsupportedError(f"backend {backend!r} takes the reference: {passed_over}")
        return lambda q, k, v: sparse_atten_func(q, k, v, selection, backend=backend)


@dataclass(frozen=True)
class Fa4Dense:
    """FlashAttention-4, every key."""

    name: str = "fa4-dense"
    dense: bool = True

    def missing(self) -> str | None:
        """It is a package of its own."""
        return not_installed("flash_attn.cute", "flash-attn-4")

    def prepare(self, problem: Problem) -> Attend:
        """Nothing to prepare: it compiles at the first call."""
        from flash_attn.cute import flash_attn_func

        return _fa4_call(problem.selection.layout, flash_attn_func, {})


@dataclass(frozen=True)
class Fa4Sparse:
    """FlashAttention-4 with block lists of 128 x 128.

    Lists of whole blocks go unmasked; blocks that are partly padding make a second list, whose
    scores pass a mask.
    """

    name: str = "fa4-sparse"
    dense: bool = False

    def missing(self) -> str | None:
        """It is a package of its own."""
        return not_installed("flash_attn.cute", "flash-attn-4")

    def prepare(self, problem: Problem) -> Attend:
        """Write the lists."""
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        selection, size = problem.selection, problem.selection.block_size
        sizes = block_sizes(selection, problem.tokens)
        ids, counts = explicit_lists(selection, problem.tokens)
        options: dict[str, Any] = {}
        if selection.kv_block_sizes is None:
            # A short last block needs no mask: positions past the last key are always hidden.
            none = ids.new_zeros((*ids.shape[:3], 1)), counts.new_zeros(counts.shape)
            partial, full = none, (ids, counts)
        else:
            partial, full = split_lists(ids, counts, sizes < size)
            valid = torch.arange(size, device=sizes.device) < sizes[:, None]
            options["mask_mod"] = _fa4_mask()
            options["aux_tensors"] = [valid.flatten()[: problem.tokens].int()]
        lists = {"mask_block_cnt": partial[1], "mask_block_idx": _within(partial[0])}
        lists |= {"full_block_cnt": full[1], "full_block_idx": _within(full[0])}
        expect_parameters(BlockSparseTensorsTorch, [*lists, "block_size"])
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(**lists, block_size=(size, size))
        expect_parameters(flash_attn_func, options)
        return _fa4_call(selection.layout, flash_attn_func, options)


@dataclass(frozen=True)
class CudnnSparse:
    """cuDNN's block-sparse attention with blocks of 128: one count for all rows, or one a row."""

    per_row: bool
    dense: bool = False

    @property
    def name(self) -> str:
        """By mode."""
        return "cudnn-counts" if self.per_row else "cudnn-fixed"

    def missing(self) -> str | None:
        """It is a package of its own."""
        return not_installed("cudnn", "nvidia-cudnn-frontend")

    def prepare(self, problem: Problem) -> Attend:
        """Write the lists."""
        from cudnn import block_sparse_attention_forward

        selection = problem.selection
        ids, counts = explicit_lists(selection, problem.tokens)
        options: dict[str, Any] = {
            "block_sizes": selection.kv_block_sizes,
            "sparse_block_size": selection.block_size,
            "layout": selection.layout,
        }
        if self.per_row:
            options["q2k_block_nums"] = counts.contiguous()
        else:
            if counts.unique().numel() != 1:
                raise UnsupportedError("one count for all rows")
            options["block_sparse_num"] = int(counts.flatten()[0])
        expect_parameters(block_sparse_attention_forward, options)
        table = _within(ids)
        return lambda q, k, v: block_sparse_attention_forward(q, k, v, table, **options)["o_tensor"]


@dataclass(frozen=True)
class Flex:
    """torch's FlexAttention, compiled (Triton), with a block mask."""

    name: str = "flex"
    dense: bool = False

    def missing(self) -> str | None:
        """Its kernels are Triton's, whose launchers are C."""
        return no_triton()

    def prepare(self, problem: Problem) -> Attend:
        """Make the block mask and compile."""
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        selection, tokens = problem.selection, problem.tokens
        size = selection.block_size
        sizes = block_sizes(selection, tokens)
        ids, counts = explicit_lists(selection, tokens)
        partial, full = split_lists(ids, counts, sizes < size)
        wide = [_widened(part[0], len(sizes)) for part in (partial, full)]
        mask = BlockMask.from_kv_blocks(
            partial[1],
            wide[0],
            full[1],
            wide[1],
            BLOCK_SIZE=size,
            mask_mod=lambda b, h, q, k: k % size < sizes[k // size],
            seq_lengths=(tokens, tokens),
        )
        torch.compiler.reset()  # or the shapes before this one would count as recompilations
        compiled = torch.compile(flex_attention, dynamic=False)
        gqa = problem.group > 1

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=mask, enable_gqa=gqa)

        return _in_heads_first(selection.layout, attend)


@dataclass(frozen=True)
class Sdpa:
    """torch's scaled_dot_product_attention, every key; cuDNN's kernel where there is one."""

    name: str = "sdpa"
    dense: bool = True

    def missing(self) -> str | None:
        """It is part of torch."""
        return None

    def prepare(self, problem: Problem) -> Attend:
        """Nothing to prepare."""
        gqa = problem.group > 1

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
                return scaled_dot_product_attention(q, k, v, enable_gqa=gqa)

        return _in_heads_first(problem.selection.layout, attend)


@dataclass(frozen=True)
class SdpaMasked:
    """torch's scaled_dot_product_attention with a mask of bools; for small shapes."""

    name: str = "sdpa-mask"
    dense: bool = False

    def missing(self) -> str | None:
        """It is part of torch."""
        return None

    def prepare(self, problem: Problem) -> Attend:
        """Write the mask of all queries and keys."""
        selection, tokens = problem.selection, problem.tokens
        ids, counts = explicit_lists(selection, tokens)
        num_bytes = counts.shape[:2].numel() * tokens**2
        if num_bytes > MASK_BYTES:
            raise UnsupportedError(
                f"a mask of {num_bytes / 2**30:.1f} GiB; at most {MASK_BYTES / 2**30:.0f}"
            )
        sizes, size = block_sizes(selection, tokens), selection.block_size
        kept = torch.arange(ids.shape[3], device=ids.device) < counts[..., None]
        table = torch.zeros(*counts.shape, len(sizes) + 1, dtype=torch.bool, device=ids.device)
        table.scatter_(3, ids.masked_fill(~kept, len(sizes)).long(), value=True)
        place = torch.arange(tokens, device=ids.device)
        mask = table[..., place // size].logical_and_(place % size < sizes[place // size])
        mask = mask[:, :, place // size]
        backends = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
        ]
        gqa = problem.group > 1

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backends, set_priority=True):
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

        return _in_heads_first(selection.layout, attend)


RIVALS: tuple[Rival, ...] = (
    Fa4Dense(),
    Fa4Sparse(),
    CudnnSparse(per_row=False),
    CudnnSparse(per_row=True),
    Flex(),
    Sdpa(),
    SdpaMasked(),
)


def not_installed(module: str, package: str) -> str | None:
    """Say that a package is missing, without importing it; None if it is there."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return None if found else f"{package} is not installed"


def no_triton() -> str | None:
    """Say what Triton lacks to compile and launch a kernel; None if nothing."""
    reason = not_installed("triton", "triton")
    if reason is None and not (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    ):
        reason = "triton finds no C compiler: neither CC nor gcc nor clang"
    return reason


def expect_parameters(function: Callable, names: Any) -> None:
    """Refuse an interface that lacks a parameter.

    Raises
    ------
    UnsupportedError
        Naming what is missing.
    """
    known = inspect.signature(function).parameters
    unknown = [name for name in names if name not in known]
    if unknown:
        name = getattr(function, "__qualname__", repr(function))
        raise UnsupportedError(f"{name} of this version has no parameter {', '.join(unknown)}")


def split_lists(
    ids: Tensor, counts: Tensor, partial: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split each row's ids by whether the block is partly padding, in order; -1 after them."""
    kept = torch.arange(ids.shape[3], device=ids.device) < counts[..., None]
    is_partial = partial[ids.clamp(min=0).long()]
    parts = []
    for chosen in (kept & is_partial, kept & ~is_partial):
        order = chosen.byte().sort(dim=-1, descending=True, stable=True).indices
        number = chosen.sum(-1, dtype=torch.int32)
        width = max(int(number.max()), 1) if number.numel() else 1
        taken = ids.gather(3, order)[..., :width]
        absent = torch.arange(width, device=ids.device) >= number[..., None]
        parts.append((taken.masked_fill(absent, -1).contiguous(), number))
    return parts[0], parts[1]


def _within(ids: Tensor) -> Tensor:
    """Unused slots as 0: what nobody should read is at least no wild address."""
    return ids.clamp(min=0).contiguous()


def _widened(ids: Tensor, blocks: int) -> Tensor:
    """A table with room for every block."""
    wide = ids.new_zeros((*ids.shape[:3], blocks))
    wide[..., : ids.shape[3]] = ids.clamp(min=0)
    return wide


def _in_heads_first(layout: str, attend: Attend) -> Attend:
    """Call with [B, H, S, D] views."""
    if layout == "bhsd":
        return attend
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _fa4_call(layout: str, function: Callable, options: dict[str, Any]) -> Attend:
    """Call with [B, S, H, D] views; the LSE is dropped."""
    if layout == "bshd":
        return lambda q, k, v: function(q, k, v, **options)[0]
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k, v)), **options)[
        0
    ].transpose(1, 2)


def _fa4_mask() -> Callable:
    """Hide the keys whose entry in the first auxiliary tensor is 0."""
    from cutlass import Int32, cute
    from flash_attn.cute import utils

    @cute.jit
    def is_valid(batch, head, query, key, lengths, tensors):  # noqa: PLR0917 - as FA4 calls it
        valid = utils.scalar_to_ssa(tensors[0][key[0]], Int32)
        return valid > utils.scalar_to_ssa(Int32(0), Int32)

    return is_valid
