"""A padded batch gives the same as the batch, whatever its padding holds; so graphs may pad."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.attention.segments import Segments
from kernels.tower import plain
from services.common.families.paddleocr_vl import SiglipTower
from services.common.families.qwen2_5_vl import WindowTower
from services.common.families.qwen2_vl import PlainTower
from services.common.families.qwen3_vl import DeepStackTower
from services.common.geometry import Grid
from services.common.model_spec import TowerSpec
from services.common.nn.dispatch import CapturedCalls
from services.common.nn.dummy_weights import load_dummy
from services.encoder.engine.graphs import (
    MAX_CAPTURED_PATCHES,
    Captured,
    TowerGraphs,
    buckets,
)
from services.encoder.models import create_tower
from services.encoder.models.qwen3_vl import VisionTower
from services.encoder.models.window_layout import most_windows, windows_of, windows_of_batch
from services.encoder.operations.ops import Ops
from tests.tower import cpu_ops

CPU = torch.device("cpu")
SPEC = DeepStackTower(3, 48, 96, 3, 3, 16, 2, 2, 40, 36, (0, 1))
SPECS = {
    "qwen3_vl": SPEC,
    "paddleocr_vl": SiglipTower(2, 48, 80, 3, 3, 16, 1, 2, 40, 36),
    "qwen2_vl": PlainTower(3, 48, 96, 3, 3, 16, 2, 2, 40),
    "qwen2_5_vl": WindowTower(3, 48, 80, 3, 3, 16, 2, 2, 40, 64, (1,)),
}
BATCHES: list[list[Grid]] = [[(1, 4, 6), (1, 2, 2)], [(1, 8, 8)], [(1, 2, 2)], [(1, 6, 4)] * 2]
ROWS = 72


class PaddedOps(Ops):
    """On the CPU what attention kernels do with static segments on a GPU: rows of no segment are
    not written; here they are NaN.
    """

    def ragged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        out = torch.full_like(query, torch.nan)
        used = sum(segments.lengths)
        out[:used] = plain.ragged_attention(query[:used], key[:used], value[:used], segments)
        return out


@pytest.fixture(scope="module")
def model() -> VisionTower:
    return make(SPEC)


def make(spec: TowerSpec) -> VisionTower:
    with torch.device("meta"):
        made = create_tower(spec, PaddedOps(cpu_ops(spec).table))
    load_dummy(made, device=CPU, dtype=torch.float32)
    return made.eval()


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_padding_changes_nothing(name: str) -> None:
    model = make(SPECS[name])
    layout = model.static_layout(ROWS, 2)
    padded = torch.full((ROWS, 3 * 16**2), torch.nan)
    for seed, grids in enumerate(BATCHES):  # the buffers of one batch do not reach the next
        count = sum(h * w for _, h, w in grids)
        padded[:count] = torch.randn(
            count, 3 * 16**2, generator=torch.Generator().manual_seed(seed)
        )
        layout.set(grids)
        expected = model(padded[:count], model.layout(grids))
        found = model(padded, layout.rows(ROWS))[:, : count // 4]
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Part:
    """On the CPU what the graph of one part of the tower does: it reads and writes the buffers."""

    def __init__(self, graphs: TowerGraphs, feature: int) -> None:
        self.graphs, self.feature = graphs, feature

    def replay(self) -> None:
        graphs = self.graphs
        embedded, layout = graphs._embedded[:ROWS].clone(), graphs._layout.rows(ROWS)
        rows = dict(graphs._model.features(embedded, layout))[self.feature]
        graphs._output[self.feature, : len(rows)] = rows


@torch.inference_mode()
@pytest.mark.parametrize("name", SPECS)
def test_the_same_graphs_compute_still_images_and_pairs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = make(SPECS[name])
    graphs = TowerGraphs(model, torch.float32, CPU)
    parts = [(Part(graphs, feature), feature) for feature in range(model.spec.num_features)]
    captured = {ROWS: Captured(parts, CapturedCalls())}  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "_captured", captured)
    generator = torch.Generator().manual_seed(0)
    ops, times = model.ops, model.spec.temporal_patch_size
    for are_pairs in (False, True, False) if times == 2 else (False,):
        pack = ops.pack_pairs if are_pairs else ops.pack_patches
        for grids in BATCHES:
            assert graphs.fits(grids)
            size = (1 + are_pairs) * 3 * 16**2 * sum(h * w for _, h, w in grids)
            pixels = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            found = dict(graphs.replay(pixels, grids, are_pairs=are_pairs))
            patches = pack(pixels, grids, 16, 2, torch.float32)
            assert patches.shape[1] == (1 + are_pairs) * 3 * 16**2
            for feature, rows in enumerate(model(patches, model.layout(grids))):
                torch.testing.assert_close(found[feature], rows, rtol=1e-5, atol=1e-6)


def test_views_stay_where_they_are(model: VisionTower) -> None:
    layout = model.static_layout(ROWS, 2)
    before = layout.rows(64)
    layout.set([(1, 8, 8)])
    after = layout.rows(64)
    assert before.positions.embeddings.data_ptr() == after.positions.embeddings.data_ptr()
    assert torch.equal(before.positions.cos, model.layout([(1, 8, 8)]).positions.cos)


def test_windows_are_squares_that_are_cut_at_the_edges() -> None:
    order, lengths = windows_of(6, 10, 2, 2)  # 3 x 5 tokens
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert lengths == [16, 16, 8, 8, 8, 4]
    both = windows_of_batch([(1, 2, 2), (1, 6, 10)], 2, 2)
    assert both.order.tolist() == [0, *(1 + order).tolist()] and both.lengths == [4, *lengths]


def test_the_bound_of_windows_holds_for_every_shape() -> None:
    for side in (1, 2, 3, 4):
        for height in range(2, 40, 2):
            for width in range(2, 40, 2):
                found = len(windows_of(height, width, side, 2).lengths)
                assert found <= most_windows(height * width, 1, side, 2), (height, width)


def test_every_small_batch_finds_a_size_that_is_not_much_larger() -> None:
    sizes = buckets()
    assert sizes == sorted(sizes) and sizes[-1] == MAX_CAPTURED_PATCHES
    steps = [later - sooner for sooner, later in pairwise(sizes)]
    assert max(steps) <= 512
    assert all(size % 4 == 0 for size in sizes)
