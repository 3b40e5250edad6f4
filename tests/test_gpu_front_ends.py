"""The front ends give on a GPU what they give on a CPU, without a synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparse_atten import prepare, sparse_atten_func
from sparse_atten.msa import index_branch, minimax_sparse_attention
from sparse_atten.nsa import nsa_attention
from sparse_atten.vsa import VideoLayout, video_sparse_attention

pytestmark = pytest.mark.gpu


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def video(move: Callable[[Tensor], Tensor]) -> Tensor:
    device = move(torch.zeros(())).device
    layout = VideoLayout.from_segments([77, (5, 6, 9), (4, 9, 17)], tile=(4, 4, 8), device=device)
    q, k, v = (move(random(2, 4, layout.num_tokens, 64, seed=s)) for s in range(3))
    return video_sparse_attention(
        q, k[:, :2], v[:, :2], layout, sparsity=[0.5, 0.7], gate=torch.sigmoid(q)
    )


def half_video(move: Callable[[Tensor], Tensor]) -> Tensor:
    """What the kernels for packing take, in both orders of dims."""
    device = move(torch.zeros(())).device
    layout = VideoLayout.from_segments([77, (5, 6, 9), (4, 9, 17)], tile=(4, 4, 8), device=device)
    q, k, v = (move(random(2, 4, layout.num_tokens, 128, seed=s).bfloat16()) for s in range(3))
    outputs = []
    for gate in (None, move(random(2, 4, layout.num_tokens, 128, seed=3).bfloat16())):
        tensors = q, k[:, :2], v[:, :2]
        plain = video_sparse_attention(*tensors, layout, sparsity=0.6, gate=gate)
        turned = [None if x is None else x.transpose(1, 2) for x in (*tensors, gate)]
        other = video_sparse_attention(
            *turned[:3], layout, sparsity=0.6, gate=turned[3], tensor_layout="bshd"
        )
        outputs += [plain, other.transpose(1, 2)]
    return torch.stack(outputs)


def language(move: Callable[[Tensor], Tensor]) -> Tensor:
    offsets = move(torch.tensor([0, 300, 300, 777], dtype=torch.int32))
    q, k, v = (move(random(777, h, 64, seed=s)) for s, h in enumerate((8, 2, 2)))
    q_idx, k_idx = move(random(777, 2, 32, seed=3)), move(random(777, 1, 32, seed=4))
    lengths = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 477,
        "max_seqlen_k": 477,
    }
    choice = {"topk": 3, "block_size": 64}
    out = minimax_sparse_attention(q, k, v, q_idx, k_idx, num_sink_blocks=1, **choice, **lengths)
    selection = index_branch(q_idx, k_idx, num_sink_blocks=1, **choice, **lengths)
    prepared = prepare(selection, q, k, num_sms=16)
    again = sparse_atten_func(q, k, v, prepared, causal=True)
    return torch.cat([out.flatten(), again.flatten(), prepared.csr.q_indices.flatten().float()])


def native(move: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = (move(random(2, 500, h, 64, seed=s)) for s, h in enumerate((8, 2, 2)))
    gates = tuple(move(random(2, 500, 8, seed=s).sigmoid()) for s in range(3))
    return nsa_attention(q, k, v, gates=gates, block_size=32, num_selected=4, window_size=100)


@pytest.mark.parametrize("front_end", [video, half_video, language, native])
def test_a_gpu_agrees_with_the_cpu(front_end):
    on_cpu = front_end(lambda x: x)
    on_gpu = front_end(lambda x: x.cuda())
    assert_agree(on_gpu.cpu(), on_cpu)


def assert_agree(found: Tensor, expected: Tensor) -> None:
    rtol = atol = 1e-4
    if expected.dtype == torch.bfloat16:  # a result next to a boundary may round to either side
        rtol, atol = 0, 2.0**-7 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_a_captured_video_call_follows_its_inputs():
    layout = VideoLayout.from_segments([77, (5, 6, 9)], device="cuda")
    shape = (1, 2, layout.num_tokens, 128)
    q, k, v, gate = (random(*shape, seed=s).bfloat16().cuda() for s in range(4))

    def attend() -> Tensor:
        return video_sparse_attention(q, k, v, layout, sparsity=0.5, gate=gate)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for seed in range(5, 8):
        for i, x in enumerate((q, k, v, gate)):
            x.copy_(random(*shape, seed=10 * seed + i))
        graph.replay()
        assert_agree(out, attend())


@pytest.mark.parametrize("front_end", [video, half_video, language, native])
def test_no_synchronisation(front_end):
    inputs: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        inputs.append(x.cuda())
        return inputs[-1]

    front_end(keep)  # warm-up: layouts and kernels are made
    torch.cuda.synchronize()
    again = iter(inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        front_end(lambda _: next(again))
    finally:
        torch.cuda.set_sync_debug_mode("default")
