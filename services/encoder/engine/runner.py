"""The runner: it owns the device, and turns pixels in host memory into embeddings in the arena.

The engine's loop launches a batch, and finishes it later. Meanwhile the engine's waiter waits for
the batch's features. The runner knows neither queues nor messages. If a launch raises an error, the
caller calls `recover`, which frees the memory that the failed launch has allocated.
"""

import math
import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from services.common.geometry import Grid, Unit
from services.encoder.engine.arena_writer import ArenaWriter
from services.encoder.engine.graphs import TowerGraphs, buckets
from services.encoder.engine.job import Job
from services.encoder.engine.throttle import (
    Throttle,
    count_flops,
    most_patches_without_turn,
    needs_turn,
)

if TYPE_CHECKING:
    from services.encoder.models import VisionTower

# Pinned memory that the warm-up allocates: bytes of a block, and number of blocks. The allocator
# reuses a block only for sizes with the same next power of two. The pixels of an image or of a pair
# of frames have 0.5 to 4 MiB, and the peaks of a batch's rows up to 64 KiB.
_WARM_HOST_BLOCKS = {
    size: 16 if size >= 1 << 20 else 4
    for size in (*(1 << bits for bits in range(9, 17)), 1 << 20, 2 << 20, 4 << 20)
}
# Patches of the largest image of the warm-up: an image may be larger than a batch's budget.
_LARGE_IMAGE_PATCHES = 32_768


@dataclass(slots=True)
class LaunchedBatch:
    """A batch that the device works on.

    Attributes:
        images: jobs of the batch, in packing order.
        row_peaks: largest magnitude of each row of the embeddings, `[features, num_tokens]` float32
            on the host. NaN if a value of the row is NaN. Valid after `done`.
        done: event after the last copy to the host. None on a CPU, where the launch itself
            completes the batch.
        written: features in the order of their copies to the arena, each with the event after its
            copy. The last feature is left out, because `done` follows it.
    """

    images: list[Job]
    row_peaks: Tensor
    done: torch.cuda.Event | None
    written: list[tuple[int, torch.cuda.Event]]


class Runner:
    """Runs batches in the order of their launches. Any thread may call `wait`; one thread calls
    all other methods.

    Args:
        model: vision tower with its weights.
        device: device of the model.
        dtype: data type of patches and embeddings.
        arena: memory for the embeddings, shared with the front. It is pinned on CUDA.
        adapted: towers of adapters, of the same sizes. They run without CUDA graphs.
        shares_device: True if another process uses the GPU, too. Very large batches then leave the
            GPU idle half of the time. The caller takes turns for large batches, see `needs_turn`.
    """

    def __init__(
        self,
        model: "VisionTower",
        device: torch.device,
        dtype: torch.dtype,
        arena: mmap.mmap,
        *,
        adapted: Sequence["VisionTower"] = (),
        shares_device: bool = False,
    ) -> None:
        self._model = model
        self._towers = model, *adapted
        self._device = device
        self._dtype = dtype
        self._writer = ArenaWriter(arena, device)
        self._stream: torch.cuda.Stream | None = None
        self._graphs: TowerGraphs | None = None
        self._shares_device = shares_device and device.type == "cuda"
        self._throttle = Throttle()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the weights were written on another stream
            self._stream = torch.cuda.Stream(device)  # the default one cannot be captured

    @torch.inference_mode()
    def launch(self, images: Sequence[Job]) -> LaunchedBatch:
        """Enqueues a batch. On CUDA it does not wait for the device.

        Args:
            images: jobs of one tower, with pixels and places in the arena. Either all of them are
                still images, or all are pairs of frames.

        Raises:
            torch.OutOfMemoryError: the device has too little memory for the batch. Copies that were
                enqueued before the error write only to the places of these images, and before any
                copy of a later launch.
        """
        with self._on_stream():
            return self._launch(images)

    def needs_turn(self, images: Sequence[Job]) -> bool:
        """Returns whether a batch should have a turn, if the GPU is shared with decoders."""
        return needs_turn(count_flops(self._model.spec, [image.unit.grid for image in images]))

    def most_patches_without_turn(self, most: int) -> int:
        """Returns how many patches a batch may have without a turn, but at most `most`."""
        return most_patches_without_turn(self._model.spec, most)

    @property
    def kernel_calls(self) -> dict[str, int]:
        """Number of kernel calls so far, by "operation=implementation". Calls of replayed CUDA
        graphs are included.
        """
        calls = self._model.ops.table.calls()
        return {f"{operation}={name}": count for (operation, name), count in calls.items()}

    def is_done(self, batch: LaunchedBatch) -> bool:
        """Returns whether the device has finished a batch, so that `finish` would not wait."""
        return batch.done is None or batch.done.query()

    def wait(self, batch: LaunchedBatch) -> Iterator[int]:
        """Waits until the device has finished a batch. Any thread may call it.

        Yields:
            Each feature but the last, as soon as it is in the arena for all images of the batch.
        """
        if batch.done is not None:
            for feature, written in batch.written:
                written.synchronize()
                yield feature
            batch.done.synchronize()

    def finish(self, batch: LaunchedBatch) -> list[bool]:
        """Waits until all embeddings of a batch are in the arena.

        Returns:
            True for each image of `batch.images` whose embedding has only finite values.
        """
        if batch.done is not None:
            batch.done.synchronize()
        # For so few values torch takes ten times as long as numpy, which delays a first token.
        finite = np.isfinite(batch.row_peaks.numpy()).all(axis=0)
        ends = np.cumsum(self._num_tokens(batch.images))
        return [bool(rows.all()) for rows in np.split(finite, ends[:-1])]

    def recover(self) -> None:
        """Frees cached device memory after a failed launch.

        Raises:
            RuntimeError: the device is broken. Only a new process can use it.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Frees the graphs and unpins the arena. It must be called before the arena is unmapped and
        before the interpreter ends.
        """
        self._writer.close()
        self._graphs = None

    @torch.inference_mode()
    def warm_up(self, max_batch_patches: int, *, takes_videos: bool = True) -> None:
        """Runs each kernel once, and captures the CUDA graphs. A kernel that fails is replaced by
        the next implementation of the table.

        It runs a small batch of different sizes, on CUDA also images of up to the largest batch and
        beyond. The embeddings are written to the start of the arena, which must still be unused.

        Args:
            max_batch_patches: most patches of a batch.
            takes_videos: True if pairs of frames are run, too.
        """
        spec = self._model.spec
        merge = spec.spatial_merge_size
        shapes = [[(1, 2 * merge, 4 * merge), (1, 4 * merge, 2 * merge), (1, 2 * merge, 4 * merge)]]
        if self._device.type == "cuda":
            # Libraries load a kernel for each class of sizes at its first use.
            largest = sorted({max_batch_patches, _LARGE_IMAGE_PATCHES})
            sides = [*range(8 * merge, 33 * merge, 4 * merge), *map(math.isqrt, largest)]
            shapes += [[(1, side // merge * merge, side // merge * merge)] for side in sides]
            # Pinned memory is slow to allocate. The allocator reuses these blocks later.
            blocks = [
                torch.empty(size, dtype=torch.uint8, pin_memory=True)
                for size, count in _WARM_HOST_BLOCKS.items()
                for _ in range(count)
            ]
            del blocks
        batches = [
            [
                Job(-1, unit, pixels=_random_pixels(unit, spec.patch_size), arena_offset=0)
                for unit in units
            ]
            for units in (list(map(Unit, grids)) for grids in shapes)
            if max(map(self._embedding_bytes, units)) <= self._writer.size_bytes
        ]
        with self._on_stream(), self._model.ops.table.warming_up():
            self._run_each(batches)
            if takes_videos:
                self._run_each([[_as_pair(image) for image in batch] for batch in batches[:1]])
            if self._device.type == "cuda":
                self._graphs = TowerGraphs(self._model, self._dtype, self._device)
                self._graphs.capture(buckets())
                fits = self._graphs.fits
                replayed = [batch for batch in batches if fits([i.unit.grid for i in batch])]
                self._run_each(replayed)
                if takes_videos:
                    self._run_each([[_as_pair(image) for image in batch] for batch in replayed])
            if self._shares_device and batches:  # measures the largest batch, now without loading
                start = time.monotonic()
                self._run_each(batches[-1:])
                flops = count_flops(spec, [image.unit.grid for image in batches[-1]])
                self._throttle.calibrate(flops, time.monotonic() - start)

    def _run_each(self, batches: Sequence[Sequence[Job]]) -> None:
        for images in batches:
            self.finish(self._launch(images))

    def _launch(self, images: Sequence[Job]) -> LaunchedBatch:
        # Neighbouring images of one size share a call of `pack_patches` and of plain attention.
        images = sorted(images, key=lambda image: image.unit.grid)
        grids = [image.unit.grid for image in images]
        pixels = self._upload(images)
        are_pairs = images[0].unit.frames is not None
        tower = self._towers[images[0].tower]
        graphs = self._graphs if tower is self._model else None
        if graphs is not None and graphs.fits(grids):
            features = graphs.replay(pixels, grids, are_pairs=are_pairs)
        else:
            features = self._forward(tower, pixels, grids, are_pairs=are_pairs)
        tokens = self._num_tokens(images)
        offsets = [image.arena_offset for image in images if image.arena_offset is not None]
        peaks = torch.empty(
            self._model.spec.num_features, sum(tokens), dtype=torch.float32, device=self._device
        )
        written: list[tuple[int, torch.cuda.Event]] = []
        spec = self._model.spec
        idle_s = self._throttle.idle_s(count_flops(spec, grids), spec.num_features)
        for feature, rows in features:
            event = self._writer.write(rows, tokens, offsets, feature)
            torch.linalg.vector_norm(rows, math.inf, 1, dtype=torch.float32, out=peaks[feature])
            if event is not None:
                written.append((feature, event))
            if idle_s > 0:
                self._throttle.insert_idle(torch.cuda.current_stream(), idle_s)
        return LaunchedBatch(images, *self._writer.seal(peaks), written[:-1])

    def _forward(
        self, tower: "VisionTower", pixels: Tensor, grids: Sequence[Grid], *, are_pairs: bool
    ) -> Iterator[tuple[int, Tensor]]:
        """Runs a tower without a graph. Yields each feature with its rows, as the tower does.

        Args:
            tower: the model's tower, or that of an adapter.
            pixels: flat uint8 pixels of all images, on the device.
            grids: sizes of the images in patches.
            are_pairs: True if the images are pairs of frames.
        """
        spec, ops = tower.spec, tower.ops
        pack = ops.pack_pairs if are_pairs else ops.pack_patches
        patches = pack(pixels, grids, spec.patch_size, spec.spatial_merge_size, self._dtype)
        return tower.features(tower.patch_embed(patches), tower.layout(grids))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _num_tokens(self, images: Sequence[Job]) -> list[int]:
        merge = self._model.spec.spatial_merge_size**2
        return [image.unit.num_patches // merge for image in images]

    def _embedding_bytes(self, unit: Unit) -> int:
        spec = self._model.spec
        tokens = unit.num_patches // spec.spatial_merge_size**2
        return spec.num_features * tokens * spec.out_hidden_size * self._dtype.itemsize

    def _upload(self, images: Sequence[Job]) -> Tensor:
        """Enqueues the copy of all pixels to the device. Returns them flat, in order."""
        flat = [image.pixels.reshape(-1) for image in images if image.pixels is not None]
        if self._device.type != "cuda":
            return flat[0] if len(flat) == 1 else torch.cat(flat)
        sizes = [pixels.numel() for pixels in flat]
        target = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        for part, pixels in zip(target.split(sizes), flat, strict=True):
            # A copy from memory that is not pinned would wait for the device.
            part.copy_(pixels if pixels.is_pinned() else pixels.pin_memory(), non_blocking=True)
        return target


def _as_pair(image: Job) -> Job:
    assert image.pixels is not None
    pixels = torch.stack([image.pixels, image.pixels])
    return replace(image, unit=replace(image.unit, frames=(0, 1)), pixels=pixels)


def _random_pixels(unit: Unit, patch_size: int) -> Tensor:
    shape = (unit.grid[1] * patch_size, unit.grid[2] * patch_size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8)
