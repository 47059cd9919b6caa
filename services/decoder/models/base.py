"""The types that all layers of a language model share: a step's context, and a layer's mixer."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.attention.base import AttentionMetadata
from services.decoder.models.stream import Stream
from services.decoder.operations.adapted import adapted
from services.decoder.operations.ops import Ops
from services.decoder.operations.step_kernels import StepKernels

# Name of a model's submodule for multi-token prediction, and of its tensors in the files.
DRAFT_HEAD = "mtp"


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
        adapters: adapters of the step's tokens. None if no token has one.
    """

    ops: Ops
    kernels: StepKernels
    rope: tuple[Tensor, Tensor]
    kv_cache: Tensor
    kv_rows: Tensor
    metadata: AttentionMetadata
    adapters: AdapterRows | None = None

    def kernels_of(self, rows: Tensor) -> StepKernels:
        """Returns the kernels for some of the tokens, whose indices are `rows` `[R]`.

        With adapters, this launches kernels that write the slots of these tokens. The caller has to
        launch a kernel of torch before it calls the kernels, see `kernels.dependent_launch`.
        """
        adapters = self.adapters
        if adapters is not None:
            adapters = self.ops.group_adapters(adapters.part(rows))
        return step_kernels(self.ops, len(rows), adapters)


def step_kernels(ops: Ops, num_tokens: int, adapters: AdapterRows | None) -> StepKernels:
    """Returns the kernels of a layer for `num_tokens` tokens, of which some may have adapters."""
    kernels = ops.for_tokens(num_tokens)
    return kernels if adapters is None else adapted(kernels, adapters)


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
