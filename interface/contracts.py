"""What every backend is given: the two kinds of selection, and the checks of each call.

The checks here read shapes, dtypes, devices and strides only, so they run on every call, on every
device, without a synchronisation. What the integers inside a selection must be is in `checks`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparse_atten.cute_kernels.common.arguments import (
    describe,
    expect_bool,
    expect_int,
    expect_positive,
    expect_table,
)
from sparse_atten.cute_kernels.common.target import Target, target_of

Layout = Literal["bhsd", "bshd"]
KVLayout = Literal["hnd", "nhd"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EMPTY = -1  # the id of an unused slot of a TokenSelection
ALIGNMENT = 16  # bytes; what a TMA descriptor asks of base addresses and strides


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """KV blocks that each block of queries sees: all queries of a block share one list (VSA).

    Query and KV blocks both hold `block_size` consecutive tokens; ``Nq = ceil(Sq / block_size)``,
    ``Nkv = ceil(Skv / block_size)``. An odd `Nq` needs no partner block.

    Parameters
    ----------
    q2k_indices : Tensor, int32 [B, Hq, Nq, K], any strides
        Ids of the kept KV blocks, 0 to ``Nkv - 1``, in any order.
    q2k_counts : Tensor, int32 [B, Hq, Nq], any strides
        How many leading ids of each row count, 0 to K; the rest of the row is not read. A row with
        count 0 is empty: output 0, LSE -inf.
    layout : {"bhsd", "bshd"}
        Order of the dims of q, k, v and the output.
    block_size : int
        Tokens in a block.
    kv_block_sizes : Tensor, int32 [Nkv] or [B, Nkv], optional
        Valid keys at the start of each KV block. None: all blocks are full, the last one up to Skv.
    q_block_sizes : Tensor, int32 [Nq], optional
        Valid queries at the start of each query block; rows past it are padding, written as 0.
    dense_rows : int
        The first so many query blocks see every KV block; their rows of the table are not read.

    Notes
    -----
    A duplicate id counts once for each occurrence; `check_selection` refuses it.
    """

    q2k_indices: Tensor
    q2k_counts: Tensor
    _: KW_ONLY
    layout: Layout = "bhsd"
    block_size: int = 128
    kv_block_sizes: Tensor | None = None
    q_block_sizes: Tensor | None = None
    dense_rows: int = 0


@dataclass(frozen=True, eq=False)
class TokenSelection:
    """KV blocks that each query token sees, shared by the heads of a GQA group (MSA).

    Sequences of different lengths are packed: sequence b owns the query tokens
    ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``. Query tokens after the last sequence are
    padding: output 0, LSE -inf.

    Parameters
    ----------
    q2k_indices : Tensor, int32 [Hkv, Tq, K], any strides
        Ids of the kept KV blocks, counted from the start of the token's own sequence, in any order;
        -1 marks an unused slot and may stand anywhere.
    cu_seqlens_q : Tensor, int32 [B + 1]
        Where each sequence's queries start; the first is 0, non-decreasing.
    cu_seqlens_k : Tensor, int32 [B + 1], or None
        The same for keys; None when KV is paged.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the sequence lengths, on the host.
    block_size : int
        Tokens in a KV block; the page size when KV is paged.
    page_table : Tensor, int32 [B, pages], optional
        KV is paged: block j of sequence b lies in page ``page_table[b, j]`` of both pools.
    seqused_k : Tensor, int32 [B], optional
        Keys of each sequence. Required when KV is paged; with flat KV it shortens the sequences.
    kv_layout : {"hnd", "nhd"}
        Dims of the pools: [pages, Hkv, block_size, D] or [pages, block_size, Hkv, D].
    head_indices : Tensor, int32 [Tq, Hq, K], optional
        Set by `from_head_indices`, so that the value checks can compare the heads of a group.
    """

    q2k_indices: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    _: KW_ONLY
    block_size: int = 128
    page_table: Tensor | None = None
    seqused_k: Tensor | None = None
    kv_layout: KVLayout = "hnd"
    head_indices: Tensor | None = None

    @classmethod
    def from_head_indices(cls, indices: Tensor, num_kv_heads: int, **fields: Any) -> TokenSelection:
        """Make a selection from ids that are listed for each query head.

        Parameters
        ----------
        indices : Tensor, int32 [Tq, Hq, K]
            The first head of each GQA group speaks for the group; no copy is made.
        num_kv_heads : int
            Hkv, a divisor of Hq.
        **fields
            The other fields of `TokenSelection`, by name.

        Raises
        ------
        TypeError, ValueError
            `indices` is not int32 [Tq, Hq, K], or Hkv does not divide Hq. Heads of a group that
            disagree are found by `check_selection`, and at the call for CPU tensors.
        """
        expect_table("indices", indices, ("Tq", "Hq", "K"))
        expect_int("num_kv_heads", num_kv_heads, 1)
        num_q_heads = indices.shape[1]
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide the {num_q_heads} heads of indices, got {num_kv_heads}"
            )
        group = num_q_heads // num_kv_heads
        leaders = indices[:, ::group] if group else indices
        return cls(leaders.transpose(0, 1), head_indices=indices, **fields)


Selection = BlockSelection | TokenSelection


class Options(NamedTuple):
    """The options of one attention call that change what is computed."""

    causal: bool = False
    softmax_scale: float = 1.0
    lse_temperature: float | None = None
    return_lse: bool = False


@dataclass(frozen=True)
class Problem:
    """What a backend has to be capable of: one validated call, without its tensors."""

    granularity: Literal["block", "token"]
    batch: int
    num_q_heads: int
    num_kv_heads: int
    num_queries: int  # Sq, or Tq over all sequences
    num_keys: int  # Skv, or Tk over all sequences, or the tokens of the pool
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int
    table_width: int
    causal: bool
    paged: bool
    lse_temperature: bool
    needs_grad: bool
    target: Target | None  # of the device; None where it is no GPU

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads if self.num_kv_heads else 0


def options_of(
    q: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    lse_temperature: float | None,
    return_lse: bool,
) -> Options:
    """Check the scalar options and fill in the default softmax scale, 1 / sqrt(D)."""
    _expect_attention_dtype("q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"q must have 3 or 4 dims, got {describe(q)}")
    expect_bool("causal", causal)
    expect_bool("return_lse", return_lse)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    else:
        expect_positive("softmax_scale", softmax_scale)
    if lse_temperature is not None:
        expect_positive("lse_temperature", lse_temperature)
    return Options(causal, float(softmax_scale), lse_temperature, return_lse)


def validate(q: Tensor, k: Tensor, v: Tensor, selection: Selection, options: Options) -> Problem:
    """Check shapes, dtypes, devices and strides of one call.

    Raises
    ------
    TypeError
        An argument has the wrong class or dtype.
    ValueError
        An argument has a wrong rank, shape, device or stride. Every message names the argument,
        what was expected and what came.
    NotImplementedError
        A legal request that no backend serves (FP8 KV, pages that are not a block).
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _expect_attention_dtype(name, tensor)
    if isinstance(selection, BlockSelection):
        problem = _validate_blocks(q, k, v, selection, options)
    elif isinstance(selection, TokenSelection):
        problem = _validate_tokens(q, k, v, selection, options)
    else:
        raise TypeError(
            "selection must be a BlockSelection, a TokenSelection or what prepare() returned, "
            f"got {describe(selection)}"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {describe(tensor)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {describe(tensor)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _expect_strides(name, tensor)
    return problem


def validate_out(out: Tensor, shape: tuple[int, ...], q: Tensor, needs_grad: bool) -> None:
    """Check a caller's output tensor: shape, dtype, device, strides, no gradient."""
    _expect_attention_dtype("out", out)
    _expect_shape("out", out, shape)
    if out.dtype != q.dtype:
        raise TypeError(f"out must have q's dtype {q.dtype}, got {describe(out)}")
    if out.device != q.device:
        raise ValueError(f"out must be on q's device {q.device}, got {describe(out)}")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out must not repeat memory, got strides {out.stride()}")
    _expect_strides("out", out)
    if needs_grad or out.requires_grad:
        raise ValueError("out must be None where gradients are recorded: out= has no derivative")


def expect_aligned(**tensors: Tensor | None) -> None:
    """Check that base addresses suit a TMA descriptor; a tensor without storage has none."""
    for name, tensor in tensors.items():
        if tensor is None or tensor.numel() == 0 or not _rows_are_aligned(tensor):
            continue
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {ALIGNMENT} bytes, "
                f"got address {tensor.data_ptr():#x}"
            )


def _validate_blocks(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, options: Options
) -> Problem:
    layout, block = selection.layout, selection.block_size
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout must be 'bhsd' or 'bshd', got {layout!r}")
    expect_int("block_size", block, 1)
    dims = "[B, H, S, D]" if layout == "bhsd" else "[B, S, H, D]"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be {dims} for layout {layout!r}, got {describe(tensor)}")
    seq, head = (2, 1) if layout == "bhsd" else (1, 2)
    batch, num_q_heads, num_queries, head_dim = q.shape[0], q.shape[head], q.shape[seq], q.shape[3]
    num_kv_heads, num_keys, value_dim = k.shape[head], k.shape[seq], v.shape[3]
    _expect_head_dims(head_dim, value_dim)
    kv_shape = [batch, num_kv_heads, num_keys]
    if layout == "bshd":
        kv_shape = [batch, num_keys, num_kv_heads]
    _expect_shape("k", k, (*kv_shape, head_dim))
    _expect_shape("v", v, (*kv_shape, value_dim))
    _expect_group(num_q_heads, num_kv_heads)

    num_q_blocks, num_kv_blocks = -(-num_queries // block), -(-num_keys // block)
    rows = (batch, num_q_heads, num_q_blocks)
    names = ("B", "Hq", "Nq", "K")
    on_q: Any = {"like": ("q", q)}
    expect_table("q2k_indices", selection.q2k_indices, names, shape=(*rows, None), **on_q)
    expect_table("q2k_counts", selection.q2k_counts, names[:3], shape=rows, **on_q)
    sizes = selection.kv_block_sizes
    if sizes is not None:
        if isinstance(sizes, Tensor) and sizes.dim() == 2:
            shape: tuple[int, ...] = (batch, num_kv_blocks)
            expect_table("kv_block_sizes", sizes, ("B", "Nkv"), shape=shape, **on_q)
        else:
            expect_table("kv_block_sizes", sizes, ("Nkv",), shape=(num_kv_blocks,), **on_q)
    if selection.q_block_sizes is not None:
        expect_table(
            "q_block_sizes", selection.q_block_sizes, ("Nq",), shape=(num_q_blocks,), **on_q
        )
    expect_int("dense_rows", selection.dense_rows, 0)
    if selection.dense_rows > num_q_blocks:
        raise ValueError(
            f"dense_rows must be at most the {num_q_blocks} query blocks, "
            f"got {selection.dense_rows}"
        )
    return Problem(
        granularity="block",
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=q.dtype,
        device=q.device,
        block_size=block,
        table_width=selection.q2k_indices.shape[3],
        causal=options.causal,
        paged=False,
        lse_temperature=options.lse_temperature is not None,
        needs_grad=records_grad(q, k, v),
        target=target_of(q.device),
    )


def _validate_tokens(
    q: Tensor, k: Tensor, v: Tensor, selection: TokenSelection, options: Options
) -> Problem:
    block, paged = selection.block_size, selection.page_table is not None
    expect_int("block_size", block, 1)
    expect_int("max_seqlen_q", selection.max_seqlen_q, 0)
    expect_int("max_seqlen_k", selection.max_seqlen_k, 0)
    if selection.kv_layout not in ("hnd", "nhd"):
        raise ValueError(f"kv_layout must be 'hnd' or 'nhd', got {selection.kv_layout!r}")
    if q.dim() != 3:
        raise ValueError(f"q must be [Tq, Hq, D], got {describe(q)}")
    num_queries, num_q_heads, head_dim = q.shape
    on_q: Any = {"like": ("q", q)}
    expect_table("cu_seqlens_q", selection.cu_seqlens_q, ("B + 1",), **on_q)
    batch = selection.cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q must hold at least one offset, got int32 [0]")
    kv_names, head = _kv_dims(selection)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != len(kv_names):
            raise ValueError(
                f"{name} must be [{', '.join(kv_names)}] "
                f"{'with' if paged else 'without'} a page_table, got {describe(tensor)}"
            )
    num_kv_heads, value_dim = k.shape[head], v.shape[-1]
    _expect_head_dims(head_dim, value_dim)
    _expect_shape("k", k, (*k.shape[:-1], head_dim))
    _expect_shape("v", v, (*k.shape[:-1], value_dim))
    _expect_group(num_q_heads, num_kv_heads)

    if paged:
        _validate_pages(k, selection, batch)
        num_keys = k.shape[0] * block
    else:
        if selection.cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k must be int32 [B + 1] without a page_table, got None")
        expect_table("cu_seqlens_k", selection.cu_seqlens_k, ("B + 1",), shape=(batch + 1,), **on_q)
        num_keys = k.shape[0]
    if selection.seqused_k is not None:
        expect_table("seqused_k", selection.seqused_k, ("B",), shape=(batch,), **on_q)
    names = ("Hkv", "Tq", "K")
    wanted = (num_kv_heads, num_queries, None)
    expect_table("q2k_indices", selection.q2k_indices, names, shape=wanted, **on_q)
    if selection.head_indices is not None:
        width = selection.q2k_indices.shape[2]
        shape = (num_queries, num_q_heads, width)
        expect_table("head_indices", selection.head_indices, ("Tq", "Hq", "K"), shape=shape, **on_q)
    return Problem(
        granularity="token",
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=q.dtype,
        device=q.device,
        block_size=block,
        table_width=selection.q2k_indices.shape[2],
        causal=options.causal,
        paged=paged,
        lse_temperature=options.lse_temperature is not None,
        needs_grad=records_grad(q, k, v),
        target=target_of(q.device),
    )


def _kv_dims(selection: TokenSelection) -> tuple[tuple[str, ...], int]:
    """Names of the dims of k and v, and which of them is the head."""
    if selection.page_table is None:
        return ("Tk", "Hkv", "D"), 1
    if selection.kv_layout == "hnd":
        return ("pages", "Hkv", "block_size", "D"), 1
    return ("pages", "block_size", "Hkv", "D"), 2


def _validate_pages(k: Tensor, selection: TokenSelection, batch: int) -> None:
    if selection.cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k must be None with a page_table (lengths come from seqused_k), "
            f"got {describe(selection.cu_seqlens_k)}"
        )
    if selection.seqused_k is None:
        raise ValueError("seqused_k must be int32 [B] with a page_table, got None")
    page_table = selection.page_table
    expect_table("page_table", page_table, ("B", "pages"), shape=(batch, None), like=("q", k))
    page_size = k.shape[2 if selection.kv_layout == "hnd" else 1]
    if page_size != selection.block_size:
        raise NotImplementedError(
            f"k has pages of {page_size} tokens for block_size {selection.block_size} "
            f"(kv_layout {selection.kv_layout!r}); supported: page size == block_size"
        )


def records_grad(*tensors: Tensor) -> bool:
    """Whether autograd would record a function of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _expect_attention_dtype(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {describe(tensor)}")
    if tensor.dtype in DTYPES:
        return
    supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.uint8:
        raise NotImplementedError(
            f"{name} is {describe(tensor)}: quantised attention is not supported; "
            f"supported: {supported}"
        )
    raise TypeError(f"{name} must be one of {supported}, got {describe(tensor)}")


def _expect_head_dims(head_dim: int, value_dim: int) -> None:
    if head_dim < 1:
        raise ValueError(f"q must have a head dim of at least 1, got {head_dim}")
    if value_dim < 1:
        raise ValueError(f"v must have a head dim of at least 1, got {value_dim}")


def _expect_group(num_q_heads: int, num_kv_heads: int) -> None:
    if num_q_heads and (num_kv_heads == 0 or num_q_heads % num_kv_heads):
        raise ValueError(
            f"q must have a multiple of k's {num_kv_heads} heads, got {num_q_heads} heads"
        )


def _expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must be {list(shape)}, got {describe(tensor)}")


def _rows_are_aligned(tensor: Tensor) -> bool:
    """Whether a row fills whole 16-byte units; other head dims only the reference serves."""
    return tensor.shape[-1] * tensor.element_size() % ALIGNMENT == 0


def _expect_strides(name: str, tensor: Tensor) -> None:
    """Last dim contiguous, the others multiples of 16 bytes; dims of size 1 have no stride."""
    strides = [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if tensor.numel() == 0 or not strides:
        return
    if tensor.shape[-1] != 1 and strides.pop() != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dim, got strides {tuple(tensor.stride())}"
        )
    unit = ALIGNMENT // tensor.element_size()
    if _rows_are_aligned(tensor) and any(stride % unit for stride in strides):
        raise ValueError(
            f"{name} must have strides that are multiples of {ALIGNMENT} bytes "
            f"({unit} elements), got strides {tuple(tensor.stride())}"
        )
