"""Positions and deltas against HF's get_rope_index, and by hand."""

import types

import numpy as np
import pytest

from services.common.geometry import Geometry, Run, Unit

GEOMETRY = Geometry(9, 16, 2, 1, 1 << 30)


def layout(*items):
    """Numbers of text tokens, and grids, to (num_tokens, runs)."""
    index, runs = 0, []
    for item in items:
        if isinstance(item, int):
            index += item
        else:
            unit = Unit(item)
            runs.append(Run(index, GEOMETRY.num_tokens(unit), unit, len(runs)))
            index += runs[-1].num_tokens
    return index, runs


def test_text_alone_counts_up():
    positions, delta = GEOMETRY.positions(5, [])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_image_takes_rows_and_columns_and_moves_on_by_its_longer_side():
    positions, delta = GEOMETRY.positions(*layout(2, (1, 4, 6), 1))
    assert positions[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert positions[:, 8].tolist() == [5, 5, 5]
    assert delta == 6 - 9
    assert positions.dtype == np.int32


@pytest.fixture(scope="module")
def hf():
    torch = pytest.importorskip("torch")
    import tests.parity.torchvision_ops  # noqa: F401 - before transformers

    # isort: split
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    config = types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2))
    model = types.SimpleNamespace(
        config=config,
        get_vision_position_ids=lambda *a, **k: Qwen3VLModel.get_vision_position_ids(
            model, *a, **k
        ),
    )

    def positions(num_tokens, runs):
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        kinds = torch.zeros(1, num_tokens, dtype=torch.int)
        for run in runs:
            kinds[0, run.offset : run.offset + run.num_tokens] = 1
        grids = torch.tensor([run.unit.grid for run in runs]) if runs else None
        found, delta = Qwen3VLModel.get_rope_index(model, ids, kinds, grids)
        return found[:, 0].numpy(), int(delta)

    return positions


CASES = {
    "text": (17,),
    "one image": (4, (1, 16, 16), 9),
    "three images": (3, (1, 8, 6), 2, (1, 2, 40), 2, (1, 30, 4), 5),
    "interleaved turns": (3, (1, 4, 4), 12, (1, 10, 14), 30, (1, 6, 2), 7),
    "image first and last": ((1, 4, 8), 2, (1, 8, 4)),
    "64 x 96": (6, (1, 64, 96), 11),
}


@pytest.mark.parametrize("items", CASES.values(), ids=CASES.keys())
def test_equals_hf(hf, items):
    num_tokens, runs = layout(*items)
    expected, expected_delta = hf(num_tokens, runs)
    positions, delta = GEOMETRY.positions(num_tokens, runs)
    np.testing.assert_array_equal(positions, expected)
    assert delta == expected_delta


def test_equals_hf_on_random_layouts(hf):
    rng = np.random.default_rng(0)
    for _ in range(200):
        items = [int(rng.integers(1, 9))]
        for _ in range(rng.integers(0, 5)):
            items.append((1, 2 * int(rng.integers(1, 20)), 2 * int(rng.integers(1, 20))))
            items.append(int(rng.integers(1, 9)))
        num_tokens, runs = layout(*items)
        expected, expected_delta = hf(num_tokens, runs)
        positions, delta = GEOMETRY.positions(num_tokens, runs)
        np.testing.assert_array_equal(positions, expected)
        assert delta == expected_delta
        assert delta <= 0
