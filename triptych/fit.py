"""Computes whether a model fits a card before any process starts, and suggests what would fit.

A decoder measures its largest step when it starts and gives the remaining memory to the KV cache.
Here only lower bounds are known: weights, recurrent states and the KV cache of one request. A
decoder whose lower bound exceeds the memory cannot start, and `checks` refuses it with a
suggestion. `layout` divides cards by the same sizes.
"""

from dataclasses import dataclass, replace

from services.common.model_spec import ModelSpec, TextSpec, TowerSpec

GIB = 1 << 30
BLOCK_TOKENS = 16  # tokens of a block of the KV cache
# CUDA's context, libraries, kernels and graph nodes. The decoder's kv_cache.py reserves the same.
RESERVED_BYTES = 5 << 28
_STEP_TOKENS = 8192  # tokens of the longest step on a GPU
_LAYER_VALUES = 6  # hidden states per token that are alive at the same time in a layer
_SAMPLER_COPIES = 3  # float32 copies of the logits in the sampler


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a decoder needs of a card, in bytes.

    Attributes:
        weights: size of the weights in the served precision.
        states: size of the recurrent states of running sequences with linear attention.
        token: size of a token's keys and values in the KV cache.
        step: estimated memory of the largest step.
    """

    weights: int
    states: int
    token: int
    step: int

    def of_rank(self, ranks: int, num_kv_heads: int) -> "Need":
        """Approximate need of one of several ranks. Each rank in fact has whole embeddings."""
        return replace(
            self,
            weights=self.weights // ranks,
            states=self.states // ranks,
            token=self.token // min(ranks, num_kv_heads),
        )

    def least(self, tokens: int) -> int:
        """Least memory to start with, for one request of `tokens` tokens and without the step."""
        return self.weights + self.states + RESERVED_BYTES + (tokens + BLOCK_TOKENS) * self.token

    def tokens_in(self, num_bytes: float) -> int:
        """Approximate number of tokens of the KV cache if the decoder has `num_bytes` bytes."""
        left = num_bytes - self.weights - self.states - RESERVED_BYTES - self.step
        return max(0, int(left // self.token) // BLOCK_TOKENS * BLOCK_TOKENS)


def decoder_need(
    text: TextSpec, weights: int, itemsize: int, max_num_seqs: int, *, fp8_cache: bool = False
) -> Need:
    """Computes the memory that a decoder needs.

    Args:
        text: spec of the language model.
        weights: size of the weights in bytes.
        itemsize: bytes of a value of the served data type.
        max_num_seqs: largest number of running sequences.
        fp8_cache: True if keys and values are stored in one byte each.
    """
    token = 2 * text.num_kv_heads * text.head_dim * len(text.attention_layers)
    token *= 1 if fp8_cache else itemsize
    states = 0
    if (linear := text.linear_attention) is not None:
        values = linear.conv_width * linear.num_channels * itemsize
        slot = values + 4 * linear.value_size * linear.key_head_dim
        states = (max_num_seqs + 1) * slot * len(text.linear_layers)
    inner = text.intermediate_size
    if text.moe is not None:
        inner = text.moe.top_k * text.moe.intermediate_size + text.moe.shared_intermediate_size
    step = _STEP_TOKENS * (_LAYER_VALUES * text.hidden_size + 2 * inner) * itemsize
    step += max_num_seqs * text.vocab_size * 4 * _SAMPLER_COPIES
    return Need(weights, states, token, step)


def text_parameters(text: TextSpec) -> tuple[int, int]:
    """Numbers of parameters of the language model.

    Returns:
        Parameters of the linear layers, and other parameters (embeddings, head, norms), which no
        format quantizes.
    """
    hidden, head = text.hidden_size, text.head_dim
    queries = text.num_heads * head * (2 if text.output_gate else 1)
    attention = hidden * (queries + 2 * text.num_kv_heads * head) + text.num_heads * head * hidden
    linear = attention * len(text.attention_layers)
    other = text.vocab_size * hidden * (1 if text.tie_word_embeddings else 2)
    if (delta := text.linear_attention) is not None:
        inputs = delta.num_channels + delta.value_size
        linear += (inputs * hidden + delta.value_size * hidden) * len(text.linear_layers)
        gates = 2 * delta.num_value_heads * hidden + delta.conv_width * delta.num_channels
        other += gates * len(text.linear_layers)
    for layer in range(text.num_layers):
        if text.moe is None or not text.has_experts(layer):
            linear += 3 * hidden * text.intermediate_size
        else:
            moe = text.moe
            inner = moe.num_experts * moe.intermediate_size + moe.shared_intermediate_size
            linear += 3 * hidden * inner
            other += moe.num_experts * hidden
        other += 2 * hidden
    return linear, other + hidden


def tower_parameters(tower: TowerSpec) -> int:
    """Approximate number of parameters of a vision tower, without biases, norms and positions."""
    hidden = tower.hidden_size
    block = tower.block_weights
    merged = hidden * tower.spatial_merge_size**2
    merger = merged * merged + merged * tower.out_hidden_size
    patch = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2 * hidden
    return tower.depth * block + tower.num_features * merger + patch


def dummy_bytes(spec: ModelSpec, itemsize: int) -> tuple[int, int]:
    """Bytes of random weights of the language model and of the vision tower."""
    linear, other = text_parameters(spec.text)
    quantization = spec.checkpoint.quantization
    bits = 8 * itemsize if quantization is None else quantization.bits
    tower = 0 if spec.vision is None else tower_parameters(spec.vision.tower) * itemsize
    return linear * bits // 8 + other * itemsize, tower


def gib(num_bytes: float) -> str:
    """Formats a size for people."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.0f} MiB"


def what_fits(
    need: Need,
    have: float,
    wanted: int | None,
    *,
    itemsize: int,
    quantized: bool,
    share: float,
    fp8_cache: bool = False,
) -> str:
    """Suggests what would fit if `need` exceeds the memory.

    Args:
        need: memory that the decoder needs.
        have: bytes that the decoder may use.
        wanted: number of tokens that the user asked for. None if the user did not set a number.
        itemsize: bytes of a value of the served data type.
        quantized: True if the checkpoint is quantized already.
        share: share of a card's memory that the decoder may use.
        fp8_cache: True if keys and values are stored in one byte already.
    """
    if (tokens := need.tokens_in(have)) > 0 and (wanted or 0) > tokens:
        narrow = replace(need, token=need.token // itemsize)
        narrower = not fp8_cache and narrow.tokens_in(have) >= (wanted or 0)
        return f"what fits: --max-model-len {tokens}" + "; or --kv-cache-dtype fp8" * narrower
    advice: list[str] = []
    if itemsize == 4:
        half = Need(need.weights // 2, need.states, need.token // 2, need.step // 2)
        if tokens := half.tokens_in(have):
            advice.append(f"--dtype bfloat16, with a KV cache of {tokens:,} tokens")
    if not quantized and itemsize < 4:
        eighth = Need(int(need.weights * 0.53), need.states, need.token, need.step)
        if tokens := eighth.tokens_in(have):
            about = f"about {gib(eighth.weights)}"
            advice.append(f"its FP8 checkpoint ({about}), with a KV cache of {tokens:,} tokens")
    if need.states:
        fewer = Need(need.weights, need.states // 8, need.token, need.step)
        if tokens := fewer.tokens_in(have):
            advice.append(
                f"an eighth of the sequences (--max-num-seqs), with a KV cache of {tokens:,} tokens"
            )
    if advice:
        return "what fits: " + "; or ".join(advice)
    card = gib((need.least(wanted or 0) + need.step) / share)
    return f"a card with {card} or more is needed, or a smaller model"
