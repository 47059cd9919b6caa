"""Qwen2-VL's vision tower. It differs from Qwen3-VL's (`qwen3_vl`) in three ways: the positions of
patches are rotary alone, without a table of embeddings; the MLPs have the quick GELU; and there is
one merger, whose output is the only feature.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.families.qwen2_vl import PlainTower
from services.common.geometry import Grid
from services.common.model_spec import TowerSpec
from services.common.nn.linear import Linear
from services.common.nn.weight_map import WeightMap
from services.encoder.models.patch_embed import PatchEmbed
from services.encoder.models.positions import (
    PositionCache,
    StaticLayout,
    VisionLayout,
    batch_layout,
)
from services.encoder.models.qwen3_vl import Attention, add_norm, project, project_back
from services.encoder.operations.ops import Ops

_LAYER_NORM_EPS = 1e-6


class VisionTower(nn.Module):
    """The vision tower: a patch embedding, pre-norm transformer blocks, and a merger.

    Args:
        spec: sizes of the tower.
        ops: operations of the tower, with the kernels chosen for the device.
        prefix: prefix of the tower's tensor names in a checkpoint.
    """

    def __init__(self, spec: PlainTower, ops: Ops, prefix: str = "") -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.patch_embed = PatchEmbed(spec, bias=False)
        self.blocks = nn.ModuleList([Block(spec, ops) for _ in range(spec.depth)])
        self.merger = Merger(spec, ops, nn.LayerNorm(spec.hidden_size, eps=_LAYER_NORM_EPS))
        self.weight_map = tower_weights(spec, prefix)

    def reset_buffers(self, device: torch.device) -> None:
        """Creates the cache of rotary angles on the device."""
        self._positions = rotary_positions(self.spec, device)

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """Returns the layout of a batch, see `qwen3_vl`."""
        return batch_layout(self._positions, grids)

    def static_layout(self, max_patches: int, max_segments: int) -> StaticLayout:
        """Creates the layout that CUDA graphs read, see `qwen3_vl`."""
        return StaticLayout(self._positions, max_patches, max_segments)

    def features(self, embedded: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower, and yields 0 and the feature, see `qwen3_vl`."""
        added: Tensor | None = None
        hidden = embedded
        for block in cast("Iterable[Block]", self.blocks):
            normed, hidden = add_norm(added, hidden, block.norm1, self.ops)
            added, hidden = block(normed, hidden, layout)
        normed, _ = add_norm(added, hidden, cast(nn.LayerNorm, self.merger.ln_q), self.ops)
        yield 0, self.merger(normed)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """Returns the feature as `[1, num_tokens, out_hidden]`."""
        features = self.features(self.patch_embed(patches), layout)
        return torch.stack([rows for _, rows in features])


def tower_weights(spec: TowerSpec, prefix: str) -> WeightMap:
    """Returns the names of a tower's parameters, and the shape of its convolution."""
    sides = spec.temporal_patch_size, spec.patch_size, spec.patch_size
    shape = spec.hidden_size, spec.in_channels, *sides
    return WeightMap(prefixes={"": prefix}, shapes={"patch_embed.proj.weight": shape})


def rotary_positions(spec: TowerSpec, device: torch.device) -> PositionCache:
    """Creates the cache of rotary angles. The position embeddings have no columns."""
    table = torch.empty(1, 0, device=device)
    return PositionCache(table, spec.head_dim, spec.spatial_merge_size)


class Block(nn.Module):
    """A transformer block with layer norms and an MLP with the quick GELU, see `qwen3_vl.Block`."""

    def __init__(self, spec: PlainTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.norm1 = nn.LayerNorm(spec.hidden_size, eps=_LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(spec.hidden_size, eps=_LAYER_NORM_EPS)
        self.attn = Attention(spec, ops)
        self.mlp = Mlp(spec, ops)

    def forward(
        self, normed: Tensor, residual: Tensor, layout: VisionLayout
    ) -> tuple[Tensor | None, Tensor]:
        """Computes the block. Returns two tensors `[N, hidden]` whose sum is its output, or None
        and the whole sum.
        """
        attended = self.attn(normed, residual, layout)
        normed, residual = add_norm(attended, residual, self.norm2, self.ops)
        return self.mlp(normed, residual), residual


class Mlp(nn.Module):
    """The feed-forward network of a block: `fc2(quick_gelu(fc1(x)))`."""

    def __init__(self, spec: PlainTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.fc1 = Linear(spec.hidden_size, spec.intermediate_size, bias=True)
        self.fc2 = Linear(spec.intermediate_size, spec.hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Computes the network of `x`, `[N, hidden]`. Returns the result of `project_back`."""
        inner = project(x, self.fc1, self.ops)
        return project_back(self.ops.quick_gelu(inner), self.fc2, residual, self.ops)


class Merger(nn.Module):
    """Concatenates the merge² normalized patches of each image token, and projects them to one row
    of the language model's width. The exact GELU is between the two layers.

    Args:
        spec: sizes of the tower.
        ops: operations of the tower.
        norm: the norm of the patches, which the caller applies.
    """

    def __init__(self, spec: TowerSpec, ops: Ops, norm: nn.Module) -> None:
        super().__init__()
        self.ops = ops
        self.grouped_size = spec.hidden_size * spec.spatial_merge_size**2
        self.ln_q = norm
        # The names of the checkpoint are those of an `nn.Sequential` with the GELU in the middle.
        self.mlp = nn.ModuleDict(
            {
                "0": Linear(self.grouped_size, self.grouped_size, bias=True),
                "2": Linear(self.grouped_size, spec.out_hidden_size, bias=True),
            }
        )

    def forward(self, normed: Tensor) -> Tensor:
        """Projects normalized patches `[N, hidden]` to `[N / merge², out_hidden]`."""
        first, second = cast(Linear, self.mlp["0"]), cast(Linear, self.mlp["2"])
        grouped = normed.reshape(-1, self.grouped_size)
        return project(F.gelu(project(grouped, first, self.ops)), second, self.ops)
