"""A large batch has a shared GPU in a turn. A very large one leaves it idle half of the time."""

import pytest

from services.common.families.qwen3_vl import DeepStackTower
from services.encoder.engine.throttle import (
    Throttle,
    count_flops,
    most_patches_without_turn,
    needs_turn,
)

TWO_B = DeepStackTower(24, 1024, 4096, 16, 3, 16, 2, 2, 2048, 2304, (5, 11, 17))


@pytest.mark.parametrize(("side", "tera"), [(448, 0.534), (512, 0.721), (1024, 4.12), (4096, 462)])
def test_flops_are_those_of_the_blocks(side: int, tera: float) -> None:
    """Written out in another order: projections, MLP and attention of each block."""
    patches = (side // 16) ** 2
    block = 2 * patches * (4 * 1024**2 + 2 * 1024 * 4096) + 4 * patches**2 * 1024
    found = count_flops(TWO_B, [(1, side // 16, side // 16)])
    assert found == 24 * block
    assert found == pytest.approx(tera * 1e12, rel=0.01)


def test_images_of_a_batch_attend_to_themselves_alone() -> None:
    grid = (1, 64, 64)
    assert count_flops(TWO_B, [grid] * 3) == 3 * count_flops(TWO_B, [grid])


def test_only_large_batches_are_throttled() -> None:
    throttle = Throttle()
    large = count_flops(TWO_B, [(1, 256, 256)])
    throttle.calibrate(large / 4, 0.25)
    assert throttle.idle_s(large, 4) == pytest.approx(0.25)
    usual = count_flops(TWO_B, [(1, 64, 64)] * 8)  # as much as a batch may have
    assert throttle.idle_s(usual, 4) == 0.0
    assert throttle.idle_s(count_flops(TWO_B, [(1, 128, 128)]), 4) == 0.0


def test_a_batch_of_large_images_needs_a_turn_and_one_of_usual_images_does_not() -> None:
    for images, expected in (
        ([(1, 64, 64)], False),
        ([(1, 64, 64)] * 3, False),  # as many as a batch has
        ([(1, 150, 112)], True),  # a page of 1,800 x 2,400
        ([(1, 256, 256)], False),  # is throttled
    ):
        assert needs_turn(count_flops(TWO_B, images)) is expected


def test_images_that_overtake_a_large_batch_need_no_turn() -> None:
    most = most_patches_without_turn(TWO_B, 12_288)
    assert 4096 < most < 12_288
    assert not needs_turn(count_flops(TWO_B, [(1, 1, most)]))
    assert needs_turn(count_flops(TWO_B, [(1, 1, most + 1)]))
    assert not needs_turn(count_flops(TWO_B, [(1, 1, most // 2)] * 2))
    assert most_patches_without_turn(TWO_B, 100) == 100
