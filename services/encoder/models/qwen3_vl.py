"""Qwen3-VL's vision tower: it computes the embeddings of images from their patches.

The N patches of all images of a batch are rows of one tensor. A linear layer turns each patch into
a hidden state, to which an embedding of the patch's position is added. The transformer blocks
follow; a patch attends only to patches of its own image. Mergers then turn each square of merge²
patches (2 by 2) into one image token. The last block's output gives feature 0 of the embeddings;
the outputs of a few inner blocks give the DeepStack features 1, 2, ….

Values are rounded to the tower's data type at the same places as in transformers 5.17, except in
the patch embedding (`patch_embed`).
`engine_main` creates the tower on the `meta` device and loads its weights. The runner calls
`patch_embed` and `features`. `Ops` chooses the kernels, so this file has no code for a particular
device.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Grid
from services.common.model_spec import TowerSpec
from services.common.nn.layers import embedding
from services.common.nn.linear import Linear
from services.common.nn.weight_map import WeightMap
from services.encoder.models.patch_embed import PatchEmbed
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
        """Creates the cache of position embeddings. The loader calls this method when it has moved
        the parameters to `device`, because the cached values are computed from a parameter.
        """
        self._positions = PositionCache(
            self.pos_embed.weight,
            self.spec.head_dim,
            self.spec.spatial_merge_size,
        )

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """Returns the layout of a batch: the positions of its patches, and which rows are one
        image.

        Args:
            grids: size (t, h, w) of each unit in patches, in the order of the batch.
        """
        return batch_layout(self._positions, grids)

    def static_layout(self, max_patches: int, max_segments: int) -> StaticLayout:
        """Creates the layout that CUDA graphs read. Its buffers keep their addresses, and each
        batch is copied into them.

        Args:
            max_patches: most patches of a batch.
            max_segments: most segments of a batch. Each image and each pair of frames is one.
        """
        return StaticLayout(self._positions, max_patches, max_segments)

    def features(self, embedded: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the blocks and the mergers. Yields each feature as soon as its block is computed or,
        on CUDA, as soon as the kernels of the block are launched. The caller can copy it while
        later blocks run.

        Args:
            embedded: embedded patches `[N, hidden]`, the result of `patch_embed`. They may be
                overwritten.
            layout: result of the method `layout` for the same batch.

        Yields:
            Number of a feature and its rows, `[num_tokens, out_hidden]`. The DeepStack features 1,
            2, … come first, in order. Feature 0 comes last.
        """
        # A block returns two tensors, whose sum is its output. The sum is computed by `add_norm`
        # at the start of the next turn, because a single kernel can compute the sum and the next
        # block's first norm. Therefore `hidden`, after `add_norm`, is the output of block
        # `index - 1`. A DeepStack feature may have to be made from it.
        feature_blocks = self.spec.deepstack_indexes
        added: Tensor | None = embedded
        hidden = layout.positions.embeddings  # [N, hidden]
        for index, block in enumerate(cast("Iterable[Block]", self.blocks)):
            normed, hidden = add_norm(added, hidden, block.norm1, self.ops)
            if index - 1 in feature_blocks:
                yield self._deepstack_feature(index - 1, hidden)
            added, hidden = block(normed, hidden, layout)
        normed, hidden = add_norm(added, hidden, self.merger.norm, self.ops)
        if len(self.blocks) - 1 in feature_blocks:
            yield self._deepstack_feature(len(self.blocks) - 1, hidden)
        yield 0, self.merger.project(normed)

    def _deepstack_feature(self, block: int, hidden: Tensor) -> tuple[int, Tensor]:
        """Returns the number and the rows of the feature that comes from a block's output."""
        position = self.spec.deepstack_indexes.index(block)
        return position + 1, self.deepstack_merger_list[position](hidden)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """Returns all features as one tensor, `[features, num_tokens, out_hidden]`.

        Args:
            patches: pixels of the patches, scaled to [-1, 1], one row per patch. The merge² patches
                of an image token are neighbouring rows. A row has
                `channels * temporal * patch * patch` values. For still images, whose pixels are the
                same at each time, it may have `channels * patch * patch` values instead.
            layout: result of the method `layout` for the same batch.
        """
        features = dict(self.features(self.patch_embed(patches), layout))
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
    """Computes `layer(x)`. If the layer's weights are not quantized, `ops` chooses the kernel."""
    if layer.is_plain and layer.bias is not None:
        return ops.linear(x, layer.weight, layer.bias)
    return layer(x)


def project_back(x: Tensor, layer: Linear, residual: Tensor, ops: Ops) -> Tensor | None:
    """Computes `layer(x)`, the output of an attention or an MLP, which has to be added to the
    residual stream.

    Returns:
        `layer(x)`, for the caller to add. None if the kernel has added it to `residual` already.
    """
    if layer.is_plain and layer.bias is not None:
        return ops.linear_add(x, layer.weight, layer.bias, residual)
    return layer(x)


class Block(nn.Module):
    """A transformer block: `x += attention(norm1(x)); x += mlp(norm2(x))`.

    The caller computes `norm1(x)` before the block, and the last `+=` after it.
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
            second is the whole sum already.
        """
        attended = self.attn(normed, residual, layout)
        normed, residual = add_norm(attended, residual, self.norm2, self.ops)
        return self.mlp(normed, residual), residual


class Attention(nn.Module):
    """Full attention within each image or pair of frames, with rotary embeddings of rows and
    columns.
    """

    def __init__(self, spec: TowerSpec, ops: Ops) -> None:
        super().__init__()
        self.num_heads = spec.num_heads
        self.ops = ops
        # As in the checkpoint, one matrix has the rows of all heads' queries, then the rows of
        # their keys, then the rows of their values.
        self.qkv = Linear(spec.hidden_size, 3 * spec.hidden_size, bias=True)
        self.proj = Linear(spec.hidden_size, spec.hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor, layout: VisionLayout) -> Tensor | None:
        """Computes the attention of `x`, `[N, hidden]`. Returns the result of `project_back`."""
        query, key, value = self._heads(x, layout)
        attended = self.ops.ragged_attention(query, key, value, layout.segments)
        return project_back(attended.flatten(1), self.output, residual, self.ops)

    @property
    def output(self) -> Linear:
        return self.proj

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
        """Computes the network of `x`, `[N, hidden]`. Returns the result of `project_back`."""
        fc1 = self.linear_fc1
        if fc1.is_plain and fc1.bias is not None:
            inner = self.ops.linear_gelu(x, fc1.weight, fc1.bias)
        else:
            inner = F.gelu(fc1(x), approximate="tanh")
        return project_back(inner, self.linear_fc2, residual, self.ops)


class Merger(nn.Module):
    """Concatenates the merge² patches of each image token, and projects them to one row of the
    language model's width.

    The merger of feature 0 normalizes the patches before it concatenates them. The mergers of the
    DeepStack features normalize the concatenated rows. The mergers use the exact GELU, unlike the
    blocks, which use its tanh approximation.
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
        """Projects normalized patches `[N, hidden]` or normalized groups `[N / merge², merge² *
        hidden]`. The patches of a group are neighbouring rows, so a reshape concatenates them.
        """
        grouped = normed.reshape(-1, self.grouped_size)
        inner = F.gelu(project(grouped, self.linear_fc1, self.ops))
        return project(inner, self.linear_fc2, self.ops)
