"""Rotary position embedding, and the transformation of projected heads that ends in it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.common.model_spec import RopeSpec
from services.common.nn.layers import rms_norm
from services.common.nn.linear import sum_parts
from services.decoder.attention.base import write_kv


class RotaryEmbedding(nn.Module):
    """Cos and sin of positions.

    Position rows are the axes (t, h, w) of M-RoPE. Interleaved M-RoPE: frequency j rotates with the
    height where j % 3 == 1 and j < 3 * section[1], with the width where j % 3 == 2 and
    j < 3 * section[2], and with time elsewhere: t h w t h w … t t t. A model with 1-D positions
    (`mrope_section` None) reads row 0 alone.

    Attributes:
        attention_factor: cos and sin are multiplied by it, so it scales q · k by its square.
        inv_freq: `[rotary_dim / 2]` float32, whatever the model's dtype.
        axis: `[rotary_dim / 2]` int64: the position row of each frequency, 0, 1 or 2.
    """

    inv_freq: Tensor
    axis: Tensor

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attention_factor = spec.attention_factor
        self.register_buffer("inv_freq", None, persistent=False)
        self.register_buffer("axis", None, persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Computes the buffers on the host, so that every device holds the same values."""
        self.inv_freq = inverse_frequencies(self.spec).to(device)
        j = torch.arange(self.spec.rotary_dim // 2, device="cpu")
        axis = torch.zeros_like(j)
        if self.spec.mrope_section is not None:
            _, height, width = self.spec.mrope_section
            axis[(j % 3 == 1) & (j < 3 * height)] = 1
            axis[(j % 3 == 2) & (j < 3 * width)] = 2
        self.axis = axis.to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[3, T]` → cos and sin, each `[T, rotary_dim / 2]`; computed in float32, then `dtype`."""
        angles = positions.float()[self.axis].T.contiguous() * self.inv_freq
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """`[rotary_dim / 2]` float32 on the CPU, by transformers' formulas and in their order.

    `llama3` divides frequencies of long wavelength by `factor` and interpolates between the two
    bounds. `yarn` (Peng et al., 2023) ramps from the unscaled frequencies of the first dimensions
    to those divided by `factor`.
    """
    dim = spec.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim
    powers = spec.theta**exponents
    if spec.kind == "llama3":
        return _llama3(1.0 / powers, spec)
    if spec.kind == "yarn":
        low, high = _yarn_range(spec)
        index = torch.arange(dim // 2, dtype=torch.float, device="cpu")
        unscaled = 1 - ((index - low) / (high - low)).clamp(0, 1)
        return 1.0 / (spec.factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled
    return 1.0 / powers


def _llama3(inv_freq: Tensor, spec: RopeSpec) -> Tensor:
    context, low, high = (
        spec.original_max_position_embeddings, spec.low_freq_factor, spec.high_freq_factor
    )  # fmt: skip
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / spec.factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, (1 - smooth) * scaled / spec.factor + smooth * scaled, scaled)


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    """The dimensions between which frequencies change over from unscaled to scaled."""

    def dimension(num_rotations: float) -> float:
        """Which dimension turns so often within the original context."""
        turns = spec.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R elements of each head of `x` `[T, H, D]`; cos and sin are `[T, R / 2]`.

    Element j pairs with j + R / 2; elements from R on pass through.
    """
    width = 2 * cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin, x[..., width:])
    return torch.cat(rotated, dim=-1)


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What becomes of one layer's projected heads of a step's tokens, and where they go.

    Attributes:
        norms: weights of the query's and the key's norm, `[head_dim]` each; None: no norm.
        eps: of the norms.
        rope: cos and sin, `[T, rotary_dim / 2]`.
        kv_cache: `[num_blocks, 2, block_size, num_kv_heads, head_dim]`.
        rows: `[2, T]`, from `kv_rows`.
    """

    norms: tuple[Tensor, Tensor] | None
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
        parts = (self.qkv, *(self.norms or ()), *self.rope, self.kv_cache, self.rows)
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
    if heads.norms is not None:
        query = rms_norm(query, heads.norms[0], heads.eps)
        key = rms_norm(key, heads.norms[1], heads.eps)
    key = rotate(key, *heads.rope)
    write_kv(heads.kv_cache, heads.rows, key, value)
    if keys_values is not None:
        torch.cat((key, value), dim=1, out=keys_values)
    return rotate(query, *heads.rope)
