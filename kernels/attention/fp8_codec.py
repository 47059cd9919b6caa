"""Device code of `fp8_pages`: e4m3 by integer operations, on cards whose Triton has none."""

# ruff: noqa: ANN201 - blocks of the kernel's compiler

import triton
import triton.language as tl


@triton.jit
def round_to_e4m3(x, scale):
    """float32 / scale, rounded as `quantize` does, but still float32. NaN stays NaN."""
    x = tl.clamp(x * tl.div_rn(1.0, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding 1.5 * 2^(e + 20) to a number of exponent e leaves it three bits behind the first; all
    # below 2^-6 are multiples of 2^-9.
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (x + magic) - magic
    return tl.where(rounded == 0, x * 0.0, rounded)  # -0 stays -0


@triton.jit
def encode_e4m3(x):
    """Bytes of float32 values that e4m3 has."""
    bits = (x * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120: the exponents' biases
    magnitude = tl.minimum((bits & 0x7FFFFFFF) >> 20, 127)
    return (magnitude | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode_e4m3(x, dtype: tl.constexpr):
    """Values of bytes in a float dtype, without their scale; NaN's byte becomes 480.

    In 16 bits two at a time: a byte's sign and its other bits go to where the dtype has them, and a
    multiplication corrects the exponent.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s, z;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000; shr.u32 a, a, 4; and.b32 a, a, 0x07F007F0; or.b32 a, a, s;
            and.b32 s, b, 0x80008000; shr.u32 b, b, 4; and.b32 b, b, 0x07F007F0; or.b32 b, b, s;
            mov.b32 s, 0x7B807B80; mov.b32 z, 0x80008000;
            fma.rn.bf16x2 $0, a, s, z; fma.rn.bf16x2 $1, b, s, z; }""",
            "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x80008000; shr.u32 a, a, 1; and.b32 a, a, 0x3F803F80; or.b32 a, a, s;
            and.b32 s, b, 0x80008000; shr.u32 b, b, 1; and.b32 b, b, 0x3F803F80; or.b32 b, b, s;
            mov.b32 s, 0x5C005C00;
            mul.rn.f16x2 $0, a, s; mul.rn.f16x2 $1, b, s; }""",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = x.to(tl.int32)
        bits = ((wide & 128) << 24) | ((wide & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
