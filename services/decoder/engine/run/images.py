"""Image embeddings from the arena to a step's image tokens.

`ModelRunner` reads eager steps' images with it, and the graphs those of captured steps. It knows
runs of image tokens, not sequences; the engine keeps an image's memory until its step has run.
"""

import mmap
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from services.common.nn.pinned import pin
from services.decoder.models.visual import Transfer, VisualInput


class ImageRun(NamedTuple):
    """Consecutive tokens of one image in a step, see `ComputeStep.images`. The embedding is
    `[features, num_tokens, hidden]`.
    """

    row: int
    num_rows: int
    arena_offset: int
    num_tokens: int
    first_token: int


class ImageReader:
    """Reads embeddings out of the arena, into a buffer of `max_batched_tokens` rows per feature.

    On a GPU the arena is registered as pinned memory, and copied to the device on a separate
    stream. The copy overlaps earlier steps that do not read the buffer, and the step's own first
    layers, each of which waits for its own feature only.
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
        with torch.cuda.stream(self._stream):  # of None: no stream
            if self._transfer is not None:
                self._transfer.wait_until_read()
            for feature in range(len(self._buffer)):
                for target, source in moves:  # contiguous on both sides: one asynchronous copy
                    target[feature].copy_(source[feature], non_blocking=True)
                if self._transfer is not None:
                    self._transfer.record_arrival(feature)

    def visual(self, mask: Tensor) -> VisualInput:
        """What `read` copies; `mask` `[T]` is not 0 where a token is an image's."""
        return VisualInput((mask != 0).unsqueeze(1), self._buffer[:, : len(mask)], self._transfer)

    def _view(self, part: ImageRun) -> Tensor:
        """`[features, num_rows, hidden]`, in the arena."""
        start = part.arena_offset // self._values.itemsize
        num_features, _, hidden = self._buffer.shape
        size = num_features * part.num_tokens * hidden
        image = self._values[start : start + size].view(num_features, part.num_tokens, hidden)
        return image[:, part.first_token : part.first_token + part.num_rows]
