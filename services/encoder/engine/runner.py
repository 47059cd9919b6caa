"""The only user of the device: pixels in host memory → embeddings in the arena."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.encoder.engine.patches import pack_patches
from services.encoder.models.base import Grid, VisionModel


@dataclass(slots=True)
class PreparedImage:
    """An image ready to run.

    Attributes:
        job_id: the front's name for it.
        grid: (1, h, w) in patches.
        pixels: `[h * patch, w * patch, channels]` uint8, host.
        arena_offset: first byte of its `[levels, num_tokens, hidden]` in the arena.
    """

    job_id: int
    grid: Grid
    pixels: Tensor
    arena_offset: int

    @property
    def num_patches(self) -> int:
        """Patches before merging."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(slots=True)
class LaunchedBatch:
    """A batch the device works on.

    Attributes:
        images: in packing order.
        row_finite: `[num_tokens]` bool, host; valid once `done`.
        done: recorded after the last copy to the host; None: the device is the host.
    """

    images: list[PreparedImage]
    row_finite: Tensor
    done: torch.cuda.Event | None


class Runner:
    """Runs batches in the order they are launched.

    Args:
        model: loaded, on `device`, in `dtype`.
        device: where it runs.
        dtype: of the embeddings.
        arena: where embeddings go; pinned on CUDA.
    """

    def __init__(
        self, model: VisionModel, device: torch.device, dtype: torch.dtype, arena: mmap.mmap
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)
        if device.type == "cuda":
            _pin(self._arena)

    @torch.inference_mode()
    def launch(self, images: Sequence[PreparedImage]) -> LaunchedBatch:
        """Enqueues a batch. On CUDA it does not wait for the device.

        Raises:
            torch.OutOfMemoryError: the batch does not fit. Copies enqueued before that write to
                places of these images only, and before any copy of a later launch.
        """
        # Neighbours of one size share an attention call.
        images = sorted(images, key=lambda image: image.grid)
        config = self._model.config
        pixels = self._upload(images)
        grids = [image.grid for image in images]
        patches = pack_patches(
            pixels, grids, config.patch_size, config.spatial_merge_size, self._dtype
        )
        layout = self._model.layout(grids)
        tokens = [image.num_patches // config.spatial_merge_size**2 for image in images]
        row_finite = torch.ones(sum(tokens), dtype=torch.bool, device=self._device)
        for level, rows in self._model.levels(patches, layout):
            row_finite &= torch.isfinite(rows).all(dim=1)
            self._download(images, tokens, level, rows)
        return self._sealed(images, row_finite)

    def is_done(self, batch: LaunchedBatch) -> bool:
        """Whether `finish` would not wait."""
        return batch.done is None or batch.done.query()

    def finish(self, batch: LaunchedBatch) -> list[bool]:
        """Waits for a batch; its images' bytes are in the arena then.

        Returns:
            For each of `batch.images`: whether all its values are finite.
        """
        if batch.done is not None:
            batch.done.synchronize()
        merge = self._model.config.spatial_merge_size**2
        tokens = [image.num_patches // merge for image in batch.images]
        return [bool(rows.all()) for rows in batch.row_finite.split(tokens)]

    def recover(self) -> None:
        """After a failed launch: gives cached memory back.

        Raises:
            RuntimeError: the device itself is broken, and the process with it.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Gives the arena's pinning back; due before the memory is unmapped, if it ever is."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            _cudart().cudaHostUnregister(self._arena.data_ptr())

    def warm_up(self, max_batch_patches: int) -> None:
        """Runs each kernel once: a small mixed batch, and on CUDA the largest batch.

        Writes to the start of the arena, which holds nothing yet.
        """
        config = self._model.config
        merge = config.spatial_merge_size
        shapes = [[(1, 2 * merge, 4 * merge), (1, 4 * merge, 2 * merge), (1, 2 * merge, 4 * merge)]]
        if self._device.type == "cuda":
            side = int(max_batch_patches**0.5) // merge * merge
            if self._embedding_bytes((1, side, side)) <= self._arena.numel():
                shapes.append([(1, side, side)])
        for grids in shapes:
            images = [
                PreparedImage(-1, grid, _random_pixels(grid, config.patch_size), 0)
                for grid in grids
                if self._embedding_bytes(grid) <= self._arena.numel()
            ]
            if images:
                self.finish(self.launch(images))

    def _embedding_bytes(self, grid: Grid) -> int:
        config = self._model.config
        tokens = grid[0] * grid[1] * grid[2] // config.spatial_merge_size**2
        return config.levels * tokens * config.out_hidden_size * self._dtype.itemsize

    def _upload(self, images: Sequence[PreparedImage]) -> Tensor:
        """All pixels, flat, on the device; one copy over the bus."""
        flat = [image.pixels.reshape(-1) for image in images]
        if self._device.type != "cuda":
            return flat[0] if len(flat) == 1 else torch.cat(flat)
        size = sum(pixels.numel() for pixels in flat)
        staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)  # from torch's host pool
        torch.cat(flat, out=staging)
        return staging.to(self._device, non_blocking=True)

    def _download(
        self, images: Sequence[PreparedImage], tokens: list[int], level: int, rows: Tensor
    ) -> None:
        """Copies one level's rows, `[sum(tokens), hidden]`, to each image's place in the arena."""
        row_bytes = rows.shape[1] * rows.element_size()
        for image, part in zip(images, rows.split(tokens), strict=True):
            size = len(part) * row_bytes
            start = image.arena_offset + level * size
            target = self._arena[start : start + size].view(rows.dtype).view(part.shape)
            target.copy_(part, non_blocking=True)

    def _sealed(self, images: list[PreparedImage], row_finite: Tensor) -> LaunchedBatch:
        if self._device.type != "cuda":
            return LaunchedBatch(images, row_finite, None)
        host = torch.empty(row_finite.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(row_finite, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        return LaunchedBatch(images, host, done)


def _pin(memory: Tensor) -> None:
    """Registers host memory with CUDA, so that copies to it are asynchronous."""
    result = _cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        raise RuntimeError(f"cudaHostRegister failed with {int(result)}")


def _cudart() -> Any:  # noqa: ANN401 - a module made at run time
    return torch.cuda.cudart()


def _random_pixels(grid: Grid, patch_size: int) -> Tensor:
    shape = (grid[1] * patch_size, grid[2] * patch_size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8)
