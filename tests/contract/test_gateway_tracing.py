"""Request ids in every log line, and one trace per request through all services."""

import asyncio
import json
import logging

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.errors import InternalError
from services.common.telemetry import _JsonFormatter
from tests.fake_collector import exporting_to
from tests.gateway_fixtures import asking, image_url

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    with exporting_to("gateway", exporter):
        yield exporter


def post(stack, headers: dict[str, str], **fields: object) -> None:
    body = {"model": "tiny", "messages": asking(image_url()), **fields}
    with stack.client(headers=headers) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_holds_the_request_its_stages_and_the_services(stack, spans, stream):
    post(stack, {"traceparent": PARENT, "x-request-id": "my-id"}, stream=stream)
    names = {"http request", "tokenize", "fetch", "encode call", "decode stream"}
    stack.wait(lambda: names <= {span.name for span in spans.get_finished_spans()})
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found.keys() == names
    trace_id = int(PARENT.split("-")[1], 16)
    assert {span.context.trace_id for span in found.values()} == {trace_id}
    root = found["http request"]
    assert root.parent.span_id == int(PARENT.split("-")[2], 16)
    assert dict(root.attributes) == {
        "request_id": "my-id", "method": "POST", "path": "/v1/chat/completions", "status": 200,
        "outcome": "stop",
    }  # fmt: skip
    for name in found.keys() - {"http request"}:
        assert found[name].parent.span_id == root.context.span_id

    def traceparent(span) -> str:
        return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"

    assert stack.encoder.traceparents == [traceparent(found["encode call"])]
    assert stack.decoder.submits[0].traceparent == traceparent(found["decode stream"])


def test_without_tracing_nothing_is_sent(stack):
    post(stack, {"traceparent": PARENT})
    assert stack.encoder.traceparents == [""]
    assert stack.decoder.submits[0].traceparent == ""


class Lines(logging.Handler):
    """Formats records where they are logged, as the service does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_JsonFormatter("gateway"))
        self.lines: list[dict] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


def test_every_log_line_of_a_request_has_its_id(pair):
    async def fail(_: object) -> None:
        raise InternalError("broken")

    async def wait(_: object) -> None:
        await asyncio.sleep(60)

    for encoder in pair.encoders:
        encoder.before = fail
    for decoder in pair.decoders:
        decoder.before = wait
    lines, log = Lines(), logging.getLogger("services.gateway")
    level = log.level
    log.addHandler(lines)
    log.setLevel("INFO")
    try:
        for request_id in ("id-one", "id-two"):
            with pair.client(headers={"x-request-id": request_id}) as client:
                body = {"model": "tiny", "messages": asking(image_url())}
                assert client.post("/v1/chat/completions", json=body).status_code == 503
        pair.wait(lambda: len(lines.lines) >= 6)
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
    messages = [(line["request_id"], line["message"].split(" ")[0]) for line in lines.lines]
    expected = [(i, m) for i in ("id-one", "id-two") for m in ("encoder", "encoder", "POST")]
    assert messages == expected
