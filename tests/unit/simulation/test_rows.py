"""The stage costs against measured serving rows."""

from dataclasses import replace

import pytest

from benchmarks.simulation.rows import MEASURED, compare
from benchmarks.simulation.stages import H200_2B, StageCosts

TOLERANCE = 0.15


def off_by(costs: StageCosts) -> dict[tuple[str, str, int], float]:
    return {
        (m.row, m.figure, len(m.plan.fleets)): predicted / m.value - 1
        for m, predicted in compare(costs)
        if not m.calibrates
    }


def test_rows_that_were_not_used_for_calibration_are_predicted_within_15_percent() -> None:
    rows = off_by(H200_2B)
    assert len(rows) >= 8
    assert {k: v for k, v in rows.items() if abs(v) > TOLERANCE} == {}


def test_rows_that_calibrate_are_met() -> None:
    for measured, predicted in compare(H200_2B):
        if measured.calibrates:
            assert predicted == pytest.approx(measured.value, rel=0.02), measured.row


@pytest.mark.parametrize(
    "wrong",
    [
        replace(H200_2B, per_token=H200_2B.per_token * 1.5),
        replace(H200_2B, per_kv_token=H200_2B.per_kv_token * 2),
        replace(H200_2B, per_patch=H200_2B.per_patch * 2),
    ],
    ids=["prompts", "attention", "tower"],
)
def test_wrong_costs_are_noticed(wrong: StageCosts) -> None:
    assert max(abs(error) for error in off_by(wrong).values()) > TOLERANCE


def test_each_stage_is_checked_by_a_row() -> None:
    names = {measured.row for measured in MEASURED if not measured.calibrates}
    assert {"text_c64", "text_c256", "img512_c64", "img1024_c32", "img4x640_c16"} <= names
