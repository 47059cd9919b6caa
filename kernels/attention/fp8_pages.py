"""Keys and values of 8 bits in the KV cache: e4m3, with a scale per key head.

Scales are powers of two. e4m3 has an exponent of its own, so that a finer scale would not make it
more precise: a scale only moves its range to where a head's values are. And multiplying by a power
of two is exact, wherever it is done: of the query, of the accumulator, of what is read.

Kernels see the pool as bytes, because Triton has e4m3 only from compute capability 8.9 on. Their
codec is `fp8_codec`, whose plain twin is this file, without Triton: engines on a CPU import it.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """`[..., H, D]` of any float → e4m3, to the nearest, ties to even; what is beyond its range
    becomes its largest value.

    Args:
        scales: `[H]` float32, what the result is to be multiplied with.
    """
    return (x.float() / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(E4M3)


def dequantize(x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., H, D]` e4m3 → `dtype`: exact, as far as it has the range."""
    return (x.float() * scales[:, None]).to(dtype)


def as_bytes(pool: Tensor) -> Tensor:
    """A pool as kernels take it: bytes, if it is e4m3."""
    return pool.view(torch.uint8) if pool.dtype == E4M3 else pool
