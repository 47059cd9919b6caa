"""Traces: equal by seed, of the stated rates, and read from files without silence."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.traces import bursts, day, flash_crowd, patches_of, recorded


def test_equal_seeds_make_equal_traces() -> None:
    first, again, other = (flash_crowd(0.2, seed, hours=0.5) for seed in (1, 1, 2))
    assert (first.arrival, first.images, first.output) == (
        again.arrival, again.images, again.output,
    )  # fmt: skip
    assert first.arrival != other.arrival


@pytest.mark.parametrize("make", [day, bursts, flash_crowd])
def test_requests_come_in_order_within_the_trace(make) -> None:
    trace = make(0.2, hours=1.0)
    arrivals = np.array(trace.arrival)
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[0] >= 0
    assert arrivals[-1] < trace.duration_s == 3600
    for request in trace.requests():
        assert request.prompt_tokens > sum(request.images) // 4
        assert request.output_tokens >= 2


def test_a_day_is_busiest_in_the_afternoon() -> None:
    trace = day(0.02)
    per_hour = np.bincount((np.array(trace.arrival) // 3600).astype(int))
    assert len(per_hour) == 24
    assert per_hour[13:16].min() > 3 * per_hour[2:6].max()
    assert len(trace) == pytest.approx(0.02 * 11.3 * 86_400, rel=0.1)


def test_patches() -> None:
    assert patches_of(1024, 1024) == 4096
    assert patches_of(640, 640) == 1600
    assert patches_of(8, 8) == 4


def test_a_recorded_trace(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 12.5, "prompt_tokens": 1058, "output_tokens": 64, "images": [[1024, 1024]]},
        {"arrival_s": 10, "prompt_tokens": 5, "output_tokens": 1},
    ]
    path = tmp_path / "monday.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    requests = list(recorded(path).requests())
    assert [(r.arrival, r.prompt_tokens, r.output_tokens, r.images) for r in requests] == [
        (0.0, 5, 1, ()), (2.5, 1058, 64, (4096,)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"arrival_s": 0, "prompt_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 1.5, "output_tokens": 5}',
        '{"arrival_s": NaN, "prompt_tokens": 5, "output_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "image": []}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "images": [[32]]}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5, "images": 3}',
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n' + line)
    with pytest.raises(ValueError, match=r"trace.jsonl, line 2"):
        recorded(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no request"):
        recorded(path)
