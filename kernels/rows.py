"""Per-sequence state on the device, and the input of a step that updates it.

Each running sequence has a row in `DeviceRows`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Largest number of chunks of a step in which entries of `DeviceRows.blocks` change, because a
# single program of the kernel has to apply all changes.
MAX_CHANGING_CHUNKS = 1024


class OfToken:
    """Indices of the fields in `StepEntry.tokens`.

    Attributes:
        ROW: row of the token's sequence in `DeviceRows`. -1 for padding.
        INDEX: index of the token in its sequence. -1 if it is the token that was sampled last.
        ID: token id.
        POSITION: first of three fields with the token's position on each axis.
        COUNT: number of fields.
    """

    ROW, INDEX, ID, POSITION = 0, 1, 2, 3
    COUNT = 6


class OfChunk:
    """Indices of the fields in `StepEntry.chunks`.

    Attributes:
        ROW: row of the chunk's sequence in `DeviceRows`.
        END: length of the sequence after the step. -1 if it grows by one token.
        PLACE: flat index of an entry of `DeviceRows.blocks` that changes before the step. -1 if no
            entry changes.
        BLOCK: new value of the entry.
        COUNT: number of fields.
    """

    ROW, END, PLACE, BLOCK = 0, 1, 2, 3
    COUNT = 4


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """State of R running sequences between steps. The last row is scratch for padding.

    Attributes:
        blocks: `[R + 1, max_blocks]` int32, KV blocks of each sequence in order.
        lengths: `[R + 1]` int32, number of tokens whose keys and values are in the cache.
        position_deltas: `[R + 1]` int32, difference between a generated token's position and its
            index.
        last_tokens: `[R + 1]` int32, token that was sampled last.
    """

    blocks: Tensor
    lengths: Tensor
    position_deltas: Tensor
    last_tokens: Tensor

    @classmethod
    def allocate(cls, num_rows: int, max_blocks: int, device: torch.device) -> "DeviceRows":
        """Allocates rows, all for sequences without tokens."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = num_rows + 1
        return cls(zeros(rows, max_blocks), zeros(rows), zeros(rows), zeros(rows))


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step of T tokens in S chunks, as the host sends it. Chunks of one token come first.

    Attributes:
        tokens: `[6, T]` int32, with the fields of `OfToken`.
        chunks: `[4, S]` int32, with the fields of `OfChunk`.
    """

    tokens: Tensor
    chunks: Tensor


@dataclass(frozen=True, slots=True)
class EnteredStep:
    """A step of T tokens in S chunks, as the model reads it.

    Attributes:
        input_ids: `[T]` int32, token ids.
        positions: `[3, T]` int32, positions on each axis.
        slots: `[T]` int64, slots of the KV cache for keys and values: block * block_size + offset.
            -1 for padding, which is not stored.
        rows: `[S]` int64, row of each chunk in `DeviceRows`.
        lengths: `[S]` int32, length of each chunk's sequence after the step.
        first_blocks: `[S]` int32, flat index in `DeviceRows.blocks` of each sequence's first block.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    lengths: Tensor
    first_blocks: Tensor

    @classmethod
    def allocate(cls, num_tokens: int, num_chunks: int, device: torch.device) -> "EnteredStep":
        """Allocates the memory of the largest step. `part` returns that of a smaller step."""

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            empty(num_tokens, torch.int32),
            empty(3 * num_tokens, torch.int32),
            empty(num_tokens, torch.int64),
            empty(num_chunks, torch.int64),
            empty(num_chunks, torch.int32),
            empty(num_chunks, torch.int32),
        )

    def part(self, num_tokens: int, num_chunks: int) -> "EnteredStep":
        """Returns a step of a smaller size in the same memory."""
        return EnteredStep(
            self.input_ids[:num_tokens],
            self.positions[: 3 * num_tokens].view(3, num_tokens),
            self.slots[:num_tokens],
            self.rows[:num_chunks],
            self.lengths[:num_chunks],
            self.first_blocks[:num_chunks],
        )
