"""The language model that all text families share.

The model is a pre-norm transformer. A layer mixes tokens with grouped-query attention (with or
without q/k norm) or with linear attention (`gated_delta_net`). SwiGLU (`mlp`) or a mixture of
experts (`moe`) follows. The differences between families are data in `TextSpec`: sizes, kinds of
layers, biases, rope, tied embeddings. With M-RoPE, positions have three axes. In a
vision-language model, an image's embedding replaces the embeddings of its placeholder tokens, and
its DeepStack features are added to the same tokens after the first decoder layers.

With tensor parallelism, each rank holds a part of the model: some heads, a share of the
intermediate size of each MLP and expert, and a part of the output head. Norms, routers and the
embedding table are whole on each rank. A layer declares which rows or columns of the checkpoint's
tensors it holds (`collectives.Share`). The output projections of attention and of the MLP give only
a part of the result on each rank. `row_parallel` sums these parts and adds the residual. Rank 0
collects the logits of all ranks. `rank_spec` computes the sizes of a rank's part.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from kernels.attention.heads import ProjectedHeads
from services.common.model_spec import ModelSpec, TextSpec
from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.layers import RMSNorm, embedding
from services.common.nn.linear import Linear
from services.common.nn.weight_map import WeightMap
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.models import layer_kind
from services.decoder.models.adapters import Adapters
from services.decoder.models.base import Mixer, StepContext, step_kernels
from services.decoder.models.mlp import MLP, row_parallel
from services.decoder.models.rope import RotaryEmbedding
from services.decoder.models.stream import Stream
from services.decoder.models.visual import VisualInput
from services.decoder.operations.ops import Ops


class Attention(nn.Module):
    """Grouped-query attention without its output projection, which the layer applies afterwards.

    Args:
        spec: sizes and options of the whole model.
        backend: implementation of paged attention.
        layer: index of the layer among those with full attention. It is the layer's index in the
            KV cache, because layers with linear attention have no keys and values.
        ranks: ranks that share the model's heads.

    Attributes:
        kv_heads: the heads of keys and values of this rank.
        kv_scales: scales of keys and values in an 8-bit cache (e4m3), see `heads.as_stored`. None
            if the cache has the model's data type, or if the scales are yet to be read or measured.
    """

    name = "self_attn"

    def __init__(self, spec: TextSpec, backend: AttentionBackend, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.backend, self.layer = backend, layer
        self.head_dim, self.gated = spec.head_dim, spec.output_gate
        query_rows = spec.head_dim * (1 + self.gated)  # A gated head has a gate behind its query.
        query = ranks.share(spec.num_heads, "num_heads", query_rows)
        heads = ranks.share(spec.num_heads, "num_heads", spec.head_dim)
        kv = ranks.share(spec.num_kv_heads, "num_kv_heads", spec.head_dim, replicated=True)
        parts = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(spec.hidden_size, parts, bias=spec.qkv_bias)
        self.o_proj = Linear(heads, spec.hidden_size, bias=spec.o_bias)
        self.eps = spec.rms_norm_eps
        self.q_norm = norm_of(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = norm_of(spec, spec.head_dim) if spec.qk_norm else None
        self.kv_heads = ranks.part(spec.num_kv_heads, "num_kv_heads", replicated=True)
        self.kv_scales: Tensor | None = None

    @property
    def output(self) -> Linear:
        return self.o_proj

    def forward(self, stream: Stream, norm: RMSNorm, step: StepContext) -> tuple[Tensor, Tensor]:
        """Computes attention, and writes the layer's keys and values to the cache; see `Mixer`.

        Returns:
            The output of attention, `[T, num_heads * head_dim]`, and the residual, `[T, hidden]`.
        """
        qkv, residual = stream.projected(norm, self.qkv_proj, step.kernels)
        return self._attend(qkv, step.kv_cache[self.layer], step), residual

    def _attend(self, qkv: Tensor, kv_cache: Tensor, step: StepContext) -> Tensor:
        """Returns the output of attention, `[T, num_heads * head_dim]`.

        Args:
            qkv: output of `qkv_proj`, `[T, N]`. If the GEMM was split along its inner dimension
                into P parts, this is `[P, T, N]`, and the kernel that reads `qkv` adds the parts.
            kv_cache: cache of this layer.
            step: context of the step.
        """
        metadata, kernels = step.metadata, step.kernels
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        scales = None if kv_cache.dtype == step.rope[0].dtype else self.kv_scales
        heads = ProjectedHeads(
            qkv=qkv,
            norms=norms,
            eps=self.eps,
            rope=step.rope,
            kv_cache=kv_cache,
            rows=step.kv_rows,
            gated=self.gated,
            kv_scales=scales,
        )
        if metadata.fused:
            return kernels.fused_decode_attention(
                heads, metadata.block_ids, metadata.first_blocks_device, metadata.seq_lens_device
            )
        # If `wants_keys_values`, the backend reads the keys and values of this step's tokens from a
        # separate tensor, not from the cache.
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
    """Creates an RMSNorm over `size` elements, with the epsilon and the form of the model."""
    return RMSNorm(size, spec.rms_norm_eps, zero_centred=spec.zero_centred_norms)


class DecoderLayer(nn.Module):
    """A decoder layer: a mixer (attention or linear attention) and an MLP, each behind a norm. Both
    add their output to the residual stream.

    Args:
        spec: sizes and options of the model.
        layer: index of the layer.
        mixer: attention or linear attention.
        ranks: ranks that share the model.
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
        """The mixer. It is a submodule under the name that checkpoints give it."""
        return getattr(self, self._mixer_name)

    def forward(self, stream: Stream, step: StepContext, rows: Tensor | None = None) -> Stream:
        """Returns the residual stream after the layer.

        Args:
            stream: the residual stream before the layer, of all T tokens.
            step: context of the step.
            rows: `[R]` int64, indices of the tokens for which the MLP is computed and the stream
                returned. The mixer always computes all T tokens, because later steps need their
                keys and values, or the recurrent states after them. None for all tokens.
        """
        kernels, mixer = step.kernels, self.mixer
        mixed, residual = mixer(stream, self.input_layernorm, step)
        if rows is not None:
            kernels = step.kernels_of(rows)
            mixed, residual = mixed[rows], residual[rows]  # kernels of torch, see `kernels_of`
        stream = row_parallel(mixed, mixer.output, residual, kernels, self.ranks)
        return self.mlp(stream, self.post_attention_layernorm, kernels)


class Transformer(nn.Module):
    """A language model. Its input is the T tokens of a step: the tokens of all sequences,
    concatenated. It is created on the device `meta`, and the loader then gives it weights.

    Args:
        spec: the whole model, of all ranks.
        backend: implementation of paged attention, for this rank's heads.
        ops: operations with the kernels that were chosen for this model and device.
        ranks: ranks that share the model. Only rank 0 gets whole logits.
    """

    def __init__(
        self, spec: ModelSpec, backend: AttentionBackend, ops: Ops, *, ranks: Ranks = ALONE
    ) -> None:
        super().__init__()
        text = spec.text
        self.ops, self.ranks = ops, ranks
        self.embed_tokens = embedding(text.vocab_size, text.hidden_size)
        self.adapters: Adapters | None = None  # set by the factory of runners
        self.rope = RotaryEmbedding(text.rope)
        # The gates of linear attention share a GEMM with its other projections. Quantized
        # checkpoints quantize these projections and not the gates, so there the gates have a GEMM
        # of their own.
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
        # Tied embeddings serve as the head, too. But a rank's head is a part of the vocabulary,
        # while its embedding table is whole, so with several ranks the head has weights of its own.
        if not tied or ranks.count > 1:
            rows = ranks.share(text.vocab_size, "vocab_size")
            self.lm_head = Linear(text.hidden_size, rows)
            table = f"{spec.checkpoint.text_prefix}embed_tokens."
            head = {"lm_head.": table if tied else "lm_head."}
        self.weight_map = WeightMap(
            prefixes={"": spec.checkpoint.text_prefix} | head,
            ignored=frozenset({"lm_head.weight"}) if tied else frozenset(),
            others=spec.checkpoint.vision_prefixes,
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        visual: VisualInput | None = None,
        rows: Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Runs the layers.

        Args:
            input_ids: `[T]` int32 or int64, token ids. Image tokens may have any valid id.
            positions: `[3, T]` integer positions (t, h, w). With 1-D positions all rows are equal.
            kv_cache: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`, cache of
                the full attention layers.
            metadata: layout of the step for attention.
            visual: embeddings of the image tokens. None if the step cannot have images.
            rows: `[R]` int64, indices of the tokens whose hidden states are returned. None for all
                tokens.
            adapters: adapters of the tokens. None if no token has one.

        Returns:
            Hidden states after the final norm, `[R, hidden]`.
        """
        residual = F.embedding(input_ids, self.embed_tokens.weight)
        rope, kv_rows = self.ops.rope_and_rows(
            positions, metadata.slot_mapping, self.rope, residual.dtype, kv_cache.shape[3]
        )
        if adapters is not None and self.adapters is not None:
            residual = self.adapters.embed(input_ids, residual, adapters)
        kernels = step_kernels(self.ops, len(residual), adapters)
        step = StepContext(
            ops=self.ops,
            kernels=kernels,
            rope=rope,
            kv_cache=kv_cache,
            kv_rows=kv_rows,
            metadata=metadata,
            adapters=adapters,
        )
        if visual is not None:
            visual.replace(residual)
        stream, last = Stream(residual), len(self.layers) - 1
        # Only the hidden states of `rows` are needed after the last layer, so its MLP runs for
        # these tokens alone. There is one exception, in very shallow models: if DeepStack features
        # are added after the last layer, its MLP runs for all tokens, because `visual` finds the
        # tokens of images by their index among all T tokens.
        adds_last = visual is not None and visual.adds_after(last)
        for index, layer in enumerate(self.layers):
            stream = layer(stream, step, rows if index == last and not adds_last else None)
            if visual is not None:
                stream = visual.deepstack(index, stream)
        if rows is not None:
            kernels = self.ops.for_tokens(len(rows))
            if adds_last:
                stream = Stream(stream.residual[rows])
        normed, _ = stream.normed(self.norm, kernels)
        return normed

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, adapters: AdapterRows | None = None
    ) -> Tensor:
        """Returns the logits `[R, vocab_size]` of hidden states, in the model's data type.

        Args:
            hidden: `[R, hidden]`, hidden states of the tokens after which a token is sampled.
            out: `[R, vocab_size]`, tensor for the logits. None if a new tensor is created.
            adapters: adapters of these tokens. None if no token has one.
        """
        if self.ranks.count == 1 and adapters is None:
            return self._logits(hidden, out=out)
        found = self._logits(hidden)
        if adapters is not None and self.adapters is not None:
            found = self.adapters.logits(hidden, found, adapters)
        return self.ranks.gather(found, out) if self.ranks.count > 1 else found

    def _logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Returns the logits of this rank's part of the vocabulary."""
        head = self.lm_head
        if head is None:
            return self.ops.logits(hidden, self.embed_tokens.weight, out=out)
        if head.is_plain:
            return self.ops.logits(hidden, head.weight, out=out)
        found = head(hidden)
        return found if out is None else out.copy_(found)
