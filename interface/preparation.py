"""What a KV-outer kernel needs of a token selection: its k2q CSR and its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparse_atten.checks import check_values
from sparse_atten.contracts import BlockSelection, Options, Selection, TokenSelection, validate
from sparse_atten.csr import K2QCSR, row_bound
from sparse_atten.cute_kernels.common.arguments import describe
from sparse_atten.cute_kernels.common.memo import Memo, key_of
from sparse_atten.cute_kernels.common.nvrtc import runs_kernels
from sparse_atten.cute_kernels.common.target import B200, target_of
from sparse_atten.scheduler import Schedule, build_csr_and_schedule

_NUMBERS: Memo[dict[str, int]] = Memo()


@dataclass(frozen=True, eq=False)
class PreparedSelection:
    """A `TokenSelection` with its k2q CSR and work schedule; takes the selection's place.

    Parameters
    ----------
    selection : TokenSelection
        What was prepared.
    csr : K2QCSR
        For each KV head and KV block, the query tokens that chose the block.
    schedule : Schedule
        The work items of the KV-outer pass, and the slot of each partial result.
    """

    selection: TokenSelection
    csr: K2QCSR
    schedule: Schedule


def prepare(
    selection: TokenSelection, q: Tensor, k: Tensor, *, num_sms: int | None = None
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
    Memory is linear in edges and rows.
    """
    if isinstance(selection, BlockSelection):
        raise TypeError(
            "selection must be a TokenSelection, got a BlockSelection: it needs no preparation, "
            "pass it to sparse_atten_func as it is"
        )
    if not isinstance(selection, TokenSelection):
        raise TypeError(f"selection must be a TokenSelection, got {describe(selection)}")
    key = key_of(q, k, num_sms, *vars(selection).values()) if runs_kernels(q) else None
    numbers = None if key is None else _NUMBERS.find(key)
    if numbers is None:
        numbers = _check(selection, q, k, num_sms)
        if key is not None:
            _NUMBERS.keep(key, numbers)
    csr, schedule = build_csr_and_schedule(
        selection.q2k_indices,
        selection.cu_seqlens_q,
        selection.cu_seqlens_k,
        seqused_k=selection.seqused_k,
        **numbers,
    )
    return PreparedSelection(selection, csr, schedule)


def _check(selection: TokenSelection, q: Tensor, k: Tensor, num_sms: int | None) -> dict[str, int]:
    """Check a call, and return the numbers that `build_csr_and_schedule` takes."""
    problem = validate(q, k, k, selection, Options())
    if problem.device.type == "cpu":
        check_values(selection, problem)
    if num_sms is None:
        num_sms = (target_of(problem.device) or B200.target).num_sms
    block, pages = selection.block_size, selection.page_table
    if pages is None:
        num_rows = row_bound(problem.batch, block, total_k=problem.num_keys)
        key_capacity = problem.num_keys
    else:
        num_rows = row_bound(problem.batch, block, max_seqlen_k=selection.max_seqlen_k)
        key_capacity = pages.shape[1] * block
    return {
        "num_q_heads": problem.num_q_heads,
        "num_sms": num_sms,
        "num_rows": num_rows,
        "block_size": block,
        "key_capacity": key_capacity,
    }


def selection_of(selection: Selection | PreparedSelection) -> Selection:
    """Return the selection itself, prepared or not."""
    return selection.selection if isinstance(selection, PreparedSelection) else selection
