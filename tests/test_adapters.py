"""The drop-in forms: their arguments mean what they mean to the packages that they stand in for."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math

import pytest
import torch
from cases import BlockCase, TokenCase

from sparse_atten import sparse_atten_func
from sparse_atten.adapters import (
    fastvideo_block_sparse_attn,
    flashinfer_msa_sparse_attention,
    msa_sparse_atten_func,
)
from sparse_atten.contracts import Options
from sparse_atten.definition import define_attention

VIDEO = BlockCase("video", batch=2, lengths=(64, 64), kv_sizes="vector", dtype=torch.float64)
TEXT = TokenCase(
    "text",
    queries=(20, 0, 33, 7),
    keys=(40, 5, 33, 130),
    block=128,
    width=2,
    causal=True,
    dtype=torch.float64,
    spare_queries=2,
)
WIDE = TokenCase("wide", queries=(9, 30), keys=(300, 500), block=128, width=3, dtype=torch.float64)


def msa_csr(selection, spare_rows=0):
    """A k2q CSR as MSA's builder orders it, by plain loops: block by block, then sequences."""
    q_ends, k_ends = selection.cu_seqlens_q.tolist(), selection.cu_seqlens_k.tolist()
    lengths = [b - a for a, b in itertools.pairwise(k_ends)]
    counts = [-(-n // selection.block_size) for n in lengths]
    rows = [(b, j) for j in range(max(counts)) for b, n in enumerate(counts) if j < n]
    heads, num_queries, width = selection.q2k_indices.shape
    row_ptr = torch.zeros(heads, len(rows) + spare_rows + 1, dtype=torch.int32)
    q_indices = torch.full((heads, num_queries * width), -1, dtype=torch.int32)
    for head in range(heads):
        end = 0
        for row, (b, j) in enumerate(rows):
            for token in range(q_ends[b], q_ends[b + 1]):
                if j in selection.q2k_indices[head, token].tolist():
                    q_indices[head, end] = token - q_ends[b]
                    end += 1
            row_ptr[head, row + 1 :] = end
    return row_ptr, q_indices


def msa_arguments(selection):
    return {
        "cu_seqlens_q": selection.cu_seqlens_q,
        "cu_seqlens_k": selection.cu_seqlens_k,
        "max_seqlen_q": selection.max_seqlen_q,
        "max_seqlen_k": selection.max_seqlen_k,
        "blk_kv": selection.block_size,
    }


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_fastvideo_lse_is_in_base_2(index_dtype):
    (q, k, v), selection, options = VIDEO.build()
    tables = (selection.q2k_indices, selection.q2k_counts, selection.kv_block_sizes)
    out, lse = fastvideo_block_sparse_attn(q, k, v, *(x.to(index_dtype) for x in tables))
    exact = define_attention(q, k, v, selection, options)
    close(out, exact.out)
    close(lse, exact.lse / math.log(2))
    assert (lse == -math.inf).any(), "no empty row in the case"
    again, nothing = fastvideo_block_sparse_attn(
        q, k, v, *(x.to(index_dtype) for x in tables), need_lse=False
    )
    assert torch.equal(again, out)
    assert nothing is None


def test_fastvideo_refuses_what_it_cannot_mean():
    (q, k, v), selection, _ = VIDEO.build()
    tables = (selection.q2k_indices, selection.q2k_counts)
    sizes = selection.kv_block_sizes
    with pytest.raises(ValueError, match=r"variable_block_sizes must have a length that divides"):
        fastvideo_block_sparse_attn(q, k, v, *tables, sizes[:3])
    with pytest.raises(TypeError, match=r"variable_block_sizes must be int32 or int64, got float"):
        fastvideo_block_sparse_attn(q, k, v, *tables, sizes.float())
    with pytest.raises(ValueError, match=r"k must be \[B, H, S, D\], got"):
        fastvideo_block_sparse_attn(q, k[0], v, *tables, sizes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [TEXT, WIDE], ids=lambda case: case.name)
def test_msa_over_a_callers_csr(case, causal):
    inputs, selection, options = case.build()
    csr = msa_csr(selection, spare_rows=4)
    out, lse, lse_t = msa_sparse_atten_func(
        *inputs,
        *csr,
        case.width,
        causal=causal,
        softmax_scale=0.3,
        return_softmax_lse=True,
        return_temperature_lse=True,
        lse_temperature_scale=4.0,
        schedule=object(),
        **msa_arguments(selection),
    )
    options = Options(causal, 0.3, 1 / 4.0, True)  # MSA divides the scores by its scale
    exact = define_attention(*inputs, selection, options)
    for got, want in zip((out, lse, lse_t), exact, strict=True):
        close(got, want)
    plain = msa_sparse_atten_func(
        *inputs, *csr, case.width, causal=causal, softmax_scale=0.3, **msa_arguments(selection)
    )
    assert torch.equal(plain, out)


def test_msa_takes_rows_in_any_order():
    inputs, selection, _ = WIDE.build()
    row_ptr, q_indices = msa_csr(selection)
    wanted = msa_sparse_atten_func(
        *inputs, row_ptr, q_indices, WIDE.width, causal=True, **msa_arguments(selection)
    )
    shuffled = q_indices.clone()
    for head in range(row_ptr.shape[0]):
        for begin, end in zip(row_ptr[head, :-1], row_ptr[head, 1:], strict=True):
            shuffled[head, begin:end] = q_indices[head, begin:end].flip(0)
    assert not torch.equal(shuffled, q_indices)
    got = msa_sparse_atten_func(
        *inputs, row_ptr, shuffled, WIDE.width, causal=True, **msa_arguments(selection)
    )
    assert torch.equal(got, wanted)


def test_msa_over_pages():
    flat = dataclasses.replace(WIDE, keep=1.1)
    paged = dataclasses.replace(flat, paging="hnd")
    (q, k, v), selection, options = paged.build()
    _, same, _ = flat.build()
    assert torch.equal(selection.q2k_indices, same.q2k_indices)
    arguments = msa_arguments(same)
    for used in (None, selection.seqused_k):
        out = msa_sparse_atten_func(
            q,
            k,
            v,
            *msa_csr(same),
            WIDE.width,
            causal=True,
            page_table=selection.page_table,
            seqused_k=used,
            **arguments,
        )
        close(out, define_attention(q, k, v, selection, options).out)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ptr, q: ptr.__setitem__((0, 1), 10**6), "k2q_row_ptr must start at 0"),
        (lambda ptr, q: ptr.__setitem__((0, 0), 1), "k2q_row_ptr must start at 0"),
        (lambda ptr, q: q.__setitem__((0, 0), 10**6), "must be tokens of the row's sequence"),
        (lambda ptr, q: q.__setitem__((1, 3), -1), "must be tokens of the row's sequence"),
    ],
)
def test_msa_refuses_a_csr_that_contradicts_itself(spoil, message):
    inputs, selection, _ = WIDE.build()
    csr = msa_csr(selection)
    spoil(*csr)
    with pytest.raises(ValueError, match=message):
        msa_sparse_atten_func(*inputs, *csr, WIDE.width, **msa_arguments(selection))


def test_msa_refuses_too_few_rows_and_too_many_entries():
    inputs, selection, _ = dataclasses.replace(WIDE, keep=1.1).build()
    row_ptr, q_indices = msa_csr(selection)
    arguments = msa_arguments(selection)
    with pytest.raises(ValueError, match="must have a row for each KV block of each sequence"):
        msa_sparse_atten_func(*inputs, row_ptr[:, :-1], q_indices, WIDE.width, **arguments)
    with pytest.raises(ValueError, match="must name a token at most topK = 2 times"):
        msa_sparse_atten_func(*inputs, row_ptr, q_indices, 2, **arguments)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"partial_dtype": torch.float32}, NotImplementedError, "partial_dtype torch.float32"),
        ({"usable_SM_count": 12}, NotImplementedError, "usable_SM_count 12 is not supported"),
        ({"qk_dtype": torch.float8_e4m3fn}, NotImplementedError, "qk_dtype torch.float8_e4m3fn"),
        ({"pv_dtype": torch.float16}, NotImplementedError, "pv_dtype torch.float16"),
        ({"return_temperature_lse": True}, ValueError, "return_softmax_lse must be True"),
        ({"lse_temperature_scale": 0.0}, ValueError, "lse_temperature_scale must be a finite"),
    ],
)
def test_msa_refuses_options_that_we_lack(option, error, message):
    inputs, selection, _ = dataclasses.replace(WIDE, dtype=torch.bfloat16).build()
    with pytest.raises(error, match=message):
        msa_sparse_atten_func(
            *inputs, *msa_csr(selection), WIDE.width, **msa_arguments(selection), **option
        )


@pytest.mark.parametrize("paging", ["flat", "hnd"])
def test_flashinfer_multiplies_by_its_temperature(paging):
    case = dataclasses.replace(TEXT, paging=paging)
    (q, k, v), selection, _ = case.build()
    out, lse, lse_t = flashinfer_msa_sparse_attention(
        q,
        k,
        v,
        selection.q2k_indices,
        selection.cu_seqlens_q,
        selection.cu_seqlens_k,
        True,
        page_table=selection.page_table,
        seqused_k=selection.seqused_k,
        return_temperature_lse=True,
        lse_temperature_scale=0.25,
    )
    options = Options(True, q.shape[-1] ** -0.5, 0.25, True)
    exact = define_attention(q, k, v, selection, options)
    for got, want in zip((out, lse, lse_t), exact, strict=True):
        close(got, want)


def test_flashinfer_returns_what_is_asked_for():
    (q, k, v), selection, _ = TEXT.build()
    tables = (selection.q2k_indices, selection.cu_seqlens_q, selection.cu_seqlens_k)
    out = flashinfer_msa_sparse_attention(q, k, v, *tables)
    both = flashinfer_msa_sparse_attention(q, k, v, *tables, return_softmax_lse=True)
    wanted = sparse_atten_func(q, k, v, selection, return_lse=True)
    assert torch.equal(out, wanted[0])
    assert all(torch.equal(x, y) for x, y in zip(both, wanted, strict=True))


@pytest.mark.parametrize(
    "option", ["k_scale", "v_scale", "k_global_scale", "v_global_scale", "q_offset"]
)
def test_flashinfer_refuses_options_that_we_lack(option):
    (q, k, v), selection, _ = TEXT.build()
    tables = (selection.q2k_indices, selection.cu_seqlens_q, selection.cu_seqlens_k)
    with pytest.raises(NotImplementedError, match=f"{option} .* is not supported"):
        flashinfer_msa_sparse_attention(q, k, v, *tables, **{option: torch.ones(1)})


def test_quantised_keys_are_refused_by_name():
    (q, k, _), selection, _ = dataclasses.replace(TEXT, dtype=torch.bfloat16).build()
    tables = (selection.q2k_indices, selection.cu_seqlens_q, selection.cu_seqlens_k)
    packed = k.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"k is float8_e4m3fn .* quantised attention"):
        flashinfer_msa_sparse_attention(q, packed, packed, *tables)


SIGNATURES = {
    fastvideo_block_sparse_attn: "q k v q2k_idx q2k_num variable_block_sizes need_lse",
    msa_sparse_atten_func: "q k v k2q_row_ptr k2q_q_indices topK * cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k blk_kv causal softmax_scale lse_temperature_scale "
    "return_temperature_lse partial_dtype return_softmax_lse page_table seqused_k schedule "
    "usable_SM_count qk_dtype pv_dtype",
    flashinfer_msa_sparse_attention: "q k v q2k_indices cu_seqlens_q cu_seqlens_k causal "
    "softmax_scale page_table seqused_k return_softmax_lse k_scale v_scale k_global_scale "
    "v_global_scale q_offset return_temperature_lse lse_temperature_scale",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures_are_those_of_the_packages(function):
    """Names and order as published, and which of them are positional."""
    names, keyword_only = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            names.append("*")
            keyword_only = True
        names.append(name)
    assert " ".join(names) == SIGNATURES[function]


@pytest.mark.gpu
def test_a_gpu_agrees_without_a_synchronisation():
    inputs, selection, _ = WIDE.build()
    csr, tables = msa_csr(selection), msa_arguments(selection)
    wanted = msa_sparse_atten_func(*inputs, *csr, WIDE.width, causal=True, **tables)
    moved = [x.cuda() for x in (*inputs, *csr)]
    tables = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in tables.items()}
    msa_sparse_atten_func(*moved, WIDE.width, causal=True, **tables)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = msa_sparse_atten_func(*moved, WIDE.width, causal=True, **tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(got.cpu(), wanted)
