"""Simulates a fleet over a day of requests: `python -m benchmarks.simulate --help`.

Discrete events: every request, image batch and step of every pod, with stage costs measured on one
GPU and the autoscalers of Kubernetes and KEDA. docs/autoscaling.md has the model, its limits and
what it chose. Equal seeds give equal results.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulation import figures
from benchmarks.simulation.experiments import Progress, compare, silent, sweep
from benchmarks.simulation.layouts import SECONDS, goodput, predict, workloads
from benchmarks.simulation.policies import cell_policy, cells, shipped, split
from benchmarks.simulation.results import Result, simulate
from benchmarks.simulation.rows import compare as compare_rows
from benchmarks.simulation.stages import H100_8B, H200_2B
from benchmarks.simulation.traces import SYNTHETIC, Trace, recorded
from triptych.layout import layouts, read_layout
from triptych.stack import StackError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 2 if a trace or a layout cannot be read."""
    options = _parser().parse_args(arguments)
    try:
        options.action(options)
    except (OSError, ValueError, StackError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _rows(options: argparse.Namespace) -> None:
    """Predicted serving rows beside measured ones."""
    lines = [("row", "figure", "measured", "predicted", "off by", "", "source")]
    for measured, predicted in compare_rows(H200_2B):
        off = f"{100 * (predicted / measured.value - 1):+.1f} %"
        note = "calibrated" if measured.calibrates else ""
        lines.append(
            (measured.row, measured.figure, f"{measured.value:,g}", f"{predicted:,.4g}", off, note,
             measured.source)
        )  # fmt: skip
    _print_columns(lines)


def _run(options: argparse.Namespace) -> None:
    """One trace, one fleet."""
    trace = _trace(options)
    if options.cells:
        policy = None if options.fixed else cell_policy()
        plan = cells(options.cells, policy, options.start_s)
    elif options.fixed:
        plan = split(options.encoders, options.decoders)
    else:
        plan = shipped(options.encoders, options.decoders, options.start_s)
    started = time.process_time()
    name = "replicas of both" if options.cells else "encoders and decoders"
    result = simulate(
        trace, plan, H200_2B, name=name, seed=options.seed,
        progress=lambda share: _progress()(name, share),
    )  # fmt: skip
    _print_results([result])
    print(f"{result.num_requests} requests, {time.process_time() - started:.0f} s of CPU time")
    _write(options.out, "run", [result])


def _compare(options: argparse.Namespace) -> None:
    """The shipped policy beside fixed fleets and replicas of both stages."""
    trace = _trace(options)
    results = compare(
        trace, H200_2B, seed=options.seed, start_s=options.start_s, progress=_progress()
    )
    _print_results(results)
    _write(options.out, trace.name.replace(" ", "-"), results)
    if options.out:
        path = options.out / f"{trace.name.replace(' ', '-')}.png"
        figures.draw_day(path, trace, results)


def _sweep(options: argparse.Namespace) -> None:
    """Each threshold around its shipped value."""
    points = sweep(H200_2B, seed=options.seed, scale=options.scale, progress=_progress())
    head = ("threshold", "value", "attained", "GPU hours", "refused", "TTFT p99, s")
    lines = [
        (p.threshold, f"{p.value:g}", f"{100 * p.attained:.2f} %", f"{p.gpu_hours:.2f}",
         f"{100 * p.refused:.2f} %", f"{p.ttft_p99:.2f}")
        for p in points
    ]  # fmt: skip
    _print_columns([head, *lines])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        document = json.dumps([asdict(point) for point in points], indent=1)
        (options.out / "sweep.json").write_text(document + "\n")
        figures.draw_sweep(options.out / "sweep.png", points)


def _layouts(options: argparse.Namespace) -> None:
    """Both stages on each card beside cards of their own, under open loops (8B, H100)."""
    cards = options.cards
    wanted = [read_layout(name, cards) for name in options.layouts.split(",") if name]
    found = [
        predict(H100_8B, name, rate, layout, options.seconds)
        for name, rate in workloads(cards)
        for layout in filter(None, wanted or layouts(cards))
    ]
    lines = [("row", "layout", "good of answered req/s", "TTFT p50 / p99, ms", "TPOT p50, ms")]
    for each in found:
        ttft = " / ".join(f"{value:.0f}" for value in each.ttft_ms)
        good = f"{each.good_per_s:.1f} of {each.requests_per_s:.1f}"
        lines.append((each.workload, each.layout, good, ttft, f"{each.tpot_ms:.1f}"))
    _print_columns(lines)
    for layout, share in goodput(found).items():
        print(f"{layout}: {share:.1%} of the best in each row, on average")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        document = json.dumps([asdict(each) for each in found], indent=1)
        (options.out / f"layouts-{cards}.json").write_text(document + "\n")


def _trace(options: argparse.Namespace) -> Trace:
    if options.trace in SYNTHETIC:
        more = {"hours": options.hours} if options.hours else {}
        return SYNTHETIC[options.trace](options.scale, options.seed, **more)
    if options.hours or options.scale != 1:
        raise ValueError("--hours and --scale are of synthetic traces")
    return recorded(Path(options.trace))


def _print_results(results: Sequence[Result]) -> None:
    lines = [
        ("fleet", "attained", "refused", "TTFT p50 / p99, s", "TPOT p99, ms", "GPU hours", "pods")
    ]
    for result in results:
        pods = ", ".join(f"{min(n)}-{max(n)} {stage}" for stage, n in result.pods.items())
        lines.append(
            (result.name, f"{100 * result.attained:.2f} %", f"{100 * result.refused:.2f} %",
             f"{result.ttft_p50:.3f} / {result.ttft_p99:.2f}", f"{1e3 * result.tpot_p99:.1f}",
             f"{result.gpu_hours:.1f}", pods)
        )  # fmt: skip
    _print_columns(lines)


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _write(out: Path | None, name: str, results: Sequence[Result]) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for result in results:
        fields = asdict(result)
        del fields["minutes"]
        rows.append(fields)
    (out / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")


def _progress() -> Progress:
    if not sys.stderr.isatty():
        return silent

    def show(name: str, share: float) -> None:
        bar = "#" * int(30 * share)
        end = "\n" if share >= 1 else ""
        print(f"\r{name:<24} [{bar:<30}] {100 * share:3.0f} %", end=end, file=sys.stderr)

    return show


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    actions = parser.add_subparsers(required=True)
    made = actions.add_parser("layouts", help=_layouts.__doc__)
    made.set_defaults(action=_layouts)
    made.add_argument("--cards", type=int, default=2, help="of one host; rates grow with them")
    made.add_argument("--layouts", default="", help="default: all that use every card")
    made.add_argument("--seconds", type=float, default=SECONDS, help="of arrivals")
    made.add_argument("--out", type=Path, default=None, help="a folder for JSON")
    for name, action in (("rows", _rows), ("run", _run), ("compare", _compare), ("sweep", _sweep)):
        made = actions.add_parser(
            name, help=action.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        made.set_defaults(action=action)
        if action is _rows:
            continue
        made.add_argument("--seed", type=int, default=0, help="of arrivals and of picks")
        made.add_argument("--scale", type=float, default=1.0, help="of a synthetic trace's rates")
        made.add_argument("--out", type=Path, default=None, help="a folder for JSON and plots")
        if action is _sweep:
            continue
        made.add_argument("--trace", default="day", help=f"{', '.join(SYNTHETIC)}, or a JSONL file")
        made.add_argument("--hours", type=float, default=None, help="of a synthetic trace")
        made.add_argument("--start-s", type=float, default=60.0, help="until a new pod gets work")
        if action is _run:
            made.add_argument("--encoders", type=int, default=2, help="at the start")
            made.add_argument("--decoders", type=int, default=2, help="at the start")
            made.add_argument("--cells", type=int, default=0, help="pods of both stages instead")
            made.add_argument("--fixed", action="store_true", help="their number stays")
    return parser


if __name__ == "__main__":
    sys.exit(main())
