"""Where tests send spans: to an exporter, or an OTLP/HTTP endpoint that keeps what it is sent."""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from services.common.spans import SpanRecorder, record_with
from services.common.tracing import record_to


@contextmanager
def fake_collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP/HTTP endpoint: its address, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def exporting_to(service: str, exporter: SpanExporter) -> Generator[None]:
    """Spans go to `exporter` as soon as they end."""
    record_to(service, SimpleSpanProcessor(exporter))
    try:
        yield
    finally:
        record_with(SpanRecorder())
