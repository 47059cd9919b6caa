"""What the runner needs of a language model."""

from dataclasses import dataclass
from typing import Protocol

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
class VisualRows:
    """Embeddings of all visual tokens one after the other, on the device."""

    rows: Tensor  # [V] int64: the visual tokens' rows, each once
    embeddings: Tensor  # [levels, V, hidden]

    @property
    def num_levels(self) -> int:
        """Levels of the embeddings."""
        return self.embeddings.shape[0]

    def replace(self, hidden: Tensor) -> None:
        """See VisualInput."""
        hidden.index_copy_(0, self.rows, self.embeddings[0])

    def add(self, hidden: Tensor, level: int) -> None:
        """See VisualInput."""
        hidden.index_add_(0, self.rows, self.embeddings[level])


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
    """Embeddings in the rows of their tokens; shapes do not depend on how many are visual."""

    mask: Tensor  # [T, 1] bool: the row is visual
    embeddings: Tensor  # [levels, T, hidden]; rows of other tokens hold anything

    @property
    def num_levels(self) -> int:
        """Levels of the embeddings."""
        return self.embeddings.shape[0]

    def replace(self, hidden: Tensor) -> None:
        """See VisualInput."""
        hidden.copy_(self.embeddings[0].where(self.mask, hidden))

    def add(self, hidden: Tensor, level: int) -> None:
        """See VisualInput."""
        hidden.add_(self.embeddings[level].where(self.mask, 0.0))


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
