"""The disk cache: hits, misses, corruption, and builders that race."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sparse_atten.cute_kernels.common.cache import cache_key, cached


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Counts its calls."""

    def __init__(self, payload=b"payload"):
        self.payload, self.calls = payload, 0

    def __call__(self) -> bytes:
        """Make the payload."""
        self.calls += 1
        return self.payload


def entry(folder: Path, key: str) -> Path:
    (found,) = (path for path in folder.rglob(key) if path.is_file())
    return found


def test_keys_tell_parts_apart():
    keys = {
        cache_key("ab", "c"),
        cache_key("a", "bc"),
        cache_key("abc"),
        cache_key("ab", "c", ()),
        cache_key("1"),
        cache_key(1),
    }
    assert len(keys) == 6
    assert cache_key("ab", 1, (9, 0)) == cache_key("ab", 1, (9, 0))


@pytest.mark.parametrize("payload", [b"", b"\0" * 5, bytes(range(256)) * 999])
def test_the_second_call_reads_what_the_first_built(payload):
    build, key = Builder(payload), cache_key("k")
    assert cached(key, build) == payload
    assert cached(key, build) == payload
    assert build.calls == 1


def test_keys_do_not_mix():
    assert cached(cache_key("a"), Builder(b"a")) == b"a"
    assert cached(cache_key("b"), Builder(b"b")) == b"b"
    assert cached(cache_key("a"), Builder(b"c")) == b"a"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
    ids=["empty", "cut_digest", "cut_payload", "longer", "flipped_payload", "flipped_digest"],
)
def test_a_corrupt_entry_is_built_again(folder, damage):
    build, key = Builder(), cache_key("k")
    cached(key, build)
    path = entry(folder, key)
    path.write_bytes(damage(path.read_bytes()))
    assert cached(key, build) == b"payload"
    assert build.calls == 2
    assert cached(key, build) == b"payload"
    assert build.calls == 2


def test_a_failed_build_leaves_nothing(folder):
    def fail():
        raise OSError("no compiler")

    with pytest.raises(OSError, match="no compiler"):
        cached(cache_key("k"), fail)
    assert not [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert cached(cache_key("k"), Builder()) == b"payload"


def test_no_temporary_file_stays(folder):
    cached(cache_key("k"), Builder())
    assert not list(folder.rglob("*.tmp"))


def test_a_folder_that_cannot_be_made_costs_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path / "file"))
    build = Builder()
    with caplog.at_level(logging.WARNING, "sparse_atten"):
        assert cached(cache_key("k"), build) == b"payload"
        assert cached(cache_key("k"), build) == b"payload"
    assert build.calls == 2
    assert "is not cached" in caplog.text


def test_threads_of_one_key_build_once():
    build, key = Builder(), cache_key("k")
    results = []

    def slow():
        threading.Event().wait(0.05)
        return build()

    threads = [threading.Thread(target=lambda: results.append(cached(key, slow))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"payload"] * 8
    assert build.calls == 1


def test_processes_of_one_key_build_once(tmp_path):
    log = tmp_path / "builds"
    code = f"""
import time
from sparse_atten.cute_kernels.common.cache import cache_key, cached
def build():
    with open({str(log)!r}, "a") as file:
        file.write("built\\n")
    time.sleep(0.3)
    return b"payload"
assert cached(cache_key("k"), build) == b"payload"
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd="/") for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"
