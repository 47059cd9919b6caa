"""Qwen2.5-VL's vision tower. It differs from Qwen2-VL's (`qwen2_vl`) in two ways: norms are RMS
norms and MLPs are gated (SwiGLU); and most blocks attend within windows (`window_layout`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.families.qwen2_5_vl import WindowTower
from services.common.geometry import Grid
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, UnquantizedLinear
from services.encoder.models.patch_embed import PatchEmbed
from services.encoder.models.positions import VisionLayout
from services.encoder.models.qwen2_vl import Merger, rotary_positions, tower_weights
from services.encoder.models.qwen3_vl import Attention, project, project_back
from services.encoder.models.window_layout import (
    StaticWindowLayout,
    WindowLayout,
    batch_layout,
    reorder,
)
from services.encoder.operations.ops import Ops

_RMS_NORM_EPS = 1e-6
_PADDED_TO = 64  # columns of a stage of a GEMM


class VisionTower(nn.Module):
    """The vision tower: a patch embedding, pre-norm transformer blocks, and a merger.

    Args:
        spec: sizes of the tower.
        ops: operations of the tower, with the kernels chosen for the device.
        prefix: prefix of the tower's tensor names in a checkpoint.
    """

    def __init__(self, spec: WindowTower, ops: Ops, prefix: str = "") -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.patch_embed = PatchEmbed(spec, bias=False)
        self.blocks = nn.ModuleList([Block(spec, ops) for _ in range(spec.depth)])
        self.merger = Merger(spec, ops, RMSNorm(spec.hidden_size, _RMS_NORM_EPS))
        self.weight_map = tower_weights(spec, prefix)

    def reset_buffers(self, device: torch.device) -> None:
        """Creates the cache of rotary angles on the device."""
        self._positions = rotary_positions(self.spec, device)

    def layout(self, grids: Sequence[Grid]) -> WindowLayout:
        """Returns the layout of a batch: positions, images and windows.

        Args:
            grids: size (t, h, w) of each unit in patches, in the order of the batch.
        """
        return batch_layout(self._positions, grids, self.spec.window_tokens)

    def static_layout(self, max_patches: int, max_segments: int) -> StaticWindowLayout:
        """Creates the layout that CUDA graphs read, see `qwen3_vl`."""
        side = self.spec.window_tokens
        return StaticWindowLayout(self._positions, max_patches, max_segments, side)

    def features(self, embedded: Tensor, layout: WindowLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower, and yields 0 and the feature, see `qwen3_vl`."""
        added: Tensor | None = None
        hidden = reorder(embedded, layout.order, self.spec.spatial_merge_size)
        for index, block in enumerate(cast("Iterable[Block]", self.blocks)):
            is_full = index in self.spec.full_attention_blocks
            normed, hidden = add_norm(added, hidden, block.norm1, self.ops)
            added, hidden = block(normed, hidden, layout.images if is_full else layout.windows)
        normed, _ = add_norm(added, hidden, cast(RMSNorm, self.merger.ln_q), self.ops)
        yield 0, self.merger(normed)[layout.inverse]

    def forward(self, patches: Tensor, layout: WindowLayout) -> Tensor:
        """Returns the feature as `[1, num_tokens, out_hidden]`."""
        features = self.features(self.patch_embed(patches), layout)
        return torch.stack([rows for _, rows in features])


def add_norm(x: Tensor | None, residual: Tensor, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
    """Adds `x` to the residual stream, unless it is None, and computes the RMS norm of the sum.

    Returns:
        The normalized sum and the sum, `[N, hidden]` each.
    """
    if x is None:
        return ops.rms_norm(residual, norm.weight, norm.eps), residual
    return ops.add_rms_norm(x, residual, norm.weight, norm.eps)


class Block(nn.Module):
    """A transformer block with RMS norms and a gated MLP, see `qwen3_vl.Block`."""

    def __init__(self, spec: WindowTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.norm1 = RMSNorm(spec.hidden_size, _RMS_NORM_EPS)
        self.norm2 = RMSNorm(spec.hidden_size, _RMS_NORM_EPS)
        self.attn = Attention(spec, ops)
        self.mlp = Mlp(spec, ops)

    def forward(
        self, normed: Tensor, residual: Tensor, layout: VisionLayout
    ) -> tuple[Tensor | None, Tensor]:
        """Computes the block. Returns two tensors `[N, hidden]` whose sum is its output, or None
        and the whole sum.

        Args:
            normed: `norm1(x)`, `[N, hidden]`.
            residual: `x`, `[N, hidden]`. It may be overwritten.
            layout: layout of the batch, with the segments that the block attends within.
        """
        attended = self.attn(normed, residual, layout)
        normed, residual = add_norm(attended, residual, self.norm2, self.ops)
        return self.mlp(normed, residual), residual


class Mlp(nn.Module):
    """The feed-forward network of a block: `down(silu(gate(x)) * up(x))`.

    Weights that are not quantized are padded (`PaddedRows`, `PaddedColumns`).
    """

    def __init__(self, spec: WindowTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        inner = self._inner_size = spec.intermediate_size
        self.gate_up_proj = Linear(
            spec.hidden_size, {"gate_proj": inner, "up_proj": inner}, True, PaddedRows()
        )
        self.down_proj = Linear(inner, spec.hidden_size, True, PaddedColumns())

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Computes the network of `x`, `[N, hidden]`. Returns the result of `project_back`."""
        inner = self.ops.silu_and_mul(project(x, self.gate_up_proj, self.ops))
        down = self.down_proj
        num_columns = down.weight.shape[1] if down.is_plain else self._inner_size
        if inner.shape[1] != num_columns:  # Only one of the layers is quantized.
            inner = F.pad(inner, (0, num_columns - inner.shape[1]))
        return project_back(inner, down, residual, self.ops)


class PaddedRows(UnquantizedLinear):
    """Weights whose modules each have a number of rows that is a multiple of `_PADDED_TO`.

    The published towers have 3,420 rows, and a row of 3,420 numbers of 16 bits is not a multiple of
    16 bytes. GEMMs of Hopper and loads of 16 bytes cannot read such rows. Zeros change no result.
    """

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Adds rows of zeros behind the rows of each module."""
        sizes = list(layer.parts.values())
        for name in ("weight", "bias"):
            parts = getattr(layer, name).data.split(sizes)
            padded = torch.cat([_padded(part, 0) for part in parts])
            setattr(layer, name, nn.Parameter(padded, requires_grad=False))


class PaddedColumns(UnquantizedLinear):
    """Weights that have as many columns as `PaddedRows` gives the layer before."""

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Adds columns of zeros."""
        layer.weight = nn.Parameter(_padded(layer.weight.data, 1), requires_grad=False)


def _padded(tensor: Tensor, axis: int) -> Tensor:
    """Adds zeros until the size along an axis is a multiple of `_PADDED_TO`."""
    shape = list(tensor.shape)
    shape[axis] = -shape[axis] % _PADDED_TO
    return torch.cat((tensor, tensor.new_zeros(shape)), axis)
