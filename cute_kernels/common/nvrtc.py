"""CUDA C++ text to running kernels, through NVRTC and the driver, without nvcc.

A `Program` is the text of one .cu file (which includes nothing) and its constants. Compiling needs
NVRTC alone, no GPU and no driver; machine code is cached on disk. On a GPU the program is loaded
once for each device, and a `Kernel` launches on torch's current stream of its device:

    PROGRAM = Program.read(Path(__file__).with_name("scale.cu"), ITEMS=4)
    PROGRAM.compile((9, 0)).resources["scale"].registers           # anywhere
    PROGRAM.preload(x.device)                                      # before a CUDA graph capture
    kernel = PROGRAM.kernel("scale", "PPqf", x.device)
    kernel(grid, block, x.data_ptr(), y.data_ptr(), x.numel(), 0.5)

What is launched often is laid out once, as `Launches` of steps.py.

A signature has one code for each kernel parameter, as in the struct module: P pointer, q int64,
i int32, I uint32, f float, 24s a struct of 24 bytes. It is compared with the parameters of the
loaded kernel. Kernels are declared ``extern "C" __global__``.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparse_atten.cute_kernels.common.cache import cache_key, cached
from sparse_atten.cute_kernels.common.env import dump_dir, logger
from sparse_atten.cute_kernels.common.steps import Launches, Step
from sparse_atten.cute_kernels.common.target import device_capability

OLDEST_CAPABILITY = (9, 0)
_OPTIONS = ("--std=c++17", "--generate-line-info", "--ptxas-options=-v")
_DEFAULT_SHARED_BYTES = 48 << 10  # a kernel that needs more must be told so before its launch


def runs_kernels(x: object) -> bool:
    """Whether kernels from here do an argument's work: a plain CUDA tensor, not being traced."""
    return (
        type(x) is torch.Tensor
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and _can_run(x.device)
    )


@cache
def _can_run(device: torch.device) -> bool:
    capability = device_capability(device)
    if capability is None or capability < OLDEST_CAPABILITY:
        return False
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        logger().warning("torch stands in for kernels on %s: cuda-python is not installed", device)
        return False
    return True


class CompileError(RuntimeError):
    """NVRTC refused a program; the message carries the compile log."""


@dataclass(frozen=True)
class Resources:
    """What one thread or block of a kernel takes, as ptxas reports it.

    Attributes
    ----------
    registers : int
        32-bit registers of a thread.
    spill_bytes : int
        Bytes of a thread spilled to local memory, stores and loads.
    stack_bytes : int
        Local memory of a thread.
    shared_bytes : int
        Static shared memory of a block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """What compiling made: log, PTX and, unless the target is virtual, machine code."""

    architecture: str
    log: str
    ptx: str
    cubin: bytes

    @property
    def image(self) -> bytes:
        """What the driver loads: machine code, or PTX for a GPU newer than this NVRTC."""
        return self.cubin or self.ptx.encode() + b"\0"

    @property
    def resources(self) -> dict[str, Resources]:
        """Resources of each kernel; empty for a virtual target."""
        found = {}
        for part in re.split(r"Compiling entry function ", self.log)[1:]:
            name = part.split("'")[1]
            found[name] = Resources(
                registers=_number(r"Used (\d+) registers", part),
                spill_bytes=_number(r"(\d+) bytes spill stores", part)
                + _number(r"(\d+) bytes spill loads", part),
                stack_bytes=_number(r"(\d+) bytes stack frame", part),
                shared_bytes=_number(r"(\d+) bytes smem", part),
            )
        return found


@dataclass(frozen=True)
class Program:
    """The text of one .cu file and the constants that it is compiled with."""

    name: str
    source: str
    defines: tuple[tuple[str, int], ...] = ()

    @classmethod
    def read(cls, path: Path, **defines: int) -> Program:
        """Take the text of a file; each keyword becomes a ``#define``."""
        return cls(path.name, path.read_text(), tuple(sorted(defines.items())))

    def compile(self, capability: tuple[int, int]) -> Compiled:
        """Compile for a compute capability, past the cache.

        Raises
        ------
        CompileError
            NVRTC refused the program.
        NotImplementedError
            The capability is older than 9.0.
        """
        from cuda.bindings import nvrtc

        architecture = _architecture(capability, tuple(checked(nvrtc.nvrtcGetSupportedArchs())))
        options = [option.encode() for option in self._options(architecture)]
        source, name = self.source.encode(), self.name.encode()
        program = checked(nvrtc.nvrtcCreateProgram(source, name, 0, [], []))
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise CompileError(f"{self.name} does not compile for {architecture}:\n{log}")
            ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
            cubin = b""
            if architecture.startswith("sm_"):
                cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        compiled = Compiled(architecture, log, ptx, cubin)
        self._dump(compiled)
        return compiled

    def image(self, capability: tuple[int, int]) -> bytes:
        """What the driver loads on such a device, from the disk cache where it is there."""
        from cuda.bindings import nvrtc

        def build() -> bytes:
            logger().info("compiling %s %s", self.name, dict(self.defines))
            return self.compile(capability).image

        if dump_dir() is not None:
            return build()
        version = checked(nvrtc.nvrtcVersion())
        key = cache_key("nvrtc", version, capability, self._options(""), self.source)
        return cached(key, build)

    def preload(self, device: torch.device | str | int) -> None:
        """Compile and load for a device, so that a CUDA graph capture finds all kernels ready."""
        _module(self, device_index(device))

    def kernel(
        self, name: str, signature: str, device: torch.device | str | int, *, shared_bytes: int = 0
    ) -> Kernel:
        """Return one kernel of the program, loaded on a device.

        Parameters
        ----------
        name : str
            The kernel's name.
        signature : str
            One code for each parameter; see the module.
        device : torch.device
            A CUDA device.
        shared_bytes : int
            The most dynamic shared memory that a launch will ask for.

        Raises
        ------
        RuntimeError
            The program is not loaded and torch's current stream is being captured; the driver
            refused the program; or the signature is not that of the kernel.
        """
        index = device_index(device)
        return Kernel(name, signature, index, _module(self, index), shared_bytes)

    def _options(self, architecture: str) -> list[str]:
        defines = [f"-D{name}={value}" for name, value in self.defines]
        return [f"--gpu-architecture={architecture}", *_OPTIONS, *defines]

    def _dump(self, compiled: Compiled) -> None:
        folder = dump_dir()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        constants = "".join(f"-{name.lower()}{value}" for name, value in self.defines)
        stem = folder / f"{Path(self.name).stem}{constants}-{compiled.architecture}"
        for suffix, content in (
            ("cu", self.source.encode()),
            ("ptx", compiled.ptx.encode()),
            ("cubin", compiled.cubin),
            ("log", compiled.log.encode()),
        ):
            stem.with_name(f"{stem.name}.{suffix}").write_bytes(content)


class Kernel:
    """One kernel on one device; calling it launches on torch's current stream of that device.

    Attributes
    ----------
    index, context : int, object
        The device and its primary context.
    function : object
        What the driver launches.
    layout, offsets : struct.Struct, list of int
        The parameters as one C struct, and where each begins.
    """

    def __init__(
        self, name: str, signature: str, index: int, module: _Module, shared_bytes: int
    ) -> None:
        from cuda.bindings import driver

        self.name = name
        self.index = index
        self.context = module.context
        self.layout = struct.Struct("@" + signature)
        codes = re.findall(r"\d*[a-zA-Z]", signature)
        sizes = [struct.calcsize(code) for code in codes]
        ends = [struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes))]
        self.offsets = [end - size for end, size in zip(ends, sizes, strict=True)]
        with current(module.context):
            self.function = checked(
                driver.cuModuleGetFunction(module.handle, name.encode()), f"kernel {name}"
            )
            if shared_bytes > _DEFAULT_SHARED_BYTES:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(driver.cuFuncSetAttribute(self.function, limit, shared_bytes), name)
        self._check_sizes(signature, sizes)

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        *values: float | bytes,
        shared_bytes: int = 0,
    ) -> None:
        """Launch once; values are pointers and numbers in the order of the signature."""
        Launches([self], [Step(self.name, grid, block, values, shared_bytes)])()

    def _check_sizes(self, signature: str, given: list[int]) -> None:
        sizes = parameter_sizes(self.function)
        if tuple(given) != sizes:
            raise RuntimeError(
                f"kernel {self.name} takes parameters of {list(sizes)} bytes, signature "
                f"{signature!r} has {given}"
            )


def parameter_sizes(function: Any) -> tuple[int, ...]:
    """Ask the driver how many bytes each parameter of a loaded kernel has."""
    from cuda.bindings import driver

    sizes: list[int] = []
    while True:
        status, *offset_and_size = driver.cuFuncGetParamInfo(function, len(sizes))
        if status != driver.CUresult.CUDA_SUCCESS:
            return tuple(sizes)
        sizes.append(offset_and_size[1])


@dataclass(frozen=True)
class _Module:
    handle: Any
    context: Any


_MODULES: dict[tuple[Program, int], _Module] = {}
_LOADING = threading.Lock()


def _module(program: Program, index: int) -> _Module:
    """Return the program loaded on a device; load it there on first use."""
    key = program, index
    with _LOADING:
        if key not in _MODULES:
            _MODULES[key] = _load(program, index)
        return _MODULES[key]


def _load(program: Program, index: int) -> _Module:
    from cuda.bindings import driver

    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{program.name} is not loaded on {device}, and a CUDA graph capture cannot load "
                "it: call preload() or the function once before the capture"
            )
    image = program.image(torch.cuda.get_device_capability(device))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(index))))
    with current(context):
        handle = checked(driver.cuModuleLoadData(image), f"loading {program.name}")
        count = checked(driver.cuModuleGetFunctionCount(handle))
        for function in checked(driver.cuModuleEnumerateFunctions(count, handle)):
            checked(driver.cuFuncLoad(function))
    return _Module(handle, context)


@contextmanager
def current(context: Any) -> Iterator[None]:
    """Make a context current for a while."""
    from cuda.bindings import driver

    checked(driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        checked(driver.cuCtxPopCurrent())


def device_index(device: torch.device | str | int) -> int:
    """Return the index of a CUDA device, the current one where none is named."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {found}")
    return torch.cuda.current_device() if found.index is None else found.index


def _architecture(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Name the best target that this NVRTC has: machine code of the same major, or PTX."""
    if capability < OLDEST_CAPABILITY:
        raise NotImplementedError(
            f"kernels need compute capability 9.0 or newer, got {capability[0]}.{capability[1]}"
        )
    number = 10 * capability[0] + capability[1]
    best = max(known for known in supported if known <= number)
    return f"sm_{best}" if best // 10 == capability[0] else f"compute_{best}"


def checked(result: tuple[Any, ...], doing: str = "CUDA") -> Any:
    """Return what a binding gives beside its status; raise where the status is an error."""
    status, *values = result
    if status:
        raise RuntimeError(f"{doing}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _bytes(size_of: Any, read: Any, program: Any) -> bytes:
    content = bytes(checked(size_of(program)))
    checked(read(program, content))
    return content


def _text(size_of: Any, read: Any, program: Any) -> str:
    return _bytes(size_of, read, program).rstrip(b"\0").decode(errors="replace").strip()


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0
