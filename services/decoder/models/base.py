"""The types that all layers of a language model share: a step's context, and a layer's mixer."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.attention.base import AttentionMetadata
from services.decoder.models.stream import Stream
from services.decoder.operations.ops import Ops
from services.decoder.operations.step_kernels import StepKernels


@dataclass(frozen=True, slots=True)
class StepContext:
    """The values that all layers share in one forward pass.

    Attributes:
        ops: operations of the model.
        kernels: kernels for the step's number of tokens.
        rope: cos and sin, `[T, rotary_dim / 2]` each.
        kv_cache: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`, cache of the
            full attention layers.
        kv_rows: `[2, T]`, places of the step's keys and values in the cache.
        metadata: layout of the step for attention.
    """

    ops: Ops
    kernels: StepKernels
    rope: tuple[Tensor, Tensor]
    kv_cache: Tensor
    kv_rows: Tensor
    metadata: AttentionMetadata


class Mixer(Protocol):
    """The part of a layer that mixes tokens, up to its output projection; a module.

    Attributes:
        name: name of the module in the files of checkpoints.
    """

    name: str

    @property
    def output(self) -> Linear:
        """The projection back to the residual stream."""
        ...

    def __call__(self, stream: Stream, norm: RMSNorm, step: StepContext) -> tuple[Tensor, Tensor]:
        """Returns the input of `output`, and the hidden state.

        Args:
            stream: residual stream before the layer.
            norm: norm that the mixer applies to the hidden state first.
            step: context of the step.
        """
        ...
