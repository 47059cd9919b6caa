"""The facts that decide which of the decoder's kernels run: of device, model and weights.

`table` resolves its rows by these facts.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.attention.attention_tuning import AttentionFacts
from kernels.device import DeviceFacts
from kernels.launches import launch_hiding_tokens
from services.common.model_spec import TextSpec

# Weight format of unquantized layers, as in `LinearMethod.weight_format`.
UNQUANTIZED = "plain"


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The facts that decide which kernels run.

    Attributes:
        device: facts of the device.
        text: sizes and options of the model, or of one rank's part.
        dtype: data type of weights, activations and the KV cache.
        weight_format: weight format of the linear layers, see `LinearMethod`.
        num_ranks: number of ranks that share the model by tensor parallelism.
    """

    device: DeviceFacts
    text: TextSpec
    dtype: torch.dtype
    weight_format: str = UNQUANTIZED
    num_ranks: int = 1

    @property
    def pdl(self) -> int:
        """Mode of programmatic dependent launch of kernels without a quantized format.

        0 if the device has no dependent launch, otherwise 1 or 2, see
        `dependent_launch.wait_for_earlier`. With mode 2, a step of 64 decodes of the 2B model takes
        2.7 % less time than with mode 1, but a single decode of the 8B model in W4A16 takes 23 %
        more.
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

    @property
    def launch_hiding_tokens(self) -> int:
        """Number of tokens from which an eager step hides its launches, see `launches`.

        Formats of fewer bits take about half of the time for a token and launch more kernels, so
        that their steps need twice as many tokens.
        """
        text, moe = self.text, self.text.moe
        width = text.intermediate_size
        if moe is not None:
            width = moe.top_k * moe.intermediate_size + moe.shared_intermediate_size
        weights = text.hidden_size * (self.qkv_size + self.query_size + 3 * width)
        is_quantized = self.weight_format != UNQUANTIZED
        return launch_hiding_tokens(weights // 2 if is_quantized else weights)


def attention_facts(
    facts: KernelFacts,
    *,
    block_size: int = 16,
    **others: Any,  # noqa: ANN401 - fields of several types
) -> AttentionFacts:
    """Returns the facts that select attention kernels.

    Args:
        facts: facts of device, model and weights.
        block_size: tokens per KV block. Fused operations do not depend on it.
        others: further fields of `AttentionFacts`, on which fused operations do not depend.
    """
    text = facts.text
    return AttentionFacts(
        device=facts.device,
        dtype=facts.dtype,
        num_heads=text.num_heads,
        num_kv_heads=text.num_kv_heads,
        head_dim=text.head_dim,
        block_size=block_size,
        rotary_dim=text.rope.rotary_dim,
        launch_hiding_tokens=facts.launch_hiding_tokens,
        **others,
    )
