"""One request through all services: one request id in their logs, one trace at the collector."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, message, png, wait_until
from tests.fake_collector import fake_collector
from tests.noise import PATIENCE_S

# Each service alone: tests/contract/test_gateway_tracing.py, tests/unit/common/test_tracing.py.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(300)]
REQUEST_ID = "req-e2e-42"
CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
# Span name -> service, for a request with one new image.
EXPECTED = {
    "http request": "gateway", "encode call": "gateway", "decode stream": "gateway",
    "tokenize": "gateway", "fetch": "gateway",
    "encode": "encoder", "send embedding": "encoder",
    "sequence": "decoder", "fetch embedding": "decoder", "queue": "decoder",
    "transfer": "decoder", "prefill": "decoder", "decode": "decoder",
}  # fmt: skip


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, list[Any]]]:
    with fake_collector() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
        with Cluster(tmp_path) as cluster:
            yield cluster, received


def spans_of(received: list[Any]) -> dict[str, tuple[str, Any]]:
    """Name -> (service, span) of the trace that the caller began."""
    found = {}
    for resource_spans in (each for request in received for each in request.resource_spans):
        attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
        service = attributes["service.name"].removeprefix("triptych-")
        for span in (each for scope in resource_spans.scope_spans for each in scope.spans):
            if span.trace_id == bytes.fromhex("ab" * 16):
                found[span.name] = service, span
    return found


def log_lines(directory: Path, service: str) -> list[dict[str, Any]]:
    text = "".join(path.read_text() for path in directory.glob(f"{service}*.log"))
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("request_id") == REQUEST_ID]


def test_one_request_is_one_id_and_one_trace_in_all_services(
    traced: tuple[Cluster, list[Any]], tmp_path: Path
) -> None:
    cluster, received = traced
    with cluster.client() as client:
        client.chat.completions.create(
            model="demo",
            messages=[message("What is it?", png(7))],
            max_tokens=4,
            extra_headers={"x-request-id": REQUEST_ID, "traceparent": CALLER},
        )
    wait_until(lambda: EXPECTED.keys() <= spans_of(received).keys(), PATIENCE_S, "all spans")
    found = spans_of(received)
    assert {name: service for name, (service, _) in found.items()} == EXPECTED

    def parent(name: str) -> bytes:
        return found[name][1].parent_span_id

    assert parent("http request") == bytes.fromhex("cd" * 8)
    for child, of in (
        ("encode call", "http request"), ("decode stream", "http request"),
        ("tokenize", "http request"), ("fetch", "http request"),
        ("encode", "encode call"), ("sequence", "decode stream"), ("queue", "sequence"),
        ("prefill", "sequence"), ("decode", "sequence"), ("fetch embedding", "sequence"),
        ("send embedding", "fetch embedding"),
    ):  # fmt: skip
        assert parent(child) == found[of][1].span_id, child
    for service in (cluster.encoders[0], cluster.decoders[0]):
        assert service.metric(f"{service.kind}_kernel_calls_total") > 0
    for service in ("gateway", "encoder", "decoder"):
        lines = log_lines(tmp_path, service)
        assert lines, f"no line of the {service} has the request's id"
        assert {line["service"] for line in lines} == {service}
