"""The fused operations, gathered. Imported only where Triton is."""

import torch

from services.common.model_spec import TextSpec
from services.common.nn.linear import add_product, multiply
from services.decoder.kernels import (
    add_norm,
    draw,
    few_tokens,
    greedy,
    penalties,
    prompt_swiglu,
    qk_rope_cache,
    silu_mul,
    small_batch,
    step_entry,
)
from services.decoder.kernels.few_attention import FewAttention
from services.decoder.kernels.overlap import overlaps


class TritonOps:
    """See `ops.Ops`."""

    pick_tokens = staticmethod(step_entry.pick_tokens)
    rope_and_rows = staticmethod(step_entry.rope_and_rows)
    rms_norm = staticmethod(add_norm.rms_norm)
    add_rms_norm = staticmethod(add_norm.add_rms_norm)
    silu_and_mul = staticmethod(silu_mul.silu_and_mul)
    qk_rope_cache = staticmethod(qk_rope_cache.qk_rope_cache)
    greedy = staticmethod(greedy.greedy)
    draw = staticmethod(draw.draw)
    penalize = staticmethod(penalties.penalize)
    count_tokens = staticmethod(penalties.count_tokens)
    linear_parts = staticmethod(small_batch.linear_parts)
    linear = staticmethod(few_tokens.linear)
    norm_linear = staticmethod(few_tokens.norm_linear)
    norm_swiglu = staticmethod(few_tokens.norm_swiglu)
    linear_add = staticmethod(few_tokens.linear_add)

    def __init__(
        self, max_few_tokens: int, few_attention: FewAttention, max_small_batch: int = 0
    ) -> None:
        self.max_few_tokens = max_few_tokens
        self.attend_few = few_attention
        self._max_small_batch = max_small_batch

    def max_fused_context(self, num_tokens: int) -> int:
        """See `ops.Ops`."""
        return self.attend_few.max_context(num_tokens) if num_tokens <= self.max_few_tokens else 0

    def is_small_batch(self, x: torch.Tensor) -> bool:
        """See `ops.Ops`. Tensor cores would round float32."""
        return len(x) <= self._max_small_batch and x.itemsize == 2

    def add_product(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> bool:
        """See `ops.Ops`."""
        return add_product(x, weight, None, residual)

    def linear_swiglu(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `ops.Ops`: by the kernel that is the fastest for so many tokens."""
        if self.is_small_batch(x):
            return small_batch.linear_swiglu(x, weight)
        if overlaps() and prompt_swiglu.gains(x, weight):
            return prompt_swiglu.linear_swiglu(x, weight)
        return silu_mul.silu_and_mul(multiply(x, weight))


def create_triton_ops(device: torch.device, config: TextSpec) -> TritonOps:
    """The operations for a model of these sizes."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    # Rows and columns of q/k/v, output, gate and up, down.
    weights = (
        (qkv_size, hidden), (hidden, query_size), (2 * intermediate, hidden), (hidden, intermediate)
    )  # fmt: skip
    small = overlaps() and all(small_batch.count_parts(*sizes) for sizes in weights)
    return TritonOps(
        few_tokens.MAX_TOKENS if few_tokens.fits(hidden, intermediate, query_size) else 0,
        FewAttention(device, config.num_heads, config.num_kv_heads, config.head_dim),
        small_batch.MAX_TOKENS if small else 0,
    )
