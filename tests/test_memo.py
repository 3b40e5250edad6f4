"""Keys tell apart all that checks tell apart, and a memo stays bounded."""

from __future__ import annotations

import pytest
import torch

from sparse_atten.cute_kernels.common import memo
from sparse_atten.cute_kernels.common.memo import Memo, key_of


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2, dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int32).T,
        torch.zeros(2, 3, dtype=torch.int32, device="meta"),
        torch.zeros(2, 1, dtype=torch.int32).expand(2, 3),
        None,
    ],
)
def test_a_key_holds_the_layout_of_a_tensor(other):
    table = torch.zeros(2, 3, dtype=torch.int32)
    assert key_of(table) == key_of(torch.ones_like(table))
    assert key_of(table) != key_of(other)


def test_a_key_tells_types_apart():
    keys = {key_of(x) for x in (1, True, 1.0, "1", None, 0, False)}
    assert len(keys) == 7
    assert key_of(1, 2) == key_of(1, 2) != key_of(2, 1)


def test_what_has_no_hash_is_not_found():
    found: Memo[int] = Memo()
    assert found.keep(key_of(1), 5) == 5
    assert found.find(key_of(1)) == 5
    assert found.find(key_of(2)) is None
    assert found.find(key_of([1])) is None


def test_a_full_memo_starts_again(monkeypatch):
    monkeypatch.setattr(memo, "_MOST", 3)
    found: Memo[int] = Memo()
    for i in range(4):
        found.keep(key_of(i), i)
    assert dict(found) == {key_of(3): 3}
