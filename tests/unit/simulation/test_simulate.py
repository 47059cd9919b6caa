"""The command line."""

import json
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulation import figures
from benchmarks.simulation.experiments import Point


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["rows"]) == 0
    assert "img4x640_c16" in capsys.readouterr().out


def test_a_comparison_is_printed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", "--trace", "flash", "--hours", "0.02", "--out", str(tmp_path)]
    assert simulate.main(arguments) == 0
    out = capsys.readouterr().out
    assert "replicas of both" in out
    assert "fixed, too small" in out
    rows = json.loads((tmp_path / "flash-crowd.json").read_text())
    assert rows[0]["name"] == "shipped"
    assert (tmp_path / "flash-crowd.png").read_bytes()[:4] == b"\x89PNG"


def test_a_recorded_trace_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 5}\n')
    for more in ([], ["--cells", "1"], ["--fixed"]):
        assert simulate.main(["run", "--trace", str(path), *more]) == 0
        assert "1 requests" in capsys.readouterr().out


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert simulate.main(["run", "--trace", str(tmp_path / "none")]) == 2
    path = tmp_path / "trace.jsonl"
    path.write_text("{}")
    assert simulate.main(["run", "--trace", str(path)]) == 2
    assert simulate.main(["run", "--trace", str(path), "--hours", "1"]) == 2


def test_the_sweep_is_drawn(tmp_path: Path) -> None:
    points = [
        Point(threshold, value, 0.9, 0.0, 1.0, 10.0)
        for threshold in ("rows", "waiting", "replicas")
        for value in (1, 2)
    ]
    figures.draw_sweep(tmp_path / "sweep.png", points)
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
