"""Qwen3-VL's vision tower. Rounding points are those of HF's modules (transformers 5.17).

`engine_main` builds it on `meta` and fills it; the runner runs `features`. It knows no device: all
that depends on one is behind `Ops`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Grid
from services.common.nn.layers import embedding
from services.common.nn.linear import Linear, UnquantizedLinear
from services.common.nn.weight_map import WeightMap
from services.encoder.models.positions import (
    PositionCache,
    StaticLayout,
    VisionLayout,
    batch_layout,
)
from services.encoder.operations.ops import Ops

_LAYER_NORM_EPS = 1e-6


class VisionTower(nn.Module):
    """Patch embedding, pre-norm blocks, and a merger per feature. Runner and graphs know of it what
    is public here; it decides no kernel, but calls `Ops`.
    """

    def __init__(self, spec: DeepStackTower, ops: Ops, prefix: str = "") -> None:
        """`prefix`: of its tensors' names in a checkpoint."""
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.patch_embed = PatchEmbed(spec)
        self.pos_embed = embedding(spec.num_position_embeddings, spec.hidden_size)
        self.blocks = nn.ModuleList([Block(spec, ops) for _ in range(spec.depth)])
        self.merger = Merger(spec, ops, norm_after_grouping=False)
        self.deepstack_merger_list = nn.ModuleList(
            [Merger(spec, ops, norm_after_grouping=True) for _ in spec.deepstack_indexes]
        )
        self.weight_map = WeightMap(
            prefixes={"": prefix},
            shapes={
                "patch_embed.proj.weight": (
                    spec.hidden_size,
                    spec.in_channels,
                    spec.temporal_patch_size,
                    spec.patch_size,
                    spec.patch_size,
                )
            },
        )

    def reset_buffers(self, device: torch.device) -> None:
        """Called when the parameters have been materialized: cached positions are void."""
        self._positions = PositionCache(
            self.pos_embed.weight,
            self.spec.head_dim,
            self.spec.spatial_merge_size,
        )

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """The layout of a batch of images or frames, packed in this order."""
        return batch_layout(self._positions, grids)

    def static_layout(self, max_patches: int, max_segments: int) -> StaticLayout:
        """For CUDA graphs: of at most so many patches, and images or frames."""
        return StaticLayout(self._positions, max_patches, max_segments)

    def features(self, patches: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower, yielding each feature as soon as its block is done (enqueued, on CUDA).

        Args:
            patches: `[N, channels * temporal * patch * patch]`, scaled to [-1, 1], rows in
                merge-block order; or without the temporal factor where all slices of time are
                equal, as in still images.
            layout: what `layout` returned for the same batch.

        Yields:
            `(feature, [num_tokens, out_hidden])`: DeepStack features from 1 on, in order; feature
            0, the merged output, comes last.
        """
        # A block may leave its last addition to the next norm, so a tap waits for that norm.
        taps = self.spec.deepstack_indexes
        added: Tensor | None = self.patch_embed(patches)  # [N, hidden]
        hidden = layout.positions.embeddings  # [N, hidden]
        for index, block in enumerate(cast("Iterable[Block]", self.blocks)):
            normed, hidden = add_norm(added, hidden, block.norm1, self.ops)
            if index - 1 in taps:
                yield self._tapped(index - 1, hidden)
            added, hidden = block(normed, hidden, layout)
        normed, hidden = add_norm(added, hidden, self.merger.norm, self.ops)
        if len(self.blocks) - 1 in taps:
            yield self._tapped(len(self.blocks) - 1, hidden)
        yield 0, self.merger.project(normed)

    def _tapped(self, index: int, hidden: Tensor) -> tuple[int, Tensor]:
        tap = self.spec.deepstack_indexes.index(index)
        return tap + 1, self.deepstack_merger_list[tap](hidden)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """`[features, num_tokens, out_hidden]`."""
        features = dict(self.features(patches, layout))
        return torch.stack([features[feature] for feature in range(len(features))])


def add_norm(
    x: Tensor | None, residual: Tensor, norm: nn.LayerNorm, ops: Ops
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, or of `residual` alone, and what it is the norm of."""
    if x is None:
        return ops.layer_norm(residual, norm.weight, norm.bias, norm.eps), residual
    return ops.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)


def project(x: Tensor, layer: Linear, ops: Ops) -> Tensor:
    """`layer(x)` by the kernel table, if its weights are not quantized."""
    if layer.is_plain and layer.bias is not None:
        return ops.linear(x, layer.weight, layer.bias)
    return layer(x)


def project_back(x: Tensor, layer: Linear, residual: Tensor, ops: Ops) -> Tensor | None:
    """`layer(x)`, still to be added to the residual stream; None: it has been added."""
    if layer.is_plain and layer.bias is not None:
        return ops.linear_add(x, layer.weight, layer.bias, residual)
    return layer(x)


class Block(nn.Module):
    """x += attention(norm1 x); x += mlp(norm2 x). The caller computes the first norm and, if
    `forward` says so, the last sum.
    """

    def __init__(self, spec: DeepStackTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.norm1 = nn.LayerNorm(spec.hidden_size, eps=_LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(spec.hidden_size, eps=_LAYER_NORM_EPS)
        self.attn = Attention(spec, ops)
        self.mlp = Mlp(spec.hidden_size, spec.intermediate_size, ops)

    def forward(
        self, normed: Tensor, residual: Tensor, layout: VisionLayout
    ) -> tuple[Tensor | None, Tensor]:
        """From `norm1 x` and x, which may be overwritten, to two `[N, hidden]` whose sum is the
        block's output; None: nothing is to be added.
        """
        attended = self.attn(normed, residual, layout)
        normed, residual = add_norm(attended, residual, self.norm2, self.ops)
        return self.mlp(normed, residual), residual


class Attention(nn.Module):
    """Full attention within each frame, with 2-D rope."""

    def __init__(self, spec: DeepStackTower, ops: Ops) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.ops = ops
        # Fused in the checkpoint: rows are q, then k, then v, each head by head.
        self.qkv = Linear(spec.hidden_size, 3 * spec.hidden_size, bias=True)
        self.proj = Linear(spec.hidden_size, spec.hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor, layout: VisionLayout) -> Tensor | None:
        """`[N, hidden]`, as `x`, see `project_back`."""
        query, key, value = self._heads(x, layout)
        attended = self.ops.ragged_attention(query, key, value, layout.segments)
        return project_back(attended.flatten(1), self.proj, residual, self.ops)

    def _heads(self, x: Tensor, layout: VisionLayout) -> tuple[Tensor, ...]:
        """Rotated queries, rotated keys and values, `[N, heads, head_dim]` each."""
        parts = project(x, self.qkv, self.ops).unflatten(1, (3, self.num_heads, -1))
        _, cos, sin = layout.positions
        query, key = self.ops.rotary(parts[:, :2], cos, sin).unbind(1)
        return query, key, parts[:, 2]


class Mlp(nn.Module):
    """fc2(gelu_tanh(fc1 x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.linear_fc1 = Linear(hidden_size, intermediate_size, bias=True)
        self.linear_fc2 = Linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """`[N, hidden]`, as `x`, see `project_back`."""
        fc1 = self.linear_fc1
        if fc1.is_plain and fc1.bias is not None:
            inner = self.ops.linear_gelu(x, fc1.weight, fc1.bias)
        else:
            inner = F.gelu(fc1(x), approximate="tanh")
        return project_back(inner, self.linear_fc2, residual, self.ops)


class Merger(nn.Module):
    """Groups the patches of an image token into one row of the language model's width.

    The main merger normalizes each patch before grouping, DeepStack's mergers the grouped row. The
    GELU is the exact one here, the tanh one in the blocks.
    """

    def __init__(self, spec: DeepStackTower, ops: Ops, *, norm_after_grouping: bool) -> None:
        super().__init__()
        self.ops = ops
        self.grouped_size = spec.hidden_size * spec.spatial_merge_size**2
        norm_size = self.grouped_size if norm_after_grouping else spec.hidden_size
        self.norm = nn.LayerNorm(norm_size, eps=_LAYER_NORM_EPS)
        self.linear_fc1 = Linear(self.grouped_size, self.grouped_size, bias=True)
        self.linear_fc2 = Linear(self.grouped_size, spec.out_hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden]` → `[N / merge², out_hidden]`."""
        norm, rows = self.norm, x.reshape(-1, self.norm.weight.numel())
        return self.project(self.ops.layer_norm(rows, norm.weight, norm.bias, norm.eps))

    def project(self, normed: Tensor) -> Tensor:
        """The part after the norm; rows may be grouped or not."""
        grouped = normed.reshape(-1, self.grouped_size)
        inner = F.gelu(project(grouped, self.linear_fc1, self.ops))
        return project(inner, self.linear_fc2, self.ops)


class PatchEmbed(nn.Module):
    """The checkpoint's Conv3d, whose stride is its kernel: a linear over a patch's pixels."""

    def __init__(self, spec: DeepStackTower) -> None:
        super().__init__()
        pixels = spec.in_channels * spec.patch_size**2
        method = PatchWeights(spec)
        self.proj = Linear(
            pixels * spec.temporal_patch_size, spec.hidden_size, bias=True, method=method
        )

    def forward(self, patches: Tensor) -> Tensor:
        """`[N, channels * time * patch²]`, or `[N, channels * patch²]` of still images → hidden."""
        weight = self.proj.weight
        if patches.shape[1] != self.proj.in_features:
            weight = self.proj.still_weight
        assert isinstance(weight, Tensor)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class PatchWeights(UnquantizedLinear):
    """Takes pixels scaled to [-1, 1], whatever the checkpoint's are normalized by. Also keeps the
    weights summed over time, for patches that are the same at each time.
    """

    def __init__(self, spec: DeepStackTower) -> None:
        self._spec = spec

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Makes `still_weight` `[hidden, channels * patch²]`. All sums are float32, cast once."""
        spec, weight, bias = self._spec, layer.weight.detach(), layer.bias
        assert bias is not None
        shape = spec.in_channels, spec.temporal_patch_size, -1
        by_time = weight.unflatten(1, shape).float()  # [hidden, channels, time, patch²]
        mean, std = (
            torch.tensor(levels, device=weight.device)[:, None, None]
            for levels in (spec.pixel_mean, spec.pixel_std)
        )
        if not torch.all((mean == 127.5) & (std == 127.5)):
            # (x - mean) / std of x = 127.5 y + 127.5
            bias.data.copy_(bias + (by_time * ((127.5 - mean) / std)).sum((1, 2, 3)))
            by_time = by_time * (127.5 / std)
            weight.copy_(by_time.flatten(1))
        layer.still_weight = by_time.sum(2).flatten(1).to(weight.dtype)
