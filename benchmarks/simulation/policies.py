"""The policies that ship, read from deploy/k8s/components/autoscaling, and fleets under them.

The bounds of the replicas are the cluster's and are not taken over.
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.simulation.autoscaler import Policy, Rule, Trigger
from benchmarks.simulation.cluster import FleetPlan, Plan

COMPONENT = Path(__file__).parents[2] / "deploy/k8s/components/autoscaling"
_LABELS = 'namespace="triptych",installation="triptych"'
# The mean of the pods that report, times those that are there and have reported.
_QUERY = re.compile(
    r"avg\((?:(?P<function>avg_over_time|rate)\()?"
    rf"(?P<series>(?P<metric>\w+)\{{{_LABELS}(?:,(?P<label>\w+='\w+'))?\}})"
    r"(?:\[(?P<minutes>\d+)m\]\))?\)"
    r" \* count\((?P<again>\w+)\((?P=series)\[10m\]\)"
    rf" and on \(pod\) up\{{{_LABELS}\}}\)"
)


@cache
def encoder_policy() -> Policy:
    """Of encoders that scale apart."""
    return _policy(_document("encoder.yaml"))


@cache
def decoder_policy() -> Policy:
    """Of decoders that scale apart, and of a text model's."""
    return _policy(_document("text/decoder.yaml"))


@cache
def cell_policy() -> Policy:
    """Of pods that hold both: the decoder's triggers and the encoder's."""
    decoder = decoder_policy()
    (patch,) = _document("cell/kustomization.yaml")["patches"]
    triggers = list(decoder.triggers)
    for operation in yaml.safe_load(patch["patch"]):
        match operation["op"], operation["path"].split("/"):
            case "add", ["", "spec", "triggers", "-"]:
                triggers.append(_trigger(operation["value"]))
            case "replace", ["", "spec", "triggers", index, "metadata", "threshold"]:
                threshold = float(operation["value"])
                triggers[int(index)] = replace(triggers[int(index)], threshold=threshold)
            case _:
                raise ValueError(f"not simulated: {operation['op']} of {operation['path']}")
    return replace(decoder, triggers=tuple(triggers))


def split(encoders: int = 1, decoders: int = 1, *, encoder: Policy | None = None,
          decoder: Policy | None = None, start_s: float = 60.0) -> Plan:  # fmt: skip
    """Encoders and decoders of their own; without a policy their number stays."""
    return Plan(
        (
            FleetPlan(("encoder",), encoders, encoder, start_s),
            FleetPlan(("decoder",), decoders, decoder, start_s),
        )
    )


def shipped(encoders: int = 1, decoders: int = 1, start_s: float = 60.0) -> Plan:
    """Encoders and decoders under the policies that ship."""
    return split(
        encoders, decoders, encoder=encoder_policy(), decoder=decoder_policy(), start_s=start_s
    )


def cells(number: int = 1, policy: Policy | None = None, start_s: float = 60.0) -> Plan:
    """Pods that hold both stages on one GPU."""
    return Plan((FleetPlan(("encoder", "decoder"), number, policy, start_s),))


def _document(name: str) -> dict[str, Any]:
    return yaml.safe_load((COMPONENT / name).read_text())


def _policy(scaled_object: dict[str, Any]) -> Policy:
    spec = scaled_object["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    return Policy(
        triggers=tuple(_trigger(trigger) for trigger in spec["triggers"]),
        up=_rule(behavior["scaleUp"]),
        down=_rule(behavior["scaleDown"]),
        min_replicas=spec["minReplicaCount"],
        fallback_replicas=spec["fallback"]["replicas"],
    )


def _rule(rule: dict[str, Any]) -> Rule:
    (policy,) = rule["policies"]
    if policy["type"] != "Pods":
        raise ValueError(f"a policy of type {policy['type']} is not simulated")
    return Rule(rule["stabilizationWindowSeconds"], policy["value"], policy["periodSeconds"])


def _trigger(trigger: dict[str, Any]) -> Trigger:
    query = trigger["metadata"]["query"]
    match = _QUERY.fullmatch(query)
    if (
        trigger["metricType"] != "AverageValue"
        or match is None
        or match["again"] != (match["function"] or "last_over_time")
    ):
        raise ValueError(f"not simulated: {trigger['metricType']} of {query}")
    label = "{" + match["label"].replace("'", '"') + "}" if match["label"] else ""
    return Trigger(
        metric=match["metric"] + label,
        function={None: "sum", "avg_over_time": "avg", "rate": "rate"}[match["function"]],
        threshold=float(trigger["metadata"]["threshold"]),
        window_s=60.0 * int(match["minutes"] or 0),
        # KEDA's own default takes an answer without series for 0.
        absent=None if trigger["metadata"].get("ignoreNullValues") == "false" else 0.0,
    )
