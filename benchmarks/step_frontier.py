"""Goodput and throughput by the bound of a step (`DECODER_STEP_MS`).

    python -m benchmarks.step_frontier --model DIR --out frontier.json \
        --bounds 10,20,30,40,60,100,1000 --device cuda --load-format dummy --gateways 4

Each bound is a start of `triptych serve`, which unknown options go to; `default` is the decoder's.
Open loops (img1, epd4) send requests at random times, as many a second as `@` says, whether or not
others are answered; an answer is good if its first token comes within 2 s and later ones within 50
ms each, on average. Closed loops are rows of `benchmarks.serve`, by name or by shape, such as
8x12000+64:32. Results of a bound replace those of an earlier run in the same file.
`--plot PICTURE` draws the file instead. If the file is a table of rows beside vLLM, as
data/frontier_beside_vllm.csv, the picture shows first tokens against later ones.
"""

import argparse
import asyncio
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.client import Connection, Sample, Target
from benchmarks.serve import run_row
from benchmarks.startup import serving
from benchmarks.worker import model_name
from benchmarks.workloads import Row, request_bodies, row_named

GOOD_TTFT_S, GOOD_TPOT_S = 2.0, 0.05
_TIMEOUT_S = 300.0
OPEN = {  # the numbers of requests follow from rate and time
    "img1": Row("img1", 32, 0, 24, 64, 1024, 1),
    "epd4": Row("epd4", 16, 0, 60, 150, 640, 4),
    "text": Row("text", 32, 0, 500, 128),
}
_DEFAULT = "img1@24,epd4@10,text_c64,text_c256"


def is_good(sample: Sample) -> bool:
    """Returns whether an answer came soon enough, by its first token and by later ones."""
    return sample.ttft_s <= GOOD_TTFT_S and sample.tpot_s <= GOOD_TPOT_S


async def open_loop(target: Target, bodies: Sequence[bytes], rate: float) -> list[Sample]:
    """Sends each body at its time; intervals are exponential, and the same in each run."""
    due = np.cumsum(np.random.default_rng(11).exponential(1 / rate, len(bodies)))
    return await send_at(target, bodies, due.tolist(), time.monotonic(), _TIMEOUT_S)


async def ask(target: Target, body: bytes, timeout_s: float) -> Sample:
    """Sends a body over a connection of its own."""
    connection = Connection(target)
    try:
        return await connection.post(body, timeout_s)
    finally:
        connection.close()


async def send_at(
    target: Target, bodies: Sequence[bytes], due: Sequence[float], start: float, timeout_s: float
) -> list[Sample]:
    """Sends each body at its time, in seconds from `start` of the monotonic clock."""

    async def send(body: bytes, at: float) -> Sample:
        await asyncio.sleep(start + at - time.monotonic())
        return await ask(target, body, timeout_s)

    return await asyncio.gather(*(send(b, at) for b, at in zip(bodies, due, strict=True)))


def measure(workload: str, url: str, seconds: float, seed: int) -> dict[str, Any]:
    """The figures of `img1@24`, `text_c64` and so on."""
    target = Target.from_url(url)
    model = model_name(target, _TIMEOUT_S)
    name, _, rate = workload.partition("@")
    if rate:
        row = replace(OPEN[name], num_requests=round(float(rate) * seconds))
        bodies = list(request_bodies(row, model, seed))
        asyncio.run(open_loop(target, bodies[: row.num_warmup], float(rate)))
        answers = asyncio.run(open_loop(target, bodies[row.num_warmup :], float(rate)))
    else:
        row = row_named(name)
        answers, _ = run_row(row, target, request_bodies(row, model, seed), _TIMEOUT_S)
    return {"workload": workload} | figures(answers)


def figures(answers: Sequence[Sample]) -> dict[str, Any]:
    """Rates, and percentiles in milliseconds."""
    whole = [answer for answer in answers if not answer.error]
    if not whole:
        raise SystemExit(f"no request was answered: {answers[0].error}")
    start = min(answer.start for answer in answers)
    wall_s = max(answer.end for answer in answers) - start

    def percentiles(values: Sequence[float]) -> list[float]:
        return [round(1e3 * float(v), 2) for v in np.percentile(values, (50, 99))]

    return {
        "good_per_s": round(sum(map(is_good, whole)) / wall_s, 2),
        "requests_per_s": round(len(whole) / wall_s, 2),
        "tokens_per_s": round(sum(answer.completion_tokens for answer in whole) / wall_s, 1),
        "ttft_ms": percentiles([answer.ttft_s for answer in whole]),
        "tpot_ms": percentiles([answer.tpot_s for answer in whole]),
        "gap_ms": percentiles([answer.gap_s for answer in whole]),
        "errors": len(answers) - len(whole),
    }


def write_plot(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """Goodput of open loops, and throughput of closed ones, by the bound."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (good, rate) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    found = [row for row in found if row["step_ms"]]
    for workload in dict.fromkeys(row["workload"] for row in found):
        rows = sorted((r for r in found if r["workload"] == workload), key=lambda r: r["step_ms"])
        bounds = [row["step_ms"] for row in rows]
        if "@" in workload:
            (line,) = good.plot(bounds, [r["good_per_s"] for r in rows], "o-", label=workload)
            answered = [r["requests_per_s"] for r in rows]
            good.plot(bounds, answered, ":", color=line.get_color(), label="all answers")
        else:
            best = max(r["tokens_per_s"] for r in rows)
            shares = [100 * r["tokens_per_s"] / best for r in rows]
            rate.plot(bounds, shares, "o-", label=f"{workload}: 100 % = {best:,.0f} tokens/s")
    good.set_title("good answers per second: first token ≤ 2 s, ≤ 50 ms a token", fontsize=10)
    rate.set_title("tokens per second, % of the best", fontsize=10)
    ticks = sorted({row["step_ms"] for row in found})
    for axis in (good, rate):
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("DECODER_STEP_MS")
        axis.set_ylim(bottom=0)
        if axis.lines:
            axis.legend(fontsize=8)
        axis.axvline(40, color="0.8", zorder=0)  # the default
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def write_plane(path: Path, table: Path) -> None:
    """Draws the first token of text_c64 against each later one, a point for each bound."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["workload"] == "text_c64"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, all_axes = plt.subplots(
        1, len(models), figsize=(5.5 * len(models), 4), layout="constrained", squeeze=False
    )
    for axis, model in zip(all_axes[0], models, strict=True):
        for server in dict.fromkeys(row["server"] for row in rows):
            part = [row for row in rows if (row["model"], row["server"]) == (model, server)]
            x = [float(row["tpot_p50_ms"]) for row in part]
            y = [float(row["ttft_p50_ms"]) for row in part]
            axis.plot(x, y, "o-", label=server)
            for number, (row, *point) in enumerate(zip(part, x, y, strict=True)):
                bound = f"{row['step_ms']} ms: " if row["step_ms"] else ""
                text = f"{bound}{float(row['tokens_per_s']):,.0f} tokens/s"
                above = 6 if number else -14
                axis.annotate(text, point, (6, above), textcoords="offset points", fontsize=8)
        axis.set_title(f"{model}, 64 clients, by DECODER_STEP_MS", fontsize=10)
        axis.set_xlabel("each later token, ms (p50)")
        axis.set_ylabel("first token, ms (p50)")
        axis.set_ylim(bottom=0)
        axis.margins(x=0.45, y=0.15)
        axis.legend(fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; other options go to `triptych serve`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file, read first if it is there")
    add("--plot", type=Path, help="draw the file and measure nothing")
    add("--model", type=Path, help="checkpoint")
    add("--bounds", default="10,20,30,40,60,100,1000", help="milliseconds, or `default`")
    add("--workloads", default=_DEFAULT, help=f"{', '.join(OPEN)} with @RATE, or rows")
    add("--seconds", type=float, default=10.0, help="of each open loop")
    options, rest = parser.parse_known_args(arguments)
    if options.plot and options.out.suffix == ".csv":
        write_plane(options.plot, options.out)
        return 0
    found: list[dict[str, Any]] = (
        json.loads(options.out.read_text()) if options.out.exists() else []
    )
    if options.plot:
        write_plot(options.plot, found)
        return 0
    workloads = options.workloads.split(",")
    for workload in workloads:
        name, _, rate = workload.partition("@")
        if rate and name not in OPEN:
            parser.error(f"--workloads: unknown open loop {name}; known: {', '.join(OPEN)}")
        try:
            _ = rate or row_named(name)
        except ValueError as error:
            parser.error(f"--workloads: {error}")
    for bound in (None if b == "default" else float(b) for b in options.bounds.split(",")):
        settings = {} if bound is None else {"DECODER_STEP_MS": str(bound)}
        with serving(options.model, rest, None, **settings) as (url, _):
            for seed, workload in enumerate(workloads):
                row = {"step_ms": bound} | measure(workload, url, options.seconds, seed)
                key = bound, workload
                found = [r for r in found if (r["step_ms"], r["workload"]) != key] + [row]
                options.out.write_text(json.dumps(found, indent=1) + "\n")
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
