"""The Grafana dashboard of the component `monitoring`, which `reference.py` writes.

The panels are here, the layout is computed. A test checks that each metric in them is exported.
"""

import json
from dataclasses import dataclass
from typing import Any

_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 7


@dataclass(frozen=True)
class Panel:
    """A graph over time.

    Attributes:
        title: of the panel.
        unit: Grafana's id of it.
        queries: PromQL, by legend. `{$}` selects the installation.
    """

    title: str
    unit: str
    queries: dict[str, str]


# Pods on Kubernetes, processes of `triptych serve`; the other label is empty.
_EACH_LABELS, _EACH = "pod, process", "{{pod}} {{process}}"


def _rates(metric: str, by: str, prefix: str = "") -> dict[str, str]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return {prefix + legend: f"sum by ({by}) (rate({metric}{{$}}[$__rate_interval]))"}


def _quantiles(metric: str, *quantiles: float, by: str = "") -> dict[str, str]:
    labels = f"le, {by}" if by else "le"
    return {
        f"p{100 * quantile:g}" + (f" {{{{{by}}}}}" if by else ""): (
            f"histogram_quantile({quantile}, "
            f"sum by ({labels}) (rate({metric}_bucket{{$}}[$__rate_interval])))"
        )
        for quantile in quantiles
    }


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Requests by outcome", "reqps", _rates("triptych_gateway_requests_total", "outcome")),
        Panel("Time to first token", "s", _quantiles("triptych_gateway_ttft_seconds", 0.5, 0.95, 0.99)),
        Panel("Time per output token", "s", _quantiles("triptych_gateway_tpot_seconds", 0.5, 0.95, 0.99)),
        Panel("Tokens", "cps", _rates("triptych_gateway_tokens_total", "kind")),
        Panel("Stages: 95th percentile", "s",
              _quantiles("triptych_gateway_stage_seconds", 0.95, by="stage")),
        Panel("Requests that hold a slot", "short", {_EACH: "triptych_gateway_requests_running{$}"}),
        Panel("Refusals, retries, hand-overs", "cps", {
            **_rates("triptych_gateway_rejections_total", "reason", "refused: "),
            **_rates("triptych_gateway_retries_total", "service", "retried: "),
            "handed over": "sum(rate(triptych_gateway_handovers_total{$}[$__rate_interval]))",
        }),
        Panel("Pods that accept work", "short", {
            "{{service}}": "min by (service) (triptych_gateway_healthy_pods{$})",
        }),
        Panel("Requests by tenant", "reqps", _rates("triptych_gateway_tenant_requests_total", "tenant")),
    ],
    "Encoders": [
        Panel("Backlog", "s", {_EACH: "triptych_encoder_backlog_seconds{$}"}),
        Panel("Busy", "percentunit", _rates("triptych_encoder_busy_seconds_total", _EACH_LABELS)),
        Panel("Patches encoded", "cps", _rates("triptych_encoder_patches_encoded_total", _EACH_LABELS)),
        Panel("Patches that wait or run", "short", {_EACH: "triptych_encoder_queue_patches{$}"}),
        Panel("Calls by source", "reqps", _rates("triptych_encoder_requests_total", "source")),
        Panel("Stages: 95th percentile", "s",
              _quantiles("triptych_encoder_stage_seconds", 0.95, by="stage")),
        Panel("Failures", "cps", _rates("triptych_encoder_failures_total", "method, code")),
        Panel("Redis", "cps", _rates("triptych_encoder_redis_events_total", "event")),
        Panel("Silence of the engine", "s", {_EACH: "triptych_encoder_engine_silence_seconds{$}"}),
    ],
    "Decoders": [
        Panel("KV blocks in use", "percentunit", {_EACH: "triptych_decoder_kv_usage_ratio{$}"}),
        Panel("Rows in use", "percentunit", {_EACH: "triptych_decoder_row_usage_ratio{$}"}),
        Panel("Sequences that wait", "short", {
            "for {{for}}": "sum by (for) (triptych_decoder_sequences_waiting{$})",
        }),
        Panel("Tokens generated", "cps", _rates("triptych_decoder_generated_tokens_total", _EACH_LABELS)),
        Panel("Busy", "percentunit", _rates("triptych_decoder_busy_seconds_total", _EACH_LABELS)),
        Panel("Preemptions, late masks", "cps", {
            **_rates("triptych_decoder_preemptions_total", _EACH_LABELS, "preempted "),
            **_rates("triptych_decoder_late_token_masks_total", _EACH_LABELS, "late "),
        }),
        Panel("Queue, transfer, prefill: 95th percentile", "s", {
            **{f"queue {k}": v for k, v in _quantiles("triptych_decoder_queue_seconds", 0.95).items()},
            **{f"transfer {k}": v for k, v in _quantiles("triptych_decoder_transfer_seconds", 0.95).items()},
            **{f"prefill {k}": v for k, v in _quantiles("triptych_decoder_prefill_seconds", 0.95).items()},
        }),
        Panel("Embeddings by path", "Bps", _rates("triptych_decoder_embedding_fetch_bytes_total", "path")),
        Panel("Prompt tokens, of them cached", "cps", {
            "all": "sum(rate(triptych_decoder_prompt_tokens_total{$}[$__rate_interval]))",
            "cached": "sum(rate(triptych_decoder_prefix_cache_hit_tokens_total{$}[$__rate_interval]))",
        }),
    ],
}  # fmt: skip


def document() -> str:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, row_panels in ROWS.items():
        place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": row, "gridPos": place, "collapsed": False})
        y += 1
        for number, panel in enumerate(row_panels):
            line, column = divmod(number, _COLUMNS // _WIDTH)
            place = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_graph(panel, place))
        y += -(-len(row_panels) // (_COLUMNS // _WIDTH)) * _HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    dashboard = {
        "uid": "triptych",
        "title": "Triptych",
        "tags": ["triptych"],
        "timezone": "browser",
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "schemaVersion": 39,
        "templating": {"list": [_DATASOURCE, _NAMESPACE, _INSTALLATION]},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


# "All" matches also series without the label: `triptych serve` has neither, unless its target in
# Prometheus sets them.
_SELECTED = '{namespace=~"$namespace",installation=~"$installation"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus"}
_NAMESPACE = {
    "name": "namespace",
    "type": "query",
    "datasource": _SOURCE,
    "query": "label_values(triptych_gateway_requests_running, namespace)",
    "refresh": 2,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}
_INSTALLATION = _NAMESPACE | {
    "name": "installation",
    "query": 'label_values(triptych_gateway_requests_running{namespace=~"$namespace"}, installation)',
}


def _graph(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.replace("{$}", _SELECTED),
                "legendFormat": legend,
            }
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }
