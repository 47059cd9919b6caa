"""Queries of scalers, alerts and dashboard: each metric is exported, with the labels asked for."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import grafana_dashboard, metrics_table

ROOT = Path(__file__).resolve().parents[3]
COMPONENTS = ROOT / "deploy" / "k8s" / "components"
# What Prometheus adds to each sample of a pod.
TARGET_LABELS = {"namespace", "installation", "pod", "container", "endpoint", "instance", "job"}
TARGET_LABELS |= {"process"}  # the endpoint of `triptych serve` adds it
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|' + r"'[^']*'")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
_INCREASE = re.compile(r"increase\((\w+)\{([^}]*)\}")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_METRIC = re.compile(r"\btriptych_(?:gateway|encoder|decoder)_\w+")


@pytest.fixture(scope="module")
def exported() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each series that the services export, by its name."""
    found: dict[str, tuple[str, set[str]]] = {}
    for registry in metrics_table.registries().values():
        for name, kind, labels, _ in metrics_table.rows(registry):
            names = {label.strip() for label in labels.split(",") if label}
            if kind != "histogram":
                found[name] = (kind, names)
                continue
            found[f"{name}_bucket"] = ("counter", names | {"le"})
            found[f"{name}_sum"] = found[f"{name}_count"] = ("counter", names)
    return found


def load(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def scaler_queries() -> Iterator[str]:
    for path in (COMPONENTS / "autoscaling").rglob("*.yaml"):
        yield from re.findall(r"^\s*query: (.*)$", path.read_text(), re.MULTILINE)


def rules(group: str = "triptych") -> list[dict[str, Any]]:
    (document,) = load(COMPONENTS / "monitoring" / "alerts.yaml")
    (found,) = (g for g in document["spec"]["groups"] if g["name"] == group)
    return found["rules"]


def limits_rule() -> dict[str, Any]:
    """What the component `monitoring/limits` adds."""
    (document,) = load(COMPONENTS / "monitoring" / "limits" / "kustomization.yaml")
    (patch,) = document["patches"]
    (operation,) = yaml.safe_load(patch["patch"])
    assert operation["path"] == "/spec/groups/0/rules/-"  # that of `rules`
    return operation["value"]


RULES = [*rules(), limits_rule()]
# The one group whose metrics are not ours, but kube-state-metrics'.
AUTOSCALING_RULES = rules("triptych-autoscaling")


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((COMPONENTS / "monitoring" / "triptych-dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


QUERIES = [*scaler_queries(), *(rule["expr"] for rule in RULES), *panel_queries()]


def test_there_are_queries_of_each_kind() -> None:
    assert len(list(scaler_queries())) == 7
    assert len(rules()) > 10
    assert len(list(panel_queries())) > 30


@pytest.mark.parametrize("query", QUERIES)
def test_each_metric_is_exported_with_its_labels(
    query: str, exported: dict[str, tuple[str, set[str]]]
) -> None:
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    selectors = re.findall(r"\b(triptych_(?:gateway|encoder|decoder)_\w+)(\{[^}]*\})?", query)
    targets = re.findall(r"\bup(\{[^}]*\})", query)  # what Prometheus says of a pod
    assert set(targets) <= {'{namespace="triptych",installation="triptych"}'}
    assert selectors or targets
    labels_there: set[str] = set()
    for name, selector in selectors:
        assert name in exported, name
        kind, labels = exported[name]
        labels_there |= labels
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", _LITERAL.sub("", selector)))
        assert asked <= labels | TARGET_LABELS
        assert {"namespace", "installation"} <= asked
        # A counter is only looked at by its rate, and a gauge never.
        used = re.search(rf"(\w*)\({re.escape(name + selector)}(\[)?", query)
        rated = used is not None and used[1] in ("rate", "increase")
        assert rated == (kind == "counter"), name
    for group in _GROUPING.findall(query):
        assert {label.strip() for label in group.split(",")} <= labels_there | TARGET_LABELS


@pytest.mark.parametrize("rule", [*RULES, *AUTOSCALING_RULES], ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_how_bad_it_is(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].endswith(".")
    assert 'namespace="triptych"' in rule["expr"]
    # A label in the text must be one that the expression keeps.
    for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
        groups = _GROUPING.findall(rule["expr"])
        assert all(label in group for group in groups) or not groups


def test_what_an_alert_counts_is_there_before_it_happens() -> None:
    """A series that begins at 1 has not increased."""
    registries = metrics_table.registries().values()
    asked = [found for rule in RULES for found in _INCREASE.findall(rule["expr"])]
    assert asked
    for name, literals in asked:
        own = {k: v for k, v in _LABEL.findall(literals) if k not in TARGET_LABELS}
        assert 0.0 in [registry.get_sample_value(name, own) for registry in registries], name


def test_what_a_scaler_needs_is_missed_by_an_alert() -> None:
    missed = {name for rule in rules() for name in re.findall(r"absent\((\w+)\{", rule["expr"])}
    assert {"triptych_decoder_kv_usage_ratio", "triptych_encoder_backlog_seconds"} <= missed
    text = " ".join(rule["expr"] for rule in AUTOSCALING_RULES)
    metrics = re.findall(r"\b(kube_\w+)\{", text)
    assert {name.removeprefix("kube_horizontalpodautoscaler_") for name in metrics} == {
        "status_desired_replicas", "spec_max_replicas", "status_condition",
    }  # fmt: skip


def test_the_dashboards_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(grafana_dashboard.document())["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["title"] for panel in panels()}) > 20


def test_every_pod_with_metrics_is_scraped() -> None:
    (monitor,) = load(COMPONENTS / "monitoring" / "pod-monitor.yaml")
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    paths = (
        "base/gateway.yaml", "base/decoder.yaml", "vision/encoder.yaml",
        "overlays/single/triptych.yaml",
    )  # fmt: skip
    ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert ports == {"metrics", "encoder-metrics"}
    names = set[str]()
    for path in paths:
        (deployment,) = (d for d in load(ROOT / "deploy/k8s" / path) if d["kind"] == "Deployment")
        names.add(deployment["metadata"]["name"])
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert "metrics" in {port["name"] for port in container["ports"]}
    assert set(expression["values"]) == names


def test_each_variable_of_the_dashboard_is_optional() -> None:
    """Where nothing sets the labels, as with `triptych serve`, "All" selects every series."""
    dashboard = json.loads(grafana_dashboard.document())
    source, *variables = dashboard["templating"]["list"]
    assert source["type"] == "datasource"
    assert [variable["name"] for variable in variables] == ["namespace", "installation"]
    for variable in variables:
        assert variable["includeAll"] is True and variable["allValue"] == ".*"
        assert variable["current"]["value"] == "$__all"
    for query in panel_queries():
        selectors = re.findall(r"\{([^}]*)\}", query)
        assert selectors
        for selector in selectors:
            for variable in variables:
                assert f'{variable["name"]}=~"${variable["name"]}"' in selector


def test_prefix_names_are_ours_alone() -> None:
    """The expressions above find metrics by prefix; a name without one would go unseen."""
    for query in QUERIES:
        assert _METRIC.search(query) or query.startswith("up{")
        assert not re.search(r"\b(?:container|kube|node)_\w+", _LITERAL.sub("", query))
