"""Image embeddings from the arena to a step's image tokens.

`ModelRunner` reads eager steps' images with it, and the graphs those of captured steps. It knows
runs of image tokens, not sequences; the engine keeps an image's memory until its step has run.
"""

import mmap
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from services.common.pinned import pin, unpin
from services.decoder.models.base import (
    Transfer,
    VisualInput,
    VisualMask,
    VisualRows,
    VisualSegments,
)


class ImageRun(NamedTuple):
    """Consecutive tokens of one image in a step; see `Step.images`.

    Attributes:
        row: index in the step of the run's first token.
        num_rows: tokens of the run.
        arena_offset: bytes, of the image's embedding `[features, num_tokens, hidden]`.
        num_tokens: tokens of the whole image.
        first_token: index in the image of the run's first token.
    """

    row: int
    num_rows: int
    arena_offset: int
    num_tokens: int
    first_token: int


class ImageReader:
    """Reads embeddings out of the arena.

    On a CPU a step reads them in place. On a GPU the arena is registered as pinned memory. The rows
    that a step needs are copied on a separate stream to a device buffer of `max_batched_tokens`
    rows per feature. The copy overlaps earlier steps that do not read the buffer, and the step's
    own first layers, each of which waits for its own feature only.
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
        """Unregisters the arena; due before its memory is unmapped."""
        if self._buffer is not None:
            unpin(self._values, self._buffer.device)

    def read(self, runs: Seq[ImageRun], rows: Tensor | None) -> VisualInput:
        """The embeddings of a step's image tokens.

        Args:
            runs: at least one, by row.
            rows: on a GPU, the runs' rows one after the other, `[V]` int64 on the device.
        """
        if self._buffer is None:
            return VisualSegments([(part.row, self._view(part)) for part in runs])
        assert rows is not None
        counts = [part.num_rows for part in runs]
        *first_rows, total = accumulate(counts, initial=0)
        self._copy(runs, first_rows)
        return VisualRows(rows, self._buffer[:, :total], self._transfer)

    def read_in_place(self, runs: Seq[ImageRun]) -> None:
        """On a GPU: copies a step's image tokens to the rows of their indices, for `masked`."""
        self._copy(runs, [part.row for part in runs])

    def masked(self, mask: Tensor) -> VisualMask:
        """What `read_in_place` copied; `mask` `[T]` is not 0 where a token is an image's."""
        assert self._buffer is not None
        rows = (mask != 0).unsqueeze(1)
        return VisualMask(rows, self._buffer[:, : len(mask)], self._transfer)

    def _copy(self, runs: Seq[ImageRun], first_rows: Seq[int]) -> None:
        """Feature by feature, each run to the buffer's rows from `first_rows` on."""
        assert self._buffer is not None
        moves = [
            (self._buffer[:, row : row + part.num_rows], self._view(part))
            for part, row in zip(runs, first_rows, strict=True)
        ]
        with torch.cuda.stream(self._stream):
            self._transfer.wait_until_read()
            for feature in range(self._num_features):
                for target, source in moves:  # contiguous on both sides: one asynchronous copy
                    target[feature].copy_(source[feature], non_blocking=True)
                self._transfer.arrive(feature)

    def _view(self, part: ImageRun) -> Tensor:
        """`[features, num_rows, hidden]`, in the arena."""
        start = part.arena_offset // self._values.itemsize
        size = self._num_features * part.num_tokens * self._hidden
        image = self._values[start : start + size].view(
            self._num_features, part.num_tokens, self._hidden
        )
        return image[:, part.first_token : part.first_token + part.num_rows]
