"""The runner writes each image's embedding to its place, whatever runs beside it."""

import mmap
from collections.abc import Iterator

import pytest
import torch

from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Grid, Unit
from services.common.nn.dummy_weights import load_dummy
from services.encoder.engine.job import Job
from services.encoder.engine.runner import Runner
from services.encoder.models import create_tower
from services.encoder.models.positions import VisionLayout
from services.encoder.models.qwen3_vl import VisionTower
from tests.tower import cpu_ops

SPEC = DeepStackTower(3, 48, 96, 3, 3, 16, 2, 2, 40, 36, (0, 1))
GRIDS: list[Grid] = [(1, 4, 6), (1, 6, 4), (1, 2, 2), (1, 4, 6)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> VisionTower:
    with torch.device("meta"):
        model = create_tower(SPEC, cpu_ops(SPEC))
    load_dummy(model, device=CPU, dtype=torch.float32)
    return model


def image(job_id: int, grid: Grid, offset: int = 0, seed: int = 0) -> Job:
    generator = torch.Generator().manual_seed(seed)
    shape = (grid[1] * 16, grid[2] * 16, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return Job(job_id, Unit(grid), pixels=pixels, arena_offset=offset)


def read(arena: mmap.mmap, place: Job) -> torch.Tensor:
    tokens = place.unit.num_patches // 4
    shape = (SPEC.num_features, tokens, SPEC.out_hidden_size)
    count = shape[0] * shape[1] * shape[2]
    assert place.arena_offset is not None
    return torch.frombuffer(
        arena, dtype=torch.float32, count=count, offset=place.arena_offset
    ).reshape(shape).clone()  # fmt: skip


def expected(model: VisionTower, place: Job) -> torch.Tensor:
    assert place.pixels is not None
    patches = model.ops.pack_patches(
        place.pixels.reshape(-1), [place.unit.grid], 16, 2, torch.float32
    )
    with torch.inference_mode():
        return model(patches, model.layout([place.unit.grid]))


def test_each_image_lands_in_its_place(model: VisionTower) -> None:
    arena = mmap.mmap(-1, 1 << 20)
    runner = Runner(model, CPU, torch.float32, arena)
    images = [image(n, grid, n * 65536, seed=n) for n, grid in enumerate(GRIDS)]
    batch = runner.launch(images)
    assert runner.is_done(batch)
    assert runner.finish(batch) == [True] * 4
    assert sorted(i.job_id for i in batch.images) == [0, 1, 2, 3]
    for place in images:
        torch.testing.assert_close(read(arena, place), expected(model, place), atol=2e-5, rtol=0)


def test_each_tower_computes_its_own_images(model: VisionTower) -> None:
    torch.manual_seed(1)
    with torch.device("meta"):
        other = create_tower(SPEC, model.ops)
    load_dummy(other, device=CPU, dtype=torch.float32, seed=1)
    arena = mmap.mmap(-1, 1 << 20)
    runner = Runner(model, CPU, torch.float32, arena, adapted=[other])
    same = [image(n, GRIDS[0], n * 65536, seed=3) for n in range(3)]
    for place, tower in zip(same, (1, 0, 1), strict=True):
        place.tower = tower
        runner.finish(runner.launch([place]))
    found = [read(arena, place) for place in same]
    assert torch.equal(found[0], found[2])  # the base's image between them has changed nothing
    torch.testing.assert_close(found[0], expected(other, same[0]), atol=2e-5, rtol=0)
    torch.testing.assert_close(found[1], expected(model, same[1]), atol=2e-5, rtol=0)
    assert (found[0] - found[1]).abs().max() > 0.1


def test_nothing_else_is_written(model: VisionTower) -> None:
    arena = mmap.mmap(-1, 1 << 20)
    runner = Runner(model, CPU, torch.float32, arena)
    place = image(1, (1, 4, 6), offset=65536)
    size = read(arena, place).nbytes
    runner.finish(runner.launch([place]))
    assert not any(arena[:65536]) and not any(arena[65536 + size :])


class SpoiledTower(VisionTower):
    """A tower one of whose values is replaced.

    Attributes:
        spoiled: feature, row, column, and the value there.
    """

    def __init__(self, spoiled: tuple[int, int, int, float]) -> None:
        with torch.device("meta"):
            super().__init__(SPEC, cpu_ops(SPEC))
        load_dummy(self, device=CPU, dtype=torch.float32)
        self.spoiled = spoiled

    def features(
        self, embedded: torch.Tensor, layout: VisionLayout
    ) -> Iterator[tuple[int, torch.Tensor]]:
        spoiled, row, column, value = self.spoiled
        for feature, rows in super().features(embedded, layout):
            if feature == spoiled:
                rows[row, column] = value
            yield feature, rows


def test_an_image_that_is_not_finite_is_told_apart() -> None:
    model = SpoiledTower((1, 0, 3, float("nan")))  # the first image in packing order
    runner = Runner(model, CPU, torch.float32, mmap.mmap(-1, 1 << 20))
    images = [image(n, grid, n * 65536) for n, grid in enumerate(GRIDS)]
    batch = runner.launch(images)
    assert runner.finish(batch) == [False, True, True, True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_non_finite_value_is_noticed(value: float) -> None:
    runner = Runner(SpoiledTower((2, 3, 7, value)), CPU, torch.float32, mmap.mmap(-1, 1 << 20))
    assert runner.finish(runner.launch([image(0, (1, 4, 4))])) == [False]


def test_warm_up_leaves_a_small_arena_in_peace(model: VisionTower) -> None:
    arena = mmap.mmap(-1, 4096)
    Runner(model, CPU, torch.float32, arena).warm_up(1 << 16)
    assert any(arena[:])  # the small batch fits, and was run; more would not have fitted


def test_calls_are_counted_by_kernel(model: VisionTower) -> None:
    runner = Runner(model, CPU, torch.float32, mmap.mmap(-1, 1 << 20))
    before = runner.kernel_calls
    runner.finish(runner.launch([image(0, (1, 4, 4))]))
    counted = {name: count - before.get(name, 0) for name, count in runner.kernel_calls.items()}
    assert counted["ragged_attention=plain"] == SPEC.depth
    assert counted["rotary=plain"] == SPEC.depth
    assert counted["linear_add=plain"] == 2 * SPEC.depth
    assert counted["linear=plain"] == SPEC.depth + 2 * SPEC.num_features
    assert counted["pack_patches=plain"] == 1


def test_pairs_of_frames_land_in_their_places(model: VisionTower) -> None:
    """Each equals the tower's of both frames; of two equal ones, that of a still image."""
    arena = mmap.mmap(-1, 1 << 20)
    runner = Runner(model, CPU, torch.float32, arena)
    pairs = []
    for number, grid in enumerate(GRIDS):
        first, second = image(0, grid, seed=number), image(0, grid, seed=number + number % 2)
        assert first.pixels is not None and second.pixels is not None
        pixels = torch.stack([first.pixels, second.pixels])
        pairs.append(Job(number, Unit(grid, (0, 1)), pixels=pixels, arena_offset=number * 65536))
    assert runner.finish(runner.launch(pairs)) == [True] * len(pairs)
    for number, pair in enumerate(pairs):
        grid = pair.unit.grid
        patches = model.ops.pack_pairs(pair.pixels.reshape(-1), [grid], 16, 2, torch.float32)
        with torch.inference_mode():
            alone = model(patches, model.layout([grid]))
        assert torch.allclose(read(arena, pair), alone, atol=1e-5)
        still = expected(model, image(0, grid, seed=number))
        assert torch.allclose(alone, still, atol=1e-4) == (number % 2 == 0)
