"""The layer for multi-token prediction (MTP) of Qwen3.5, which drafts tokens.

It is one decoder layer with full attention. For position i it reads the embedding of token i + 1
and the target's hidden state of token i after the final norm:

    x = fc(concat(norm_e(embedding of token i + 1), norm_h(hidden state of token i)))
    m = norm(layer(x))

The target's head makes logits of token i + 2 of m. For a further draft, m takes the place of the
hidden state. Rotary positions are those of token i. The layer's keys and values are one more layer
of the KV cache.
"""

import torch
from torch import Tensor, nn

from kernels.attention.heads import ProjectedHeads
from services.common.model_spec import ModelSpec
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.linear import Linear
from services.decoder.attention.base import AttentionBackend
from services.decoder.models.base import StepContext
from services.decoder.models.stream import Stream
from services.decoder.models.transformer import Attention, DecoderLayer, Transformer, norm_of

# Format of an output layer's copy whose best tokens are compared by the model's own weights.
COARSE = "w4a16"
# The most tokens for which that copy is read: its kernel reads it again for each further 64.
_COARSE_TOKENS = 64


class DraftAttention(Attention):
    """Attention that can also store keys and values without attending."""

    def store(self, x: Tensor, layer: DecoderLayer, step: StepContext) -> None:
        """Writes keys and values of tokens to the cache.

        Args:
            x: `[T, hidden]`, residual stream before the layer.
            layer: the layer of this attention.
            step: context of the step.
        """
        qkv, _ = Stream(x).projected(layer.input_layernorm, self.qkv_proj, step.kernels)
        assert self.q_norm is not None and self.k_norm is not None
        cache = step.kv_cache[self.layer]
        heads = ProjectedHeads(
            qkv=qkv,
            norms=(self.q_norm.weight, self.k_norm.weight),
            eps=self.eps,
            rope=step.rope,
            kv_cache=cache,
            rows=step.kv_rows,
            gated=self.gated,
            kv_scales=None if cache.dtype == step.rope[0].dtype else self.kv_scales,
        )
        gates = None
        if self.gated:
            num_heads = self.o_proj.in_features // self.head_dim
            gates = x.new_empty(len(x), num_heads, self.head_dim)
        step.kernels.qk_rope_cache(heads, None, gates)


class DraftHead(nn.Module):
    """The MTP layer, created on the device `meta` as a part of the language model.

    Args:
        spec: the whole model.
        backend: implementation of paged attention.
        ranks: ranks that share the model. Each has the whole of `fc`.

    Attributes:
        lm_head: copy of the model's output layer in 4 or 8 bits, which is read for each draft. None
            if the model's own output layer is used.
    """

    def __init__(self, spec: ModelSpec, backend: AttentionBackend, ranks: Ranks = ALONE) -> None:
        super().__init__()
        text = spec.text
        hidden = text.hidden_size
        self.fc = Linear(2 * hidden, hidden)
        self.pre_fc_norm_embedding = norm_of(text, hidden)
        self.pre_fc_norm_hidden = norm_of(text, hidden)
        attention = DraftAttention(text, backend, len(text.attention_layers), ranks)
        last = text.num_layers - 1
        self.layers = nn.ModuleList([DecoderLayer(text, last, attention, ranks)])
        self.norm = norm_of(text, hidden)
        self.lm_head: Linear | None = None  # set by `draft_head_files.round_output`

    @property
    def layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    @property
    def attention(self) -> DraftAttention:
        mixer = self.layer.mixer
        assert isinstance(mixer, DraftAttention)
        return mixer

    def inputs(self, embedded: Tensor, hidden: Tensor, step: StepContext) -> Tensor:
        """Returns the residual stream before the layer, `[T, hidden]`.

        Args:
            embedded: `[T, hidden]`, embeddings of the tokens behind the positions.
            hidden: `[T, hidden]`, hidden states of the positions after the final norm, or the
                outputs of this layer for the drafts before.
            step: context of the step.
        """
        one, _ = step.kernels.add_norm(None, embedded, self.pre_fc_norm_embedding)
        other, _ = step.kernels.add_norm(None, hidden, self.pre_fc_norm_hidden)
        return self.fc(torch.cat((one, other), dim=-1))

    def store(self, x: Tensor, step: StepContext) -> None:
        """Writes the layer's keys and values of positions to the cache; see `inputs` for `x`."""
        self.attention.store(x, self.layer, step)

    def logits(self, hidden: Tensor, model: Transformer) -> Tensor:
        """Returns logits `[T, vocab_size]` of outputs of this layer. Rank 0 alone may use them.

        Args:
            hidden: `[T, hidden]`, outputs of this layer.
            model: the language model, whose output layer is used if the head lacks one.
        """
        if self.lm_head is None:
            return model.logits(hidden)
        found = self.lm_head(hidden)
        return model.ranks.gather(found) if model.ranks.count > 1 else found

    def most_likely(self, hidden: Tensor, model: Transformer) -> Tensor:
        """Returns the most likely tokens `[T]` int32 after outputs of this layer, see `logits`.

        A copy of the output layer in 4 bits only finds candidates: the model's own weights decide
        among them.
        """
        if self.lm_head is None or self.lm_head.weight_format != COARSE:
            return model.ops.greedy(self.logits(hidden, model))
        if len(hidden) > _COARSE_TOKENS:
            return model.ops.greedy(model.logits(hidden))
        own = model.embed_tokens if model.lm_head is None else model.lm_head
        return model.ops.greedy_rescored(self.lm_head(hidden), hidden, own.weight)

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """Returns the outputs `[T, hidden]` after the layer's own norm; see `inputs` for `x`."""
        normed, _ = self.layer(Stream(x), step).normed(self.norm, step.kernels)
        return normed
