"""The policies that ship are those that are simulated, and those that the documentation names."""

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.simulation import policies
from benchmarks.simulation.autoscaler import Policy
from benchmarks.simulation.cluster import METRICS
from benchmarks.simulation.policies import cell_policy, decoder_policy, encoder_policy

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs/autoscaling.md").read_text()
_POLICIES = {"encoder": encoder_policy, "decoder": decoder_policy, "cell": cell_policy}


def shown(policy: Policy) -> set[tuple[str, float]]:
    """Queries without their namespace, and thresholds."""
    forms = {"sum": "sum({})", "avg": "sum(avg_over_time({}[{}m]))", "rate": "sum(rate({}[{}m]))"}
    return {
        (forms[t.function].format(t.metric, round(t.window_s / 60)), t.threshold)
        for t in policy.triggers
    }


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_the_documentation_has_the_thresholds_that_ship(name: str) -> None:
    rows = re.findall(rf"^\| {name} \| `([^`]+)` \| ([\d.]+) \|$", _PAGE, re.MULTILINE)
    assert {(query, float(threshold)) for query, threshold in rows} == shown(_POLICIES[name]())


def test_cells_have_all_triggers_and_fewer_sequences() -> None:
    row = r"^\| cell \| `sum\(triptych_decoder_sequences_running\)` \| (\d+) \|$"
    (threshold,) = re.findall(row, _PAGE, re.MULTILINE)
    both = shown(encoder_policy()) | shown(decoder_policy())
    queries = {query for query, _ in both}
    cell = dict(shown(cell_policy()))
    assert cell.keys() == queries
    assert cell.pop("sum(triptych_decoder_sequences_running)") == float(threshold)
    assert cell.items() <= both


@pytest.mark.parametrize("policy", _POLICIES.values(), ids=_POLICIES)
def test_the_documentation_has_the_speed_that_ships(policy) -> None:
    up, down = policy().up, policy().down
    assert (up.stabilization_s, f"{up.pods} pods in {up.period_s} s" in _PAGE) == (0, True)
    assert f"one in {down.period_s} s, after {down.stabilization_s} s" in _PAGE
    assert down.pods == 1


def test_metrics_of_the_policies_are_simulated_and_exported() -> None:
    exported = (_ROOT / "docs/metrics.md").read_text()
    for policy in _POLICIES.values():
        for trigger in policy().triggers:
            assert trigger.metric in METRICS
            assert f"`{trigger.metric.partition('{')[0]}`" in exported


def test_a_query_that_is_not_simulated_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = yaml.safe_load((policies.COMPONENT / "encoder.yaml").read_text())
    document["spec"]["triggers"][0]["metadata"]["query"] = "max(triptych_encoder_backlog_seconds)"
    (tmp_path / "encoder.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(policies, "COMPONENT", tmp_path)
    with pytest.raises(ValueError, match="not simulated"):
        policies.encoder_policy.__wrapped__()
