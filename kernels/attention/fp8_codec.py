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
