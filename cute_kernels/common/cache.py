"""Disk cache of compiled kernels, safe among threads and processes.

An entry is one file, named by its key: a digest of the payload, then the payload. It is written to
a temporary file and renamed, so that a reader sees all of it or nothing; a file whose digest does
not fit counts as missing. Builders of one key wait for each other on a lock file. Nothing here
knows what a payload means:

    key = cache_key("nvrtc", version, "sm_90", options, source)
    cubin = cached(key, lambda: compile_it(source))
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparse_atten.cute_kernels.common.env import cache_dir, logger

try:
    import fcntl
except ImportError:  # not a POSIX system: builders of one key may repeat each other's work
    fcntl = None  # type: ignore[assignment]

_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_key(*parts: object) -> str:
    """Digest of everything that an entry depends on, each part by its `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cached(key: str, build: Callable[[], bytes]) -> bytes:
    """Return the entry of a key; where there is none, build and store it.

    Parameters
    ----------
    key : str
        From `cache_key`.
    build : callable
        Makes the payload. Its exceptions pass through, and then nothing is stored.

    Notes
    -----
    A folder that cannot be used costs a warning on the logger and a build, never an error.
    """
    path = cache_dir() / key[:2] / key
    with _locked(path):
        payload = _read(path)
        if payload is None:
            payload = build()
            _write(path, payload)
    return payload


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of an entry, where the folder and the system allow one."""
    lock = None
    if fcntl is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger().warning("no lock for the cached kernel %s: %s", path, error)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _read(path: Path) -> bytes | None:
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    digest, payload = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        logger().warning("the cached kernel %s is corrupt: it is built again", path)
        return None
    return payload


def _write(path: Path, payload: bytes) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError as error:
        logger().warning("the kernel is not cached as %s: %s", path, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
