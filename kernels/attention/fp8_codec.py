"""Device code that converts e4m3 by integer operations, for GPUs without e4m3 in Triton.

`fp8_pages` has the reference implementation.
"""

# ruff: noqa: ANN201 - Triton blocks have no type

import triton
import triton.language as tl

from kernels.gemm.fp8_kernels import unpack


@triton.jit
def round_to_e4m3(x, scale):
    """Divides float32 by a scale and rounds to values of e4m3, in float32. NaN stays NaN."""
    x = tl.clamp(x * tl.div_rn(1.0, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding 1.5 * 2^(e + 20) to a number with exponent e rounds it to three bits after the leading
    # bit. Numbers below 2^-6 are rounded to multiples of 2^-9.
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (x + magic) - magic
    return tl.where(rounded == 0, x * 0.0, rounded)  # -0 stays -0


@triton.jit
def encode_e4m3(x):
    """Converts float32 values that are exact in e4m3 to bytes."""
    # The factor is 2^-120, where 120 is the difference of the exponent biases.
    bits = (x * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF) >> 20, 127)
    return (magnitude | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def decode_e4m3(x, dtype: tl.constexpr):
    """Converts bytes to a float dtype, without their scale. The byte of NaN becomes 480."""
    if dtype == tl.float32:
        wide = x.to(tl.int32)
        bits = ((wide & 128) << 24) | ((wide & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        return unpack(x, dtype, PURE=True)


def _to_16_bits(selectors: tuple[int, ...], shift: int, mask: int) -> str:
    """PTX that moves e4m3 bytes to where a 16-bit float has its exponent and mantissa.

    A pair of bytes, each with its sign in the byte above, becomes a register of two elements.
    Exponents keep the bias of e4m3, so that elements are too small by a power of two, and subnormal
    numbers stay subnormal. The bytes are those of one register, or of two with four selectors.
    """
    count = len(selectors)
    first, second = f"${count}", f"${count + 1}" if count == 4 else "0"
    lines = [
        f"""
        prmt.b32 pair, {first}, {second}, {selector:#06x};
        shl.b32 pair, pair, {shift};
        and.b32 ${index}, pair, {mask:#06x}{mask:04x};"""
        for index, selector in enumerate(selectors)
    ]
    return f"{{ .reg .b32 pair;{''.join(lines)} }}"


# Bytes 0 and 1, and then 2 and 3, of a register; byte 0 of two registers, then bytes 1, 2 and 3.
_OF_ONE, _OF_TWO = (0x9180, 0xB3A2), (0xC480, 0xD591, 0xE6A2, 0xF7B3)
_ONE_TO_BF16 = tl.constexpr(_to_16_bits(_OF_ONE, 4, 0x87F0))
_ONE_TO_F16 = tl.constexpr(_to_16_bits(_OF_ONE, 7, 0xBF80))
_TWO_TO_BF16 = tl.constexpr(_to_16_bits(_OF_TWO, 4, 0x87F0))
_TWO_TO_F16 = tl.constexpr(_to_16_bits(_OF_TWO, 7, 0xBF80))


@triton.jit
def factor_before(dtype: tl.constexpr):
    """Factor of what is multiplied by scaled values, so that products keep their precision."""
    return 1.0 if dtype == tl.float16 else 1.152921504606847e18  # 2^60


@triton.jit
def factor_after(dtype: tl.constexpr):
    """Factor of sums of products of scaled values and of what `factor_before` multiplied."""
    return 256.0 if dtype == tl.float16 else 1.152921504606847e18  # 2^60


@triton.jit
def decode_scaled(x, dtype: tl.constexpr):
    """Converts bytes to a float dtype, divided by both of its factors.

    This takes six instructions for four values, where `decode_e4m3` takes ten. The divisor is
    2^120, and 2^8 for float16: the differences of the exponent biases. The byte of NaN becomes 480.
    """
    if dtype == tl.float32:
        wide = x.to(tl.int32)
        scaled = (((wide & 128) << 24) | ((wide & 127) << 20)).to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        scaled = tl.inline_asm_elementwise(
            _ONE_TO_F16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        scaled = tl.inline_asm_elementwise(
            _ONE_TO_BF16, "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return scaled


@triton.jit
def decode_words(x, dtype: tl.constexpr):
    """Converts the four bytes of int32 words to a block each, as `decode_scaled` does."""
    if dtype == tl.float32:
        first, second = decode_scaled(x & 255, dtype), decode_scaled((x >> 8) & 255, dtype)
        third, fourth = decode_scaled((x >> 16) & 255, dtype), decode_scaled(x >> 24, dtype)
    elif dtype == tl.float16:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _TWO_TO_F16,
            "=r,=r,=r,=r,r,r",
            [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            _TWO_TO_BF16,
            "=r,=r,=r,=r,r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return first, second, third, fourth
