"""The encoder's engine alone: no gRPC, no cache. Prints each figure with its floor.

    python -m benchmarks.encode --model DIR --load-format dummy

Tower: from uint8 pixels on the device to all levels, eagerly and as a captured graph; `host` is
what the launches take. Engine: from JPEG bytes through the preprocessing pool, the batches and the
copies into the arena, with so many images under way at a time.
"""

import argparse
import functools
import io
import mmap
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from services.common.channel import EngineChannel, create_socket_pair
from services.common.families import read_spec
from services.common.image_geometry import image_grid
from services.common.model_spec import ModelSpec, TowerSpec
from services.encoder.engine.engine import Engine
from services.encoder.engine.graphs import MAX_CAPTURED_PATCHES, TowerGraphs, buckets
from services.encoder.engine.messages import (
    EncodeImage,
    EngineMessage,
    FrontMessage,
    ImageDone,
    PlaceImage,
    Shutdown,
)
from services.encoder.engine.patches import pack_patches
from services.encoder.engine.runner import Runner
from services.encoder.engine_main import load_model, prepare_device, resolve_device, warm_up
from services.encoder.models.base import Grid, VisionModel, dtype_named
from services.encoder.preprocess import preprocess
from services.encoder.settings import EncoderSettings

# Measured on an H200 with large matrix products; see benchmarks/LOG.md.
FLOPS = 790e12  # bf16


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured."""

    config: ModelSpec
    settings: EncoderSettings
    model: VisionModel
    device: torch.device
    dtype: torch.dtype

    def grid(self, side: int) -> Grid:
        """Of a square image, as it is resized."""
        return image_grid(side, side, self.config.vision_part.limits)

    def embedding_bytes(self, grid: Grid) -> int:
        """Of an image, all levels."""
        vision, (_, height, width) = self.config.vision_part.tower, grid
        tokens = height * width // vision.spatial_merge_size**2
        return vision.num_features * tokens * vision.out_hidden_size * self.dtype.itemsize


def floor_s(config: TowerSpec, patches: int) -> float:
    """Operations of one image's forward, over the rate."""
    hidden, inner = config.hidden_size, config.intermediate_size
    grouped = hidden * config.spatial_merge_size**2
    embed = 2 * patches * config.in_channels * config.patch_size**2 * hidden
    linear = 2 * patches * (4 * hidden**2 + 2 * hidden * inner)
    attention = 4 * patches**2 * hidden
    tokens = patches // config.spatial_merge_size**2
    merger = 2 * tokens * (grouped**2 + grouped * config.out_hidden_size)
    return (embed + config.depth * (linear + attention) + config.num_features * merger) / FLOPS


def timed(bench: Bench, run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of a run with nothing between two, and of those the host's."""
    cuda = bench.device.type == "cuda"
    for _ in range(3):
        run()
    taken, host = [], []
    for _ in range(3):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        launched = time.perf_counter()
        if cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) / repeats)
        host.append((launched - begin) / repeats)
    return statistics.median(taken), min(host)


def measure_tower(bench: Bench, side: int, batch: int, repeats: int) -> None:
    """Prints one row."""
    vision, grids = bench.config.vision_part.tower, [bench.grid(side)] * batch
    patches = grids[0][1] * grids[0][2]
    size = batch * patches * vision.patch_size**2 * vision.in_channels
    pixels = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.device)

    def eager() -> None:
        packed = pack_patches(
            pixels, grids, vision.patch_size, vision.spatial_merge_size, bench.dtype
        )
        list(bench.model.features(packed, bench.model.layout(grids)))

    taken, host = timed(bench, eager, repeats)
    replayed = None
    graphs = None
    if batch * patches <= MAX_CAPTURED_PATCHES:
        graphs = TowerGraphs.create(bench.model, bench.dtype, bench.device)
    if graphs is not None:
        graphs.capture([size for size in buckets() if size >= batch * patches][:1])
        replayed, _ = timed(bench, lambda: list(graphs.replay(pixels, grids)), repeats)
    best, floor = min(taken, replayed or taken), floor_s(vision, patches) * batch
    shown = f"{replayed * 1e3:8.2f}" if replayed else f"{'-':>8}"
    print(
        f"{side:6} {batch:6} {taken * 1e3:8.2f} {host * 1e3:8.2f} {shown} {batch / best:9.1f} "
        f"{floor * 1e3:8.3f} {best / floor:8.2f}",
        flush=True,
    )


def jpegs(side: int, count: int) -> list[bytes]:
    """Coarse noise, as the serving benchmark's images."""
    found = []
    for number in range(count):
        cells = max(1, side // 16)
        noise = np.random.default_rng(number).integers(0, 255, (cells, cells, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(
            file, "JPEG", quality=88
        )
        found.append(file.getvalue())
    return found


class EngineBench:
    """A real engine in a thread, spoken to as its front would."""

    def __init__(self, bench: Bench, slots: int, slot_bytes: int) -> None:
        self._bench = bench
        self._slots = slots
        self._slot_bytes = -(-slot_bytes // 4096) * 4096
        arena = mmap.mmap(-1, self._slots * self._slot_bytes)
        self.runner = Runner(bench.model, bench.device, bench.dtype, arena)
        settings, limits = bench.settings, bench.config.vision_part.limits
        prepare = functools.partial(
            preprocess, limits=limits, max_source_pixels=settings.max_source_pixels,
            pinned=bench.device.type == "cuda",
        )  # fmt: skip
        warm_up(self.runner, prepare, limits, settings.max_batch_patches)
        self._ends = create_socket_pair()
        self._front: EngineChannel[EngineMessage] = EngineChannel(self._ends[0], EngineMessage)
        self._engine = Engine(
            EngineChannel(self._ends[1], FrontMessage), self.runner, prepare,
            max_batch_patches=settings.max_batch_patches, workers=os.cpu_count() or 1,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._engine.run)
        self._thread.start()
        self._next_id = 0

    def encode(self, files: list[bytes], grid: Grid, under_way: int, count: int) -> list[float]:
        """Seconds from each image's submission to its end, in the order of the ends."""
        started: dict[int, float] = {}
        taken: list[float] = []
        first = self._next_id
        while len(taken) < count:
            while len(started) < under_way and self._next_id - first < count:
                number, self._next_id = self._next_id, self._next_id + 1
                started[number] = time.perf_counter()
                offset = number % self._slots * self._slot_bytes
                self._front.send(EncodeImage(number, files[number % len(files)], grid))
                self._front.send(PlaceImage(number, offset))
            for message in self._front.receive(60.0):
                if isinstance(message, ImageDone):
                    assert not message.error_code, message
                    taken.append(time.perf_counter() - started.pop(message.job_id))
        return taken

    def close(self) -> None:
        """Ends the engine and its threads: one that Python ends while it is in C++ aborts."""
        self._front.send(Shutdown())
        self._thread.join()
        self.runner.close()
        self._ends[0].shutdown(socket.SHUT_RDWR)
        for thread in threading.enumerate():
            if thread.name in ("receiver", "waiter"):
                thread.join()
        for end in self._ends:
            end.close()


def measure_engine(bench: Bench, side: int, under_way: int, count: int) -> None:
    """Prints one row."""
    grid = bench.grid(side)
    engine = EngineBench(bench, 2 * under_way, bench.embedding_bytes(grid))
    try:
        files = jpegs(side, min(count, 32))
        engine.encode(files, grid, under_way, max(8, under_way))
        begin = time.perf_counter()
        taken = engine.encode(files, grid, under_way, count)
        wall = time.perf_counter() - begin
    finally:
        engine.close()
    floor = floor_s(bench.config.vision_part.tower, grid[1] * grid[2])
    print(
        f"{side:6} {under_way:6} {statistics.median(taken) * 1e3:8.2f} {count / wall:9.1f} "
        f"{floor * 1e3:8.3f} {wall / count / floor:8.2f}",
        flush=True,
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="The encoder's engine alone.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--sides", default="512,768,1024")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--under-way", default="1,64")
    parser.add_argument("--images", type=int, default=384, help="per row of the engine's table")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    settings = EncoderSettings(
        model=arguments.model, device=arguments.device, load_format=arguments.load_format,
        attention_backend=arguments.attention,
    )  # fmt: skip
    config = read_spec(arguments.model)
    device, dtype = resolve_device(settings.device, settings.dtype)
    prepare_device(device, settings)
    model, _ = load_model(config, settings, device, dtype)
    bench = Bench(config, settings, model, device, dtype_named(dtype))
    sides = [int(part) for part in arguments.sides.split(",")]
    print(f"{config.name} on {device}, {dtype}; torch {torch.__version__}")
    print("tower, uint8 on the device: ms per batch")
    print(
        f"{'side':>6} {'batch':>6} {'eager':>8} {'host':>8} {'graph':>8} {'images/s':>9} "
        f"{'floor':>8} {'x floor':>8}"
    )
    stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else None
    with torch.inference_mode(), stream or torch.inference_mode():
        for side in sides:
            for batch in (int(part) for part in arguments.batches.split(",")):
                measure_tower(bench, side, batch, arguments.repeats)
    print("engine, from JPEG bytes: ms per image (median), images/s, floor in ms per image")
    print(f"{'side':>6} {'under':>6} {'ms':>8} {'images/s':>9} {'floor':>8} {'x floor':>8}")
    for side in sides:
        for under_way in (int(part) for part in arguments.under_way.split(",")):
            count = arguments.images if under_way > 1 else max(8, arguments.images // 8)
            measure_engine(bench, side, under_way, count)


if __name__ == "__main__":
    main()
