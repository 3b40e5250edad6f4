"""Compiling for chosen architectures without a GPU; loading and launching with one."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
import torch
from emulation import SCHEDULES, emulator

from sparse_atten.cute_kernels.common import nvrtc
from sparse_atten.cute_kernels.common.nvrtc import CompileError, Kernel, Program
from sparse_atten.cute_kernels.common.steps import Address, Launches, Step

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-python")

CAPABILITIES = [(9, 0), (10, 0), (10, 3)]
SCALE = """
extern "C" __global__ void scale(const float* x, float* y, long long n, int add, float factor) {
    __shared__ float tile[BLOCK];
    const long long i = blockIdx.x * static_cast<long long>(BLOCK) + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) y[i] = tile[threadIdx.x] * factor + add;
}
extern "C" __global__ void fill(int* y, int value) { y[threadIdx.x] = value; }
"""


def scale_program(block: int = 64) -> Program:
    return Program("scale.cu", SCALE, (("BLOCK", block),))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_ATTEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARSE_ATTEN_DUMP_DIR", raising=False)
    return tmp_path


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code_for_an_explicit_architecture(capability):
    compiled = scale_program().compile(capability)
    name = f"sm_{capability[0]}{capability[1]}"
    assert compiled.architecture == name
    assert f".target {name}" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.image == compiled.cubin


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_resources_of_each_kernel(capability):
    resources = scale_program(48).compile(capability).resources
    assert set(resources) == {"scale", "fill"}
    assert resources["scale"].shared_bytes >= 48 * 4
    assert resources["fill"].shared_bytes < 48 * 4
    for kernel in resources.values():
        assert 0 < kernel.registers <= 32
        assert kernel.spill_bytes == kernel.stack_bytes == 0


def test_spills_are_seen():
    source = """
extern "C" __global__ void __launch_bounds__(1024, 2) wide(float* x) {
    float v[96];
    for (int i = 0; i < 96; ++i) v[i] = x[i * 1024 + threadIdx.x];
    for (int r = 0; r < 5; ++r) for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i * 7 + 1) % 96];
    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = v[i];
}"""
    resources = Program("wide.cu", source).compile((9, 0)).resources["wide"]
    assert resources.spill_bytes + resources.stack_bytes > 0


def test_a_gpu_newer_than_the_compiler_gets_ptx():
    compiled = scale_program().compile((99, 0))
    assert compiled.architecture.startswith("compute_")
    assert compiled.cubin == b""
    assert compiled.image == compiled.ptx.encode() + b"\0"


def test_a_newer_chip_of_a_known_family_gets_its_machine_code():
    assert scale_program().compile((9, 7)).architecture == "sm_90"


def test_an_older_gpu_is_refused():
    with pytest.raises(NotImplementedError, match=r"capability 9\.0 or newer, got 8\.9"):
        scale_program().compile((8, 9))


def test_an_error_carries_the_log():
    program = Program("broken.cu", 'extern "C" __global__ void k() { undeclared = 1; }')
    with pytest.raises(CompileError, match=r"(?s)broken\.cu .* sm_90.*\"undeclared\" is undefined"):
        program.compile((9, 0))


def test_read_takes_the_text_and_the_constants(tmp_path):
    (tmp_path / "a.cu").write_text(SCALE)
    assert Program.read(tmp_path / "a.cu", BLOCK=64).source == SCALE
    assert Program.read(tmp_path / "a.cu", B=1, A=2) == Program.read(tmp_path / "a.cu", A=2, B=1)


def test_the_image_is_compiled_once(monkeypatch):
    calls = []
    compile_ = Program.compile
    monkeypatch.setattr(
        Program, "compile", lambda self, capability: calls.append(1) or compile_(self, capability)
    )
    first = scale_program().image((9, 0))
    assert scale_program().image((9, 0)) == first
    assert len(calls) == 1
    others = [
        scale_program(32).image((9, 0)),
        scale_program().image((10, 0)),
        Program("scale.cu", SCALE + "//", (("BLOCK", 64),)).image((9, 0)),
    ]
    assert len(calls) == 4
    assert first not in others[:2]


def test_a_dump_holds_what_was_compiled(monkeypatch, tmp_path):
    scale_program().image((9, 0))
    monkeypatch.setenv("SPARSE_ATTEN_DUMP_DIR", str(tmp_path / "dump"))
    image = scale_program().image((9, 0))
    stem = tmp_path / "dump" / "scale-block64-sm_90"
    assert stem.with_suffix(".cubin").read_bytes() == image
    assert stem.with_suffix(".cu").read_text() == SCALE
    assert ".visible .entry scale" in stem.with_suffix(".ptx").read_text()
    assert "registers" in stem.with_suffix(".log").read_text()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_ptx_runs_on_an_emulator(schedule):
    emu = emulator()
    x = torch.arange(150.0)
    y = torch.full((160,), -1.0)
    ptx = scale_program().compile((9, 0)).ptx
    emu.run_ptx(ptx, "scale", 3, 64, 0, [x, y, 150, 2, 0.5], **schedule)
    assert torch.equal(y[:150], x * 0.5 + 2)
    assert (y[150:] == -1).all()


class FakeDriver:
    """What `Kernel` and `Launches` ask of the driver; keeps the parameters of each launch."""

    def __init__(self, monkeypatch, signatures):
        from cuda.bindings import driver

        self.results, self.signatures, self.statuses = driver.CUresult, signatures, []
        self.launched, self.contexts = [], []
        self.index = 1
        success = self.results.CUDA_SUCCESS
        for name, stand_in in {
            "cuModuleGetFunction": lambda _, name: (success, name.decode()),
            "cuFuncGetParamInfo": self._parameter,
            "cuCtxPushCurrent": lambda _: (success,),
            "cuCtxPopCurrent": lambda: (success, None),
            "cuCtxSetCurrent": lambda context: (self.contexts.append(context) or success,),
            "cuLaunchKernel": self._launch,
        }.items():
            monkeypatch.setattr(driver, name, stand_in)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.index)
        monkeypatch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False
        )

    def kernel(self, name):
        """Return a kernel with the signature of its name."""
        signature = "".join(self.signatures[name])
        return Kernel(name, signature, self.index, nvrtc._Module("module", "context"), 0)

    def _parameter(self, function, i):
        if i == len(self.signatures[function]):
            return self.results.CUDA_ERROR_INVALID_VALUE, 0, 0
        return self.results.CUDA_SUCCESS, 0, struct.calcsize(self.signatures[function][i])

    def _launch(self, function, *shape_and_rest):
        *shape, stream, parameters, extra = shape_and_rest
        assert (stream, extra) == (71, 0)
        status = self.statuses.pop(0) if self.statuses else self.results.CUDA_SUCCESS
        if not status:
            codes = self.signatures[function]
            places = (ctypes.c_void_p * len(codes)).from_address(parameters)
            values = [
                struct.unpack(code, ctypes.string_at(place, struct.calcsize(code)))[0]
                for code, place in zip(codes, places, strict=True)
            ]
            self.launched.append((function, tuple(shape), values))
        return (status,)


CODES = {"one": ("P", "i", "q", "5s", "P", "f"), "two": ("I", "P", "P"), "three": ()}
STEPS = (
    Step("one", (1, 2, 3), (4, 5, 6), (Address(0), -7, 2**40, b"bytes", Address(1, 24), 0.5), 8),
    Step("two", (9, 1, 1), (32, 1, 1), (2**32 - 1, Address(1, 24), 0)),
    Step("three", (1, 1, 1), (1, 1, 1), ()),
    Step("two", (9, 1, 1), (32, 1, 1), (1, Address(0), Address(2, 2**41))),
)


def test_launches_pass_the_arguments_of_their_steps(monkeypatch):
    fake = FakeDriver(monkeypatch, CODES)
    launches = Launches([fake.kernel(step.kernel) for step in STEPS], STEPS)
    for bases in ((2**60, 2**33, 8), (16, 0, 2**50)):
        launches(*bases)
        wanted = [
            (step.kernel, (*step.grid, *step.block, step.shared_bytes), step.values(bases))
            for step in STEPS
        ]
        assert fake.launched == wanted
        fake.launched.clear()


def test_a_thread_without_a_context_gets_one(monkeypatch):
    fake = FakeDriver(monkeypatch, CODES)
    launches = Launches([fake.kernel("two")], STEPS[1:2])
    fake.statuses = [fake.results.CUDA_ERROR_INVALID_CONTEXT]
    launches(0, 100)
    assert fake.contexts == ["context"]
    assert fake.launched == [("two", (9, 1, 1, 32, 1, 1, 0), [2**32 - 1, 124, 0])]
    fake.statuses = [fake.results.CUDA_ERROR_INVALID_CONTEXT, fake.results.CUDA_ERROR_NO_DEVICE]
    with pytest.raises(RuntimeError, match=r"launch of two with grid \(9, 1, 1\).*NO_DEVICE"):
        launches(0, 100)


def test_a_step_must_match_its_kernel(monkeypatch):
    fake = FakeDriver(monkeypatch, CODES)
    with pytest.raises(ValueError, match="shorter than"):
        Launches([fake.kernel("two")], [Step("two", (1, 1, 1), (1, 1, 1), (1, 2))])


def launch_scale(kernel, x, y, add=1):
    blocks = -(-x.numel() // 64)
    kernel((blocks, 1, 1), (64, 1, 1), x.data_ptr(), y.data_ptr(), x.numel(), add, 2.0)


@pytest.mark.gpu
def test_a_launch_on_the_current_stream():
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    kernel = scale_program().kernel("scale", "PPqif", x.device)
    launch_scale(kernel, x, y)
    assert torch.equal(y, x * 2 + 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        launch_scale(kernel, x, y)
    stream.synchronize()
    assert (y == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("signature", ["PPqi", "PPqiff", "PPiif"])
def test_a_wrong_signature_is_refused(signature):
    with pytest.raises(RuntimeError, match=r"kernel scale takes parameters of \[8, 8, 8, 4, 4\]"):
        scale_program().kernel("scale", signature, "cuda")


@pytest.mark.gpu
def test_a_launch_that_cannot_be_is_named():
    kernel = scale_program().kernel("fill", "Pi", "cuda")
    y = torch.empty(64, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"launch of fill with grid .*CUDA_ERROR_INVALID"):
        kernel((1, 1, 1), (4096, 1, 1), y.data_ptr(), 1)


@pytest.mark.gpu
def test_a_capture_needs_a_preloaded_program():
    program = scale_program(96)
    x = torch.randn(500, device="cuda")
    y = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.zero_()
        with pytest.raises(RuntimeError, match=r"scale\.cu is not loaded.*preload\(\)"):
            program.kernel("scale", "PPqif", x.device)
    program.preload(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel = program.kernel("scale", "PPqif", x.device)
        kernel((6, 1, 1), (96, 1, 1), x.data_ptr(), y.data_ptr(), x.numel(), 1, 2.0)
    x.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 11).all()


@pytest.mark.gpu
def test_threads_share_a_kernel():
    kernel = scale_program().kernel("scale", "PPqif", "cuda")
    x = torch.randn(300, device="cuda")
    outputs = [torch.empty_like(x) for _ in range(8)]
    torch.cuda.synchronize()

    def work(i):
        for _ in range(200):
            launch_scale(kernel, x, outputs[i], add=i)
        torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, y in enumerate(outputs):
        assert torch.equal(y, x * 2 + i)


@pytest.mark.gpu
def test_threads_share_launches():
    """Each thread's first launch finds no context; addresses of one never reach another."""
    x = torch.randn(300, device="cuda")
    step = Step("scale", (5, 1, 1), (64, 1, 1), (Address(0), Address(1), x.numel(), 3, 2.0))
    launches = Launches([scale_program().kernel("scale", "PPqif", "cuda")], [step])
    inputs = [x + i for i in range(8)]
    outputs = [torch.empty_like(x) for _ in range(8)]
    torch.cuda.synchronize()

    def work(i):
        for _ in range(200):
            launches(inputs[i].data_ptr(), outputs[i].data_ptr())
        torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, y in zip(inputs, outputs, strict=True):
        assert torch.equal(y, x * 2 + 3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_need_not_be_current():
    x = torch.randn(1000, device="cuda:1")
    y = torch.empty_like(x)
    with torch.cuda.device(0):
        launch_scale(scale_program().kernel("scale", "PPqif", x.device), x, y)
        assert torch.cuda.current_device() == 0
    assert torch.equal(y, x * 2 + 1)


def test_only_cuda_devices_run_kernels():
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        scale_program().preload("cpu")
