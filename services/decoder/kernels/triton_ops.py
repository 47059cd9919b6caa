"""The fused operations, gathered. Imported only where Triton is."""

import torch

from services.common.model_config import TextConfig
from services.decoder.kernels import (
    add_norm,
    few_tokens,
    greedy,
    linear_parts,
    qk_rope_cache,
    silu_mul,
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
    linear_parts = staticmethod(linear_parts.linear_parts)
    linear = staticmethod(few_tokens.linear)
    norm_linear = staticmethod(few_tokens.norm_linear)
    norm_swiglu = staticmethod(few_tokens.norm_swiglu)
    linear_add = staticmethod(few_tokens.linear_add)

    def __init__(
        self, max_few_tokens: int, few_attention: FewAttention, *, in_parts: bool = False
    ) -> None:
        self.max_few_tokens = max_few_tokens
        self.attend_few = few_attention
        self._in_parts = in_parts

    def max_fused_context(self, num_tokens: int) -> int:
        """See `ops.Ops`."""
        return self.attend_few.max_context(num_tokens) if num_tokens <= self.max_few_tokens else 0

    def in_parts(self, x: torch.Tensor) -> bool:
        """See `ops.Ops`. Tensor cores would round float32."""
        return self._in_parts and len(x) <= linear_parts.MAX_TOKENS and x.itemsize == 2


def create_triton_ops(device: torch.device, config: TextConfig) -> TritonOps:
    """The operations for a model of these sizes."""
    query_size = config.num_heads * config.head_dim
    widths = (config.hidden_size, config.intermediate_size, query_size)
    qkv_size = query_size + 2 * config.num_kv_heads * config.head_dim
    products = ((qkv_size, widths[0]), (widths[0], query_size), (widths[0], widths[1]))
    return TritonOps(
        few_tokens.MAX_TOKENS if few_tokens.fits(*widths) else 0,
        FewAttention(device, config.num_heads, config.num_kv_heads, config.head_dim),
        in_parts=overlaps() and all(linear_parts.count_parts(*sizes) for sizes in products),
    )
