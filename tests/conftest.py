"""Shared test configuration: skips with reasons, parts of the suite, kernels compiled once."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sparse_atten.cute_kernels.common import offline
from sparse_atten.cute_kernels.common.cache import cache_key, cached


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let several runs share the suite."""
    parser.addoption("--part", default="1/1", help="run a part of the tests, such as 2/3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the part that is asked for; skip tests that want a device that is not there.

    Tests marked `gpu` want any device, those marked `gpu(9, 0)` one of that capability.
    """
    number, count = map(int, config.getoption("--part").split("/"))
    items[:] = items[number - 1 :: count]
    present = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None or (present and marker.args in ((), present)):
            continue
        wanted = f" of capability {marker.args[0]}.{marker.args[1]}" if marker.args else ""
        found = f"{present[0]}.{present[1]} is" if present else "none is"
        reason = f"needs a CUDA device{wanted}; {found} present"
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def one_compilation_for_all_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let one of the processes of pytest-xdist compile a kernel, and the others read its text."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder: Path = tmp_path_factory.getbasetemp().parent / "compiled"  # all processes have this one
    compile_offline = offline.compile_offline

    @functools.cache
    def shared(module: str, config: Any, target: Any) -> offline.Compiled:
        def build() -> bytes:
            return pickle.dumps(compile_offline(module, config, target))

        with mock.patch.dict(os.environ, SPARSE_ATTEN_CACHE_DIR=str(folder)):
            return pickle.loads(cached(cache_key(module, config, target.arch), build))

    with mock.patch.object(offline, "compile_offline", shared):
        yield
