"""Instructions of one lane against Python's integers, fractions and numpy's conversions."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from emulator.rounding import exact_sum, fma, rounded
from micro import kernel, lanewise, launch

EDGES32 = (0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678)
PAIRS = np.array(list(itertools.product(EDGES32, EDGES32)), np.uint32).T.copy()
X, Y = PAIRS


def s32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def s64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def towards_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER = {
    "add.s32 $d, $a, $b;": lambda a, b: a + b,
    "sub.s32 $d, $a, $b;": lambda a, b: a - b,
    "mul.lo.s32 $d, $a, $b;": lambda a, b: a * b,
    "mul.hi.s32 $d, $a, $b;": lambda a, b: s32(a) * s32(b) >> 32,
    "mul.hi.u32 $d, $a, $b;": lambda a, b: a * b >> 32,
    "mad.lo.s32 $d, $a, $b, $a;": lambda a, b: a * b + a,
    "min.s32 $d, $a, $b;": lambda a, b: min(s32(a), s32(b)),
    "max.u32 $d, $a, $b;": max,
    "min.relu.s32 $d, $a, $b;": lambda a, b: max(min(s32(a), s32(b)), 0),
    "max.relu.s32 $d, $a, $b;": lambda a, b: max(s32(a), s32(b), 0),
    "shl.b32 $d, $a, $b;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 $d, $a, $b;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 $d, $a, $b;": lambda a, b: s32(a) >> min(b, 31),
    "and.b32 $d, $a, $b;": lambda a, b: a & b,
    "xor.b32 $d, $a, $b;": lambda a, b: a ^ b,
    "neg.s32 $d, $a;": lambda a, b: -a,
    "abs.s32 $d, $a;": lambda a, b: abs(s32(a)),
    "not.b32 $d, $a;": lambda a, b: ~a,
    "popc.b32 $d, $a;": lambda a, b: bin(a).count("1"),
    "clz.b32 $d, $a;": lambda a, b: 32 - a.bit_length(),
    "brev.b32 $d, $a;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfe.u32 $d, $a, 3, 9;": lambda a, b: a >> 3 & 511,
    "bfe.s32 $d, $a, 20, 20;": lambda a, b: s32(a) >> 20,
    "bfi.b32 $d, $a, $b, 5, 7;": lambda a, b: b & ~(127 << 5) | (a & 127) << 5,
    "bfind.u32 $d, $a;": lambda a, b: a.bit_length() - 1,
    "bfind.s32 $d, $a;": lambda a, b: (s32(a) if s32(a) >= 0 else ~s32(a)).bit_length() - 1,
    "shf.l.wrap.b32 $d, $a, $b, 7;": lambda a, b: ((b << 32 | a) << 7) >> 32,
    "shf.r.clamp.b32 $d, $a, $b, 40;": lambda a, b: b,
    "lop3.b32 $d, $a, $b, $a, 0x96;": lambda a, b: a ^ b ^ a,
    "prmt.b32 $d, $a, $b, 0x7160;": lambda a, b: (
        a & 0xFF | (b >> 16 & 0xFF) << 8 | (a >> 8 & 0xFF) << 16 | (b >> 24) << 24
    ),
    "cvt.u16.u32 %h1, $a; cvt.u32.u16 $d, %h1;": lambda a, b: a & 0xFFFF,
    "cvt.s8.s32 $d, $a;": lambda a, b: (a + 128) % 256 - 128,
    "setp.lt.s32 %p1, $a, $b; selp.b32 $d, 3, 4, %p1;": lambda a, b: 3 if s32(a) < s32(b) else 4,
    "setp.hi.u32 %p1|%p2, $a, $b; selp.b32 $d, 3, 4, %p2;": lambda a, b: 4 if a > b else 3,
    "setp.eq.s32 %p1, $a, 5; setp.ne.or.s32 %p2, $b, 1, !%p1; selp.b32 $d, 1, 0, %p2;": (
        lambda a, b: int(b != 1 or a != 5)
    ),
    "@!%p39 mov.u32 $d, 9; setp.eq.u32 %p1, $a, $a; @%p1 add.u32 $d, $d, $b;": lambda a, b: 9 + b,
}


@pytest.mark.parametrize("line", INTEGER)
@pytest.mark.parametrize("group", [1, 8])
def test_integers(line, group):
    if "%p39" in line:
        line = "setp.ne.u32 %p39, $a, $a; " + line
    function = INTEGER[line.removeprefix("setp.ne.u32 %p39, $a, $a; ")]
    found = lanewise(line, [X, Y], np.uint32, group=group)
    want = [function(int(a), int(b)) % 2**32 for a, b in zip(X, Y, strict=True)]
    assert found.tolist() == want


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_division(kind):
    bits, signed = int(kind[1:]), kind[0] == "s"
    values = [0, 1, 2, 7, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1, 2**bits - 9, 1000003]
    pairs = [(a, b) for a, b in itertools.product(values, values) if b]
    a, b = (np.array(x, f"u{bits // 8}") for x in zip(*pairs, strict=True))
    convert = (lambda v: (v + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)) if signed else int
    for name in ("div", "rem"):
        found = lanewise(f"{name}.{kind} $d, $a, $b;", [a, b], a.dtype.type)
        for x, y, z in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
            quotient = towards_zero(convert(x), convert(y))
            want = quotient if name == "div" else convert(x) - quotient * convert(y)
            assert z == want % 2**bits, (x, y)


WIDE = {
    "mul.wide.s32 $d, $a, $b;": lambda a, b: s32(a) * s32(b),
    "mul.wide.u32 $d, $a, $b;": lambda a, b: a * b,
    "mov.b64 $d, {$a, $b};": lambda a, b: b << 32 | a,
    "cvt.s64.s32 $d, $a;": lambda a, b: s32(a),
    "cvt.u64.u32 $d, $a; mad.lo.s64 $d, $d, 3, $d;": lambda a, b: 4 * a,
}


@pytest.mark.parametrize("line", WIDE)
def test_wide_results(line):
    found = lanewise(line, [X, Y], np.uint64)
    want = [WIDE[line](int(a), int(b)) % 2**64 for a, b in zip(X, Y, strict=True)]
    assert found.tolist() == want


def nearest_f32(value: Fraction) -> np.float32:
    """Round to nearest even, by search among neighbours of a first guess."""
    guess = np.float32(float(value))
    if not np.isfinite(guess):
        return guess
    around = [np.nextafter(guess, np.float32(s)) for s in (-np.inf, np.inf)]
    return min(
        [guess, *(x for x in around if np.isfinite(x))],
        key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1),
    )


def hard_floats() -> np.ndarray:
    """Triples whose product and sum lie on or next to a tie of two float32."""
    draw = np.random.default_rng(5)
    a = draw.standard_normal(400).astype(np.float32)
    b = draw.standard_normal(400).astype(np.float32)
    c = (-(a * b) * np.float32(1 + 2.0**-20)).astype(np.float32)
    c[::3] = draw.standard_normal(134).astype(np.float32) * np.float32(2.0**20)
    ties = [(1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60), (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-60))]
    ties += [(2.0**-75, 2.0**-74, 2.0**-149), (2.0**-75, 3 * 2.0**-75, 2.0**-148), (1.5, 0.0, 0.0)]
    return np.concatenate([np.stack([a, b, c]), np.array(ties, np.float32).T], axis=1)


def test_fma_rounds_once():
    a, b, c = hard_floats()
    for found in (fma(a, b, c), lanewise("fma.rn.f32 $d, $a, $b, $c;", [a, b, c], np.float32)):
        for x, y, z, got in zip(a, b, c, found, strict=True):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            assert got == nearest_f32(exact), (x, y, z)


@pytest.mark.parametrize("mode", ["rm", "rp", "rz"])
def test_directed_sums(mode):
    a, _, c = hard_floats()
    found = lanewise(f"add.{mode}.f32 $d, $a, $b;", [a, c], np.float32)
    for x, y, got in zip(a, c, found, strict=True):
        exact = Fraction(float(x)) + Fraction(float(y))
        value, step = Fraction(float(got)), np.float32(np.inf if mode == "rm" else -np.inf)
        if mode == "rz":
            assert abs(value) <= abs(exact)
            step = np.float32(np.copysign(np.inf, got)) if got else np.float32(np.inf)
            assert abs(Fraction(float(np.nextafter(got, step)))) > abs(exact) or value == exact
        else:
            assert value <= exact if mode == "rm" else value >= exact
            beyond = Fraction(float(np.nextafter(got, step)))
            assert beyond > exact if mode == "rm" else beyond < exact


def test_exact_sum_has_no_error():
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal(200) * 1e10, draw.standard_normal(200)
    high, low = exact_sum(a, b)
    for x, y, h, w in zip(a, b, high, low, strict=True):
        assert Fraction(x) + Fraction(y) == Fraction(h) + Fraction(w)
    assert rounded((np.array([1.0]), np.array([0.0])), "rn")[0] == 1


def test_packed_floats_are_two_lanes():
    a, b = hard_floats()[0][:64], hard_floats()[1][:64]
    found = lanewise("add.rn.f32x2 $d, $a, $b;", [a.view(np.uint64), b.view(np.uint64)], np.uint64)
    assert np.array_equal(found.view(np.float32), a + b)
    halves = lanewise("mul.rn.f32x2 $d, $a, $b;", [a.view(np.uint64), b.view(np.uint64)], np.uint64)
    assert np.array_equal(halves.view(np.float32), a * b)


SPECIALS = np.array(
    (
        *(0.0, -0.0, 1.0, -1.5, 2.5, 3.5, math.inf, -math.inf, math.nan, 1e-40, -1e-40),
        *(65520.0, 7e4, 3e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20),
        *(2.0**-25, 2.0**-24, 2147483648.0, -3e9),
    ),
    np.float32,
)


def bf16_bits(value: np.float32) -> int:
    """Choose the nearer of the two neighbours, the even one for a tie."""
    bits = int(value.view(np.uint32))
    if math.isnan(value):
        return 0x7FFF
    low = bits >> 16
    rest = bits & 0xFFFF
    return low + (rest > 0x8000 or (rest == 0x8000 and low & 1))


def test_conversions_to_halves():
    found = lanewise("cvt.rn.bf16x2.f32 $d, $a, $b;", [SPECIALS, SPECIALS[::-1]], np.uint32)
    for high, low, got in zip(SPECIALS, SPECIALS[::-1], found.tolist(), strict=True):
        assert (got >> 16, got & 0xFFFF) == (bf16_bits(high), bf16_bits(low))
    found = lanewise("cvt.rn.f16.f32 $d, $a;", [SPECIALS], np.uint16)
    with np.errstate(over="ignore"):
        want = np.where(np.isnan(SPECIALS), 0x7FFF, SPECIALS.astype(np.float16).view(np.uint16))
    assert found.tolist() == want.tolist()
    every = np.arange(0, 65536, 7, dtype=np.uint16)[:960]
    wide = lanewise("cvt.f32.bf16 $d, $a;", [every], np.uint32)
    assert wide.tolist() == [int(x) << 16 for x in every]


def test_conversions_to_integers():
    found = lanewise("cvt.rzi.s32.f32 $d, $a;", [SPECIALS], np.int32)
    for value, got in zip(SPECIALS.tolist(), found.tolist(), strict=True):
        want = 0 if math.isnan(value) else max(-(2**31), min(2**31 - 1, value))
        assert got == int(want), value
    found = lanewise("cvt.rni.s32.f32 $d, $a;", [SPECIALS[:6]], np.int32)
    assert found.tolist() == [0, 0, 1, -2, 2, 4]
    found = lanewise("cvt.rn.f32.s32 $d, $a;", [X], np.float32)
    assert np.array_equal(found, X.view(np.int32).astype(np.float32))


def test_saturation_clamps_and_drops_nan():
    values = np.array([-1.0, 0.0, 0.25, 1.0, 1.5, np.inf, -np.inf, np.nan], np.float32)
    found = lanewise("cvt.sat.f32.f32 $d, $a;", [values], np.float32)
    assert found.tolist() == [0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_extremes_ignore_nan():
    a = np.array([1.0, math.nan, math.nan, -3.0], np.float32)
    b = np.array([math.nan, 2.0, math.nan, -4.0], np.float32)
    found = lanewise("max.f32 $d, $a, $b;", [a, b], np.float32)
    assert found[[0, 1, 3]].tolist() == [1.0, 2.0, -3.0]
    assert math.isnan(found[2])
    found = lanewise("max.NaN.f32 $d, $a, $b;", [a, b], np.float32)
    assert [math.isnan(x) for x in found] == [True, True, True, False]
    found = lanewise("max.f32 $d, $a, $b, 0f41200000;", [a, b], np.float32)
    assert found.tolist() == [10.0] * 4


def test_approximations_stay_in_their_documented_error():
    x = np.linspace(-140, 127, 4001).astype(np.float32)[:1024]
    found = lanewise("ex2.approx.ftz.f32 $d, $a;", [x], np.float32).astype(np.float64)
    exact = np.exp2(x.astype(np.float64))
    normal = exact >= 2.0**-126
    assert (np.abs(found - exact)[normal] <= exact[normal] * 2.0**-22).all()
    assert (found[~normal] == 0).all()
    special = np.array([-math.inf, math.inf, -0.0, math.nan], np.float32)
    found = lanewise("ex2.approx.ftz.f32 $d, $a;", [special], np.float32)
    assert found[:3].tolist() == [0.0, math.inf, 1.0]
    assert math.isnan(found[3])
    found = lanewise("rcp.approx.ftz.f32 $d, $a;", [SPECIALS], np.float32)
    assert found[:3].tolist() == [math.inf, -math.inf, 1.0]
    assert found[9] == math.inf  # a subnormal counts as zero


COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a < b or a > b,
    "lt": lambda a, b: a < b,
    "neu": lambda a, b: a != b,
    "geu": lambda a, b: not a < b,
    "num": lambda a, b: a == a and b == b,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_with_nan(name):
    pairs = list(itertools.product(SPECIALS[:9].tolist(), repeat=2))
    a, b = (np.array(x, np.float32) for x in zip(*pairs, strict=True))
    line = f"setp.{name}.f32 %p1, $a, $b; selp.b32 $d, 1, 0, %p1;"
    found = lanewise(line, [a, b], np.uint32)
    assert found.tolist() == [int(COMPARISONS[name](x, y)) for x, y in pairs]


def test_shared_addresses_wrap_at_32_bits():
    import torch

    body = """mov.u32 %r1, smem; st.shared.u32 [%r1+16], 77; sub.u32 %r2, %r1, 0x80000000;
    ld.shared.u32 %r3, [%r2+-2147483632]; st.global.u32 [%d0], %r3;"""
    out = torch.zeros(1, dtype=torch.int32)
    launch(kernel(body, 1), [out])
    assert out.item() == 77


def test_unknown_text_raises():
    from emulator import EmulatorError

    text = kernel("mov.u32 %r1, 1;", 0).replace("mov.u32 %r1, 1", "frob.u32 %r1, 1")
    with pytest.raises(EmulatorError, match=r"unknown instruction: opcode frob\.u32"):
        launch(text, [])
    text = kernel("add.s32 %r1, %r2, 1;", 0).replace("add.s32", "add.s32.twice")
    with pytest.raises(EmulatorError, match=r"opcode add\.s32\.twice is not modelled"):
        launch(text, [])
    with pytest.raises(ValueError, match=r"unknown operand '%z1 \+ 4'"):
        launch(kernel("mov.u32 %r1, 1;", 0).replace(", 1;", ", %z1 + 4;"), [])


@pytest.mark.parametrize("name", ["add", "min", "exch", "inc", "or"])
@pytest.mark.parametrize("descending", [False, True])
def test_atomics_serve_lanes_in_order(name, descending):
    """As a loop over the threads would, from the first or from the last one."""
    import torch

    draw = np.random.default_rng(2)
    places, amounts = draw.integers(0, 5, 64), draw.integers(0, 9, 64)
    body = f"""mul.wide.u32 %d5, %r0, 4; add.s64 %d6, %d5, %d0; ld.global.u32 %r1, [%d6];
    add.s64 %d7, %d5, %d1; ld.global.u32 %r2, [%d7]; mul.wide.u32 %d8, %r1, 4;
    add.s64 %d8, %d8, %d2; atom.global.{name}.{"b" if name in ("exch", "or") else "u"}32
    %r3, [%d8], %r2; add.s64 %d9, %d5, %d3; st.global.u32 [%d9], %r3;"""
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (places, amounts, [3] * 5, [0] * 64)]
    launch(kernel(body, 4), tensors, block=64, group=2, descending=descending)
    change = {
        "add": lambda old, v: old + v,
        "min": min,
        "exch": lambda old, v: v,
        "inc": lambda old, v: 0 if old >= v else old + 1,
        "or": lambda old, v: old | v,
    }[name]
    memory, found = [3] * 5, [0] * 64
    for i in reversed(range(64)) if descending else range(64):
        found[i] = memory[places[i]]
        memory[places[i]] = change(memory[places[i]], int(amounts[i]))
    assert tensors[2].tolist() == memory
    assert tensors[3].tolist() == found
