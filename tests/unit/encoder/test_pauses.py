"""A batch that keeps a shared device busy for long pauses as long as it works."""

import pytest

from services.common.model_spec import TowerSpec
from services.encoder.engine.pauses import Pauses, count_operations

TWO_B = TowerSpec(24, 1024, 4096, 16, 3, 16, 2, 2, 2304, 2048, (5, 11, 17))


@pytest.mark.parametrize(("side", "tera"), [(448, 0.534), (512, 0.721), (1024, 4.12), (4096, 462)])
def test_operations_are_those_of_the_blocks(side: int, tera: float) -> None:
    """Written out in another order: projections, MLP and attention of each block."""
    patches = (side // 16) ** 2
    block = 2 * patches * (4 * 1024**2 + 2 * 1024 * 4096) + 4 * patches**2 * 1024
    found = count_operations(TWO_B, [(1, side // 16, side // 16)])
    assert found == 24 * block
    assert found == pytest.approx(tera * 1e12, rel=0.01)


def test_images_of_a_batch_attend_to_themselves_alone() -> None:
    grid = (1, 64, 64)
    assert count_operations(TWO_B, [grid] * 3) == 3 * count_operations(TWO_B, [grid])
    assert count_operations(TWO_B, [(2, 64, 64)]) == 2 * count_operations(TWO_B, [grid])


def test_only_long_batches_pause() -> None:
    pauses = Pauses()
    large = count_operations(TWO_B, [(1, 256, 256)])
    pauses.calibrate(large / 4, 0.25)
    assert pauses.seconds_after_part(large, 4) == pytest.approx(0.25)
    usual = count_operations(TWO_B, [(1, 64, 64)] * 8)  # as much as a batch may have
    assert pauses.seconds_after_part(usual, 4) == 0.0
    assert pauses.seconds_after_part(count_operations(TWO_B, [(1, 128, 128)]), 4) == 0.0
