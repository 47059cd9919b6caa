"""The encoder's engine alone: no gRPC, no cache. Prints each figure with its floor.

    python -m benchmarks.encode --shape 8b
    python -m benchmarks.encode --model DIR --engine
    python -m benchmarks.encode --shape 8b --table l40s

Layer: the operations of one block, from a captured graph each. Tower: from uint8 pixels on the
device to all features, eagerly and as a captured graph; `host` is the host's time for the eager
launches. Engine: from JPEG bytes through the preprocessing pool, the batches and the copies into
the arena, with a fixed number of images in flight.
"""

import argparse
import functools
import io
import mmap
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kernels.attention.segments import BatchSegments
from kernels.device import KNOWN_DEVICES
from services.common.families import read_spec
from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Geometry, Grid, Unit
from services.common.model_spec import TowerSpec
from services.common.nn.device import resolve_device, resolve_dtype
from services.common.nn.dispatch import UnknownOverride, parse_overrides
from services.common.nn.dummy_weights import load_dummy
from services.common.process.channel import EngineChannel, create_socket_pair
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.engine.engine import Engine
from services.encoder.engine.graphs import MAX_CAPTURED_PATCHES, TowerGraphs, buckets
from services.encoder.engine.messages import (
    EncodeImage,
    EngineMessage,
    FrontMessage,
    ImageDone,
    PlaceImage,
    Shutdown,
    Source,
)
from services.encoder.engine.runner import Runner
from services.encoder.engine_main import (
    MAX_BATCH_PATCHES,
    create_decoders,
    create_ops,
    load_model,
    prepare_device,
    warm_up,
)
from services.encoder.models import create_tower
from services.encoder.models.qwen3_vl import VisionTower
from services.encoder.operations.table import TowerFacts, resolve
from services.encoder.settings import EncoderSettings

# Measured on an H200 with large GEMMs; see benchmarks/LOG.md.
FLOPS = 790e12  # bf16
_CALLS = 24  # of one operation in a graph

SHAPES = {
    "2b": DeepStackTower(24, 1024, 4096, 16, 3, 16, 2, 2, 2048, 2304, (5, 11, 17)),
    "4b": DeepStackTower(24, 1024, 4096, 16, 3, 16, 2, 2, 2560, 2304, (5, 11, 17)),
    "8b": DeepStackTower(27, 1152, 4304, 16, 3, 16, 2, 2, 4096, 2304, (8, 16, 24)),
    "32b": DeepStackTower(27, 1152, 4304, 16, 3, 16, 2, 2, 5120, 2304, (8, 16, 24)),
}
_GEOMETRY = Geometry(0, patch_size=16, merge_size=2, min_pixels=65536, max_pixels=1 << 24)


@dataclass(frozen=True, slots=True)
class Bench:
    """The model to measure, and its facts."""

    name: str
    tower: TowerSpec
    geometry: Geometry
    settings: EncoderSettings
    model: VisionTower
    device: torch.device
    dtype: torch.dtype

    def grid(self, side: int) -> Grid:
        """(t, h, w) in patches of a square image, as it is resized."""
        return self.geometry.units((side, side))[0].grid

    def embedding_bytes(self, grid: Grid) -> int:
        """Bytes of an image's embedding, all features."""
        tokens = self.geometry.num_tokens(Unit(grid))
        return self.tower.num_features * tokens * self.tower.out_hidden_size * self.dtype.itemsize


def create_bench(arguments: argparse.Namespace) -> Bench:
    """The model of a checkpoint, or random weights of a shape."""
    directory = arguments.model or Path()
    settings = EncoderSettings(
        model=directory, device=arguments.device, load_format=arguments.load_format,
        kernels=arguments.kernels,
    )  # fmt: skip
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    prepare_device(device, settings)
    if arguments.model is not None:
        spec = read_spec(directory)
        model, _ = load_model(spec, settings, device, dtype)
        vision = spec.vision_part
        return Bench(spec.name, vision.tower, vision.geometry, settings, model, device, dtype)
    tower = SHAPES[arguments.shape]
    with torch.device("meta"):
        model = create_tower(tower, create_ops(tower, settings, device, dtype))
    assert isinstance(model, torch.nn.Module)
    load_dummy(model, device=device, dtype=dtype)
    return Bench(arguments.shape, tower, _GEOMETRY, settings, model.eval(), device, dtype)


def print_table(arguments: argparse.Namespace) -> None:
    """What a known GPU would run; it need not be here."""
    tower = SHAPES.get(arguments.shape) or read_spec(arguments.model).vision_part.tower
    facts = TowerFacts.of(tower, KNOWN_DEVICES[arguments.table], torch.bfloat16)
    print(resolve(facts, parse_overrides(arguments.kernels)))


def count_flops(tower: TowerSpec, patches: int) -> float:
    """Floating-point operations of one image's forward."""
    hidden, inner = tower.hidden_size, tower.intermediate_size
    grouped = hidden * tower.spatial_merge_size**2
    embed = 2 * patches * tower.in_channels * tower.patch_size**2 * hidden
    linear = 2 * patches * (4 * hidden**2 + 2 * hidden * inner)
    tokens = patches // tower.spatial_merge_size**2
    merger = 2 * tokens * (grouped**2 + grouped * tower.out_hidden_size)
    layer = linear + attention_flops(tower, patches)
    return embed + tower.depth * layer + tower.num_features * merger


def attention_flops(tower: TowerSpec, patches: int) -> float:
    """Operations of one layer and image: the GEMMs of its scores and of its values."""
    return 4.0 * patches**2 * tower.hidden_size


def timed(bench: Bench, run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of a run, runs back to back, and the host's share of that."""
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


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a block, with the work that its floor is made of."""

    name: str
    run: Callable[[], object]
    flops: float = 0.0
    num_bytes: float = 0.0


def block_operations(bench: Bench, side: int, batch: int) -> list[Operation]:
    """Those of one block, and attention by each implementation that runs here."""
    tower, ops, (_, height, width) = bench.tower, bench.model.ops, bench.grid(side)
    patches, hidden, inner = height * width, tower.hidden_size, tower.intermediate_size
    count, head_dim = batch * patches, hidden // tower.num_heads
    random = functools.partial(torch.randn, device=bench.device, dtype=bench.dtype)
    x, residual = random(2, count, hidden).unbind()
    wide, bias = random(count, inner), random(hidden)
    qkv = random(count, 3, tower.num_heads, head_dim)
    angles = torch.rand(count, head_dim // 2, device=bench.device)
    project, up, down = random(3 * hidden, hidden), random(inner, hidden), random(hidden, inner)
    up_bias, qkv_bias = random(inner), random(3 * hidden)
    segments = BatchSegments([patches] * batch, bench.device)
    moved = x.numel() * x.itemsize
    square, rectangle = 2.0 * count * hidden**2, 2.0 * count * hidden * inner
    other, rotated = x.clone(), qkv.clone()  # overwritten
    output, norm = project[:hidden], (bias, bias, 1e-6)
    operations = [
        Operation("linear, qkv", lambda: ops.linear(x, project, qkv_bias), 3 * square),
        Operation("linear_add, proj", lambda: ops.linear_add(x, output, bias, residual), square),
        Operation("linear_gelu, fc1", lambda: ops.linear_gelu(x, up, up_bias), rectangle),
        Operation("linear_add, fc2", lambda: ops.linear_add(wide, down, bias, residual), rectangle),
        Operation("add_layer_norm", lambda: ops.add_layer_norm(other, x, *norm), 0, 4 * moved),
        Operation("layer_norm", lambda: ops.layer_norm(x, *norm), 0, 2 * moved),
        Operation("rotary", lambda: ops.rotary(rotated[:, :2], angles, angles), 0, 4 * moved),
    ]
    for name in ("hopper", "torch_varlen"):
        settings = bench.settings.model_copy(update={"kernels": f"ragged_attention={name}"})
        with suppress(UnknownOverride):
            attend = create_ops(tower, settings, bench.device, bench.dtype).ragged_attention
            run = functools.partial(attend, *qkv.unbind(1), segments)
            flops = batch * attention_flops(tower, patches)
            operations.append(Operation(f"attention, {name}", run, flops))
    return operations


def measure_layer(bench: Bench, side: int, batch: int, repeats: int) -> None:
    """Prints a row per operation of one block."""
    for operation in block_operations(bench, side, batch):
        with bench.model.ops.table.for_graph():
            operation.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_CALLS):
                    operation.run()
        taken = timed(bench, graph.replay, repeats)[0] / _CALLS
        rate = f"{operation.flops / taken / 1e12:8.0f} TFLOP/s"
        if operation.num_bytes:
            rate = f"{operation.num_bytes / taken / 1e9:8.0f} GB/s"
        print(f"{side:6} {batch:6} {operation.name:>24} {taken * 1e6:8.1f} {rate}", flush=True)


def measure_tower(bench: Bench, side: int, batch: int, repeats: int) -> None:
    """Prints one row."""
    tower, ops, grids = bench.tower, bench.model.ops, [bench.grid(side)] * batch
    patches = grids[0][1] * grids[0][2]
    size = batch * patches * tower.patch_size**2 * tower.in_channels
    pixels = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.device)

    def eager() -> None:
        packed = ops.pack_patches(
            pixels, grids, tower.patch_size, tower.spatial_merge_size, bench.dtype
        )
        embedded = bench.model.patch_embed(packed)
        list(bench.model.features(embedded, bench.model.layout(grids)))

    taken, host = timed(bench, eager, repeats)
    replayed = None
    if bench.device.type == "cuda" and batch * patches <= MAX_CAPTURED_PATCHES:
        graphs = TowerGraphs(bench.model, bench.dtype, bench.device)
        graphs.capture([size for size in buckets() if size >= batch * patches][:1])
        if graphs.fits(grids):
            replayed, _ = timed(bench, lambda: list(graphs.replay(pixels, grids)), repeats)
    best, flops = min(taken, replayed or taken), count_flops(tower, patches) * batch
    shown = f"{replayed * 1e3:8.2f}" if replayed else f"{'-':>8}"
    print(
        f"{side:6} {batch:6} {taken * 1e3:8.2f} {host * 1e3:8.2f} {shown} {batch / best:9.1f} "
        f"{flops / best / 1e12:8.0f} {flops / FLOPS * 1e3:8.3f} {best / flops * FLOPS:8.2f}",
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
    """A real engine in a thread, driven as its front drives it."""

    def __init__(self, bench: Bench, slots: int, slot_bytes: int) -> None:
        self._bench = bench
        self._slots = slots
        self._slot_bytes = -(-slot_bytes // 4096) * 4096
        arena = mmap.mmap(-1, self._slots * self._slot_bytes)
        self.runner = Runner(bench.model, bench.device, bench.dtype, arena)
        geometry = bench.geometry
        self._decoders = create_decoders()
        preprocessor = Preprocessor(geometry, self._decoders, bench.device.type == "cuda")
        warm_up(preprocessor, geometry)
        self.runner.warm_up(MAX_BATCH_PATCHES)
        self._ends = create_socket_pair()
        self._front: EngineChannel[EngineMessage] = EngineChannel(self._ends[0], EngineMessage)
        self._engine = Engine(
            EngineChannel(self._ends[1], FrontMessage), self.runner, preprocessor,
            max_batch_patches=MAX_BATCH_PATCHES, workers=self._decoders.num_workers,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._engine.run)
        self._thread.start()
        self._next_id = 0

    def encode(self, files: list[bytes], grid: Grid, in_flight: int, count: int) -> list[float]:
        """Seconds from each image's submission to its end, in the order of the ends."""
        started: dict[int, float] = {}
        taken: list[float] = []
        first = self._next_id
        while len(taken) < count:
            while len(started) < in_flight and self._next_id - first < count:
                number, self._next_id = self._next_id, self._next_id + 1
                started[number] = time.perf_counter()
                offset = number % self._slots * self._slot_bytes
                self._front.send(
                    EncodeImage(number, Source(files[number % len(files)]), Unit(grid))
                )
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
        self._decoders.close()


def measure_engine(bench: Bench, side: int, in_flight: int, count: int) -> None:
    """Prints one row."""
    grid = bench.grid(side)
    engine = EngineBench(bench, 2 * in_flight, bench.embedding_bytes(grid))
    try:
        files = jpegs(side, min(count, 32))
        engine.encode(files, grid, in_flight, max(8, in_flight))
        begin = time.perf_counter()
        taken = engine.encode(files, grid, in_flight, count)
        wall = time.perf_counter() - begin
    finally:
        engine.close()
    floor = count_flops(bench.tower, grid[1] * grid[2]) / FLOPS
    print(
        f"{side:6} {in_flight:6} {statistics.median(taken) * 1e3:8.2f} {count / wall:9.1f} "
        f"{floor * 1e3:8.3f} {wall / count / floor:8.2f}",
        flush=True,
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="The encoder's engine alone.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--shape", choices=SHAPES, help="random weights, no files")
    which.add_argument("--model", type=Path, help="a checkpoint directory")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="", help="see ENCODER_KERNELS")
    parser.add_argument("--sides", default="512,1024")
    parser.add_argument("--batches", default="1,3,8")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--engine", action="store_true", help="measure the engine, too")
    parser.add_argument("--in-flight", default="1,64", help="images, in the engine's table")
    parser.add_argument("--images", type=int, default=384, help="per row of the engine's table")
    parser.add_argument("--table", choices=KNOWN_DEVICES, help="print this GPU's kernel table")
    arguments = parser.parse_args()
    if arguments.table:
        print_table(arguments)
        return
    bench = create_bench(arguments)
    sides = [int(part) for part in arguments.sides.split(",")]
    batches = [int(part) for part in arguments.batches.split(",")]
    cuda = bench.device.type == "cuda"
    print(f"{bench.name} on {bench.device}, {bench.dtype}; torch {torch.__version__}")
    print(bench.model.ops.table)
    stream = torch.cuda.stream(torch.cuda.Stream(bench.device)) if cuda else None
    with torch.inference_mode(), stream or torch.inference_mode():
        if cuda:
            print("one layer: µs per operation")
            print(f"{'side':>6} {'batch':>6} {'operation':>24} {'us':>8} {'rate':>8}")
            for side in sides:
                for batch in batches:
                    measure_layer(bench, side, batch, arguments.repeats)
        print("tower, uint8 on the device: ms per batch")
        print(
            f"{'side':>6} {'batch':>6} {'eager':>8} {'host':>8} {'graph':>8} {'images/s':>9} "
            f"{'TFLOP/s':>8} {'floor':>8} {'x floor':>8}"
        )
        for side in sides:
            for batch in batches:
                measure_tower(bench, side, batch, arguments.repeats)
    if not arguments.engine:
        return
    print("engine, from JPEG bytes: ms per image (median), images/s, floor in ms per image")
    print(f"{'side':>6} {'flight':>6} {'ms':>8} {'images/s':>9} {'floor':>8} {'x floor':>8}")
    for side in sides:
        for in_flight in (int(part) for part in arguments.in_flight.split(",")):
            count = arguments.images if in_flight > 1 else max(8, arguments.images // 8)
            measure_engine(bench, side, in_flight, count)


if __name__ == "__main__":
    main()
