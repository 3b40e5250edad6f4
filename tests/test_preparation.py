"""`prepare`: its bounds, its defaults, and that the result stands in for the selection."""

import dataclasses

import pytest
import torch

from sparse_atten import (
    BlockSelection,
    PreparedSelection,
    TokenSelection,
    check_selection,
    preparation,
    sparse_atten_func,
)
from sparse_atten.preparation import prepare


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def flat_problem(num_kv_heads=2, group=2):
    """Two sequences of 5 and 3 queries over 20 and 7 keys in blocks of 8; one padding token."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(9, num_kv_heads * group, 8, generator=generator)
    k, v = (torch.randn(27, num_kv_heads, 8, generator=generator) for _ in range(2))
    lists = [[0, 2, -1], [1, -1, -1], [2, 1, 0], [-1, 0, -1], [2, -1, 1]]
    lists += [[0, -1, -1], [-1, -1, -1], [-1, -1, 0], [-1, -1, -1]]
    selection = TokenSelection(
        int32([lists] * num_kv_heads), int32([0, 5, 8]), int32([0, 20, 27]), 5, 20, block_size=8
    )
    return q, k, v, selection


def paged_problem():
    q, _, _, flat = flat_problem()
    pools = [torch.randn(6, 2, 8, 8) for _ in range(2)]
    fields = {
        "cu_seqlens_k": None,
        "page_table": int32([[5, 0, 2], [4, 9, 9]]),
        "seqused_k": int32([20, 7]),
    }
    return q, *pools, dataclasses.replace(flat, **fields)


def test_worked_example_of_the_reverse_index():
    lists = int32([[[0, 1], [0, 2], [1, 2], [2, 3]]])
    selection = TokenSelection(lists, int32([0, 4]), int32([0, 32]), 4, 32, block_size=8)
    q, k = torch.randn(4, 1, 8), torch.randn(32, 1, 8)
    prepared = prepare(selection, q, k)
    assert prepared.csr.row_ptr[0, :5].tolist() == [0, 2, 4, 7, 8]
    assert prepared.csr.q_indices[0].tolist() == [0, 1, 0, 2, 1, 2, 3, 3]
    assert prepared.schedule.split_counts.tolist() == [[2], [2], [2], [2]]


@pytest.mark.parametrize(("problem", "num_rows"), [(flat_problem, 27 // 8 + 2), (paged_problem, 6)])
def test_rows_are_bounded_by_what_the_host_knows(problem, num_rows):
    q, k, _, selection = problem()
    prepared = prepare(selection, q, k)
    assert prepared.selection is selection
    assert prepared.csr.row_ptr.shape == (2, num_rows + 1)
    coords = [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert prepared.csr.row_coords.tolist() == coords + [[-1, -1]] * (num_rows - 4)
    assert prepared.csr.num_bad_edges.item() == 0
    assert prepared.schedule.split_counts[:, 0].tolist() == [2, 1, 3, 1, 2, 1, 0, 1, 0]


@pytest.mark.parametrize("problem", [flat_problem, paged_problem])
def test_result_takes_the_place_of_the_selection(problem):
    q, k, v, selection = problem()
    prepared = prepare(selection, q, k)
    assert isinstance(prepared, PreparedSelection)
    check_selection(q, k, v, prepared)
    wanted = sparse_atten_func(q, k, v, selection, causal=True, return_lse=True)
    got = sparse_atten_func(q, k, v, prepared, causal=True, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_num_sms_decides_how_finely_hot_rows_are_split():
    num_queries = 512
    lists = torch.zeros(1, num_queries, 1, dtype=torch.int32)
    ends = int32([0, num_queries])
    selection = TokenSelection(lists, ends, int32([0, 8]), num_queries, 8, block_size=8)
    q, k = torch.randn(num_queries, 16, 8), torch.randn(8, 1, 8)
    one, default, many = (prepare(selection, q, k, num_sms=n).schedule for n in (1, None, 148))
    assert one.num_items.item() < many.num_items.item()
    assert torch.equal(default.work_items, many.work_items)


@pytest.mark.parametrize("problem", [flat_problem, paged_problem])
def test_nothing_is_read_on_the_host_of_a_device(problem):
    # Meta tensors hold no values: whatever needs one raises.
    q, k, _, selection = problem()
    fields = {
        name: x.to("meta") if isinstance(x, torch.Tensor) else x
        for name, x in vars(selection).items()
    }
    on_meta = prepare(TokenSelection(**fields), q.to("meta"), k.to("meta"))
    prepared = prepare(selection, q, k)
    assert on_meta.csr.row_ptr.shape == prepared.csr.row_ptr.shape
    assert on_meta.schedule.work_items.shape == prepared.schedule.work_items.shape


def test_unchecked_offsets_of_a_device_make_no_rows_past_the_keys(monkeypatch):
    q, k, _, selection = flat_problem()
    wild = dataclasses.replace(selection, cu_seqlens_k=int32([0, 20, 10**6]))
    monkeypatch.setattr("sparse_atten.preparation.check_values", lambda *_: None)
    assert torch.equal(prepare(wild, q, k).csr.row_coords, prepare(selection, q, k).csr.row_coords)


@pytest.mark.parametrize("heads", [0, 2])
def test_empty_problems(heads):
    ids = torch.empty(heads, 0, 3, dtype=torch.int32)
    selection = TokenSelection(ids, int32([0]), int32([0]), 0, 0, block_size=8)
    prepared = prepare(selection, torch.empty(0, 2 * heads, 8), torch.empty(0, heads, 8))
    assert prepared.schedule.num_items.item() == 0


def edges_of(chunk, cu_seqlens_q):
    """(head, token, batch, block) of every entry, by plain loops."""
    csr, found = chunk.csr, []
    for head, pointers in enumerate(csr.row_ptr.tolist()):
        for row, (batch, block) in enumerate(csr.row_coords.tolist()):
            for local in csr.q_indices[head, pointers[row] : pointers[row + 1]].tolist():
                token = max(int(cu_seqlens_q[batch]), chunk.first_token) + local
                found.append((head, token, batch, block))
    return sorted(found)


@pytest.mark.parametrize("problem", [flat_problem, paged_problem])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_chunks_hold_the_edges_of_their_tokens(problem, tokens):
    q, k, _, selection = problem()
    per_token = 3 * 4 * (8 * 4 + 8)  # slots, heads, a row in float32 and two LSEs
    prepared = prepare(selection, q, k, max_workspace_bytes=per_token * tokens + per_token - 1)
    chunks, ends = prepared.chunks, selection.cu_seqlens_q
    assert [chunk.tokens for chunk in chunks] == [
        slice(start, min(start + chunks[0].num_tokens, 9))
        for start in range(0, 9, chunks[0].num_tokens)
    ]
    assert len(chunks) == -(-9 // tokens)
    (whole,) = prepare(selection, q, k).chunks
    parts = [edge for chunk in chunks for edge in edges_of(chunk, ends)]
    assert edges_of(whole, ends) == sorted(parts)
    assert all(chunk.csr.num_bad_edges.item() == 0 for chunk in chunks)
    if len(chunks) > 1:
        with pytest.raises(ValueError, match=f"was prepared in {len(chunks)} chunks: name one"):
            _ = prepared.csr


def test_one_token_is_a_chunk_even_past_the_bound():
    q, k, _, selection = flat_problem()
    assert len(prepare(selection, q, k, max_workspace_bytes=1).chunks) == 9
    with pytest.raises(ValueError, match="max_workspace_bytes must be at least 1, got 0"):
        prepare(selection, q, k, max_workspace_bytes=0)


def test_a_single_chunk_takes_the_tables_as_they_are(monkeypatch):
    q, k, _, selection = flat_problem()
    taken = []
    build = preparation.build_csr_and_schedule
    monkeypatch.setattr(
        preparation,
        "build_csr_and_schedule",
        lambda *tables, **options: taken.append(tables) or build(*tables, **options),
    )
    prepare(selection, q, k)
    assert taken[0][0] is selection.q2k_indices
    assert taken[0][1] is selection.cu_seqlens_q


def test_a_block_selection_needs_no_preparation():
    ids = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(TypeError, match="BlockSelection: it needs no preparation"):
        prepare(BlockSelection(ids, ids[..., 0], block_size=8), q, q)
    with pytest.raises(TypeError, match="selection must be a TokenSelection, got str 'all'"):
        prepare("all", q, q)


def test_arguments_are_checked_as_at_the_call():
    q, k, _, selection = flat_problem()
    swapped = dataclasses.replace(selection, q2k_indices=selection.q2k_indices.transpose(0, 1))
    with pytest.raises(ValueError, match=r"q2k_indices must be int32 \[Hkv, Tq, K\] = \[2, 9, K\]"):
        prepare(swapped, q, k)
    bad = selection.q2k_indices.clone()
    bad[1, 2, 0] = 3
    with pytest.raises(ValueError, match=r"q2k_indices\[1, 2, 0\] must be in 0\.\.2 or -1, got 3"):
        prepare(dataclasses.replace(selection, q2k_indices=bad), q, k)
    wild = dataclasses.replace(selection, cu_seqlens_k=int32([0, 20, 10**6]))
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[-1\] must be at most the 27 tokens"):
        prepare(wild, q, k)
    with pytest.raises(ValueError, match="num_sms must be at least 1, got 0"):
        prepare(selection, q, k, num_sms=0)
