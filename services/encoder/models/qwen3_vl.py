"""Qwen3-VL's vision tower. Rounding points are those of HF's modules (transformers 5.17)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.model_config import VisionConfig
from services.common.nn.linear import Linear, UnquantizedLinear
from services.common.nn.weights import WeightMap
from services.encoder.attention.base import AttentionBackend
from services.encoder.kernels import rope
from services.encoder.models.base import Grid, VisionLayout
from services.encoder.models.grid_tables import GridTables

_LAYER_NORM_EPS = 1e-6


class Qwen3VLVisionModel(nn.Module):
    """Patch embedding, pre-norm blocks, and a merger per level."""

    def __init__(
        self,
        config: VisionConfig,
        attention: AttentionBackend,
        rotate: rope.Rotate = rope.rotate,
    ) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config, attention, rotate) for _ in range(config.depth)])
        self.merger = Merger(config, norm_after_grouping=False)
        self.deepstack_merger_list = nn.ModuleList(
            [Merger(config, norm_after_grouping=True) for _ in config.deepstack_indexes]
        )
        self.weight_map = WeightMap(
            prefixes={"": "model.visual."},
            shapes={
                "patch_embed.proj.weight": (
                    config.hidden_size,
                    config.in_channels,
                    config.temporal_patch_size,
                    config.patch_size,
                    config.patch_size,
                )
            },
        )

    def reset_buffers(self, device: torch.device) -> None:
        """Called when the parameters have got memory: tables made of other memory are void."""
        self._tables = GridTables(
            self.pos_embed.weight,
            self.config.hidden_size // self.config.num_heads,
            self.config.spatial_merge_size,
        )

    def layout(self, grids: Sequence[Grid]) -> VisionLayout:
        """See `VisionModel.layout`. Each frame of a video is a segment of its own."""
        frames = [(height, width) for time, height, width in grids for _ in range(time)]
        table = self._tables.of(frames)
        lengths = [height * width for height, width in frames]
        return VisionLayout(
            num_patches=sum(lengths),
            positions=table.positions,
            cos=table.cos,
            sin=table.sin,
            attention_plan=self.attention.plan(lengths, table.positions.device),
        )

    def levels(self, patches: Tensor, layout: VisionLayout) -> Iterator[tuple[int, Tensor]]:
        """See `VisionModel.levels`."""
        hidden = self.patch_embed(patches) + layout.positions  # [N, hidden]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, layout)
            if index in self.config.deepstack_indexes:
                tap = self.config.deepstack_indexes.index(index)
                yield tap + 1, self.deepstack_merger_list[tap](hidden)
        yield 0, self.merger(hidden)

    def forward(self, patches: Tensor, layout: VisionLayout) -> Tensor:
        """`[levels, num_tokens, out_hidden]`."""
        levels = dict(self.levels(patches, layout))
        return torch.stack([levels[level] for level in range(len(levels))])


class Block(nn.Module):
    """x += attention(norm1 x); x += mlp(norm2 x)."""

    def __init__(
        self, config: VisionConfig, attention: AttentionBackend, rotate: rope.Rotate
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=_LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=_LAYER_NORM_EPS)
        self.attn = Attention(config, attention, rotate)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, layout: VisionLayout) -> Tensor:
        """`[N, hidden]`, as `x`."""
        x = x + self.attn(self.norm1(x), layout)
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Full attention within each frame, with 2-D rope."""

    def __init__(
        self, config: VisionConfig, backend: AttentionBackend, rotate: rope.Rotate
    ) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.backend = backend
        self.rotate = rotate
        # Fused in the checkpoint: rows are q, then k, then v, each head by head.
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, layout: VisionLayout) -> Tensor:
        """`[N, hidden]`, as `x`."""
        qkv = self.qkv(x).unflatten(1, (3, self.num_heads, -1))  # [N, 3, heads, head_dim]
        query, key = self.rotate(qkv[:, :2], layout.cos, layout.sin).unbind(1)
        attended = self.backend.forward(query, key, qkv[:, 2], layout.attention_plan)
        return self.proj(attended.flatten(1))


class Mlp(nn.Module):
    """fc2(gelu_tanh(fc1 x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.linear_fc1 = Linear(hidden_size, intermediate_size, bias=True)
        self.linear_fc2 = Linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden]`, as `x`."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class Merger(nn.Module):
    """Groups the patches of an image token into one row of the language model's width.

    The main merger norms each patch before grouping, DeepStack's norm the grouped row. The GELU is
    the exact one here, the tanh one in the blocks.
    """

    def __init__(self, config: VisionConfig, *, norm_after_grouping: bool) -> None:
        super().__init__()
        self.grouped_size = config.hidden_size * config.spatial_merge_size**2
        self.norm_after_grouping = norm_after_grouping
        norm_size = self.grouped_size if norm_after_grouping else config.hidden_size
        self.norm = nn.LayerNorm(norm_size, eps=_LAYER_NORM_EPS)
        self.linear_fc1 = Linear(self.grouped_size, self.grouped_size, bias=True)
        self.linear_fc2 = Linear(self.grouped_size, config.out_hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """`[N, hidden]` → `[N / merge², out_hidden]`."""
        if self.norm_after_grouping:
            x = self.norm(x.reshape(-1, self.grouped_size))
        else:
            x = self.norm(x).reshape(-1, self.grouped_size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class PatchEmbed(nn.Module):
    """The checkpoint's Conv3d, whose stride is its kernel: a linear over a patch's pixels."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        pixels = config.in_channels * config.patch_size**2
        method = SummedOverTime(config.in_channels, config.temporal_patch_size)
        self.proj = Linear(
            pixels * config.temporal_patch_size, config.hidden_size, bias=True, method=method
        )

    def forward(self, patches: Tensor) -> Tensor:
        """`[N, channels * time * patch²]`, or `[N, channels * patch²]` of still images → hidden."""
        weight = self.proj.weight
        if patches.shape[1] != self.proj.in_features:
            weight = self.proj.still_weight
        assert isinstance(weight, Tensor)
        return F.linear(patches.to(weight.dtype), weight, self.proj.bias)


class SummedOverTime(UnquantizedLinear):
    """Also keeps the weights summed over time, for patches that are the same at each time."""

    def __init__(self, channels: int, times: int) -> None:
        self._shape = (channels, times)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Makes `still_weight` `[hidden, channels * patch²]`: summed in float32, cast once."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        by_time = weight.detach().unflatten(1, (*self._shape, -1)).float()
        layer.still_weight = by_time.sum(2).flatten(1).to(weight.dtype)
