"""Rotary position embedding: cos and sin of positions, for each kind of rope.

Pure functions of a `RopeSpec`; a kind that is not implemented is refused when the spec is read.
"""

import math

import torch
from torch import Tensor, nn

from services.common.model_spec import RopeSpec


class RotaryEmbedding(nn.Module):
    """Cos and sin of positions.

    Position rows are the axes (t, h, w) of M-RoPE. Interleaved M-RoPE: frequency j rotates with the
    height where j % 3 == 1 and j < 3 * section[1], with the width where j % 3 == 2 and
    j < 3 * section[2], and with time elsewhere: t h w t h w … t t t. Otherwise, the first
    section[0] frequencies rotate with time, the next section[1] with the height, and the others
    with the width. A model with 1-D positions (`mrope_section` None) reads row 0 alone.

    Args:
        spec: kind and parameters of the embedding.

    Attributes:
        attention_factor: factor of cos and sin, which scales q · k by its square.
        inv_freq: `[rotary_dim / 2]` float32, whatever the model's dtype.
        axis: `[rotary_dim / 2]` int64, row of the positions for each frequency: 0, 1 or 2.
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
            time, height, width = self.spec.mrope_section
            if self.spec.interleaved:
                axis[(j % 3 == 1) & (j < 3 * height)] = 1
                axis[(j % 3 == 2) & (j < 3 * width)] = 2
            else:
                axis[time:] = 1
                axis[time + height :] = 2
        self.axis = axis.to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, each `[T, rotary_dim / 2]`, computed in float32.

        Args:
            positions: `[3, T]`, positions on the three axes.
            dtype: data type of the result.
        """
        angles = positions.float()[self.axis].T.contiguous() * self.inv_freq
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype), sin.to(dtype)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Returns frequencies `[rotary_dim / 2]` float32 on the CPU, by transformers' formulas.

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
    context = spec.original_max_position_embeddings
    low, high = spec.low_freq_factor, spec.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / spec.factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, (1 - smooth) * scaled / spec.factor + smooth * scaled, scaled)


def _yarn_range(spec: RopeSpec) -> tuple[float, float]:
    """Returns the dimensions between which frequencies change from unscaled to scaled."""

    def dimension(num_rotations: float) -> float:
        """Returns the dimension that makes `num_rotations` rotations in the original context."""
        turns = spec.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    return low, high + 0.001 if low == high else high
