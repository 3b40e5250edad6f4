"""What a KV-outer kernel needs of a token selection: its k2q CSR and its schedule.

A KV-outer pass leaves a partial result for each query and each of its KV blocks. Where the partials
of all queries would pass a bound on temporary memory, the queries are cut into chunks of
consecutive tokens, each with a CSR and a schedule of its own, and handled one after the other in
the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sparse_atten.checks import check_values
from sparse_atten.contracts import BlockSelection, Options, Selection, TokenSelection, validate
from sparse_atten.csr import K2QCSR, row_bound
from sparse_atten.cute_kernels.common.arguments import describe, expect_int
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels
from sparse_atten.cute_kernels.common.target import B200, target_of
from sparse_atten.reference import accumulator_dtype
from sparse_atten.scheduler import Schedule, build_csr_and_schedule

PARTIALS_BYTES = 4 << 30  # the bound on the partials of a chunk, unless the caller names one
_LSE_BYTES = 8  # of a partial: its LSE and its temperature LSE, in float32


@dataclass(frozen=True, eq=False)
class QueryChunk:
    """Consecutive query tokens, with the reverse index of what they chose.

    Parameters
    ----------
    first_token, num_tokens : int
        The tokens. Their partials are indexed from the first of them.
    csr : K2QCSR
        For each KV head and KV block, the query tokens that chose the block. Entry `local` of
        sequence b is the token ``max(cu_seqlens_q[b], first_token) + local``.
    schedule : Schedule
        The work items of the KV-outer pass, and the slot of each partial result.
    """

    first_token: int
    num_tokens: int
    csr: K2QCSR
    schedule: Schedule

    @property
    def tokens(self) -> slice:
        """The chunk's tokens among all query tokens."""
        return slice(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True, eq=False)
class PreparedSelection:
    """A `TokenSelection` with its k2q CSR and work schedule; takes the selection's place.

    Parameters
    ----------
    selection : TokenSelection
        What was prepared.
    chunks : tuple of QueryChunk
        In the order of their tokens; one where the partials of all tokens fit the workspace.
    num_q_heads, num_keys : int
        Hq, and Tk or the tokens of the pool, that it was prepared for.
    """

    selection: TokenSelection
    chunks: tuple[QueryChunk, ...]
    num_q_heads: int
    num_keys: int

    @property
    def csr(self) -> K2QCSR:
        """The CSR of the only chunk."""
        return self._only_chunk().csr

    @property
    def schedule(self) -> Schedule:
        """The schedule of the only chunk."""
        return self._only_chunk().schedule

    def _only_chunk(self) -> QueryChunk:
        if len(self.chunks) > 1:
            raise ValueError(f"the selection was prepared in {len(self.chunks)} chunks: name one")
        return self.chunks[0]


def prepare(
    selection: TokenSelection,
    q: Tensor,
    k: Tensor,
    *,
    num_sms: int | None = None,
    max_workspace_bytes: int | None = None,
) -> PreparedSelection:
    """Build the k2q CSR and the schedule of a token selection, once for many calls.

    Parameters
    ----------
    selection : TokenSelection
        Which KV blocks each query token sees.
    q, k : Tensor
        As for `sparse_atten_func`. Their shapes are read, their values are not: the result serves
        any tensors of these shapes with this selection, those of other layers too.
    num_sms : int, optional
        SMs that the work is spread over. None: those of q's device; on a CPU, those of a B200.
    max_workspace_bytes : int, optional
        Bound on the partial results of a chunk of query tokens, in bytes, as far as one token
        allows. None is 4 GiB. Each chunk reads the KV blocks of its own edges, so that many chunks
        read them often.

    Returns
    -------
    PreparedSelection
        What `sparse_atten_func` accepts in place of the selection, with the same results.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `sparse_atten_func`. A `BlockSelection` needs no preparation.

    Notes
    -----
    The rows of the CSR are bounded by what the host knows: ``Tk // block_size + B`` for flat KV,
    ``B * ceil(max_seqlen_k / block_size)`` for paged KV. On a device nothing synchronises: edges
    that name no block of their sequence are dropped there and counted in `csr.num_bad_edges`.
    Memory is linear in edges and rows; each chunk has rows of its own. A partial takes, for each
    query head, D elements of q's dtype (float32 unless it has 16 bits) and two LSEs.
    """
    if isinstance(selection, BlockSelection):
        raise TypeError(
            "selection must be a TokenSelection, got a BlockSelection: it needs no preparation, "
            "pass it to sparse_atten_func as it is"
        )
    if not isinstance(selection, TokenSelection):
        raise TypeError(f"selection must be a TokenSelection, got {describe(selection)}")
    bound = PARTIALS_BYTES if max_workspace_bytes is None else max_workspace_bytes
    parts = vars(selection).values()
    key = key_of(q, k, num_sms, bound, *parts) if runs_kernels(q) else None
    layout = None if key is None else _LAYOUTS.find(key)
    if layout is None:
        layout = _check(selection, q, k, num_sms, bound)
        if key is not None:
            _LAYOUTS.keep(key, layout)
    chunks = []
    for tokens in layout.cuts:
        q2k_indices, cu_seqlens_q = selection.q2k_indices, selection.cu_seqlens_q
        if len(layout.cuts) > 1:
            q2k_indices = q2k_indices[:, tokens.start : tokens.stop]
            cu_seqlens_q = (cu_seqlens_q - tokens.start).clamp_(0, len(tokens))
        csr, schedule = build_csr_and_schedule(
            q2k_indices,
            cu_seqlens_q,
            selection.cu_seqlens_k,
            seqused_k=selection.seqused_k,
            **layout.numbers,
        )
        chunks.append(QueryChunk(tokens.start, len(tokens), csr, schedule))
    return PreparedSelection(
        selection, tuple(chunks), layout.numbers["num_q_heads"], layout.num_keys
    )


class _Layout(NamedTuple):
    """What a checked call needs but its tensors."""

    cuts: list[range]  # tokens of each chunk
    num_keys: int
    numbers: dict[str, int]  # for `build_csr_and_schedule`


_LAYOUTS: Memo[_Layout] = Memo()


def _check(
    selection: TokenSelection, q: Tensor, k: Tensor, num_sms: int | None, bound: int
) -> _Layout:
    """Check a call, and decide what it does."""
    problem = validate(q, k, k, selection, Options())
    if problem.device.type == "cpu":
        check_values(selection, problem)
    expect_int("max_workspace_bytes", bound, 1)
    if num_sms is None:
        num_sms = (target_of(problem.device) or B200.target).num_sms
    block, pages = selection.block_size, selection.page_table
    if pages is None:
        num_rows = row_bound(problem.batch, block, total_k=problem.num_keys)
        key_capacity = problem.num_keys
    else:
        num_rows = row_bound(problem.batch, block, max_seqlen_k=selection.max_seqlen_k)
        key_capacity = pages.shape[1] * block
    numbers = {
        "num_q_heads": problem.num_q_heads,
        "num_sms": num_sms,
        "num_rows": num_rows,
        "block_size": block,
        "key_capacity": key_capacity,
    }
    most = bound // max(partial_bytes(q, problem.table_width), 1)
    return _Layout(_cut(problem.num_queries, most), problem.num_keys, numbers)


def partial_bytes(q: Tensor, width: int) -> int:
    """Bytes of the partial results of one query token, `width` slots for each head."""
    element = q.element_size() if q.element_size() == 2 else accumulator_dtype(q).itemsize
    return width * q.shape[1] * (q.shape[2] * element + _LSE_BYTES)


def _cut(num_tokens: int, most: int) -> list[range]:
    """Cut the tokens into the fewest runs of at most `most` and at least one, of like length."""
    count = max(1, -(-num_tokens // max(most, 1)))
    step = -(-num_tokens // count)
    starts = range(0, num_tokens, step) if num_tokens else [0]
    return [range(start, min(start + step, num_tokens)) for start in starts]


def selection_of(selection: Selection | PreparedSelection) -> Selection:
    """Return the selection itself, prepared or not."""
    return selection.selection if isinstance(selection, PreparedSelection) else selection
