"""The language model that all text families share.

A pre-norm transformer: grouped-query attention with or without q/k norm, or linear attention
(`gated_delta_net`), then SwiGLU (`mlp`) or a mixture of experts (`moe`). What differs between
families is data in `TextSpec`: sizes, layer kinds, biases, rope, tied embeddings. With M-RoPE
positions have three axes; with image embeddings the vision tower's DeepStack features are added to
the visual tokens after the first decoder layers.

Tensor parallelism. A rank holds heads (of attention and of linear attention), a share of each MLP's
and expert's intermediate size, and a part of the vocabulary; norms, routers and the embedding table
are whole on each. Layers say which rows or columns of the files they hold (`collectives.Share`). A
rank's `o_proj` and `down_proj` give a term of a sum, and `row_parallel` is where the all-reduce
belongs: between the GEMM and the residual addition. Rank 0 gets the logits of all. `rank_spec` has
the sizes that are left.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from kernels import plain
from kernels.attention.heads import ProjectedHeads
from services.common.model_spec import ModelSpec, TextSpec
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.layers import RMSNorm, embedding
from services.common.nn.linear import Linear
from services.common.nn.weight_map import WeightMap
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.models import layer_kind
from services.decoder.models.base import Mixer, StepContext, VisualInput
from services.decoder.models.mlp import MLP, row_parallel
from services.decoder.models.rope import RotaryEmbedding
from services.decoder.operations.ops import Ops


class Attention(nn.Module):
    """Grouped-query attention, up to its output projection.

    Args:
        layer: index among the full attention layers, whose keys and values are cached.
        ranks: that share the model, by heads.
    """

    name = "self_attn"

    def __init__(self, spec: TextSpec, backend: AttentionBackend, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.backend, self.layer = backend, layer
        self.head_dim, self.gated = spec.head_dim, spec.output_gate
        rows = spec.head_dim * (1 + self.gated)  # of a head's query, and of its gate after it
        query = ranks.share(spec.num_heads, "num_heads", rows)
        heads = ranks.share(spec.num_heads, "num_heads", spec.head_dim)
        kv = ranks.share(spec.num_kv_heads, "num_kv_heads", spec.head_dim, replicated=True)
        parts = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(spec.hidden_size, parts, bias=spec.qkv_bias)
        self.o_proj = Linear(heads, spec.hidden_size, bias=spec.o_bias)
        self.eps = spec.rms_norm_eps
        self.q_norm = norm_of(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = norm_of(spec, spec.head_dim) if spec.qk_norm else None
        self.kv_heads = ranks.part(spec.num_kv_heads, "num_kv_heads", replicated=True)
        self.kv_scales: Tensor | None = None  # of a cache in e4m3, see `heads.as_stored`

    @property
    def output(self) -> Linear:
        return self.o_proj

    def forward(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """See `Mixer`: `[T, H * D]`, and the hidden state; writes this layer's keys and values."""
        qkv, residual = step.kernels.norm_linear(x, residual, norm, self.qkv_proj)
        return self._attend(qkv, step.kv_cache[self.layer], step), residual

    def _attend(self, qkv: Tensor, kv_cache: Tensor, step: StepContext) -> Tensor:
        """From `qkv_proj`'s output, or split-K partials of it, to `[T, H * D]`."""
        metadata, kernels = step.metadata, step.kernels
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        scales = None if kv_cache.dtype == step.rope[0].dtype else self.kv_scales
        heads = ProjectedHeads(
            qkv, norms, self.eps, step.rope, kv_cache, step.kv_rows, self.gated, scales
        )
        if metadata.fused:
            return kernels.fused_decode_attention(
                heads, metadata.block_ids, metadata.first_blocks_device, metadata.seq_lens_device
            )
        keys_values = None
        if metadata.wants_keys_values:
            num_kv_heads, head_dim = kv_cache.shape[-2:]
            keys_values = step.rope[0].new_empty(qkv.shape[-2], 2 * num_kv_heads, head_dim)
        gates = None
        if self.gated:
            num_heads = self.o_proj.in_features // self.head_dim
            gates = step.rope[0].new_empty(qkv.shape[-2], num_heads, self.head_dim)
        query = kernels.qk_rope_cache(heads, keys_values, gates)
        attended = self.backend.forward(query, kv_cache, metadata, keys_values, scales)
        if gates is not None:
            attended = kernels.output_gate(attended, gates)
        return attended.flatten(1)


def norm_of(spec: TextSpec, size: int) -> RMSNorm:
    """A norm over `size` elements as the model has them."""
    return RMSNorm(size, spec.rms_norm_eps, zero_centred=spec.zero_centred_norms)


class DecoderLayer(nn.Module):
    """A mixer of tokens and an MLP around a residual stream.

    A projection's addition to the stream is left to the next norm, which fuses with it, unless the
    GEMM itself has added: a layer takes and returns `(x, residual)`, whose sum is the hidden state.
    x may be None, or split-K partials.
    """

    def __init__(self, spec: TextSpec, layer: int, mixer: Mixer, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.input_layernorm = norm_of(spec, spec.hidden_size)
        self._mixer_name = mixer.name
        self.add_module(mixer.name, cast(nn.Module, mixer))
        self.post_attention_layernorm = norm_of(spec, spec.hidden_size)
        self.mlp = (
            layer_kind("experts")(spec, ranks)
            if spec.has_experts(layer)
            else MLP(spec, spec.intermediate_size, ranks)
        )

    @property
    def mixer(self) -> Mixer:
        """What mixes tokens; registered under the checkpoint's name of its kind."""
        return getattr(self, self._mixer_name)

    def forward(
        self, x: Tensor | None, residual: Tensor, step: StepContext, rows: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """The layer's output for all tokens, or for those of `rows` `[R]`; all tokens leave their
        keys and values, or change the recurrent states.
        """
        kernels, mixer = step.kernels, self.mixer
        mixed, residual = mixer(x, residual, self.input_layernorm, step)
        if rows is not None:
            mixed, residual = mixed[rows], residual[rows]
            kernels = step.ops.for_tokens(len(rows))
        x = row_parallel(mixed, mixer.output, residual, kernels, self.ranks)
        return self.mlp(x, residual, self.post_attention_layernorm, kernels)


class Transformer(nn.Module):
    """A language model over a ragged batch of T tokens. Built on `meta`, then loaded.

    Args:
        spec: of the whole model.
        backend: for this rank's heads.
        ops: resolved for the number of ranks.
        ranks: that share the model; `logits` are whole on rank 0 alone.
    """

    def __init__(
        self, spec: ModelSpec, backend: AttentionBackend, ops: Ops, *, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        text = spec.text
        self.ops, self.ranks = ops, ranks
        self.embed_tokens = embedding(text.vocab_size, text.hidden_size)
        self.rope = RotaryEmbedding(text.rope)
        merge_gates = spec.checkpoint.quantization is None
        mixers: dict[int, Mixer] = {}
        for number, index in enumerate(text.attention_layers):
            mixers[index] = Attention(text, backend, number, ranks)
        for number, index in enumerate(text.linear_layers):
            linear = layer_kind("linear_attention")
            mixers[index] = linear(text, number, ranks, merge_gates=merge_gates)
        self.layers = nn.ModuleList(
            DecoderLayer(text, layer, mixers[layer], ranks) for layer in range(text.num_layers)
        )
        self.norm = norm_of(text, text.hidden_size)
        tied = text.tie_word_embeddings
        self.lm_head: Linear | None = None
        head: dict[str, str] = {}
        if not tied or ranks.count > 1:
            rows = ranks.share(text.vocab_size, "vocab_size")
            self.lm_head = Linear(text.hidden_size, rows)
            table = f"{spec.checkpoint.text_prefix}embed_tokens."
            head = {"lm_head.": table if tied else "lm_head."}
        self.weight_map = WeightMap(
            prefixes={"": spec.checkpoint.text_prefix} | head,
            ignored=frozenset({"lm_head.weight"}) if tied else frozenset(),
            others=spec.checkpoint.vision_prefix,
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        visual: VisualInput | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Runs the layers.

        Args:
            input_ids: `[T]` int32 or int64; any valid id at visual tokens.
            positions: `[3, T]` integer: (t, h, w); with 1-D positions all rows are equal.
            kv_cache: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`, of full
                attention layers.
            visual: embeddings of the step's image tokens.
            rows: `[R]` int64, the tokens whose hidden states are returned; None: all.

        Returns:
            `[R, hidden]`, after the final norm.
        """
        residual = F.embedding(input_ids, self.embed_tokens.weight)
        rope, kv_rows = self.ops.rope_and_rows(
            positions, metadata.slot_mapping, self.rope, residual.dtype, kv_cache.shape[3]
        )
        kernels = self.ops.for_tokens(len(residual))
        step = StepContext(self.ops, kernels, rope, kv_cache, kv_rows, metadata)
        if visual is not None:
            visual.replace(residual)
        x: Tensor | None = None
        added, final = False, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            added = visual is not None and index + 1 < visual.num_features
            # No token attends to what the last layer computes.
            early = rows if index == final and not added else None
            x, residual = layer(x, residual, step, early)
            if visual is not None and added:
                if x is not None:
                    residual = residual + plain.reduce_split_k(x, residual.dtype)
                visual.add(residual, index + 1)
                x = None
        if added and rows is not None:  # after the last layer
            residual = residual[rows]
        if rows is not None:
            kernels = self.ops.for_tokens(len(rows))
        return kernels.add_norm(x, residual, self.norm)[0]

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[R, hidden]` of the rows that are sampled → `[R, vocab_size]`, in the model's dtype;
        written to `out`, if given.
        """
        if self.ranks.count > 1:
            return self.ranks.gather(self._logits(hidden), out)
        return self._logits(hidden, out=out)

    def _logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Those of the rank's part of the vocabulary."""
        head = self.lm_head
        if head is None:
            return self.ops.logits(hidden, self.embed_tokens.weight, out=out)
        if head.is_plain:
            return self.ops.logits(hidden, head.weight, out=out)
        found = head(hidden)
        return found if out is None else out.copy_(found)
