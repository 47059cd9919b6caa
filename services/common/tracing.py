"""OpenTelemetry traces: one trace per request through all services, where an OTLP endpoint is set.

The standard variables configure it (`OTEL_EXPORTER_OTLP_ENDPOINT` turns it on); the packages are
the extra `tracing`. Each service's `__main__` calls `setup_tracing`, which registers with `spans`;
without an endpoint it does nothing and imports nothing.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from services.common.settings import SettingsError, traces_endpoint
from services.common.spans import TRACEPARENT, Attribute, Span, record_with

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer


class _Recorded(Span):
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


def _start(
    tracer: "Tracer", name: str, parent: str, start_s: float | None,
    attributes: Mapping[str, Attribute],
) -> Span:  # fmt: skip
    started = None if start_s is None else _nanoseconds(start_s)
    context = _context_of(parent)
    return _Recorded(tracer.start_span(name, context, attributes=attributes, start_time=started))


def _current() -> str:
    from opentelemetry.trace import get_current_span

    found = get_current_span()
    return _Recorded(found).traceparent if found.get_span_context().is_valid else ""


def setup_tracing(service: str) -> None:
    """Called once in each process that serves requests, before the first.

    Raises:
        SettingsError: an endpoint is set and the packages are not installed.
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
    """None stands for the current context."""
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent})


def record_to(service: str, processor: object) -> None:
    """Spans go to a processor of OpenTelemetry's from now on."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    assert isinstance(processor, SpanProcessor)
    provider = TracerProvider(resource=Resource.create({"service.name": f"triptych-{service}"}))
    provider.add_span_processor(processor)
    record_with(partial(_start, provider.get_tracer("triptych")), _current)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
