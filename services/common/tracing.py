"""Exports traces with OpenTelemetry: one trace per request through all services.

OpenTelemetry's standard variables configure the export, which `OTEL_EXPORTER_OTLP_ENDPOINT` turns
on. The packages are the extra `tracing`. Each service's `__main__` calls `setup_tracing`, which
installs a recorder in `spans`. Without an endpoint it does nothing and imports nothing.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from services.common.settings import SettingsError, traces_endpoint
from services.common.spans import TRACEPARENT, Attribute, Span, SpanRecorder, record_with

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer


class _RecordedSpan(Span):
    def __init__(self, span: "OtelSpan") -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(attributes)

    def end(self, end_s: float | None = None) -> None:
        self._span.end(None if end_s is None else _nanoseconds(end_s))

    @contextmanager
    def as_current(self, *, ends: bool = False) -> Generator[Span]:
        from opentelemetry.trace import use_span

        with use_span(self._span, end_on_exit=ends):
            yield self


class _OtelRecorder(SpanRecorder):
    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    def start(
        self, name: str, parent: str, start_s: float | None, attributes: Mapping[str, Attribute]
    ) -> Span:
        started = None if start_s is None else _nanoseconds(start_s)
        context = _context_of(parent)
        return _RecordedSpan(
            self._tracer.start_span(name, context, attributes=attributes, start_time=started)
        )

    def current_traceparent(self) -> str:
        from opentelemetry.trace import get_current_span

        found = get_current_span()
        return _RecordedSpan(found).traceparent if found.get_span_context().is_valid else ""


def setup_tracing(service: str) -> None:
    """Starts the export, if an endpoint is set. Each process that serves requests calls it once,
    before the first request.

    Args:
        service: name of the service.

    Raises:
        SettingsError: an endpoint is set, and the packages are not installed.
    """
    if not traces_endpoint():
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {error.name} is not installed: "
            "install triptych[tracing]"
        ) from None
    # The exporter reads endpoint, headers and timeout from the standard variables itself.
    record_to(service, BatchSpanProcessor(OTLPSpanExporter()))


def _context_of(parent: str) -> "Context | None":
    """Returns the context of a `traceparent`, or None, which means the current context."""
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent})


def record_to(service: str, processor: object) -> None:
    """Sends all spans to a processor from now on.

    Args:
        service: name of the service.
        processor: a `SpanProcessor` of OpenTelemetry.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    assert isinstance(processor, SpanProcessor)
    provider = TracerProvider(resource=Resource.create({"service.name": f"triptych-{service}"}))
    provider.add_span_processor(processor)
    record_with(_OtelRecorder(provider.get_tracer("triptych")))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
