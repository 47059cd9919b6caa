"""A padded batch gives what the batch gives, whatever lies in its padding; so graphs may pad."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from services.common.model_spec import TowerSpec
from services.common.nn.weights import load_dummy
from services.encoder.attention.sdpa import SdpaAttention
from services.encoder.engine.graphs import MAX_CAPTURED_PATCHES, TowerGraphs, buckets
from services.encoder.models.base import Grid, LastingLayout
from services.encoder.models.qwen3_vl import Qwen3VLVisionModel

CPU = torch.device("cpu")
CONFIG = TowerSpec(3, 48, 96, 3, 3, 16, 2, 2, 36, 40, (0, 1))
BATCHES: list[list[Grid]] = [[(1, 4, 6), (1, 2, 2)], [(1, 8, 8)], [(1, 2, 2)], [(1, 6, 4)] * 2]
ROWS = 72


class Plan:
    """Segments, and nothing for the rows behind them."""

    def __init__(self, max_segments: int) -> None:
        self._max_segments = max_segments
        self.lengths: Sequence[int] = ()

    def set(self, lengths: Sequence[int]) -> None:
        assert len(lengths) <= self._max_segments
        self.lengths = lengths


class PaddedAttention(SdpaAttention):
    """On the CPU what kernels with a lasting plan do on a GPU: rows of no segment are not written,
    here not even numbers.
    """

    def lasting_plan(  # type: ignore[override]
        self, max_rows: int, max_segments: int, device: torch.device
    ) -> Plan:
        return Plan(max_segments)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: object) -> Tensor:  # type: ignore[override]
        if not isinstance(plan, Plan):
            return super().forward(query, key, value, plan)  # type: ignore[arg-type]
        out = torch.full_like(query, torch.nan)
        used = sum(plan.lengths)
        parts = (x[:used] for x in (query, key, value))
        out[:used] = super().forward(*parts, self.plan(plan.lengths, CPU))
        return out


@pytest.fixture(scope="module")
def model() -> Qwen3VLVisionModel:
    attention = PaddedAttention(3, 16, torch.float32)
    with torch.device("meta"):
        made = Qwen3VLVisionModel(CONFIG, attention)
    load_dummy(made, device=CPU, dtype=torch.float32)
    return made.eval()


@torch.inference_mode()
def test_padding_is_seen_by_nobody(model: Qwen3VLVisionModel) -> None:
    layout = model.lasting_layout(ROWS, 2)
    assert layout is not None
    padded = torch.full((ROWS, 3 * 16**2), torch.nan)
    for seed, grids in enumerate(BATCHES):  # what one leaves behind does not reach the next
        count = sum(h * w for _, h, w in grids)
        padded[:count] = torch.randn(
            count, 3 * 16**2, generator=torch.Generator().manual_seed(seed)
        )
        layout.set(grids)
        expected = model(padded[:count], model.layout(grids))
        found = model(padded, layout.rows(ROWS))[:, : count // 4]
        assert found.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_views_stay_where_they_are(model: Qwen3VLVisionModel) -> None:
    layout: LastingLayout | None = model.lasting_layout(ROWS, 2)
    assert layout is not None
    before = layout.rows(64)
    layout.set([(1, 8, 8)])
    after = layout.rows(64)
    assert before.positions.data_ptr() == after.positions.data_ptr()
    assert torch.equal(before.cos, model.layout([(1, 8, 8)]).cos)


def test_every_small_batch_finds_a_size_that_is_not_much_larger() -> None:
    sizes = buckets()
    assert sizes == sorted(sizes) and sizes[-1] == MAX_CAPTURED_PATCHES
    steps = [later - sooner for sooner, later in pairwise(sizes)]
    assert max(steps) <= 512
    assert all(size % 4 == 0 for size in sizes)


def test_where_there_is_no_lasting_plan_there_are_no_graphs() -> None:
    with torch.device("meta"):
        made = Qwen3VLVisionModel(CONFIG, SdpaAttention(3, 16, torch.float32))
    load_dummy(made, device=CPU, dtype=torch.float32)
    assert TowerGraphs.create(made, torch.float32, CPU) is None
