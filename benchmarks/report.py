"""The results of a run: percentiles, a table, JSON and a plot."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.client import Sample
from benchmarks.peers import FLOORS, TARGETS, VLLM, Figures
from benchmarks.workloads import Row


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one latency, in milliseconds; NaN when nothing was measured."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """Linear interpolation between the samples."""
        if not seconds:
            return cls(float("nan"), float("nan"), float("nan"))
        p50, p90, p99 = (float(v) * 1e3 for v in np.percentile(seconds, (50, 90, 99)))
        return cls(p50, p90, p99)


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row's figures. Requests that failed count in `num_errors` and nowhere else.

    Attributes:
        gap_ms: longest time between two events with content of each answer.
        tokens_per_s: output tokens of all good requests over the row's wall time.
        prompt_tokens: mean, as the server counted.
        errors: each distinct error and how often it came.
    """

    row: Row
    wall_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    gap_ms: Percentiles
    e2e_ms: Percentiles
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: float
    completion_tokens: float
    num_errors: int
    errors: Mapping[str, int]

    @classmethod
    def from_samples(cls, row: Row, samples: Sequence[Sample], wall_s: float) -> "RowResult":
        """Summarises a row's samples."""
        good = [sample for sample in samples if not sample.error]
        longer = [sample for sample in good if sample.completion_tokens > 1]
        completion = sum(sample.completion_tokens for sample in good)
        return cls(
            row=row,
            wall_s=wall_s,
            ttft_ms=Percentiles.of([sample.ttft_s for sample in good]),
            tpot_ms=Percentiles.of([sample.tpot_s for sample in longer]),
            gap_ms=Percentiles.of([sample.gap_s for sample in longer]),
            e2e_ms=Percentiles.of([s.end - s.start for s in good]),
            requests_per_s=len(good) / wall_s,
            tokens_per_s=completion / wall_s,
            prompt_tokens=sum(s.prompt_tokens for s in good) / max(1, len(good)),
            completion_tokens=completion / max(1, len(good)),
            num_errors=len(samples) - len(good),
            errors=dict(Counter(s.error for s in samples if s.error)),
        )


def comparisons(result: RowResult) -> list[tuple[str, float, float | None, float | None, bool]]:
    """The figures of a row that have a target or a peer.

    Returns:
        For each: its name, ours, the peer's, the target, and whether more is better.
    """
    none = Figures()
    peer = VLLM.get(result.row.name, none)
    target = TARGETS.get(result.row.name, none)
    figures = (
        ("TTFT ms", result.ttft_ms.p50, peer.ttft_ms, target.ttft_ms, False),
        ("TPOT ms", result.tpot_ms.p50, peer.tpot_ms, target.tpot_ms, False),
        ("tok/s", result.tokens_per_s, peer.tokens_per_s, target.tokens_per_s, True),
        ("req/s", result.requests_per_s, peer.requests_per_s, target.requests_per_s, True),
    )
    return [figure for figure in figures if figure[2] is not None or figure[3] is not None]


_HEAD = ("row", "c", "n", "prompt", "out", "TTFT p50/p90/p99 ms", "TPOT p50/p90/p99 ms",
         "gap p50/p99 ms", "E2E p50 ms", "tok/s", "req/s", "errors")  # fmt: skip


def print_table(results: Sequence[RowResult], meta: Mapping[str, Any]) -> None:
    """The figures, and on full-size rows how they stand to the peer and the targets."""
    rows = [_cells(result) for result in results]
    _print_columns("serving", [_HEAD, *rows])
    for result in results:
        for error, count in result.errors.items():
            print(f"  {result.row.name}: {count} x {error}")
    if meta.get("scale") == 1:
        lines = [("row", "figure", "measured", "vLLM 0.26", "times better", "target", "floor", "")]
        for result in results:
            lines += _comparison_cells(result)
        if len(lines) > 1:
            _print_columns("beside vLLM 0.26.0 on one H200, and the targets", lines)


def _cells(result: RowResult) -> tuple[str, ...]:
    def three(p: Percentiles) -> str:
        return f"{p.p50:.1f} / {p.p90:.1f} / {p.p99:.1f}"

    tpot = result.tpot_ms
    return (
        result.row.name,
        str(result.row.concurrency),
        str(result.row.num_requests),
        f"{result.prompt_tokens:.0f}",
        f"{result.completion_tokens:.0f}",
        three(result.ttft_ms),
        f"{tpot.p50:.2f} / {tpot.p90:.2f} / {tpot.p99:.2f}",
        f"{result.gap_ms.p50:.0f} / {result.gap_ms.p99:.0f}",
        f"{result.e2e_ms.p50:.0f}",
        f"{result.tokens_per_s:,.0f}",
        f"{result.requests_per_s:.1f}",
        str(result.num_errors),
    )


def _comparison_cells(result: RowResult) -> list[tuple[str, ...]]:
    floor = FLOORS.get(result.row.name, Figures())
    floors = {"TTFT ms": floor.ttft_ms, "TPOT ms": floor.tpot_ms,
              "tok/s": floor.tokens_per_s, "req/s": floor.requests_per_s}  # fmt: skip
    lines: list[tuple[str, ...]] = []
    for name, ours, peer, target, more_is_better in comparisons(result):
        ratio = times_better(ours, peer, more_is_better=more_is_better)
        reached = ""
        if target is not None:
            reached = "reached" if (ours >= target) == more_is_better else "missed"
        lines.append(
            (
                result.row.name,
                name,
                f"{ours:,.4g}",
                "" if peer is None else f"{peer:,g}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if target is None else f"{'≥' if more_is_better else '≤'} {target:,g}",
                "" if floors[name] is None else f"{floors[name]:,g}",
                reached,
            )
        )
    return lines


def times_better(ours: float, peer: float | None, *, more_is_better: bool) -> float | None:
    """How many times better ours is: above 1 is ahead, whichever way the figure goes."""
    if peer is None or not ours > 0:
        return None
    return ours / peer if more_is_better else peer / ours


def _print_columns(title: str, lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for i, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        print("  ".join(cells).rstrip())
        if i == 0:
            print(
                "-" * min(sum(widths) + 2 * len(widths), shutil.get_terminal_size((140, 0)).columns)
            )
    print()


def write_json(path: Path, results: Sequence[RowResult], meta: Mapping[str, Any]) -> None:
    """Writes all measurements as JSON."""
    document = {**meta, "rows": {result.row.name: asdict(result) for result in results}}
    path.write_text(json.dumps(_without_nan(document), indent=1) + "\n")


def _without_nan(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """JSON has no NaN: what was not measured is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def write_plot(path: Path, results: Sequence[RowResult], meta: Mapping[str, Any]) -> None:
    """Latencies and rates per row, with peer and target where they are known.

    Peer and target are drawn at full size only, because a scaled row is another workload.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("time to first token, p50 (ms)", "ttft_ms", [r.ttft_ms.p50 for r in results]),
        ("time per output token, p50 (ms)", "tpot_ms", [r.tpot_ms.p50 for r in results]),
        ("output tokens per second", "tokens_per_s", [r.tokens_per_s for r in results]),
        ("requests per second", "requests_per_s", [r.requests_per_s for r in results]),
    )
    size = (17, 2 + 0.42 * len(results))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained")
    names = [result.row.name for result in results]
    for axis, (title, field, values) in zip(axes, panels, strict=True):
        _draw_panel(axis, names, values, field, peers=meta.get("scale") == 1)
        axis.set_title(title, fontsize=10)
    axes[0].invert_yaxis()
    figure.suptitle(f"{meta.get('label') or meta['model']}, {meta['date'][:10]}", fontsize=12)
    handles: dict[str, Any] = {}
    for axis in axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(
    axis: Any,  # noqa: ANN401 - matplotlib is imported only where a plot is written
    names: Sequence[str],
    values: Sequence[float],
    field: str,
    *,
    peers: bool,
) -> None:
    measured = [0.0 if math.isnan(value) else value for value in values]
    axis.barh(names, measured, color="#3b6ea5", height=0.66, label="measured")
    axis.set_xscale("log")
    for i, value in enumerate(measured):
        text = f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
        axis.annotate(text, (0.02, i), xycoords=axis.get_yaxis_transform(), va="center",
                      color="white", fontsize=8, fontweight="bold")  # fmt: skip
    marks = ((VLLM, "|", 260, "#e0912f", "vLLM 0.26.0"), (TARGETS, "D", 26, "#57b36a", "target"))
    for source, marker, size, colour, label in marks if peers else ():
        known = [(getattr(source.get(name, Figures()), field), name) for name in names]
        points = [(number, name) for number, name in known if number is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            axis.scatter(xs, ys, marker=marker, s=size, color=colour, label=label, zorder=3)
    axis.margins(x=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
