"""The vision tower's rotary embedding in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope over the two halves of the head, in float32 and cast once.

    Args:
        x: `[N, 2, num_heads, head_dim]`, queries and keys.
        cos: `[N, head_dim / 2]` float32; element j turns with element j + head_dim / 2.
        sin: as `cos`.
    """
    cos, sin = cos[:, None, None], sin[:, None, None]
    halves = x.float().unflatten(-1, (2, -1))
    first, second = halves.unbind(-2)
    turned = torch.empty(halves.shape, dtype=halves.dtype, device=x.device)
    torch.mul(first, cos, out=turned[..., 0, :]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., 1, :]).addcmul_(first, sin)
    return turned.flatten(-2).to(x.dtype)
