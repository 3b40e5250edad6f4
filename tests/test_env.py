"""The environment: three variables, defaults, and one module that reads them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from sparse_atten.cute_kernels.common import env

ROOT = Path(__file__).parent.parent


@pytest.fixture
def fresh_logger():
    """Let `logger` read the environment again, and undo what it sets up."""
    log = logging.getLogger("sparse_atten")
    level, handlers = log.level, list(log.handlers)
    env.logger.cache_clear()
    yield log
    log.setLevel(level)
    log.handlers[:] = handlers
    env.logger.cache_clear()


def test_defaults(monkeypatch):
    monkeypatch.delenv("SPARSE_ATTEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("SPARSE_ATTEN_DUMP_DIR", raising=False)
    assert env.cache_dir() == Path.home() / ".cache" / "sparse_atten"
    assert env.dump_dir() is None


def test_folders_are_those_named(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("SPARSE_ATTEN_DUMP_DIR", str(tmp_path / "b"))
    assert env.cache_dir() == tmp_path / "a"
    assert env.dump_dir() == tmp_path / "b"


def test_without_a_level_the_logger_is_left_alone(monkeypatch, fresh_logger):
    monkeypatch.delenv("SPARSE_ATTEN_LOG_LEVEL", raising=False)
    before = fresh_logger.level, list(fresh_logger.handlers)
    assert env.logger() is fresh_logger
    assert (fresh_logger.level, fresh_logger.handlers) == before


def test_a_level_sets_the_logger_up_once(monkeypatch, fresh_logger):
    monkeypatch.setenv("SPARSE_ATTEN_LOG_LEVEL", "info")
    handlers = len(fresh_logger.handlers)
    env.logger()
    assert env.logger().level == logging.INFO
    assert len(fresh_logger.handlers) == handlers + 1


def test_an_unknown_level_is_refused(monkeypatch, fresh_logger):
    monkeypatch.setenv("SPARSE_ATTEN_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match=r"SPARSE_ATTEN_LOG_LEVEL must be one of DEBUG.*'loud'"):
        env.logger()


def test_nothing_else_reads_the_environment():
    folders = ("interface", "cute_kernels", "csr", "packing", "scheduler", "topk")
    readers = [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bos\.environ|\bgetenv\b", path.read_text())
    ]
    assert readers == ["cute_kernels/common/env.py"]
