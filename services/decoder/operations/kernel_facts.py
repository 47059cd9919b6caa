"""What decides which of the decoder's kernels run: facts of the device, the model and its weights.

`table` resolves its rows from them.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.attention_tuning import AttentionFacts
from kernels.device import DeviceFacts
from services.common.model_spec import TextSpec

UNQUANTIZED = "plain"  # as `LinearMethod.weight_format`


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What decides which kernels run.

    Attributes:
        text: the model's sizes and options.
        dtype: of weights, activations and the KV cache.
        weight_format: of the linear layers, see `LinearMethod`.
        num_ranks: that share the model by tensor parallelism.
    """

    device: DeviceFacts
    text: TextSpec
    dtype: torch.dtype
    weight_format: str = UNQUANTIZED
    num_ranks: int = 1

    @property
    def pdl(self) -> int:
        """How kernels that are not of a quantized format let the next one start, see
        `dependent_launch.wait_for_earlier`. A step of 64 decodes of the 2B takes 2.7 % less time by
        2 than by 1, but one decode of the 8B in W4A16 takes 23 % more.
        """
        early = self.weight_format == UNQUANTIZED
        return self.device.supports_pdl * (2 if early else 1)

    @property
    def query_size(self) -> int:
        """Columns of the output projection."""
        return self.text.num_heads * self.text.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the merged q, k and v projection."""
        gates = self.query_size if self.text.output_gate else 0
        return self.query_size + gates + 2 * self.text.num_kv_heads * self.text.head_dim

    @property
    def residual_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(N, K) of the projections that add to the residual stream: output, down."""
        hidden = self.text.hidden_size
        return (hidden, self.query_size), (hidden, self.text.intermediate_size)

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        """(N, K) of the merged gate and up projection."""
        return 2 * self.text.intermediate_size, self.text.hidden_size


def attention_facts(
    facts: KernelFacts,
    *,
    block_size: int = 16,
    **others: Any,  # noqa: ANN401 - of each its own type
) -> AttentionFacts:
    """The facts that select attention kernels; `others` are those on which fused operations do not
    depend, as they do not on `block_size`.
    """
    text = facts.text
    return AttentionFacts(
        device=facts.device, dtype=facts.dtype, num_heads=text.num_heads,
        num_kv_heads=text.num_kv_heads, head_dim=text.head_dim, block_size=block_size,
        rotary_dim=text.rope.rotary_dim, **others,
    )  # fmt: skip
