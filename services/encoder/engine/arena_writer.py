"""Copies embeddings from the device into the arena while the tower runs.

Only the runner calls it. The engine's messages tell the front, which reads the arena, when an
embedding is written. The ranges are not checked here, because the front has reserved them.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from services.common.nn.pinned import pin, unpin


class ArenaWriter:
    """Copies rows to host memory in the order of the calls.

    On CUDA the copies run on their own stream, so that the next block does not wait for them.

    Args:
        arena: memory for the embeddings. It is pinned here on CUDA.
        device: device of the embeddings.
    """

    def __init__(self, arena: mmap.mmap, device: torch.device) -> None:
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            pin(self._arena)
            self._stream = torch.cuda.Stream(device)

    @property
    def size_bytes(self) -> int:
        """Size of the arena in bytes."""
        return self._arena.numel()

    def write(
        self, rows: Tensor, counts: Sequence[int], offsets: Sequence[int], feature: int
    ) -> torch.cuda.Event | None:
        """Enqueues the copies of one feature of a batch.

        Args:
            rows: rows of all images, `[sum(counts), hidden]`, after the work that is enqueued on
                the current stream.
            counts: number of tokens of each image.
            offsets: first byte of each image's embedding `[features, num_tokens, hidden]`.
            feature: number of the feature.

        Returns:
            The event after the copies. None on a CPU, where the copies are complete.
        """
        if self._stream is None:
            self._copy(rows, counts, offsets, feature)
            return None
        written = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        rows.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self._copy(rows, counts, offsets, feature)
            written.record()
        return written

    def seal(self, values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Enqueues the last copy of a batch: a small tensor, to the host.

        Returns:
            The copy, and the event after this copy and all earlier copies. The event is None on a
            CPU, where the copies are complete.
        """
        if self._stream is None:
            return values, None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        values.record_stream(self._stream)
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
            done.record()
        return host, done

    def close(self) -> None:
        """Unpins the arena. It must be called before the memory is unmapped."""
        if self._stream is not None:
            unpin(self._arena, self._stream.device)

    def _copy(
        self, rows: Tensor, counts: Sequence[int], offsets: Sequence[int], feature: int
    ) -> None:
        row_bytes = rows.shape[1] * rows.element_size()
        for offset, part in zip(offsets, rows.split(counts), strict=True):
            size = len(part) * row_bytes
            start = offset + feature * size
            target = self._arena[start : start + size].view(rows.dtype).view(part.shape)
            target.copy_(part, non_blocking=True)
