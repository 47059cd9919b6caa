"""Keys and values of 8 bits in the KV cache: e4m3, with a scale per key head.

Scales are powers of two. Since e4m3 has exponents, a finer scale would not make it more precise; a
scale only shifts the range to that of a head's values. Multiplication by a power of two is exact,
so kernels may scale the query, the accumulator, or keys and values.

Kernels see the pool as bytes, because Triton has e4m3 only from compute capability 8.9 on, and
convert with `fp8_codec`. This module is the reference implementation. Engines on a CPU import it,
so it does not import Triton.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Converts floats to e4m3, rounding to nearest even and saturating at the largest value.

    Args:
        x: floats `[..., H, D]`.
        scales: `[H]` float32, factors of the result.
    """
    return (x.float() / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(E4M3)


def dequantize(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts e4m3 `[..., H, D]` to `dtype`, exactly if the values are in its range."""
    return (x.float() * scales[:, None]).to(dtype)


def as_bytes(pool: Tensor) -> Tensor:
    """Views an e4m3 pool as bytes, as kernels need it. Other pools are returned unchanged."""
    return pool.view(torch.uint8) if pool.dtype == E4M3 else pool
