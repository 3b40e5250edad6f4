"""Several tensors in one allocation: where they lie, and when they are made."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from sparse_atten.cute_kernels.common.parts import ALIGNMENT, Record, lay_out, words

TENSORS = {
    "a": ((3, 5), torch.int32),
    "b": ((), torch.int64),
    "none": ((4, 0), torch.int32),
    "c": ((2, 3, 4), torch.int64),
    "d": ((7,), torch.int32),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Pair(Record):
    """Two tensors and a number."""

    a: torch.Tensor
    d: torch.Tensor
    number: int


def test_parts_are_aligned_and_disjoint():
    parts = lay_out(TENSORS, start=100)
    taken: set[int] = set(range(100))
    for name, (shape, dtype) in TENSORS.items():
        part = parts[name]
        bytes_of_part = range(part.offset, part.end)
        assert len(bytes_of_part) == torch.empty(shape, dtype=dtype).nbytes
        assert part.offset % ALIGNMENT == 0
        assert taken.isdisjoint(bytes_of_part)
        taken.update(bytes_of_part)
    assert 4 * words(parts) >= max(taken) + 1


@pytest.mark.parametrize("before", [0, 64])
def test_each_part_is_a_contiguous_tensor_of_its_own_bytes(before):
    parts = lay_out(TENSORS)
    allocation = torch.zeros(before + words(parts), dtype=torch.int32)[before:]
    base = allocation.data_ptr()
    for name, (shape, dtype) in TENSORS.items():
        tensor = parts[name].of(allocation)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() == base + parts[name].offset
        tensor.fill_(-1)
    as_bytes = allocation.view(torch.uint8)
    covered = sum(part.end - part.offset for part in parts.values())
    assert int((as_bytes == 255).sum()) == covered


def test_no_parts_take_nothing():
    assert lay_out({}) == {}
    assert words({}) == 0


def test_a_record_makes_a_tensor_once():
    parts = lay_out({name: TENSORS[name] for name in ("a", "d")})
    allocation = torch.arange(words(parts), dtype=torch.int32)
    pair = Pair.in_parts(allocation, parts, {"number": 3})
    assert isinstance(pair, Pair)
    assert pair.number == 3
    assert pair.a.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    assert pair.a is pair.a
    assert pair.d[0] == parts["d"].offset // 4
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'e'"):
        _ = pair.e


def test_a_record_copies_as_a_dataclass_does():
    parts = lay_out({name: TENSORS[name] for name in ("a", "d")})
    pair = Pair.in_parts(torch.arange(words(parts), dtype=torch.int32), parts, {"number": 3})
    changed = dataclasses.replace(pair, number=4)
    assert (changed.number, changed.a) == (4, pair.a)
    assert torch.equal(copy.deepcopy(pair).d, pair.d)
    plain = Pair(pair.a, pair.d, 5)
    with pytest.raises(AttributeError, match="no attribute 'e'"):
        _ = plain.e
