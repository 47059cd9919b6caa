"""The language model of dense Qwen3-VL.

A Qwen3 transformer (pre-norm, grouped-query attention with q/k norm, SwiGLU) with two things more:
positions have three axes (interleaved M-RoPE), and the vision tower's intermediate levels are added
to the visual tokens after the first decoder layers (DeepStack).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.model_spec import ModelSpec, TextSpec
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear, MergedLinear
from services.common.nn.weights import WeightMap
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.kernels.ops import Ops
from services.decoder.models.base import VisualInput
from services.decoder.models.rope import HeadTransform, RotaryEmbedding


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers share in one forward."""

    rope: tuple[Tensor, Tensor]  # cos and sin, [T, head_dim / 2]
    kv_rows: Tensor  # [2, T]: where keys and values go
    metadata: AttentionMetadata
    may_split: bool  # a product may be left in parts for the norm or rotation after it


def project(x: Tensor, layer: Linear, ops: Ops, step: StepContext) -> Tensor:
    """`layer(x)`, or the parts of it, see `Ops.linear_parts`."""
    if step.may_split and ops.is_small_batch(x):
        return ops.linear_parts(x, layer.weight)
    return layer(x)


def project_back(
    x: Tensor, layer: Linear, residual: Tensor, ops: Ops, step: StepContext
) -> Tensor | None:
    """`project(x)`, for whoever adds it to the residual stream; None: it has been added."""
    if layer.is_plain and layer.bias is None and ops.add_product(x, layer.weight, residual):
        return None
    return project(x, layer, ops, step)


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on each query and key head."""

    def __init__(self, config: TextSpec, backend: AttentionBackend, ops: Ops) -> None:
        super().__init__()
        self.backend = backend
        self.ops = ops
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
        )
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.o_bias)
        self.eps = config.rms_norm_eps
        self.q_norm = RMSNorm(config.head_dim, self.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, self.eps) if config.qk_norm else None

    def forward(self, x: Tensor, kv_cache: Tensor, step: StepContext) -> Tensor:
        """`[T, hidden]` → `[T, H * D]`, before the output projection; writes this layer's keys and
        values to `kv_cache`.
        """
        if not step.metadata.wants_keys_values:
            return self.attend(project(x, self.qkv_proj, self.ops, step), kv_cache, step)
        num_kv_heads, head_dim = kv_cache.shape[-2:]
        keys_values = kv_cache.new_empty(len(x), 2 * num_kv_heads, head_dim)
        heads = self._transform(kv_cache, step).of(project(x, self.qkv_proj, self.ops, step))
        query = self.ops.qk_rope_cache(heads, keys_values)
        return self.backend.forward(query, kv_cache, step.metadata, keys_values).flatten(1)

    def attend(self, qkv: Tensor, kv_cache: Tensor, step: StepContext) -> Tensor:
        """What is between the projections of a step whose keys and values are wanted in the cache
        alone: `[T, (H + 2 KVH) * D]`, perhaps in parts, → `[T, H * D]`.
        """
        metadata, heads = step.metadata, self._transform(kv_cache, step).of(qkv)
        if metadata.fused:
            return self.ops.attend_few(heads, metadata.block_ids, metadata.seq_lens_device)
        return self.backend.forward(self.ops.qk_rope_cache(heads), kv_cache, metadata).flatten(1)

    def _transform(self, kv_cache: Tensor, step: StepContext) -> HeadTransform:
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight)
        return HeadTransform(norms, self.eps, step.rope, kv_cache, step.kv_rows)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TextSpec, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        size, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedLinear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias
        )
        self.down_proj = Linear(size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor, step: StepContext) -> Tensor | None:
        """`[T, hidden]` → see `project_back`."""
        gate_up = self.gate_up_proj
        if gate_up.is_plain and gate_up.bias is None:
            hidden = self.ops.linear_swiglu(x, gate_up.weight)
        else:
            hidden = self.ops.silu_and_mul(gate_up(x))
        return project_back(hidden, self.down_proj, residual, self.ops, step)


def add_norm(x: Tensor | None, residual: Tensor, norm: RMSNorm, ops: Ops) -> tuple[Tensor, Tensor]:
    """The norm of the hidden state, `x + residual` or `residual` alone, and the state itself."""
    if x is None:
        return ops.rms_norm(residual, norm.weight, norm.eps), residual
    return ops.add_rms_norm(x, residual, norm.weight, norm.eps)


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream.

    The last addition of a layer is left to the next norm, which fuses with it, unless the product
    itself has added: a layer takes and returns `(x, residual)`, whose sum is the hidden state, and
    x may be None.
    """

    def __init__(self, config: TextSpec, backend: AttentionBackend, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, self.eps)
        self.self_attn = Attention(config, backend, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, self.eps)
        self.mlp = MLP(config, ops)

    def forward(
        self,
        x: Tensor | None,
        residual: Tensor,
        kv_cache: Tensor,
        step: StepContext,
        rows: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """The layer's output for all tokens, or for those of `rows` `[R]`, though all leave their
        keys and values.
        """
        normed, residual = add_norm(x, residual, self.input_layernorm, self.ops)
        attended = self.self_attn(normed, kv_cache, step)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        projected = project_back(attended, self.self_attn.o_proj, residual, self.ops, step)
        normed, residual = add_norm(projected, residual, self.post_attention_layernorm, self.ops)
        return self.mlp(normed, residual, step), residual

    def forward_few(self, residual: Tensor, kv_cache: Tensor, step: StepContext) -> None:
        """The layer for `ops.max_few_tokens` tokens at most; `residual` is updated in place."""
        ops, attention, mlp = self.ops, self.self_attn, self.mlp
        weight = self.input_layernorm.weight
        qkv = ops.norm_linear(residual, weight, self.eps, attention.qkv_proj.weight)
        attended = attention.attend(qkv, kv_cache, step)
        ops.linear_add(attended, attention.o_proj.weight, residual)
        weight = self.post_attention_layernorm.weight
        hidden = ops.norm_swiglu(residual, weight, self.eps, mlp.gate_up_proj.weight)
        ops.linear_add(hidden, mlp.down_proj.weight, residual)


class Qwen3VLLanguageModel(nn.Module):
    """See `models.base.CausalLM`."""

    def __init__(self, config: ModelSpec, backend: AttentionBackend, ops: Ops) -> None:
        super().__init__()
        text = config.text
        self.ops = ops
        self._has_biases = text.qkv_bias or text.o_bias or text.mlp_bias
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.rope = RotaryEmbedding(text.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(text, backend, ops) for _ in range(text.num_layers)
        )
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps)
        tied = text.tie_word_embeddings
        self.lm_head = None if tied else Linear(text.hidden_size, text.vocab_size)
        self.weight_map = WeightMap(
            prefixes={"": config.checkpoint.text_prefix}
            | ({} if tied else {"lm_head.": "lm_head."}),
            ignored=frozenset({"lm_head.weight"}) if tied else frozenset(),
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Whether fused operations may read every weight; known after loading."""
        return all(part.is_plain for part in self.modules() if isinstance(part, Linear))

    @property
    def max_few_tokens(self) -> int:
        """Up to so many tokens, a layer's GEMMs take their neighbours with them."""
        return self.ops.max_few_tokens if self._is_plain else 0

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        visual: VisualInput | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM."""
        residual = F.embedding(input_ids, self.embed_tokens.weight)
        rope, kv_rows = self.ops.rope_and_rows(
            positions, metadata.slot_mapping, self.rope, residual.dtype, kv_cache.shape[3]
        )
        may_fuse = visual is None and not self._has_biases
        step = StepContext(rope, kv_rows, metadata, self._is_plain and may_fuse)
        norm = self.norm
        if may_fuse and len(residual) <= self.max_few_tokens:
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, DecoderLayer)
                layer.forward_few(residual, kv_cache[index], step)
            wanted = residual if rows is None else residual[rows]
            return self.ops.rms_norm(wanted, norm.weight, norm.eps)
        if visual is not None:
            visual.replace(residual)
        x: Tensor | None = None
        added, final = False, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            added = visual is not None and index + 1 < visual.num_levels
            # Nobody attends to what comes of the last layer.
            early = rows if index == final and not added else None
            x, residual = layer(x, residual, kv_cache[index], step, early)
            if visual is not None and added:
                residual = residual if x is None else residual + x
                visual.add(residual, index + 1)
                x = None
        if added and rows is not None:  # after the last layer
            residual = residual[rows]
        return add_norm(x, residual, norm, self.ops)[0]

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See CausalLM."""
        if self.lm_head is not None and not self.lm_head.is_plain:
            found = self.lm_head(hidden)
            return found if out is None else out.copy_(found)
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if len(hidden) <= self.max_few_tokens:
            return self.ops.linear(hidden, weight, out=out)
        return torch.mm(hidden, weight.t(), out=out)
