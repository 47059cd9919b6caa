"""Image embeddings from the arena to a step's visual tokens."""

import mmap
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from services.common.pinned import pin, unpin
from services.decoder.engine.batch import Chunk
from services.decoder.models.base import (
    Transfer,
    VisualInput,
    VisualMask,
    VisualRows,
    VisualSegments,
)


@dataclass(frozen=True, slots=True)
class VisualSegment:
    """Part of one image in a step.

    Attributes:
        row: the step's first token of the segment.
        num_rows: its tokens.
        arena_offset: bytes, of the image's embedding `[levels, num_tokens, hidden]`.
        num_tokens: of the whole image.
        first_token: of the segment, within the image.
    """

    row: int
    num_rows: int
    arena_offset: int
    num_tokens: int
    first_token: int


def find_segments(chunk: Chunk, first_row: int) -> list[VisualSegment]:
    """The image tokens of a chunk whose tokens are the step's rows from `first_row` on."""
    segments: list[VisualSegment] = []
    end = chunk.start + chunk.length
    for image in chunk.sequence.images:
        start = max(chunk.start, image.offset)
        stop = min(end, image.offset + image.num_tokens)
        if start < stop:
            segments.append(
                VisualSegment(
                    row=first_row + start - chunk.start,
                    num_rows=stop - start,
                    arena_offset=chunk.sequence.image_offsets[image.key],
                    num_tokens=image.num_tokens,
                    first_token=start - image.offset,
                )
            )
    return segments


class ImageReader:
    """Reads embeddings out of the arena.

    On a CPU a step uses them where they lie. On a GPU the arena is registered as pinned memory and
    the rows a step needs are copied to a device buffer of `max_batched_tokens` rows per level, by a
    stream of their own: while the steps before run, as far as they do not read the buffer, and
    beside the step's own first layers, which wait for one level after the other.
    """

    def __init__(
        self,
        arena: mmap.mmap,
        num_features: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        max_batched_tokens: int,
    ) -> None:
        self._num_features, self._hidden = num_features, hidden
        self._values = torch.frombuffer(arena, dtype=dtype)
        self._buffer: Tensor | None = None
        if device.type == "cuda":
            pin(self._values)
            self._buffer = torch.empty(
                (num_features, max_batched_tokens, hidden), dtype=dtype, device=device
            )
            self._stream = torch.cuda.Stream(device)
            self._transfer = Transfer.of(num_features)

    def close(self) -> None:
        """Gives the arena's pinning back; due before the memory is unmapped, if it ever is."""
        if self._buffer is not None:
            unpin(self._values, self._buffer.device)

    def read(self, segments: Seq[VisualSegment], rows: Tensor | None) -> VisualInput:
        """The embeddings of a step's segments.

        Args:
            segments: at least one, by row.
            rows: on a GPU, the segments' rows one after the other, `[V]` int64 on the device.
        """
        if self._buffer is None:
            return VisualSegments([(part.row, self._view(part)) for part in segments])
        assert rows is not None
        counts = [part.num_rows for part in segments]
        *first_rows, total = accumulate(counts, initial=0)
        self._copy(segments, first_rows)
        return VisualRows(rows, self._buffer[:, :total], self._transfer)

    def read_in_place(self, segments: Seq[VisualSegment]) -> None:
        """On a GPU: copies a step's segments to the rows of their tokens, for `masked`."""
        self._copy(segments, [part.row for part in segments])

    def masked(self, mask: Tensor) -> VisualMask:
        """What `read_in_place` has copied; `mask` `[T]`, not 0 where a row is visual."""
        assert self._buffer is not None
        rows = (mask != 0).unsqueeze(1)
        return VisualMask(rows, self._buffer[:, : len(mask)], self._transfer)

    def _copy(self, segments: Seq[VisualSegment], first_rows: Seq[int]) -> None:
        """Level by level: each segment to the buffer's rows from its first one on."""
        assert self._buffer is not None
        moves = [
            (self._buffer[:, row : row + part.num_rows], self._view(part))
            for part, row in zip(segments, first_rows, strict=True)
        ]
        with torch.cuda.stream(self._stream):
            self._transfer.wait_until_read()
            for level in range(self._num_features):
                for target, source in moves:  # contiguous on both sides: one asynchronous copy
                    target[level].copy_(source[level], non_blocking=True)
                self._transfer.arrive(level)

    def _view(self, part: VisualSegment) -> Tensor:
        """`[levels, num_rows, hidden]`, in the arena."""
        start = part.arena_offset // self._values.itemsize
        size = self._num_features * part.num_tokens * self._hidden
        image = self._values[start : start + size].view(
            self._num_features, part.num_tokens, self._hidden
        )
        return image[:, part.first_token : part.first_token + part.num_rows]
