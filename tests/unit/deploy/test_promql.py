"""Queries of scalers and rules of alerts, evaluated by Prometheus' own `promtool`, where it is."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.combinations import COMBINATIONS, K8S, combine
from tests.unit.deploy.kustomize import render

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: the package prometheus)"
)
LABELS = 'namespace="triptych",installation="triptych"'
# A sample each 15 s: five minutes of all pods, then d-2 is silent and d-3 gone; d-4 starts.
PODS = {"d-0": "1x200", "d-1": "1x200", "d-2": "1x20 _x180", "d-3": "1x20 stale _x179"}
UP = {"d-0": "1x200", "d-1": "1x200", "d-2": "1x20 0x180", "d-3": "1x20 stale _x179",
      "d-4": "_x20 1x180"}  # fmt: skip
LOADS = {
    "triptych_decoder_kv_usage_ratio": (0.5, ""),
    "triptych_decoder_sequences_running": (12.0, ""),
    "triptych_decoder_sequences_waiting": (3.0, ',for="engine"'),
    "triptych_encoder_backlog_seconds": (0.25, ""),
    "triptych_encoder_busy_seconds_total": (0.6, ""),
}


def series() -> list[dict[str, str]]:
    """What Prometheus has scraped."""
    found: list[dict[str, str]] = []
    for name, (load, more) in LOADS.items():
        for pod, values in PODS.items():
            count, rest = values.partition("x")[2].partition(" ")[::2]
            if name.endswith("_total"):  # a counter
                shown = f"0+{15 * load}x{count} {rest}"
            else:
                shown = f"{load}+0x{count} {rest}"
            found.append({"series": f'{name}{{{LABELS},pod="{pod}"{more}}}', "values": shown})
    found += [
        {"series": f'up{{{LABELS},pod="{pod}"}}', "values": values.replace("x", "+0x")
         .replace("_+0x", "_x")}
        for pod, values in UP.items()
    ]  # fmt: skip
    return found


def queries() -> list[tuple[str, str]]:
    """Each trigger's metric and query."""
    found: dict[str, str] = {}
    for path in (K8S / "components/autoscaling").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") == "ScaledObject":
                for trigger in document["spec"]["triggers"]:
                    query = trigger["metadata"]["query"]
                    found[next(name for name in LOADS if name in query)] = query
    assert found.keys() == LOADS.keys()
    return sorted(found.items())


def promtool(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr


def expected(load: float, at_s: int) -> list[dict[str, Any]]:
    """Four pods; then three, one of them silent; then the silent one is no longer known."""
    number = 4 if at_s <= 300 else 3 if at_s < 890 else 2
    return [{"labels": "{}", "value": load * number}]


@pytest.mark.parametrize(("metric", "query"), queries(), ids=[name for name, _ in queries()])
def test_a_silent_pod_counts_as_the_others_do(metric: str, query: str, tmp_path: Path) -> None:
    load, _ = LOADS[metric]
    steady = [300, 480, 870, 1200]  # not within the windows after a change
    tests = [
        {"expr": query, "eval_time": f"{at}s", "exp_samples": expected(load, at)} for at in steady
    ]
    # All are silent: no value, which fails.
    nothing = [s for s in series() if s["series"].startswith("up")]
    content = {
        "evaluation_interval": "15s",
        "tests": [
            {"interval": "15s", "input_series": series(), "promql_expr_test": tests},
            {
                "interval": "15s",
                "input_series": nothing,
                "promql_expr_test": [{"expr": query, "eval_time": "5m", "exp_samples": []}],
            },
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(content))
    promtool("test", "rules", "test.yaml", cwd=tmp_path)


@pytest.mark.parametrize("name", ["monitoring", "limits-alert"])
def test_prometheus_takes_the_alerts(name: str, tmp_path: Path) -> None:
    rendered = render(combine(*COMBINATIONS[name], directory=tmp_path / "own"))
    (rule,) = (r for r in rendered if r["kind"] == "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}))
    promtool("check", "rules", "rules.yaml", cwd=tmp_path)
