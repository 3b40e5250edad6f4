"""The few PTX instructions that CuTe-DSL has no plain call for, each with its ISA section.

Everything here runs at trace time inside a kernel. Values are lists of DSL scalars, so that a
thread's row of S stays in registers under Python names.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.base_dsl.typing import as_numeric
from cutlass.cute.arch import inline_ptx

FULL_WARP = 0xFFFFFFFF
_CONSTRAINTS = {Float32: "f", Int32: "r", Int64: "l"}


def direct_ptx(text: str, result: Any, arguments: list) -> Any:
    """Insert PTX with at most one result and with float arguments, as `inline_ptx` does.

    That function copies each float argument to a register of its own first, an instruction that
    only the assembler removes again.
    """
    arguments = [as_numeric(argument) for argument in arguments]
    names = ["{$w0}"] if result else []
    names += [f"{{$r{number}}}" for number in range(len(arguments))]
    for number, name in enumerate(names):
        text = text.replace(name, f"${number}")
    constraints = [f"={_CONSTRAINTS[result]}"] if result else []
    constraints += [_CONSTRAINTS[type(argument)] for argument in arguments]
    made = llvm.inline_asm(
        result.mlir_type if result else None,
        [argument.ir_value() for argument in arguments],
        text,
        ",".join(constraints),
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return result(made) if result else None


# SMEM matrix descriptor (PTX ISA, tcgen05 "Shared memory descriptor"): 128-byte swizzle, version 1,
# 8-row groups 1024 bytes apart. Strides are stored in units of 16 bytes.
_SWIZZLE_128B = 2 << 61
_VERSION = 1 << 46
_GROUP_STRIDE = (1024 >> 4) << 32


def k_major_descriptor() -> int:
    """Return the constant part of a descriptor of a K-major tile with 128-byte rows."""
    return _SWIZZLE_128B | _VERSION | _GROUP_STRIDE | (1 << 16)


def mn_major_descriptor(chunk_bytes: int) -> int:
    """Return the constant part for an MN-major tile in chunks of 64 `chunk_bytes` apart."""
    return _SWIZZLE_128B | _VERSION | _GROUP_STRIDE | ((chunk_bytes >> 4) << 16)


def instruction_descriptor(dtype: type, m: int, n: int, *, b_mn_major: bool) -> int:
    """Return the 32-bit descriptor of kind::f16 (PTX ISA, tcgen05 "Instruction descriptor")."""
    operand = 1 if dtype is BFloat16 else 0
    accumulator_f32 = 1 << 4
    shape = ((n >> 3) << 17) | ((m >> 4) << 24)
    return accumulator_f32 | (operand << 7) | (operand << 10) | (int(b_mn_major) << 16) | shape


def smem_descriptor(address: Int32, constant: int) -> tuple[Int32, int]:
    """Return the low word of the descriptor of a tile, and the constant high word."""
    return (address >> 4) + (constant & 0xFFFFFFFF), constant >> 32


def mma_chain(
    d_tmem: int | Int32, a: tuple, b: tuple, idesc: int, *, steps: list, accumulate: Int32
) -> None:
    """Issue D (+)= A B as one MMA for each 16 values of K (PTX ISA, tcgen05.mma). One thread.

    Parameters
    ----------
    d_tmem : int or Int32
        First column of D.
    a, b : tuple
        Descriptors (low word, high word). A in tensor memory is ``(first column,)``, int or Int32.
    steps : list of (int, int)
        What each MMA adds to the low words, or to the column, of A and B.
    accumulate : Int32
        0: the first MMA overwrites D. The later ones always add.
    """
    # Registers of our own: the compiler turns constant operands into immediates, which the MMA
    # does not take.
    known = {"d": d_tmem, "x": a[0]}
    arguments = [Int32(accumulate), b[0], *(x for x in known.values() if not isinstance(x, int))]
    d = d_tmem if isinstance(d_tmem, int) else "{$r2}"
    first = a[0] if isinstance(a[0], int) else f"{{$r{len(arguments) - 1}}}"
    lines = [
        "{ .reg .pred p, q; .reg .b64 a, b; .reg .b32 d, i, x, y, h, g;",
        "setp.ne.b32 p, {$r0}, 0; setp.eq.b32 q, 0, 0;",
        f"mov.b32 d, {d}; mov.b32 i, {idesc}; mov.b32 h, {b[1]};",
    ]
    if len(a) == 2:
        lines.append(f"mov.b32 g, {a[1]};")
    for number, (a_step, b_step) in enumerate(steps):
        if isinstance(first, int):
            lines.append(f"mov.b32 x, {first + a_step};")
        else:
            lines.append(f"add.s32 x, {first}, {a_step};" if a_step else f"mov.b32 x, {first};")
        if len(a) == 2:
            lines.append("mov.b64 a, {x, g};")
        lines.append(f"add.s32 y, {{$r1}}, {b_step};" if b_step else "mov.b32 y, {$r1};")
        operand, predicate = ("a" if len(a) == 2 else "[x]"), ("q" if number else "p")
        lines.append("mov.b64 b, {y, h};")
        lines.append(f"tcgen05.mma.cta_group::1.kind::f16 [d], {operand}, b, i, {predicate};")
    inline_ptx(" ".join([*lines, "}"]), read_only_args=arguments)


def tmem_load(address: Int32, column: int, columns: int) -> list[Float32]:
    """Start to read 32-bit columns, from `column`, of the thread's lane (PTX ISA, tcgen05.ld)."""
    registers = ", ".join(f"{{$w{i}}}" for i in range(columns))
    values = inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [{{$r0}}+{column}];",
        write_only_types=[Float32] * columns,
        read_only_args=[address],
    )
    return list(values)


def tmem_store(address: Int32, column: int, words: list) -> None:
    """Start to write 32-bit columns, from `column`, of the thread's lane (PTX ISA, tcgen05.st)."""
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    direct_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}+{column}], {{{registers}}};",
        None,
        [address, *words],
    )


def fence_tmem_before_sync() -> None:
    """Order the thread's tcgen05 accesses before a signal (PTX ISA, tcgen05.fence)."""
    inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_tmem_after_sync() -> None:
    """Order the thread's tcgen05 accesses after a wait (PTX ISA, tcgen05.fence)."""
    inline_ptx("tcgen05.fence::after_thread_sync;")


def smem_store_v4(address: Int32, offset: int, words: list) -> None:
    """Write 16 bytes to shared memory (PTX ISA, st)."""
    inline_ptx(
        f"st.shared.v4.b32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def smem_store_matrices(address: Int32, offset: int, words: list) -> None:
    """Write four 8 x 8 matrices of 16-bit elements to shared memory (PTX ISA, stmatrix). A warp."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 "
        f"[{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def smem_load_matrices(address: Int32, offset: int) -> tuple:
    """Read four 8 x 8 matrices of 16-bit elements of shared memory (PTX ISA, ldmatrix). A warp."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
        f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def smem_load_v4(address: Int32, offset: int) -> tuple:
    """Read four 32-bit words from shared memory (PTX ISA, ld)."""
    return inline_ptx(
        f"ld.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def smem_load(address: Int32, offset: int, dtype: type) -> Any:
    """Read one 32-bit word from shared memory (PTX ISA, ld)."""
    return inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{offset}];",
        write_only_types=[dtype],
        read_only_args=[address],
    )


def smem_store(address: Int32, offset: int, value: Int32 | Float32) -> None:
    """Write one 32-bit word to shared memory (PTX ISA, st)."""
    inline_ptx(f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, value])


def gmem_load_v4_if(address: Int64, kept: Any) -> tuple:
    """Read 16 bytes of global memory past the L1 cache, zeros unless `kept` (PTX ISA, ld)."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[address, Int32(kept)],
    )


def gmem_load_float_if(address: Int64, kept: Any) -> Float32:
    """Read a float of global memory, -inf unless `kept` (PTX ISA, ld)."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0fFF800000; "
        "@p ld.global.f32 {$w0}, [{$r0}]; }",
        write_only_types=[Float32],
        read_only_args=[address, Int32(kept)],
    )


def gmem_store(address: Int64, words: list) -> None:
    """Write 32-bit words to global memory, 16 bytes at a time where there are so many (st)."""
    for start in range(0, len(words), 4):
        part = words[start : start + 4]
        registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(part)))
        inline_ptx(
            f"st.global.v{len(part)}.b32 [{{$r0}}+{4 * start}], {{{registers}}};",
            read_only_args=[address, *part],
        )


def gmem_store_float_if(address: Int64, value: Float32, kept: Any) -> None:
    """Write a float to global memory where it is kept (PTX ISA, st)."""
    direct_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.f32 [{$r0}], {$r1}; }",
        None,
        [address, value, Int32(kept)],
    )


def float_bits(value: Float32) -> Int32:
    """Return the bits of a float as an integer."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def bits_float(value: Int32) -> Float32:
    """Return the float with these bits."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def opaque(value: Int32) -> Int32:
    """Return the value, hiding what it is, so that nothing derived from it is kept in registers."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def exp2(x: Float32) -> Float32:
    """Return 2^x on the special function unit (PTX ISA, ex2)."""
    return direct_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, [x])


def log2(x: Float32) -> Float32:
    """Return log2 x on the special function unit (PTX ISA, lg2)."""
    return direct_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", Float32, [x])


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return the largest of three; a NaN loses (PTX ISA, max with three inputs)."""
    return direct_ptx("max.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, [a, b, c])


def max_nan(a: Float32, b: Float32) -> Float32:
    """Return the larger one, NaN where one is NaN (PTX ISA, max)."""
    return direct_ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, [a, b])


def mask_below(value: Float32, position: int, bound: Int32) -> Float32:
    """Return -inf where `position` is below `bound`, else the value (PTX ISA, setp and selp)."""
    return direct_ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r1}, {$r2}; selp.f32 {$w0}, 0fFF800000, {$r0}, p; }",
        Float32,
        [value, Int32(position), bound],
    )


def mask_from(value: Float32, position: int, bound: Int32) -> Float32:
    """Return -inf where `position` is at least `bound`, else the value (PTX ISA, setp and selp)."""
    return direct_ptx(
        "{ .reg .pred p; setp.ge.s32 p, {$r1}, {$r2}; selp.f32 {$w0}, 0fFF800000, {$r0}, p; }",
        Float32,
        [value, Int32(position), bound],
    )


def pack(low: Float32, high: Float32, dtype: type) -> Int32:
    """Round two floats to `dtype`, the first into the low half of a word (PTX ISA, cvt)."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    return direct_ptx(
        f"cvt.rn.{name}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        Int32,
        [low, high],
    )


def unpack(word: Int32, dtype: type) -> tuple:
    """Return the floats that a word holds, two of 16 bits or one of 32 (PTX ISA, cvt)."""
    if dtype is Float32:
        return (bits_float(word),)
    if dtype is BFloat16:
        return bits_float(word << 16), bits_float(word & -65536)
    return inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


# 1 + f (C1 + f (C2 + f C3)) is 2^f on [0, 1) to a relative error of 8.55e-5: the minimax cubic
# (linear programming on 4000 points) among those that are 1 at 0.
_C1, _C2, _C3 = 0.69511509, 0.22765176, 0.07706102
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, held in the low mantissa bits


def exp2_cubic(a: Float32, b: Float32) -> tuple[Float32, Float32]:
    """Return 2^a and 2^b, a and b at most 127, on the FMA pipe (max relative error 8.55e-5)."""
    x = (cute.arch.fmax(a, -127.0), cute.arch.fmax(b, -127.0))
    magic = (Float32(_MAGIC), Float32(_MAGIC))
    floor_bits = cute.arch.add_packed_f32x2(x, magic, rnd="rm")
    floor = cute.arch.sub_packed_f32x2(floor_bits, magic)
    f = cute.arch.sub_packed_f32x2(x, floor)
    p = cute.arch.fma_packed_f32x2(f, (Float32(_C3),) * 2, (Float32(_C2),) * 2)
    p = cute.arch.fma_packed_f32x2(f, p, (Float32(_C1),) * 2)
    p = cute.arch.fma_packed_f32x2(f, p, (Float32(1.0),) * 2)
    return _scale_exponent(p[0], floor_bits[0]), _scale_exponent(p[1], floor_bits[1])


def _scale_exponent(mantissa: Float32, exponent: Float32) -> Float32:
    """Add the integer in the low bits of `exponent` to the exponent field of `mantissa`."""
    return direct_ptx(
        "{ .reg .b32 e, m; mov.b32 e, {$r1}; mov.b32 m, {$r0}; mad.lo.s32 m, e, 8388608, m; "
        "mov.b32 {$w0}, m; }",
        Float32,
        [mantissa, exponent],
    )
