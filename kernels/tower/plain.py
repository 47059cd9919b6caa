"""Each operation of the tower in plain torch: the specification, and the path of CPUs.

Arguments and results are those of `ops.Ops`.
"""

from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention.segments import Segments


def pack_patches(images: Tensor, height: int, width: int, merge_size: int, out: Tensor) -> None:
    """Images of one size: (x / 255 - 0.5) / 0.5 as the reference image processor fuses it, in
    float32, rounded once.

    Args:
        images: `[num_images, height * patch, width * patch, channels]` uint8, contiguous.
        height: in patches; `width` as well.
        merge_size: patches per image-token side.
        out: `[num_images * height * width, channels * patch²]`, contiguous: rows in merge-block
            order, channel-major.
    """
    patch_size = images.shape[1] // height
    blocks = images.view(
        len(images), height // merge_size, merge_size, patch_size,
        width // merge_size, merge_size, patch_size, -1,
    ).permute(0, 1, 4, 2, 5, 7, 3, 6)  # fmt: skip
    torch.div(blocks.reshape(out.shape) - 127.5, 127.5, out=out)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Writes to new memory."""
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
    """Writes to new memory."""
    residual = x + residual
    return layer_norm(residual, weight, bias, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Writes to new memory."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """By torch's choice of a GEMM kernel."""
    return F.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The GEMM's result is rounded before the GELU."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def linear_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor | None:
    """Leaves the addition to the next `add_layer_norm`."""
    return F.linear(x, weight, bias)


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """One call of torch's scaled_dot_product_attention per run of equally long segments.

    Raises:
        RuntimeError: it would be captured; the lengths are on the host, so a replay would have
            those of the capture.
    """
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("plain attention reads lengths on the host: no graph can hold it")
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
