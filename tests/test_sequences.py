"""Extents of packed sequences, and positions of query tokens, against plain Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_atten import TokenSelection
from sparse_atten.sequences import sequences_of


def selection(num_queries, cu_seqlens_q, cu_seqlens_k, **fields):
    def int32(x):
        return None if x is None else torch.tensor(x, dtype=torch.int32)

    fields = {name: int32(x) if isinstance(x, list) else x for name, x in fields.items()}
    ids = torch.empty(1, num_queries, 0, dtype=torch.int32)
    return TokenSelection(ids, int32(cu_seqlens_q), int32(cu_seqlens_k), 99, 99, **fields)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=5), st.integers(0, 3))
def test_positions_equal_a_loop_over_sequences(lengths, padding):
    q_lengths, k_lengths = [q for q, _ in lengths], [k for _, k in lengths]
    offsets = [[sum(x[:i]) for i in range(len(x) + 1)] for x in (q_lengths, k_lengths)]
    num_queries = sum(q_lengths) + padding
    sequences = sequences_of(selection(num_queries, *offsets), sum(k_lengths))
    position, num_keys = sequences.align_queries(num_queries)

    expected = [(i + k - q, k) for q, k in lengths for i in range(q)] + [(-1, 0)] * padding
    assert list(zip(position.tolist(), num_keys.tolist(), strict=True)) == expected
    half = num_queries // 2
    part, keys = sequences.align_queries(num_queries - half, half)
    assert list(zip(part.tolist(), keys.tolist(), strict=True)) == expected[half:]
    assert sequences.q_start.tolist() == offsets[0][:-1]
    assert sequences.k_start.tolist() == offsets[1][:-1]
    assert sequences.k_length.tolist() == k_lengths


def test_used_lengths_shorten_flat_sequences():
    sequences = sequences_of(selection(0, [0, 0, 0, 0], [0, 4, 9, 9], seqused_k=[9, -2, 1]), 9)
    assert sequences.k_start.tolist() == [0, 4, 9]
    assert sequences.k_length.tolist() == [4, 0, 0]


def test_paged_lengths_come_from_seqused_k_and_end_with_the_page_table():
    pages = [[0, 1], [2, 3]]
    paged = selection(0, [0, 0, 0], None, page_table=pages, seqused_k=[40, -1], block_size=16)
    sequences = sequences_of(paged, 64)
    assert sequences.k_start.tolist() == [0, 0]
    assert sequences.k_length.tolist() == [32, 0]


def test_wild_offsets_stay_inside_the_tensors():
    wild = selection(6, [2, -5, 4, 2**31 - 1], [-7, 3, 1, 99])
    sequences = sequences_of(wild, 5)
    assert sequences.q_start.tolist() == [2, 2, 4]
    assert sequences.q_length.tolist() == [0, 2, 2]
    assert sequences.k_start.tolist() == [0, 3, 3]
    assert sequences.k_length.tolist() == [3, 0, 2]
    position, num_keys = sequences.align_queries(6)
    assert position.tolist() == [-1, -1, -2, -1, 0, 1]
    assert num_keys.tolist() == [0, 0, 0, 0, 2, 2]
