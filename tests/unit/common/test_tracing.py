import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from services.common import tracing
from services.common.settings import traces_endpoint
from services.common.spans import record_span, span, start_span, traceparent
from services.common.telemetry import (
    _JsonFormatter,
    bind_request_id,
    bound_request_id,
    current_request_id,
)
from tests.fake_collector import exporting_to, fake_collector


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    with exporting_to("test", exporter):
        yield exporter


def test_without_an_endpoint_nothing_is_imported_or_recorded():
    code = (
        "import sys\n"
        "from services.common.spans import record_span, span, start_span, traceparent\n"
        "from services.common.tracing import setup_tracing\n"
        "setup_tracing('test')\n"
        "with span('a', x=1) as a:\n"
        "    a.set(y=2)\n"
        "    start_span('b', a.traceparent).end()\n"
        "    record_span('c', '', 0.0, 1.0)\n"
        "    assert a.traceparent == traceparent() == ''\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_spans_nest_and_a_traceparent_joins_another_services_span(spans):
    with span("gateway", route="/v1") as outer:
        with span("inner"):
            assert traceparent() != outer.traceparent
        carried = traceparent()
    assert carried == outer.traceparent and traceparent() == ""
    with span("encoder", parent=carried):
        pass
    start_span("decoder", carried, start_s=10.0).end(12.5)
    record_span("queue", carried, 10.0, 0.5, tokens=3)
    found = {each.name: each for each in spans.get_finished_spans()}
    assert len({each.context.trace_id for each in found.values()}) == 1
    assert found["gateway"].parent is None
    for name in ("inner", "encoder", "decoder", "queue"):
        assert found[name].parent.span_id == found["gateway"].context.span_id
    assert found["decoder"].end_time - found["decoder"].start_time == 2_500_000_000
    assert found["queue"].end_time - found["queue"].start_time == 500_000_000
    assert found["queue"].attributes == {"tokens": 3}


def test_a_failed_block_is_marked_and_its_exception_passes(spans):
    with pytest.raises(ValueError, match="broken"), span("work"):
        raise ValueError("broken")
    (found,) = spans.get_finished_spans()
    assert found.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("parent", ["nonsense", "00-0-0-0", "00-" + "0" * 32 + "-" + "0" * 16])
def test_a_malformed_traceparent_starts_a_new_trace(spans, parent):
    with span("work", parent=parent):
        pass
    (found,) = spans.get_finished_spans()
    assert found.parent is None


async def test_tasks_inherit_the_span_and_the_request_id(spans):
    async def work() -> tuple[str, str]:
        return traceparent(), current_request_id()

    with span("outer") as outer, bound_request_id("req-1"):
        task = asyncio.create_task(work())
    assert await task == (outer.traceparent, "req-1")
    assert current_request_id() == ""


def test_log_lines_bear_the_request_id_of_their_task():
    formatter = _JsonFormatter("test")
    record = logging.LogRecord("x", logging.INFO, "", 0, "message", None, None)
    assert "request_id" not in json.loads(formatter.format(record))

    def work() -> dict[str, str]:
        bind_request_id("req-7")
        return json.loads(formatter.format(record))

    async def run() -> dict[str, str]:
        async def task() -> dict[str, str]:
            return work()

        return await asyncio.create_task(task())

    assert asyncio.run(run())["request_id"] == "req-7"


def test_an_endpoint_comes_from_the_standard_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    assert traces_endpoint() == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert traces_endpoint() == "http://collector:4318"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4318/v1/traces")
    assert traces_endpoint() == "http://traces:4318/v1/traces"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert traces_endpoint() == ""


def test_an_endpoint_without_the_packages_is_an_error_at_start(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.delitem(
        sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", raising=False
    )
    with pytest.raises(tracing.SettingsError, match=r"triptych\[tracing\]"):
        tracing.setup_tracing("test")


def test_spans_reach_the_endpoint_before_the_process_ends():
    code = (
        "from services.common.spans import span\n"
        "from services.common.tracing import setup_tracing\n"
        "setup_tracing('encoder')\n"
        "with span('encode', patches=64): pass\n"
    )
    with fake_collector() as (endpoint, received):
        environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    (resource_spans,) = received[0].resource_spans
    attributes = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert attributes["service.name"] == "triptych-encoder"
    (found,) = resource_spans.scope_spans[0].spans
    assert found.name == "encode" and found.attributes[0].value.int_value == 64
