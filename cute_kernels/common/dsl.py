"""Compiled CuTe-DSL kernels at run time: from memory, from the disk cache, or from the compiler.

A kernel module has ``compile_kernel(config, options)``. The cubin that it makes is stored under a
key of everything it depends on: the package's kernel sources, the DSL's version, the Config
and the architecture. Loading one takes milliseconds, compiling one seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparse_atten.cute_kernels.common.cache import cache_key, cached
from sparse_atten.cute_kernels.common.env import dump_dir
from sparse_atten.cute_kernels.common.launch import LaunchPlan
from sparse_atten.cute_kernels.common.nvrtc import (
    checked,
    current,
    device_index,
    parameter_sizes,
)
from sparse_atten.cute_kernels.common.target import Target

_SOURCES = Path(__file__).parent.parent

_loaded: dict[tuple[str, Any, int], Function] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Function:
    """A compiled kernel, loaded on a device.

    Attributes
    ----------
    index, context : int, object
        The device and its primary context.
    handle : object
        What the driver launches.
    parameter_sizes : tuple of int
        Bytes of each parameter.
    """

    name: str
    index: int
    context: Any
    handle: Any
    parameter_sizes: tuple[int, ...]

    def launch(self, plan: LaunchPlan, stream: int, parameters: int) -> None:
        """Launch on a stream; `parameters` is the address of the array of their addresses."""
        from cuda.bindings import driver

        status = self._launch(plan, stream, parameters)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread's first touch
            driver.cuCtxSetCurrent(self.context)
            status = self._launch(plan, stream, parameters)
        if status:
            raise RuntimeError(
                f"launch of {self.name} with grid {plan.grid}, block {plan.block}, "
                f"{plan.smem_bytes} bytes of dynamic shared memory: {status.name}"
            )

    def _launch(self, plan: LaunchPlan, stream: int, parameters: int) -> Any:
        from cuda.bindings import driver

        size = (*plan.grid, *plan.block, plan.smem_bytes)
        if not plan.programmatic:
            return driver.cuLaunchKernel(self.handle, *size, stream, parameters, 0)[0]
        attribute = driver.CUlaunchAttribute()
        kinds = driver.CUlaunchAttributeID
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = plan.block
        config.sharedMemBytes = plan.smem_bytes
        config.hStream = driver.CUstream(stream)
        config.attrs, config.numAttrs = [attribute], 1
        return driver.cuLaunchKernelEx(config, self.handle, parameters, 0)[0]


def load_kernel(module: str, config: Any, target: Target, device: torch.device) -> Function:
    """Return a kernel, loaded on a device; the first time it is made ready.

    Raises
    ------
    RuntimeError
        The kernel is not ready and a CUDA graph is being captured: compiling and loading are not
        part of a graph. `sparse_atten.preload` makes it ready before.
    """
    key = (module, config, device_index(device))
    kernel = _loaded.get(key)
    if kernel is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{module} is not loaded for {config}, and a CUDA graph is being captured: call "
                "sparse_atten.preload() with the same arguments first"
            )
        with _lock:
            kernel = _loaded.get(key) or _loaded.setdefault(key, _load(target, *key))
    return kernel


def build(module: str, config: Any, target: Target) -> bytes:
    """Return a kernel's cubin from the disk cache; the first time it is compiled.

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


def _load(target: Target, module: str, config: Any, index: int) -> Function:
    from cuda.bindings import driver

    cubin = build(module, config, target)
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))
    with current(context):
        library = checked(driver.cuModuleLoadData(cubin), f"loading {module}")
        (handle,) = checked(driver.cuModuleEnumerateFunctions(1, library))
        checked(driver.cuFuncLoad(handle))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        static = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        most = target.smem_limit - checked(driver.cuFuncGetAttribute(static, handle))
        checked(driver.cuFuncSetAttribute(handle, limit, most), f"loading {module}")
        sizes = parameter_sizes(handle)
    return Function(module.rpartition(".")[2], index, context, handle, sizes)


def _compile(module: str, config: Any, target: Target) -> bytes:
    kernel = importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="sparse_atten_") as scratch:
        keep = f"--keep-ptx --keep-cubin --dump-dir={scratch}"
        compiled = kernel.compile_kernel(config, f"--gpu-arch {target.arch} {keep}")
        cubin = bytes(compiled.__cubin__)
    folder = dump_dir()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{module.rpartition('.')[2]}-{config_name(config, '-')}-{target.arch}"
        (folder / f"{stem}.ptx").write_text(compiled.__ptx__.rstrip("\0"))
        (folder / f"{stem}.cubin").write_bytes(cubin)
    return cubin


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
