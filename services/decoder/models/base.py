"""What a language model's layers share in a step, and its image embeddings.

`engine.images` makes the embeddings' views; a model reads them through `VisualInput` and does not
know where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.attention.base import AttentionMetadata
from services.decoder.operations.ops import Ops
from services.decoder.operations.step_kernels import StepKernels


@dataclass(frozen=True, slots=True)
class Transfer:
    """Events between two streams of a GPU: one copies embeddings to a buffer feature by feature,
    one runs the steps that read them there. Each call is for the current stream.

    The events are external: a CUDA graph waits for what was last recorded before its launch.
    """

    arrivals: Sequence[torch.cuda.Event]  # by feature
    last_read: torch.cuda.Event

    @classmethod
    def of(cls, num_features: int) -> "Transfer":
        """Events on which nothing waits before the first copy."""
        *arrivals, last_read = (torch.cuda.Event(external=True) for _ in range(num_features + 1))
        for event in (*arrivals, last_read):
            event.record()  # an event never recorded adds no wait to a graph
        return cls(arrivals, last_read)

    def wait_until_read(self) -> None:
        """The copying stream waits until the last copy has been read."""
        torch.cuda.current_stream().wait_event(self.last_read)

    def arrive(self, feature: int) -> None:
        """The copying stream has enqueued the feature's copy."""
        self.arrivals[feature].record()

    def wait(self, feature: int) -> None:
        """The reading stream waits until the feature has arrived."""
        torch.cuda.current_stream().wait_event(self.arrivals[feature])

    def read(self, feature: int) -> None:
        """The reading stream has enqueued all that reads the feature; they are read in order."""
        if feature == len(self.arrivals) - 1:
            self.last_read.record()


@dataclass(frozen=True, slots=True)
class VisualInput:
    """The image embeddings of one step, in the rows of their tokens: no shape depends on how many
    tokens are visual, so that a CUDA graph serves all.

    Feature 0, the tower's merged output, replaces a token's embedding; feature i is added to the
    output of decoder layer i - 1 (DeepStack).

    Attributes:
        mask: `[T, 1]` bool: the row is visual.
        embeddings: `[num_features, T, hidden]`; rows of other tokens hold anything.
        transfer: brings the embeddings; None on a CPU, where they are there.
    """

    mask: Tensor
    embeddings: Tensor
    transfer: Transfer | None

    @property
    def num_features(self) -> int:
        """Tensors per visual token."""
        return self.embeddings.shape[0]

    def replace(self, hidden: Tensor) -> None:
        """Overwrites the visual rows of `hidden` `[T, hidden]` with feature 0, in place."""
        hidden.copy_(self._read(0, hidden))

    def add(self, hidden: Tensor, feature: int) -> None:
        """Adds a feature to the visual rows of `hidden` `[T, hidden]`, in place."""
        hidden.add_(self._read(feature, 0.0))

    def _read(self, feature: int, other: Tensor | float) -> Tensor:
        """`[T, hidden]`: the feature where a row is visual, `other` elsewhere."""
        if self.transfer is None:
            return self.embeddings[feature].where(self.mask, other)
        self.transfer.wait(feature)
        found = self.embeddings[feature].where(self.mask, other)
        self.transfer.read(feature)
        return found


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers share in one forward.

    Attributes:
        kernels: those for the step's number of tokens.
        rope: cos and sin, `[T, rotary_dim / 2]`.
        kv_cache: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`, of full
            attention layers.
        kv_rows: `[2, T]`: where keys and values go.
    """

    ops: Ops
    kernels: StepKernels
    rope: tuple[Tensor, Tensor]
    kv_cache: Tensor
    kv_rows: Tensor
    metadata: AttentionMetadata


class Mixer(Protocol):
    """What mixes tokens in a layer, up to its output projection; a module."""

    name: str  # of the checkpoint's files

    @property
    def output(self) -> Linear:
        """The projection back to the residual stream."""
        ...

    def __call__(
        self, x: Tensor | None, residual: Tensor, norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """The input of `output`, and the hidden state `x + residual`, which it mixes the norm of;
        see `transformer.DecoderLayer`.
        """
        ...
