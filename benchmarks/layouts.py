"""Layouts of cards under open loops, measured through `triptych serve`.

    python -m benchmarks.layouts --model DIR --out layouts.json --cards 2 --layouts auto,split:1+1

Each layout is a start, which unknown options go to. Rows are open loops of
`benchmarks.step_frontier` (`--rows`: name@rate on two cards; with more cards rates grow): requests
arrive at random times, whether or not others are answered, and their texts and images are new. All
bodies of all rows are made before the first start, by as many processes as there are cores, and
several processes send them, so that the client is not what is measured. `python -m
benchmarks.simulate layouts` predicts the same rows.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.client import Sample, Target
from benchmarks.simulation.layouts import RATES, SECONDS
from benchmarks.startup import serving
from benchmarks.step_frontier import OPEN, figures, send_at
from benchmarks.worker import model_name, write_bodies
from benchmarks.workloads import Row, request_bodies

_ROWS = ",".join(f"{name}@{rate}" for name, rates in RATES.items() for rate in rates)
_CHUNK = 8  # requests that one process makes
_MODEL = "layouts"  # of requests
_WARM_UP_S = 2.0
_START_S = 0.5  # until all senders wait for their first time
_TIMEOUT_S = 120.0
_CONTEXT = multiprocessing.get_context("spawn")


class Workload:
    """A row's bodies in a file, and when each is due.

    Args:
        name: `name@rate` on two cards.
        cards: that serve.
        seconds: of arrivals.
        seed: of texts and images.
        directory: for the file.
    """

    def __init__(self, name: str, cards: int, seconds: float, seed: int, directory: Path) -> None:
        kind, _, rate = name.partition("@")
        self.rate = float(rate) * cards / 2
        self.name = f"{kind}@{self.rate:g}"
        self._row = OPEN[kind]
        self.path = directory / self.name
        self._counts = [round(self.rate * s) for s in (seconds, _WARM_UP_S)]
        self._seed = seed
        self.spans: Sequence[tuple[int, int]] = ()

    def make(self, pool: ProcessPoolExecutor) -> None:
        """Writes the bodies."""
        total = sum(self._counts)
        rows = [
            (
                replace(self._row, num_requests=min(_CHUNK, total - at), concurrency=0),
                self._seed + at,
            )
            for at in range(0, total, _CHUNK)
        ]
        self.spans = write_bodies(self.path, [b for made in pool.map(_bodies, rows) for b in made])

    def part(self, *, is_warm_up: bool) -> tuple[Sequence[tuple[int, int]], Sequence[float]]:
        """Spans and times of what counts, or of the warm-up."""
        start, count = (self._counts[0], self._counts[1]) if is_warm_up else (0, self._counts[0])
        due = np.cumsum(np.random.default_rng(11).exponential(1 / self.rate, count))
        return self.spans[start : start + count], due.tolist()


def _bodies(made: tuple[Row, int]) -> list[bytes]:
    row, seed = made
    return list(request_bodies(row, _MODEL, seed))


def run_open(
    workload: Workload, url: str, pool: ProcessPoolExecutor, senders: int, *, is_warm_up: bool
) -> list[Sample]:
    """Sends each body at its time."""
    spans, due = workload.part(is_warm_up=is_warm_up)
    start = time.monotonic() + _START_S
    parts = [
        pool.submit(_send, url, workload.path, spans[i::senders], due[i::senders], start)
        for i in range(senders)
    ]
    return [answer for part in parts for answer in part.result()]


def _send(
    url: str, path: Path, spans: Sequence[tuple[int, int]], due: Sequence[float], start: float
) -> list[Sample]:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    bodies = [data[begin:end] for begin, end in spans]
    return uvloop.run(send_at(Target.from_url(url), bodies, due, start, _TIMEOUT_S))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """In Markdown."""
    print("| row | layout | good of answered req/s | TTFT p50 / p99, ms | TPOT p50, ms |")
    print("|---|---|--:|--:|--:|")
    for row in rows:
        ttft = " / ".join(f"{value:,.0f}" for value in row["ttft_ms"])
        print(
            f"| {row['workload']} | {row['layout']} | {row['good_per_s']:.1f} of "
            f"{row['requests_per_s']:.1f} | {ttft} | {row['tpot_ms'][0]:.1f} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; other options go to `triptych serve`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="checkpoint")
    add("--out", type=Path, required=True, help="JSON file, written after each row")
    add("--cards", type=int, required=True, help="that are visible; rates are scaled by half")
    add("--layouts", default="auto", help="of triptych serve; LAYOUT=ROW/ROW: only these rows")
    add("--rows", default=_ROWS, help="open loops; rates are those of two cards")
    add("--seconds", type=float, default=SECONDS, help="of each")
    add("--senders", type=int, default=4, help="processes that send")
    options, rest = parser.parse_known_args(arguments)
    names = options.rows.split(",")
    if unknown := {name.partition("@")[0] for name in names} - OPEN.keys():
        parser.error(f"unknown row {', '.join(sorted(unknown))}")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        workers = max(1, (os.cpu_count() or 2) - 1)
        workloads = [
            Workload(name, options.cards, options.seconds, 100_000 * i, Path(directory))
            for i, name in enumerate(names)
        ]
        with ProcessPoolExecutor(workers, _CONTEXT) as pool:
            for workload in workloads:
                workload.make(pool)
        for layout in options.layouts.split(","):
            name, _, only = layout.partition("=")
            chosen = only.split("/") if only else names
            wanted = [w for n, w in zip(names, workloads, strict=True) if n in chosen]
            found += _measure(name, wanted, options, rest, found)
    print_table(found)
    return 0


def _measure(
    layout: str, workloads: Sequence[Workload], options: argparse.Namespace, rest: Sequence[str],
    before: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:  # fmt: skip
    """A start of the server with one layout."""
    found: list[dict[str, Any]] = []
    flags = ["--layout", layout, "--served-model-name", _MODEL, *rest]
    with (
        ProcessPoolExecutor(options.senders, _CONTEXT) as pool,
        serving(options.model, flags) as (url, ready_s),
    ):
        assert model_name(Target.from_url(url)) == _MODEL
        print(f"{layout}: ready after {ready_s:.1f} s", flush=True)
        run_open(workloads[0], url, pool, options.senders, is_warm_up=True)
        for workload in workloads:
            answers = run_open(workload, url, pool, options.senders, is_warm_up=False)
            row = {"workload": workload.name, "layout": layout, "cards": options.cards}
            found.append(row | figures(answers))
            print(json.dumps(found[-1]), flush=True)
            options.out.write_text(json.dumps([*before, *found], indent=1) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
