"""Reference implementations of the vision tower's operations in plain torch, also used on CPUs.

Arguments and results are those of `services.encoder.operations.ops.Ops`.
"""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention.segments import Segments


def pack_patches(images: Tensor, height: int, width: int, merge_size: int, out: Tensor) -> None:
    """Normalizes images of one size and divides them into patches.

    Pixels become (x / 255 - 0.5) / 0.5, computed like in transformers' image processor as
    (x - 127.5) / 127.5 in float32, and are rounded once.

    Args:
        images: `[num_images, height * patch, width * patch, channels]` uint8, contiguous.
        height, width: size of an image in patches.
        merge_size: patches per side of an image token.
        out: contiguous `[num_images * height * width, channels * patch²]`. Rows are patches in the
            order of merge blocks, with the channel as the slowest dimension of a row.
    """
    patch_size = images.shape[1] // height
    blocks = images.view(
        len(images),
        height // merge_size,
        merge_size,
        patch_size,
        width // merge_size,
        merge_size,
        patch_size,
        -1,
    ).permute(0, 1, 4, 2, 5, 7, 3, 6)
    torch.div(blocks.reshape(out.shape) - 127.5, 127.5, out=out)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries and keys `[N, 2, heads, head_dim]`. Returns a new tensor."""
    cos, sin = cos[:, None, None], sin[:, None, None]
    halves = x.float().unflatten(-1, (2, -1))
    first, second = halves.unbind(-2)
    rotated = torch.empty(halves.shape, dtype=halves.dtype, device=x.device)
    torch.mul(first, cos, out=rotated[..., 0, :]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., 1, :]).addcmul_(first, sin)
    return rotated.flatten(-2).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Adds `x` to the residual stream, and applies LayerNorm. Returns new tensors."""
    residual = x + residual
    return layer_norm(residual, weight, bias, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Applies LayerNorm. Returns a new tensor."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Applies a linear layer by torch."""
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Applies a linear layer and GELU (tanh). The GEMM's result is rounded before GELU."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Applies the sigmoid form of GELU. Each of the three operations rounds, as in transformers."""
    return x * torch.sigmoid(1.702 * x)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor | None:
    """Applies a linear layer. The next `add_layer_norm` adds the result to the residual stream."""
    return F.linear(x, weight, bias)


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Computes attention within segments, by a call of torch for each run of equal lengths.

    Raises:
        RuntimeError: a CUDA graph is being captured. The function reads the lengths on the host, so
            that a replay would use the lengths of the capture.
    """
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "plain attention cannot be captured in a CUDA graph: it reads lengths on the host"
        )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    start = 0
    for length, run in groupby(segments.lengths):
        shape = len(list(run)), length
        rows = slice(start, start + shape[0] * length)
        q, k, v = (  # [segments, heads, length, head_dim]
            x[rows].unflatten(0, shape).transpose(1, 2) for x in (query, key, value)
        )
        out[rows] = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
        start = rows.stop
    return out
