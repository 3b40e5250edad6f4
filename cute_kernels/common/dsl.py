"""Compiled CuTe-DSL kernels at run time: from memory, from the disk cache, or from the compiler.

A kernel module has ``compile_kernel(config, options)``. What it returns is stored as an object file
under a key of everything it depends on: the package's kernel sources, the DSL's version, the Config
and the architecture. Loading one takes milliseconds, compiling one seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparse_atten.cute_kernels.common.cache import cache_key, cached
from sparse_atten.cute_kernels.common.env import dump_dir
from sparse_atten.cute_kernels.common.target import Target

_SYMBOL = "sparse_atten_kernel"
_SOURCES = Path(__file__).parent.parent

_loaded: dict[tuple[str, Any, str], Any] = {}
_lock = threading.Lock()


def load_kernel(module: str, config: Any, target: Target) -> Any:
    """Return the compiled host function of a kernel module; the first time it is made ready.

    Raises
    ------
    RuntimeError
        The kernel is not ready and a CUDA graph is being captured: compiling and loading are not
        part of a graph. `sparse_atten.preload` makes it ready before.
    """
    key = (module, config, target.arch)
    kernel = _loaded.get(key)
    if kernel is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{module} is not loaded for {config}, and a CUDA graph is being captured: call "
                "sparse_atten.preload() with the same arguments first"
            )
        with _lock:
            kernel = _loaded.get(key) or _loaded.setdefault(key, _load(module, config, target))
    return kernel


def build(module: str, config: Any, target: Target) -> bytes:
    """Return a kernel's object file from the disk cache; the first time it is compiled.

    The process must have imported CuTe-DSL for the target: ``CUTE_DSL_ARCH`` says which it is where
    there is no device.
    """
    if dump_dir() is not None:
        return _compile(module, config, target)
    key = cache_key(
        "dsl",
        importlib.metadata.version("nvidia-cutlass-dsl"),
        _fingerprint(),
        module,
        config,
        target.arch,
    )
    return cached(key, lambda: _compile(module, config, target))


def _load(module: str, config: Any, target: Target) -> Any:
    import cutlass.cute as cute

    code = build(module, config, target)
    with tempfile.TemporaryDirectory(prefix="sparse_atten_") as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(code)
        return getattr(cute.runtime.load_module(str(path)), _SYMBOL)


def _compile(module: str, config: Any, target: Target) -> bytes:
    kernel = importlib.import_module(module)
    folder = dump_dir()
    keep = "" if folder is None else " --keep-ptx --keep-cubin"
    compiled = kernel.compile_kernel(config, f"--gpu-arch {target.arch}{keep}")
    code: bytes = compiled.dump_to_object(_SYMBOL)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{module.rpartition('.')[2]}-{config_name(config, '-')}-{target.arch}"
        (folder / f"{stem}.ptx").write_text(compiled.__ptx__.rstrip("\0"))
        (folder / f"{stem}.cubin").write_bytes(bytes(compiled.__cubin__))
        (folder / f"{stem}.o").write_bytes(code)
    return code


def config_name(config: Any, separator: str = " ") -> str:
    """Name a Config by the fields that differ from their defaults; a flag by its name alone."""
    parts = [
        field.name if value is True else f"{field.name}={value}"
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
    ]
    return separator.join(parts) or "default"


@cache
def _fingerprint() -> str:
    """Digest of all kernel sources: a change of any makes every entry a miss."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(path.relative_to(_SOURCES).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
