"""Draws the dashboard from a Prometheus: each panel's queries, as Grafana would send them.

For a look at it without Grafana, and for docs/dashboard.png. The drawing is matplotlib's.
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from grafana_dashboard import ROWS, Panel
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

_COLUMNS = 3
_SUFFIX = {"s": " s", "reqps": "/s", "cps": "/s", "Bps": " B/s", "short": ""}


def query_range(url: str, query: str, start: float, end: float, step: float) -> list[Any]:
    """Prometheus' answer: series with `metric` and `values`."""
    parameters = {"query": query, "start": start, "end": end, "step": step}
    address = f"{url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)["data"]["result"]


def legend_of(template: str, labels: dict[str, str]) -> str:
    """Grafana's `{{label}}` filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)


def draw(axes: Axes, panel: Panel, options: argparse.Namespace, end: float) -> None:
    """One panel."""
    start = end - 60 * options.minutes
    for legend, query in panel.queries.items():
        expression = query.replace("{$}", f'{{namespace="{options.namespace}"}}')
        expression = expression.replace("$__rate_interval", options.rate_interval)
        for series in query_range(options.prometheus, expression, start, end, options.step):
            times = [(float(at) - start) / 60 for at, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            label = legend_of(legend, series["metric"]).strip() or "(none)"
            axes.plot(times, values, linewidth=1.1, label=label)
    axes.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
    axes.set_xlim(0, options.minutes)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=7)
    if panel.unit == "percentunit":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    else:
        suffix = _SUFFIX[panel.unit]
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}{suffix}"))
    if axes.has_data():
        axes.legend(fontsize=6, loc="upper left", framealpha=0.6)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, color="grey")


def main() -> None:
    """Draws all rows into one picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--namespace", default="triptych")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--step", type=float, default=5, help="seconds between points")
    parser.add_argument("--rate-interval", default="30s")
    options = parser.parse_args()
    panels = [panel for row in ROWS.values() for panel in row]
    num_lines = -(-len(panels) // _COLUMNS)
    figure, grid = plt.subplots(num_lines, _COLUMNS, figsize=(15, 2.1 * num_lines))
    end = time.time()
    for number, (panel, axes) in enumerate(zip(panels, grid.flat, strict=True)):
        draw(axes, panel, options, end)
        row = next(name for name, found in ROWS.items() if panel in found)
        if number % _COLUMNS == 0 and panel is ROWS[row][0]:
            axes.text(0, 1.22, row, fontsize=12, fontweight="bold", transform=axes.transAxes)
    figure.tight_layout()
    figure.savefig(options.output, dpi=75)


if __name__ == "__main__":
    main()
