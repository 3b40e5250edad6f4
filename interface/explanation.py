"""`explain`: which backend a call would take and why, how much work it is, and a roofline model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sparse_atten.attention import check
from sparse_atten.contracts import BlockSelection, Problem, Selection, options_of
from sparse_atten.cute_kernels.common.target import PRODUCTS, Product, product_of
from sparse_atten.dispatch import AUTO, Report, choose, load
from sparse_atten.preparation import PreparedSelection, selection_of
from sparse_atten.reference import workspace_bytes
from sparse_atten.rows import rows_of

_LAUNCH_SECONDS = 5e-6  # a kernel launch and its first wave, as an order of magnitude
_PAIRS_AT_ONCE = 1 << 22  # elements of a temporary while counting


@dataclass(frozen=True)
class Roofline:
    """A model, not a measurement: T = route + index + max(math, memory) + launch, in seconds.

    `math` counts whole tiles at the data sheet's dense tensor-core rate, `memory` every tensor once
    at its bandwidth, `index` the tables. `route` is 0: the selection is given.
    """

    target: str
    route: float
    index: float
    math: float
    memory: float
    launch: float

    @property
    def total(self) -> float:
        """Modelled time of the call, seconds."""
        return self.route + self.index + max(self.math, self.memory) + self.launch


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; printing it gives a summary.

    Attributes
    ----------
    backend : str
        The backend that would run.
    passed_over : dict of str to list of str
        What the backends before it in order of preference lack.
    tiles, dense_tiles : int
        (query row, KV block) pairs that are computed, and how many there would be if all were kept.
        A row is a query block of one head, or one token's heads of a GQA group.
    pairs, tile_pairs : int
        (query, key) pairs that are visible, and those inside the computed tiles.
    flops, tile_flops : int
        The same as floating-point operations of both matrix products.
    memory_bytes, gathered_bytes : int
        Every tensor once; and K and V as often as tiles read them.
    workspace_bytes : int
        Bound on temporary memory.
    kernel : dict of str to str
        What the backend says of its kernel, by title: work items, resources.
    roofline : Roofline or None
        None for a device without known figures, and for tensors that are not bf16 or fp16.
    """

    backend: str
    passed_over: dict[str, list[str]]
    tiles: int
    dense_tiles: int
    pairs: int
    tile_pairs: int
    flops: int
    tile_flops: int
    memory_bytes: int
    gathered_bytes: int
    workspace_bytes: int
    roofline: Roofline | None
    kernel: dict[str, str] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Share of all tiles that is computed."""
        return self.tiles / self.dense_tiles if self.dense_tiles else 0.0

    @property
    def tile_ratio(self) -> float:
        """How much computing whole tiles inflates the work (rho_tile), at least 1."""
        return self.tile_pairs / self.pairs if self.pairs else 1.0

    def __str__(self) -> str:
        lines = [f"backend          {self.backend}"]
        lines += [
            f"  not {name}: {reason}"
            for name, reasons in self.passed_over.items()
            for reason in reasons
        ]
        lines += [
            f"tiles            {self.tiles:,} of {self.dense_tiles:,} ({self.density:.1%})",
            f"pairs            {self.pairs:,} visible, {self.tile_pairs:,} in tiles "
            f"(rho_tile {self.tile_ratio:.3f})",
            f"FLOPs            {self.flops:.3e} useful, {self.tile_flops:.3e} in tiles",
            f"memory           {self.memory_bytes:,} bytes once, {self.gathered_bytes:,} gathered",
            f"workspace        at most {self.workspace_bytes:,} bytes",
        ]
        lines += [f"{title:<17}{text}" for title, text in self.kernel.items()]
        if self.roofline is None:
            lines.append("roofline         no figures: 16-bit tensors, and a known GPU or a target")
        else:
            model = self.roofline
            lines.append(
                f"roofline (model) {model.total * 1e6:,.1f} us on {model.target}: "
                f"index {model.index * 1e6:.1f} + max(math {model.math * 1e6:.1f}, "
                f"memory {model.memory * 1e6:.1f}) + launch {model.launch * 1e6:.1f}"
            )
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | PreparedSelection,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    lse_temperature: float | None = None,
    backend: str = AUTO,
    max_workspace_bytes: int | None = None,
    target: str | None = None,
) -> Explanation:
    """Say what `sparse_atten_func` would do with the same arguments, without doing it.

    Parameters
    ----------
    q, k, v, selection, causal, softmax_scale, return_lse, lse_temperature, backend, \
max_workspace_bytes
        As for `sparse_atten_func`.
    target : str, optional
        Explain the call as if q were on this product: "H200", "B200" or "B300". None takes the
        device of q.

    Returns
    -------
    Explanation

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `sparse_atten_func`, and ValueError for an unknown target.

    Notes
    -----
    Counts tiles and pairs from the values of the selection, so it synchronises with a device.
    """
    if target is not None and target not in PRODUCTS:
        raise ValueError(f"target must be one of {', '.join(PRODUCTS)}, got {target!r}")
    given, selection = selection, selection_of(selection)
    options = options_of(
        q,
        causal=causal,
        softmax_scale=softmax_scale,
        lse_temperature=lse_temperature,
        return_lse=return_lse,
    )
    problem = check(q, k, v, selection, options)
    if target is not None:
        problem = replace(problem, target=PRODUCTS[target].target)
    choice = choose(problem, backend)
    if choice.backend.report is None:
        report = Report({}, workspace_bytes(q, max_workspace_bytes))
    else:
        ask = load(choice.backend.report)
        told = given if choice.backend.takes_prepared else selection
        report = ask(q, k, v, told, problem, max_workspace_bytes=max_workspace_bytes)
    tiles, pairs = _count(q, k, v, selection, causal)
    row_height = problem.block_size if problem.granularity == "block" else problem.group_size
    tile_pairs = tiles * row_height * problem.block_size
    flops_per_pair = 2 * (problem.head_dim + problem.value_dim)
    tables = [x for x in vars(selection).values() if isinstance(x, Tensor)]
    table_bytes = sum(x.numel() * x.element_size() for x in tables)
    heads = problem.num_q_heads * problem.num_queries * (problem.batch if q.dim() == 4 else 1)
    out_bytes = heads * problem.value_dim * q.element_size() + heads * 4 * return_lse
    memory_bytes = out_bytes + sum(x.numel() * x.element_size() for x in (q, k, v))
    gathered = tiles * problem.block_size * (problem.head_dim + problem.value_dim)
    figures = product_of(q.device) if target is None else PRODUCTS[target]
    if q.dtype not in (torch.bfloat16, torch.float16):
        figures = None  # the rates are those of 16-bit products
    return Explanation(
        backend=choice.backend.name,
        passed_over=choice.passed_over,
        tiles=tiles,
        dense_tiles=_dense_tiles(problem, selection),
        pairs=pairs,
        tile_pairs=tile_pairs,
        flops=pairs * flops_per_pair,
        tile_flops=tile_pairs * flops_per_pair,
        memory_bytes=memory_bytes,
        gathered_bytes=gathered * q.element_size(),
        workspace_bytes=report.workspace_bytes,
        kernel=report.lines,
        roofline=None
        if figures is None
        else _roofline(figures, tile_pairs * flops_per_pair, memory_bytes, table_bytes),
    )


def _count(q: Tensor, k: Tensor, v: Tensor, selection: Selection, causal: bool) -> tuple[int, int]:
    """Count the (row, block) tiles that hold a valid key, and the visible (query, key) pairs."""
    rows = rows_of(q, k, v, selection)
    tiles = pairs = 0
    for lists in rows.lists():
        width = max(lists.ids.shape[1], 1)
        step = max(1, _PAIRS_AT_ONCE // (width * max(rows.block_size, rows.row_height)))
        parts = zip(
            lists.rows.split(step), lists.ids.split(step), lists.live.split(step), strict=True
        )
        for part, ids, live in parts:
            if ids.numel() == 0:
                continue
            keys, queries = rows.keys(part, ids, live), rows.queries(part)
            sizes = keys.valid.unflatten(1, (-1, rows.block_size)).sum(-1)  # [R, K]
            visible = sizes[:, None, :].expand(-1, rows.row_height, -1)
            if causal:
                first = keys.position.unflatten(1, (-1, rows.block_size))[..., 0]
                reach = queries.last_key[..., None] - first[:, None, :] + 1
                visible = torch.minimum(reach.clamp(min=0), visible)
            tiles += int((sizes > 0).sum())
            pairs += int((visible * queries.valid[..., None]).sum())
    return tiles, pairs


def _dense_tiles(problem: Problem, selection: Selection) -> int:
    """Tiles of the same shape if every row kept every block, causal or not."""
    if isinstance(selection, BlockSelection):
        q_blocks, kv_blocks = (
            -(-length // problem.block_size) for length in (problem.num_queries, problem.num_keys)
        )
        return problem.batch * problem.num_q_heads * q_blocks * kv_blocks
    lengths = selection.seqused_k
    if lengths is None and selection.cu_seqlens_k is not None:
        lengths = selection.cu_seqlens_k.diff()
    if lengths is None:
        return 0
    blocks = (lengths.long() + problem.block_size - 1) // problem.block_size
    return problem.num_kv_heads * int((blocks * selection.cu_seqlens_q.diff()).sum())


def _roofline(product: Product, flops: int, memory_bytes: int, table_bytes: int) -> Roofline:
    return Roofline(
        target=product.name,
        route=0.0,
        index=table_bytes / product.bandwidth,
        math=flops / product.tensor_flops,
        memory=memory_bytes / product.bandwidth,
        launch=_LAUNCH_SECONDS,
    )
