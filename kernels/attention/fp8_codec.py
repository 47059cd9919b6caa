"""Device code of `fp8_pages`: e4m3 by integer operations, on cards whose Triton has none."""

# ruff: noqa: ANN201 - blocks of the kernel's compiler

import triton
import triton.language as tl

from kernels.gemm.fp8_kernels import unpack


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
    """Values of bytes in a float dtype, without their scale; NaN's byte becomes 480."""
    if dtype == tl.float32:
        wide = x.to(tl.int32)
        bits = ((wide & 128) << 24) | ((wide & 127) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        return unpack(x, dtype, PURE=True)
