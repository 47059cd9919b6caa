"""The benchmark of layouts sends what the simulator plays, and everything of a row once."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.layouts import Workload, print_table


def test_a_row_is_new_content_at_the_times_of_the_simulator(tmp_path: Path) -> None:
    workload = Workload("img1@20", 4, 0.5, 0, tmp_path)
    assert (workload.name, workload.rate) == ("img1@40", 40.0)
    with ThreadPoolExecutor(1) as pool:
        workload.make(cast(Any, pool))
    spans, due = workload.part(is_warm_up=False)
    assert due == np.cumsum(np.random.default_rng(11).exponential(1 / 40, 20)).tolist()
    more, _ = workload.part(is_warm_up=True)
    assert len(spans) == 20 and len(more) == 80
    data = workload.path.read_bytes()
    bodies = [json.loads(data[start:end]) for start, end in (*spans, *more)]
    parts = [body["messages"][0]["content"] for body in bodies]
    assert len({part[0]["image_url"]["url"] for part in parts}) == 100
    assert len({part[-1]["text"] for part in parts}) == 100
    assert {(body["max_tokens"], len(part)) for body, part in zip(bodies, parts, strict=True)} == {
        (64, 2)
    }


def test_the_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "workload": "img1@40", "layout": "both", "good_per_s": 38.04, "requests_per_s": 39.0,
        "ttft_ms": [93.2, 1185.0], "tpot_ms": [9.14, 13.7],
    }  # fmt: skip
    print_table([row])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "| img1@40 | both | 38.0 of 39.0 | 93 / 1,185 | 9.1 |"
    )
