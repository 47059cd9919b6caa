"""Rows on the device: what is kept of each running sequence, and how a step enters them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Of a step in which entries change: one program of a kernel has to see all of them.
MAX_CHANGING_CHUNKS = 1024


class OfToken:
    """Rows of `StepEntry.tokens`: the token's row (-1: padding), its index in the sequence (-1: it
    is the one that the row sampled last), its id, its position on each axis.
    """

    ROW, INDEX, ID, POSITION = 0, 1, 2, 3
    COUNT = 6


class OfChunk:
    """Rows of `StepEntry.chunks`: the chunk's row, the row's length after the step (-1: one more
    than before), an entry of `DeviceRows.blocks`, flat, that changes before (-1: none), and its new
    value.
    """

    ROW, END, PLACE, BLOCK = 0, 1, 2, 3
    COUNT = 4


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """What the device keeps of R rows between steps, and of one of scratch behind them.

    Attributes:
        blocks: `[R + 1, max_blocks]` int32, the rows' KV blocks in order.
        lengths: `[R + 1]` int32, tokens whose keys and values are in the cache.
        position_deltas: `[R + 1]` int32, a generated token's position minus its index.
        last_tokens: `[R + 1]` int32, what the row sampled last.
    """

    blocks: Tensor
    lengths: Tensor
    position_deltas: Tensor
    last_tokens: Tensor

    @classmethod
    def allocate(cls, num_rows: int, max_blocks: int, device: torch.device) -> "DeviceRows":
        """Rows of sequences without tokens."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = num_rows + 1
        return cls(zeros(rows, max_blocks), zeros(rows), zeros(rows), zeros(rows))


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A step of T tokens in S chunks as the host sends it; those of one token come first.

    Attributes:
        tokens: `[6, T]` int32, see `OfToken`.
        chunks: `[4, S]` int32, see `OfChunk`.
    """

    tokens: Tensor
    chunks: Tensor


@dataclass(frozen=True, slots=True)
class EnteredStep:
    """A step of T tokens in S chunks as the model reads it.

    Attributes:
        input_ids: `[T]` int32.
        positions: `[3, T]` int32.
        slots: `[T]` int64, where keys and values go: block * block_size + offset; -1: nowhere.
        rows: `[S]` int64, each chunk's row.
        lengths: `[S]` int32, each row's length after the step.
        first_blocks: `[S]` int32, where each row's blocks begin in `DeviceRows.blocks`, flat.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    lengths: Tensor
    first_blocks: Tensor

    @classmethod
    def allocate(cls, num_tokens: int, num_chunks: int, device: torch.device) -> "EnteredStep":
        """Memory of the largest step; `part` has that of any other."""

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            empty(num_tokens, torch.int32), empty(3 * num_tokens, torch.int32),
            empty(num_tokens, torch.int64), empty(num_chunks, torch.int64),
            empty(num_chunks, torch.int32), empty(num_chunks, torch.int32),
        )  # fmt: skip

    def part(self, num_tokens: int, num_chunks: int) -> "EnteredStep":
        """A step of this size in the same memory."""
        return EnteredStep(
            self.input_ids[:num_tokens], self.positions[: 3 * num_tokens].view(3, num_tokens),
            self.slots[:num_tokens], self.rows[:num_chunks],
            self.lengths[:num_chunks], self.first_blocks[:num_chunks],
        )  # fmt: skip
