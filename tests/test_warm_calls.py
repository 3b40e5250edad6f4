"""Calls that skip their checks since their layout is known: same results, same refusals.

CPU tensors take the kernels here, which an emulator runs (see emulation.py).
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from device_cases import CSR_TENSORS, SCHEDULE_TENSORS, assert_same, int32, ptx_of
from emulation import emulator

from sparse_atten import TokenSelection, preparation, prepare
from sparse_atten.csr import build, build_k2q_csr, transpose_block_lists
from sparse_atten.cute_kernels.common.memo import Memo
from sparse_atten.scheduler import build_csr_and_schedule, build_schedule, device, plan
from sparse_atten.topk import block_topk
from sparse_atten.topk.plan import program as topk_program

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")
TOPK = sys.modules["sparse_atten.topk.block_topk"]
MODULES = (build, plan, preparation, TOPK)
TOKENS, KEYS = 150, 1000


def ids(seed=0):
    """Distinct blocks of the four of each sequence, some slots unused."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(0, 4, (2, TOKENS, 1), generator=generator)
    lists = ((start + torch.arange(3)) % 4).int()
    return lists.masked_fill(torch.rand(lists.shape, generator=generator) < 0.2, -1)


ENDS = int32([0, 100, TOKENS]), int32([0, 490, KEYS])
TABLES = {"q2k_indices": ids(), "cu_seqlens_q": ENDS[0], "cu_seqlens_k": ENDS[1], "num_rows": 9}
SCORES = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
LISTS = {
    "q2k_indices": ids().abs()[None],
    "q2k_counts": torch.full((1, 2, TOKENS), 2, dtype=torch.int32),
    "num_kv_blocks": 4,
}


def by_prepare(q2k_indices, cu_seqlens_q, cu_seqlens_k, *, dtype=torch.float32, **options):
    sizes = {"block_size": options.pop("block_size", 128)}
    selection = TokenSelection(q2k_indices, cu_seqlens_q, cu_seqlens_k, TOKENS, KEYS, **sizes)
    q, k = torch.zeros(TOKENS, 4, 8, dtype=dtype), torch.zeros(KEYS, 2, 8)
    prepared = prepare(selection, q, k, **{"num_sms": 4, **options})
    return prepared.csr, prepared.schedule


def by_schedule(*, q2k_indices, num_sms=4, num_q_heads=4):
    """The schedule of a CSR that torch built."""
    with mock.patch.object(build, "runs_kernels", return_value=False):
        csr = build_k2q_csr(**{**TABLES, "q2k_indices": q2k_indices})
    return csr, build_schedule(csr, num_q_heads=num_q_heads, num_sms=num_sms)


CALLS = {
    "csr": (build_k2q_csr, TABLES),
    "both": (build_csr_and_schedule, {**TABLES, "num_q_heads": 4, "num_sms": 4}),
    "prepare": (by_prepare, {name: x for name, x in TABLES.items() if name != "num_rows"}),
    "schedule": (by_schedule, {"q2k_indices": ids()}),
    "lists": (transpose_block_lists, LISTS),
    "topk": (block_topk, {"scores": SCORES, "k": 3}),
    "regions": (block_topk, {"scores": SCORES, "regions": [(0, 9, 2)], "keep_spans": [(12, 14)]}),
}


@contextmanager
def emulated():
    """Launch on an emulator whatever the functions launch; nothing is known at first."""
    emu, launched = emulator(), []

    def run_steps(texts, steps):
        def run(*bases):
            for text, step in zip(texts, steps, strict=True):
                shape = step.grid, step.block, step.shared_bytes
                emu.run_ptx(text, step.kernel, *shape, step.values(bases))
                launched.append(step.kernel)

        return run

    def bind_on(_, is_wide):
        return lambda steps: run_steps([ptx_of(device.program(is_wide))] * len(steps), steps)

    with (
        mock.patch.multiple(TOPK, _kernel=lambda config, *_: ptx_of(topk_program(config))),
        mock.patch.object(TOPK, "Launches", run_steps),
        mock.patch.object(build, "bind_on", bind_on),
        mock.patch.object(plan, "bind_on", bind_on),
    ):
        for module in MODULES:
            mock.patch.object(module, "runs_kernels", lambda x: type(x) is torch.Tensor).start()
            for memo in vars(module).values():
                if isinstance(memo, Memo):
                    memo.clear()
        try:
            yield launched
        finally:
            mock.patch.stopall()


def compare(found, expected):
    for got, want in zip(found, expected, strict=True):
        if isinstance(want, torch.Tensor):
            assert torch.equal(got, want)
        else:
            assert_same(got, want, CSR_TENSORS if hasattr(want, "row_ptr") else SCHEDULE_TENSORS)


def called(name, changes):
    function, arguments = CALLS[name]
    found = function(**{**arguments, **changes})
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_follows_its_tensors(name):
    changes = [{}, {"q2k_indices": ids(7)}, {"q2k_indices": ids(8)}]
    if name == "lists":
        changes = [{}, {"q2k_indices": ids(7).abs()[None]}]
    if name in ("topk", "regions"):
        changes = [{}, {"scores": SCORES.flip(1).contiguous()}]
    wanted = [called(name, change) for change in changes]
    with emulated() as launched:
        found = [called(name, change) for change in changes]
        assert len(launched) % len(changes) == 0
        assert launched
    for got, want in zip(found, wanted, strict=True):
        compare(got, want)


WRONG_TABLES = (
    {"q2k_indices": None},
    {"q2k_indices": ids().long()},
    {"q2k_indices": ids().float()},
    {"q2k_indices": ids()[0]},
    {"cu_seqlens_q": ENDS[0].long()},
    {"cu_seqlens_q": ENDS[0][None]},
    {"cu_seqlens_q": None},
    {"cu_seqlens_q": ENDS[0].to("meta")},
    {"cu_seqlens_q": [0, 100, TOKENS]},
    {"cu_seqlens_k": ENDS[1][:2]},
    {"cu_seqlens_k": None},
    {"block_size": 0},
    {"block_size": True},
    {"block_size": 128.0},
    {"block_size": [128]},
)
WRONG_NUMBERS = (
    {"num_rows": 9.0},
    {"num_rows": -1},
    {"num_rows": [9]},
)
WRONG_SPLITS = (
    {"num_sms": 4.0},
    {"num_sms": 0},
    {"num_q_heads": 4.0},
    {"num_q_heads": 3},
)
WRONG = (
    *(("csr", change) for change in WRONG_TABLES + WRONG_NUMBERS),
    *(("both", change) for change in WRONG_TABLES + WRONG_NUMBERS + WRONG_SPLITS),
    *(("both", {"key_capacity": value}) for value in (-1, 9.0)),
    *(("prepare", change) for change in WRONG_TABLES + WRONG_SPLITS[:2]),
    ("prepare", {"dtype": torch.float16}),
    *(("schedule", change) for change in WRONG_SPLITS),
    ("lists", {"q2k_counts": LISTS["q2k_counts"].long()}),
    ("lists", {"q2k_counts": LISTS["q2k_counts"][..., :5]}),
    ("lists", {"num_kv_blocks": 4.0}),
    ("lists", {"dense_rows": TOKENS + 1}),
    ("lists", {"dense_rows": False}),
    *(
        ("topk", change)
        for change in (
            {"scores": SCORES.double()},
            {"k": 3.0},
            {"k": 0},
            {"k": None},
            {"dim": 2},
            {"dim": -1.0},
            {"first_blocks": False},
            {"last_blocks": 0.0},
            {"valid_counts": int32([1, 2])},
            {"valid_counts": torch.ones(5)},
            {"local_blocks": int32([1] * 5).to("meta")},
            {"keep_spans": [(0, 1)]},
        )
    ),
    ("regions", {"regions": [(0, 9, True)]}),
    ("regions", {"regions": [(0, 9.0, 2)]}),
    ("regions", {"regions": [(0, 13, 2)]}),
    ("regions", {"keep_spans": [(12, 41)]}),
    ("regions", {"first_blocks": 1}),
)


def refusal(name, change):
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        called(name, change)
    return type(error.value), str(error.value)


@pytest.mark.parametrize(("name", "change"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_known_call_leaves_no_wrong_one_unchecked(name, change):
    wanted = refusal(name, change)
    with emulated() as launched:
        called(name, {})
        before = len(launched)
        assert refusal(name, change) == wanted
        assert len(launched) == before
