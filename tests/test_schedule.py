"""The tables of a kernel: what they derive, and what they refuse."""

from __future__ import annotations

import pytest

from sparse_atten.cute_kernels.common.schedule import (
    Barrier,
    Region,
    Role,
    Schedule,
    lanes,
    once,
    warps,
)
from sparse_atten.cute_kernels.common.target import Target

TARGET = Target("sm_100a")
TABLES = Schedule(
    roles=(Role("math", 0, 4, 128), Role("load", 4, 4, 32)),
    barriers=(
        Barrier("full", 3, once("load"), ("math",), "a tile has landed", 4096),
        Barrier("empty", 3, warps("math"), ("load",), "the tile has been read"),
        Barrier("done", 1, lanes("math") + once("load"), ("load",), "all is over"),
    ),
    tmem=(Region("S", 128), Region("P", 64, over="S"), Region("O", 256)),
    smem=(Region("tiles", 3 * 4096), Region("sums", 512)),
)


def test_counts_and_places_follow_from_the_tables():
    TABLES.check(TARGET)
    assert TABLES.threads == 256
    assert [TABLES.arrivals(barrier) for barrier in TABLES.barriers] == [1, 4, 129]
    assert TABLES.barrier_index("empty") == 3
    assert TABLES.num_barriers == 7
    assert (TABLES.smem_offset("sums"), TABLES.smem_offset("barriers")) == (12288, 12800)
    assert TABLES.smem_bytes == 12800 + 7 * 8
    assert [TABLES.tmem_column(name) for name in "SPO"] == [0, 0, 128]


def test_tables_print_every_row():
    text = TABLES.tables()
    for part in ("0-3", "128 registers", "129 arrivals", "P over S", "56 barriers", "12856 in all"):
        assert part in text


def test_unknown_names_raise():
    with pytest.raises(KeyError, match="half"):
        TABLES.barrier_index("half")
    with pytest.raises(KeyError, match="Q"):
        TABLES.tmem_column("Q")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": (Role("a", 0, 2, 64), Role("b", 3, 1, 64))}, "cover the warps"),
        ({"roles": (Role("a", 0, 1, 65),)}, "multiples of 8"),
        ({"roles": (Role("a", 0, 16, 136),)}, "sum to at most 65536"),
        ({"roles": (Role("a", 0, 3, 64), Role("b", 3, 1, 72))}, "must agree on registers"),
        ({"barriers": (Barrier("x", 1, once("nobody"), ("a",), ""),)}, "names no role"),
        ({"tmem": (Region("S", 64), Region("P", 128, over="S"))}, "P is larger than S"),
        ({"tmem": (Region("S", 384), Region("O", 256))}, "512 columns"),
        ({"smem": (Region("q", 232_448 + 8),)}, "at most 232448"),
    ],
)
def test_schedule_refuses_what_does_not_fit(change: dict, message: str):
    tables = {"roles": (Role("a", 0, 4, 64),), "barriers": (), "tmem": (), "smem": (), **change}
    with pytest.raises(ValueError, match=message):
        Schedule(**tables).check(TARGET)
