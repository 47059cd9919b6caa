"""PaddleOCR-VL's vision tower. It computes what Qwen3-VL's (`qwen3_vl`) does, without DeepStack and
with a norm behind the blocks. The names of its tensors are SigLIP's; queries, keys and values have
a matrix each; and the merger is a projector with a prefix of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.families.paddleocr_vl import SiglipTower
from services.common.geometry import Grid
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
from services.encoder.models.qwen3_vl import Attention, add_norm, project, project_back
from services.encoder.operations.ops import Ops

_PROJECTOR_NORM_EPS = 1e-5


class VisionTower(nn.Module):
    """The vision tower: a patch embedding, pre-norm transformer blocks, and a projector.

    Args:
        spec: sizes of the tower.
        ops: operations of the tower, with the kernels chosen for the device.
        prefix: prefix of the tower's tensor names in a checkpoint, except for the projector's.
    """

    def __init__(self, spec: SiglipTower, ops: Ops, prefix: str = "") -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.patch_embed = PatchEmbed(spec)
        self.pos_embed = embedding(spec.num_position_embeddings, spec.hidden_size)
        self.layers = nn.ModuleList([Block(spec, ops) for _ in range(spec.depth)])
        self.post_layernorm = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.projector = Projector(spec, ops)
        model = f"{prefix}vision_model."
        self.weight_map = WeightMap(
            prefixes={
                "": model,
                "patch_embed.proj.": f"{model}embeddings.patch_embedding.",
                "pos_embed.": f"{model}embeddings.position_embedding.",
                "layers.": f"{model}encoder.layers.",
                "projector.": spec.projector_prefix,
            },
            shapes={
                "patch_embed.proj.weight": (
                    spec.hidden_size,
                    spec.in_channels,
                    spec.patch_size,
                    spec.patch_size,
                )
            },
        )

    def reset_buffers(self, device: torch.device) -> None:
        """Creates the cache of position embeddings, see `qwen3_vl`."""
        table, merge = self.pos_embed.weight, self.spec.spatial_merge_size
        self._positions = PositionCache(table, self.spec.head_dim, merge)

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """Returns the layout of a batch, see `qwen3_vl`."""
        return batch_layout(self._positions, grids)

    def static_layout(self, max_patches: int, max_segments: int) -> StaticLayout:
        """Creates the layout that CUDA graphs read, see `qwen3_vl`."""
        return StaticLayout(self._positions, max_patches, max_segments)

    def features(self, embedded: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """Runs the tower, and yields 0 and the feature, see `qwen3_vl`."""
        added: Tensor | None = embedded
        hidden = layout.positions.embeddings  # [N, hidden]
        for block in cast("Iterable[Block]", self.layers):
            normed, hidden = add_norm(added, hidden, block.layer_norm1, self.ops)
            added, hidden = block(normed, hidden, layout)
        normed, _ = add_norm(added, hidden, self.post_layernorm, self.ops)
        yield 0, self.projector(normed)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """Returns the feature as `[1, num_tokens, out_hidden]`."""
        features = self.features(self.patch_embed(patches), layout)
        return torch.stack([rows for _, rows in features])


class Block(nn.Module):
    """A transformer block, see `qwen3_vl.Block`."""

    def __init__(self, spec: SiglipTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.layer_norm1 = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.layer_norm2 = nn.LayerNorm(spec.hidden_size, eps=spec.layer_norm_eps)
        self.self_attn = SplitAttention(spec, ops)
        self.mlp = Mlp(spec, ops)

    def forward(
        self, normed: Tensor, residual: Tensor, layout: VisionLayout
    ) -> tuple[Tensor | None, Tensor]:
        """Computes the block. Returns two tensors `[N, hidden]` whose sum is its output, or None
        and the whole sum.
        """
        attended = self.self_attn(normed, residual, layout)
        normed, residual = add_norm(attended, residual, self.layer_norm2, self.ops)
        return self.mlp(normed, residual), residual


class SplitAttention(Attention):
    """Attention whose queries, keys and values have a matrix each in the files."""

    def __init__(self, spec: SiglipTower, ops: Ops) -> None:
        super().__init__(spec, ops)
        del self.proj
        size = spec.hidden_size
        self.qkv = Linear(size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), bias=True)
        self.out_proj = Linear(size, size, bias=True)

    @property
    def output(self) -> Linear:
        return self.out_proj


class Mlp(nn.Module):
    """The feed-forward network of a block: `fc2(gelu(fc1(x)))` with the tanh form of GELU."""

    def __init__(self, spec: SiglipTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.fc1 = Linear(spec.hidden_size, spec.intermediate_size, bias=True)
        self.fc2 = Linear(spec.intermediate_size, spec.hidden_size, bias=True)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Computes the network of `x`, `[N, hidden]`. Returns the result of `project_back`."""
        if self.fc1.is_plain and self.fc1.bias is not None:
            inner = self.ops.linear_gelu(x, self.fc1.weight, self.fc1.bias)
        else:
            inner = F.gelu(self.fc1(x), approximate="tanh")
        return project_back(inner, self.fc2, residual, self.ops)


class Projector(nn.Module):
    """Normalizes patches, concatenates the merge² patches of each image token, and projects them to
    one row of the language model's width. The exact GELU is between the two layers.
    """

    def __init__(self, spec: SiglipTower, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.grouped_size = spec.hidden_size * spec.spatial_merge_size**2
        self.pre_norm = nn.LayerNorm(spec.hidden_size, eps=_PROJECTOR_NORM_EPS)
        self.linear_1 = Linear(self.grouped_size, self.grouped_size, bias=True)
        self.linear_2 = Linear(self.grouped_size, spec.out_hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Projects patches `[N, hidden]` to `[N / merge², out_hidden]`."""
        norm = self.pre_norm
        normed = self.ops.layer_norm(x, norm.weight, norm.bias, norm.eps)
        inner = F.gelu(project(normed.reshape(-1, self.grouped_size), self.linear_1, self.ops))
        return project(inner, self.linear_2, self.ops)
