"""Qwen3-VL's vision tower: it computes the embedding of each image from the image's patches.

Values are rounded where the modules of transformers 5.17 round them. `engine_main` creates the
tower on the `meta` device and loads its weights, and the runner calls `features`. The file has no
code for a particular device: `Ops` chooses the kernels.
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
    """The vision tower: a patch embedding, pre-norm transformer blocks, and a merger per feature.

    The public methods are the interface that the runner and the CUDA graphs use.

    Args:
        spec: sizes of the tower.
        ops: operations of the tower, with the kernels chosen for the device.
        prefix: prefix of the tower's tensor names in a checkpoint.
    """

    def __init__(self, spec: DeepStackTower, ops: Ops, prefix: str = "") -> None:
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
        """Creates an empty cache of positions, on the device of the position embeddings.

        The loader calls it after it has given the parameters memory on `device`. Positions that
        were computed before are then no longer valid.
        """
        self._positions = PositionCache(
            self.pos_embed.weight,
            self.spec.head_dim,
            self.spec.spatial_merge_size,
        )

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """Returns the layout of a batch.

        Args:
            grids: sizes of the images or frames in patches, in packing order.
        """
        return batch_layout(self._positions, grids)

    def static_layout(self, max_patches: int, max_segments: int) -> StaticLayout:
        """Creates the layout that all CUDA graphs read, in static buffers.

        Args:
            max_patches: most patches of a batch.
            max_segments: most images or frames of a batch.
        """
        return StaticLayout(self._positions, max_patches, max_segments)

    def features(self, patches: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower. Yields each feature as soon as the block that it comes from is computed,
        or enqueued on CUDA.

        Args:
            patches: pixels of the patches, scaled to [-1, 1]. The rows are in merge-block order, so
                that the merge² patches of an image token follow one another:
                `[N, channels * temporal * patch * patch]`, or `[N, channels * patch * patch]` for
                still images, whose slices of time are equal.
            layout: result of the method `layout` for the same batch.

        Yields:
            Number of a feature and its rows, `[num_tokens, out_hidden]`. The DeepStack features 1,
            2, … come first, in order. Feature 0, the merged output, comes last.
        """
        # A block returns two terms of its output. The next `add_norm` computes their sum, `hidden`,
        # and the norm of the sum. The DeepStack feature of block index - 1 needs the sum alone.
        taps = self.spec.deepstack_indexes
        added: Tensor | None = self.patch_embed(patches)  # [N, hidden]
        hidden = layout.positions.embeddings  # [N, hidden]
        for index, block in enumerate(cast("Iterable[Block]", self.blocks)):
            normed, hidden = add_norm(added, hidden, block.norm1, self.ops)
            if index - 1 in taps:
                yield self._deepstack_feature(index - 1, hidden)
            added, hidden = block(normed, hidden, layout)
        normed, hidden = add_norm(added, hidden, self.merger.norm, self.ops)
        if len(self.blocks) - 1 in taps:
            yield self._deepstack_feature(len(self.blocks) - 1, hidden)
        yield 0, self.merger.project(normed)

    def _deepstack_feature(self, block: int, hidden: Tensor) -> tuple[int, Tensor]:
        """Returns the number and the rows of the feature that comes from a block's output."""
        position = self.spec.deepstack_indexes.index(block)
        return position + 1, self.deepstack_merger_list[position](hidden)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """Returns all features as one tensor, `[features, num_tokens, out_hidden]`."""
        features = dict(self.features(patches, layout))
        return torch.stack([features[feature] for feature in range(len(features))])


def add_norm(
    x: Tensor | None, residual: Tensor, norm: nn.LayerNorm, ops: Ops
) -> tuple[Tensor, Tensor]:
    """Adds `x` to the residual stream and computes the layer norm of the sum.

    Args:
        x: `[N, hidden]`. None if there is nothing to add.
        residual: `[N, hidden]`.
        norm: weight, bias and epsilon of the layer norm.
        ops: operations of the tower.

    Returns:
        The normalized sum and the sum.
    """
    if x is None:
        return ops.layer_norm(residual, norm.weight, norm.bias, norm.eps), residual
    return ops.add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)


def project(x: Tensor, layer: Linear, ops: Ops) -> Tensor:
    """Computes `layer(x)`, with a kernel of the table unless the layer's weights are quantized."""
    if layer.is_plain and layer.bias is not None:
        return ops.linear(x, layer.weight, layer.bias)
    return layer(x)


def project_back(x: Tensor, layer: Linear, residual: Tensor, ops: Ops) -> Tensor | None:
    """Computes `layer(x)`, which ends a branch of a block and is added to the residual stream.

    Returns:
        `layer(x)`, which the caller has to add. None if the kernel has added it to `residual`.
    """
    if layer.is_plain and layer.bias is not None:
        return ops.linear_add(x, layer.weight, layer.bias, residual)
    return layer(x)


class Block(nn.Module):
    """A transformer block: `x += attention(norm1(x)); x += mlp(norm2(x))`.

    The caller computes the first norm and, unless a kernel has done so, the last sum. This allows
    one kernel to compute the last sum of a block and the first norm of the next.
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
        """Computes the block.

        Args:
            normed: `norm1(x)`, `[N, hidden]`.
            residual: `x`, `[N, hidden]`. It may be overwritten.
            layout: layout of the batch.

        Returns:
            Two tensors `[N, hidden]` whose sum is the block's output. The first is None if the
            second already is the output.
        """
        attended = self.attn(normed, residual, layout)
        normed, residual = add_norm(attended, residual, self.norm2, self.ops)
        return self.mlp(normed, residual), residual


class Attention(nn.Module):
    """Full attention within each image or frame, with rotary embeddings of rows and columns."""

    def __init__(self, spec: DeepStackTower, ops: Ops) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.ops = ops
        # The checkpoint stores one matrix: rows of the queries, of the keys, then of the values,
        # each head by head.
        self.qkv = Linear(spec.hidden_size, 3 * spec.hidden_size, bias=True)
        self.proj = Linear(spec.hidden_size, spec.hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor, layout: VisionLayout) -> Tensor | None:
        """Computes the attention of `x`, `[N, hidden]`. Returns as `project_back` does."""
        query, key, value = self._heads(x, layout)
        attended = self.ops.ragged_attention(query, key, value, layout.segments)
        return project_back(attended.flatten(1), self.proj, residual, self.ops)

    def _heads(self, x: Tensor, layout: VisionLayout) -> tuple[Tensor, ...]:
        """Computes rotated queries, rotated keys, and values, `[N, heads, head_dim]` each."""
        parts = project(x, self.qkv, self.ops).unflatten(1, (3, self.num_heads, -1))
        _, cos, sin = layout.positions
        query, key = self.ops.rotary(parts[:, :2], cos, sin).unbind(1)
        return query, key, parts[:, 2]


class Mlp(nn.Module):
    """The feed-forward network of a block: `fc2(gelu(fc1(x)))` with the tanh form of GELU."""

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.linear_fc1 = Linear(hidden_size, intermediate_size, bias=True)
        self.linear_fc2 = Linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Computes the network of `x`, `[N, hidden]`. Returns as `project_back` does."""
        fc1 = self.linear_fc1
        if fc1.is_plain and fc1.bias is not None:
            inner = self.ops.linear_gelu(x, fc1.weight, fc1.bias)
        else:
            inner = F.gelu(fc1(x), approximate="tanh")
        return project_back(inner, self.linear_fc2, residual, self.ops)


class Merger(nn.Module):
    """Merges the patches of each image token into one row of the language model's width.

    The merger of feature 0 normalizes each patch before grouping. The mergers of the DeepStack
    features normalize the grouped row. GELU is exact here, unlike in the blocks.
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
        """Merges `[N, hidden]` patches into `[N / merge², out_hidden]` rows."""
        norm, rows = self.norm, x.reshape(-1, self.norm.weight.numel())
        return self.project(self.ops.layer_norm(rows, norm.weight, norm.bias, norm.eps))

    def project(self, normed: Tensor) -> Tensor:
        """Groups normalized patches `[N, hidden]`, unless they are grouped, and projects them.

        The merge² patches of a token are neighbouring rows, so that a reshape groups them.
        """
        grouped = normed.reshape(-1, self.grouped_size)
        inner = F.gelu(project(grouped, self.linear_fc1, self.ops))
        return project(inner, self.linear_fc2, self.ops)


class PatchEmbed(nn.Module):
    """The patch embedding. In the checkpoint it is a Conv3d whose stride is its kernel size, which
    is the same as a linear layer over the pixels of a patch.
    """

    def __init__(self, spec: DeepStackTower) -> None:
        super().__init__()
        pixels = spec.in_channels * spec.patch_size**2
        method = PatchWeights(spec)
        self.proj = Linear(
            pixels * spec.temporal_patch_size, spec.hidden_size, bias=True, method=method
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Embeds patches `[N, channels * time * patch²]`, or `[N, channels * patch²]` of still
        images, as `[N, hidden]`.
        """
        weight = self.proj.weight
        if patches.shape[1] != self.proj.in_features:
            weight = self.proj.still_weight
        assert isinstance(weight, Tensor)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class PatchWeights(UnquantizedLinear):
    """Weights of the patch embedding, changed for the pixels that this service gives it.

    The pixels are scaled to [-1, 1], so the mean and the deviation by which the checkpoint expects
    pixels to be normalized become part of weight and bias. For still images, whose pixels are the
    same at each time, the weights are also stored summed over time.
    """

    def __init__(self, spec: DeepStackTower) -> None:
        self._spec = spec

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Rescales weight and bias, and sets `layer.still_weight`, `[hidden, channels * patch²]`.

        Sums are computed in float32 and rounded once.
        """
        spec, weight, bias = self._spec, layer.weight.detach(), layer.bias
        assert bias is not None
        shape = spec.in_channels, spec.temporal_patch_size, -1
        by_time = weight.unflatten(1, shape).float()  # [hidden, channels, time, patch²]
        mean, std = (
            torch.tensor(levels, device=weight.device)[:, None, None]
            for levels in (spec.pixel_mean, spec.pixel_std)
        )
        if not torch.all((mean == 127.5) & (std == 127.5)):
            # The service gives y in [-1, 1], and the checkpoint expects (x - mean) / std of the
            # level x = 127.5 y + 127.5. That is y * 127.5 / std + (127.5 - mean) / std.
            bias.data.copy_(bias + (by_time * ((127.5 - mean) / std)).sum((1, 2, 3)))
            by_time = by_time * (127.5 / std)
            weight.copy_(by_time.flatten(1))
        layer.still_weight = by_time.sum(2).flatten(1).to(weight.dtype)
