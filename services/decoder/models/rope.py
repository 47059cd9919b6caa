"""Interleaved multimodal rotary embedding (M-RoPE)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.common.nn.layers import rms_norm
from services.common.nn.linear import sum_parts
from services.decoder.attention.base import write_kv


class InterleavedMRope(nn.Module):
    """Angles of three-axis positions.

    Frequency j of head_dim / 2 turns with the height axis where j % 3 == 1 and
    j < 3 * section[1], with the width axis where j % 3 == 2 and j < 3 * section[2], and with
    time elsewhere: t h w t h w … t t t.
    """

    def __init__(self, head_dim: int, theta: float, section: tuple[int, int, int]) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.section = section
        self.inv_freq: Tensor  # [head_dim / 2] float32, whatever the model's dtype
        self.axis: Tensor  # [head_dim / 2] int64: 0, 1 or 2
        self.register_buffer("inv_freq", None, persistent=False)
        self.register_buffer("axis", None, persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Computes frequencies and axes; on the host, so that every device has the same."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float, device="cpu")
        self.inv_freq = (1.0 / (self.theta ** (exponents / self.head_dim))).to(device)
        j = torch.arange(self.head_dim // 2, device="cpu")
        axis = torch.zeros_like(j)
        axis[(j % 3 == 1) & (j < 3 * self.section[1])] = 1
        axis[(j % 3 == 2) & (j < 3 * self.section[2])] = 2
        self.axis = axis.to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[3, T]` → cos and sin, each `[T, head_dim / 2]`; angles in float32, then `dtype`."""
        angles = positions.float()[self.axis].T.contiguous() * self.inv_freq
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` `[T, H, D]`; element j of a head pairs with j + D / 2."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What becomes of one layer's projected heads of a step's tokens, and where they go.

    Attributes:
        norms: weights of the query's and the key's norm, `[head_dim]` each.
        eps: of the norms.
        rope: cos and sin, `[T, head_dim / 2]`.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.
        rows: `[2, T]`, from `kv_rows`.
    """

    norms: tuple[Tensor, Tensor]
    eps: float
    rope: tuple[Tensor, Tensor]
    kv_cache: Tensor
    rows: Tensor

    def of(self, qkv: Tensor) -> "ProjectedHeads":
        """With what is to be transformed."""
        return ProjectedHeads(self.norms, self.eps, self.rope, self.kv_cache, self.rows, qkv=qkv)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedHeads(HeadTransform):
    """One layer's queries, keys and values of a step's tokens, on their way to the cache.

    Attributes:
        qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`, q then k then v; or that in parts,
            `[S, T, ...]` float32, see `sum_parts`.
    """

    qkv: Tensor

    @property
    def num_heads(self) -> int:
        """Of the query."""
        num_kv_heads, head_dim = self.kv_cache.shape[-2:]
        return self.qkv.shape[-1] // head_dim - 2 * num_kv_heads

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.qkv.shape[-2]

    @property
    def num_parts(self) -> int:
        """S; 0: the projection is whole."""
        return len(self.qkv) if self.qkv.dim() == 3 else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether all tensors are, as kernels take them."""
        parts = (self.qkv, *self.norms, *self.rope, self.kv_cache, self.rows)
        return all(part.is_contiguous() for part in parts)


def qk_rope_cache(heads: ProjectedHeads, keys_values: Tensor | None = None) -> Tensor:
    """Normalises and rotates queries and keys, writes keys and values to the cache.

    The plain twin of one fused kernel.

    Args:
        heads: see there.
        keys_values: `[T, 2 * num_kv_heads, head_dim]`, where keys and then values go, too.

    Returns:
        Queries, `[T, num_heads, head_dim]`.
    """
    num_kv_heads, head_dim = heads.kv_cache.shape[-2:]
    qkv = sum_parts(heads.qkv, heads.kv_cache.dtype)
    query, key, value = qkv.unflatten(-1, (-1, head_dim)).split(
        (heads.num_heads, num_kv_heads, num_kv_heads), dim=1
    )
    key = rotate(rms_norm(key, heads.norms[1], heads.eps), *heads.rope)
    write_kv(heads.kv_cache, heads.rows, key, value)
    if keys_values is not None:
        torch.cat((key, value), dim=1, out=keys_values)
    return rotate(rms_norm(query, heads.norms[0], heads.eps), *heads.rope)
