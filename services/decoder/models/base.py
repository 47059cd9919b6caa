"""What the runner needs of a language model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.common.nn.weights import WeightMap
from services.decoder.attention.base import AttentionMetadata
from services.decoder.kernels.ops import Ops


class VisualInput(Protocol):
    """The image embeddings of one step's tokens.

    There are `num_levels` tensors per visual token: level 0 replaces its embedding, level i is
    added to the output of decoder layer i - 1 (DeepStack).
    """

    @property
    def num_levels(self) -> int:
        """Tensors per visual token."""
        ...

    def replace(self, hidden: Tensor) -> None:
        """Overwrites the visual rows of `hidden` `[T, hidden]` with level 0, in place."""
        ...

    def add(self, hidden: Tensor, level: int) -> None:
        """Adds a level to the visual rows of `hidden` `[T, hidden]`, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Transfer:
    """Where two streams of a GPU meet: one copies embeddings to a buffer level by level, one runs
    the steps that read them there. Each call is for the current stream.

    The events are external: a CUDA graph waits for what was last recorded before its launch.
    """

    arrivals: Sequence[torch.cuda.Event]  # by level
    last_read: torch.cuda.Event

    @classmethod
    def of(cls, levels: int) -> "Transfer":
        """Of so many levels; whoever waits before there was a copy need not."""
        *arrivals, last_read = (torch.cuda.Event(external=True) for _ in range(levels + 1))
        for event in (*arrivals, last_read):
            event.record()  # else a graph would not be made to wait for it
        return cls(arrivals, last_read)

    def wait_until_read(self) -> None:
        """The copying stream: until nobody reads what was copied before."""
        torch.cuda.current_stream().wait_event(self.last_read)

    def arrive(self, level: int) -> None:
        """The copying stream: what was enqueued until now is the level."""
        self.arrivals[level].record()

    def wait(self, level: int) -> None:
        """The reading stream: until the level has arrived."""
        torch.cuda.current_stream().wait_event(self.arrivals[level])

    def read(self, level: int) -> None:
        """The reading stream: the level was read by what was enqueued until now, in order."""
        if level == len(self.arrivals) - 1:
            self.last_read.record()


@dataclass(frozen=True, slots=True)
class VisualRows:
    """Embeddings of all visual tokens one after the other, on the device or on their way to it."""

    rows: Tensor  # [V] int64: the visual tokens' rows, each once
    embeddings: Tensor  # [levels, V, hidden]
    transfer: Transfer

    @property
    def num_levels(self) -> int:
        """Levels of the embeddings."""
        return self.embeddings.shape[0]

    def replace(self, hidden: Tensor) -> None:
        """See VisualInput."""
        self.transfer.wait(0)
        hidden.index_copy_(0, self.rows, self.embeddings[0])
        self.transfer.read(0)

    def add(self, hidden: Tensor, level: int) -> None:
        """See VisualInput."""
        self.transfer.wait(level)
        hidden.index_add_(0, self.rows, self.embeddings[level])
        self.transfer.read(level)


@dataclass(frozen=True, slots=True)
class VisualSegments:
    """Embeddings where they lie, one view per image: nothing is copied before it is used."""

    segments: list[tuple[int, Tensor]]  # (first row, [levels, n, hidden])

    @property
    def num_levels(self) -> int:
        """Levels of the embeddings."""
        return self.segments[0][1].shape[0]

    def replace(self, hidden: Tensor) -> None:
        """See VisualInput."""
        for start, view in self.segments:
            hidden[start : start + view.shape[1]].copy_(view[0])

    def add(self, hidden: Tensor, level: int) -> None:
        """See VisualInput."""
        for start, view in self.segments:
            hidden[start : start + view.shape[1]].add_(view[level])


@dataclass(frozen=True, slots=True)
class VisualMask:
    """As VisualRows, but in the rows of their tokens: no shape depends on how many are visual."""

    mask: Tensor  # [T, 1] bool: the row is visual
    embeddings: Tensor  # [levels, T, hidden]; rows of other tokens hold anything
    transfer: Transfer

    @property
    def num_levels(self) -> int:
        """Levels of the embeddings."""
        return self.embeddings.shape[0]

    def replace(self, hidden: Tensor) -> None:
        """See VisualInput."""
        self.transfer.wait(0)
        hidden.copy_(self.embeddings[0].where(self.mask, hidden))
        self.transfer.read(0)

    def add(self, hidden: Tensor, level: int) -> None:
        """See VisualInput."""
        self.transfer.wait(level)
        hidden.add_(self.embeddings[level].where(self.mask, 0.0))
        self.transfer.read(level)


class CausalLM(Protocol):
    """A language model over a ragged batch of T tokens. Built on `meta`, then loaded."""

    weight_map: WeightMap
    ops: Ops

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        visual: VisualInput | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Runs the layers.

        Args:
            input_ids: `[T]` int32 or int64; any valid id at visual tokens.
            positions: `[3, T]` integer: (t, h, w).
            kv_cache: `[num_layers, num_blocks, 2, block_size, num_kv_heads, head_dim]`.
            metadata: the step's attention layout.
            visual: embeddings of the step's image tokens.
            rows: `[R]` int64, the tokens whose states are wanted; None: all.

        Returns:
            `[R, hidden]`, after the final norm.
        """
        ...

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`[R, hidden]`, only the rows that need it → `[R, vocab_size]`, in the model's dtype; to
        `out`, if there is one.
        """
        ...
