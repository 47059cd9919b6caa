"""Reads image embeddings from the arena for the image tokens of a step.

`StepComputer` reads the images of eager steps, and the graphs read the images of captured steps.
The reader knows runs of image tokens, not sequences. The engine keeps an image's memory until the
step that reads it has run.
"""

import mmap
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from services.common.nn.pinned import pin, unpin
from services.decoder.models.visual import Transfer, VisualInput


class ImageRun(NamedTuple):
    """Consecutive tokens of one image in a step, see `ComputeStep.images`.

    Attributes:
        row: index in the step of the run's first token.
        num_rows: number of tokens of the run.
        arena_offset: byte offset in the arena of the embedding `[features, num_tokens, hidden]`.
        num_tokens: number of tokens of the image.
        first_token: index in the image of the run's first token.
    """

    row: int
    num_rows: int
    arena_offset: int
    num_tokens: int
    first_token: int


class ImageReader:
    """Copies embeddings from the arena to a buffer with one row per token and feature.

    On a GPU the arena is registered as pinned memory, and embeddings are copied to the device on a
    separate stream. The copy overlaps earlier steps that do not read the buffer, and the step's own
    first layers, each of which waits for its own feature only.

    Args:
        arena: the front's shared memory.
        num_features: number of embeddings of an image token.
        hidden: width of an embedding.
        dtype: data type of embeddings.
        device: the device that computes.
        max_batched_tokens: the most tokens of a step.
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
        self._values = torch.frombuffer(arena, dtype=dtype)
        self._buffer = torch.empty(
            (num_features, max_batched_tokens, hidden), dtype=dtype, device=device
        )
        self._transfer: Transfer | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            pin(self._values)
            self._stream = torch.cuda.Stream(device)
            self._transfer = Transfer.create(num_features)

    def read(self, runs: Seq[ImageRun]) -> None:
        """Copies a step's image tokens to the rows of their indices, feature by feature."""
        moves = [
            (self._buffer[:, part.row : part.row + part.num_rows], self._view(part))
            for part in runs
        ]
        with torch.cuda.stream(self._stream):  # None leaves the current stream
            if self._transfer is not None:
                self._transfer.wait_until_read()
            for feature in range(len(self._buffer)):
                for target, source in moves:
                    # Both sides are contiguous, so this is one asynchronous copy.
                    target[feature].copy_(source[feature], non_blocking=True)
                if self._transfer is not None:
                    self._transfer.record_arrival(feature)

    def visual(self, mask: Tensor) -> VisualInput:
        """Returns the embeddings that `read` copies; `mask` `[T]` is not 0 at image tokens."""
        return VisualInput((mask != 0).unsqueeze(1), self._buffer[:, : len(mask)], self._transfer)

    def close(self) -> None:
        """Ends the registration of the arena as pinned memory, before the arena is unmapped."""
        if self._transfer is not None:
            unpin(self._values, self._buffer.device)

    def _view(self, part: ImageRun) -> Tensor:
        """Returns the embeddings of a run in the arena, `[features, num_rows, hidden]`."""
        start = part.arena_offset // self._values.itemsize
        num_features, _, hidden = self._buffer.shape
        size = num_features * part.num_tokens * hidden
        image = self._values[start : start + size].view(num_features, part.num_tokens, hidden)
        return image[:, part.first_token : part.first_token + part.num_rows]
