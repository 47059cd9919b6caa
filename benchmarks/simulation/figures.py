"""The plots of docs/autoscaling.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulation.experiments import Point
from benchmarks.simulation.results import Result
from benchmarks.simulation.traces import Trace

_BLUE, _ORANGE, _GREEN, _GREY = "#3b6ea5", "#e0912f", "#57b36a", "#8a8a8a"
_STAGES = {"encoder": _GREEN, "decoder": _BLUE, "encoder+decoder": _ORANGE}
_LABELS = {
    "rows": "decoder: sequences running, per pod",
    "waiting": "decoder: sequences waiting, per pod",
    "backlog": "encoder: backlog, s per pod",
    "busy": "encoder: busy share, per pod",
    "up": "pods added per minute",
    "start": "a pod's start, s",
}


def draw_day(path: Path, trace: Trace, results: Sequence[Result]) -> None:
    """Arrivals, pods and attained objectives over time; GPU hours."""
    plt = _pyplot()
    figure, axes = plt.subplot_mosaic(
        [["load", "cost"], ["pods", "cost"], ["attained", "cost"]],
        figsize=(11, 6), layout="constrained", width_ratios=(2.2, 1),
    )  # fmt: skip
    time = np.arange(int(trace.duration_s // 60) + 1) / 60
    minutes = np.floor(np.array(trace.arrival) / 60).astype(int)
    for number, kind in enumerate(trace.kinds):
        mine = minutes[np.array(trace.kind) == number]
        axes["load"].plot(time, np.bincount(mine, minlength=len(time)) / 60, label=kind, lw=1)
    axes["load"].set_ylabel("requests/s")
    shipped, both = results[0], results[1]
    for result in (shipped, both):
        for stage, pods in result.pods.items():
            label = stage.replace("encoder+decoder", "both in one")
            axes["pods"].plot(time[: len(pods)], pods[: len(time)], lw=1, drawstyle="steps-post",
                              color=_STAGES[stage], label=label)  # fmt: skip
    axes["pods"].set_ylabel("pods")
    for result, colour in ((shipped, _BLUE), (both, _ORANGE), (results[3], _GREY)):
        share = 100 * _smooth(result.minutes, 5)
        axes["attained"].plot(time[: len(share)], share, lw=1, color=colour, label=result.name)
    axes["attained"].set_ylabel("within objectives, %")
    axes["attained"].set_xlabel("hours")
    for name in ("load", "pods", "attained"):
        axes[name].legend(fontsize=7, loc="best", frameon=False)
        axes[name].set_xlim(0, time[-1])
    axes["attained"].set_ylim(None, 101)
    names = [f"{result.name}\n{100 * result.attained:.4g} %" for result in results]
    hours = [result.gpu_hours for result in results]
    bars = axes["cost"].barh(names, hours, color=(_BLUE, _ORANGE, _GREEN, _GREY))
    axes["cost"].bar_label(bars, fmt="%.1f", fontsize=8, padding=3)
    axes["cost"].invert_yaxis()
    axes["cost"].margins(x=0.2)
    axes["cost"].spines["right"].set_visible(False)
    axes["cost"].set_xlabel("GPU hours (% within the objectives)")
    _save(figure, axes.values(), path)


def draw_sweep(path: Path, points: Sequence[Point]) -> None:
    """Misses and GPU hours for each value; split and replicas of both against each other."""
    plt = _pyplot()
    drawn = [name for name in _LABELS if any(p.threshold == name for p in points)]
    columns = len(drawn) // 2 + 1
    figure, grid = plt.subplots(2, columns, figsize=(3.5 * columns, 5.6), layout="constrained")
    axes = list(grid.flat)
    for axis, threshold in zip(axes, drawn, strict=False):
        mine = [point for point in points if point.threshold == threshold]
        values = range(len(mine))
        axis.plot(values, [100 * (1 - p.attained) for p in mine], "o-", color=_BLUE, ms=4)
        axis.set_xticks(values, [f"{p.value:g}" for p in mine])
        axis.set_xlabel(_LABELS[threshold], fontsize=8)
        axis.set_ylabel("outside objectives, %", color=_BLUE, fontsize=8)
        axis.set_ylim(0, 11)
        hours = axis.twinx()
        hours.plot(values, [p.gpu_hours for p in mine], "s--", color=_ORANGE, ms=3, lw=1)
        hours.set_ylabel("GPU hours", color=_ORANGE, fontsize=8)
        hours.set_ylim(0, 25)
        hours.tick_params(labelsize=7)
        hours.spines["top"].set_visible(False)
    _draw_frontier(axes[len(drawn)], points)
    for axis in axes[len(drawn) + 1 :]:
        axis.axis("off")
    _save(figure, axes, path)


def _draw_frontier(axis: Any, points: Sequence[Point]) -> None:  # noqa: ANN401
    """Misses over GPU hours, a point for each number of sequences per pod."""
    fleets = (("rows", _BLUE, "split"), ("replicas", _ORANGE, "both in one"))
    for threshold, colour, label in fleets:
        mine = [point for point in points if point.threshold == threshold]
        misses = [100 * (1 - p.attained) for p in mine]
        axis.plot([p.gpu_hours for p in mine], misses, "o-", color=colour, ms=4, label=label)
        for point, miss in zip(mine, misses, strict=True):
            axis.annotate(f"{point.value:g}", (point.gpu_hours, miss), fontsize=6,
                          xytext=(2, 3), textcoords="offset points")  # fmt: skip
    axis.set_xlabel("GPU hours, by sequences per pod", fontsize=8)
    axis.set_ylabel("outside objectives, %", fontsize=8)
    axis.legend(fontsize=7, frameon=False)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    known = np.isfinite(values)
    kernel = np.ones(min(width, len(values)))
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _pyplot() -> Any:  # noqa: ANN401 - matplotlib is imported only where a plot is drawn
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, axes: Any, path: Path) -> None:  # noqa: ANN401
    for axis in axes:
        axis.tick_params(labelsize=7)
        axis.spines["top"].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    _pyplot().close(figure)
