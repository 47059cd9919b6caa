"""OpenTelemetry traces: one trace per request through all services, where an OTLP endpoint is set.

The standard variables configure it (`OTEL_EXPORTER_OTLP_ENDPOINT` turns it on); the packages are
the extra `tracing`. Without an endpoint every call here returns at once and imports nothing.

The current span is a context variable: a task inherits it from the task that creates it. Between
services it travels as a W3C `traceparent`, in HTTP headers, gRPC metadata and `Submit`.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from services.common.settings import SettingsError, traces_endpoint

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

TRACEPARENT = "traceparent"
Attribute = str | int | float | bool


class Span:
    """A stretch of a request's time. Also what callers hold while tracing is off."""

    traceparent = ""  # for another service, or for `start_span`

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def end(self, end_s: float | None = None) -> None:
        """Ends a span of `start_span`, now or at `end_s` (`time.time()`)."""

    def as_current(self) -> AbstractContextManager[object]:
        """Makes it the current span for the block, and does not end it."""
        return nullcontext()


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

    def as_current(self) -> AbstractContextManager[object]:
        from opentelemetry.trace import use_span

        return use_span(self._span)


_OFF = Span()
_tracer: "Tracer | None" = None


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
    _record_to(service, BatchSpanProcessor(OTLPSpanExporter()))


@contextmanager
def exporting_to(service: str, exporter: "SpanExporter") -> Generator[None]:
    """For tests: spans go to `exporter` as soon as they end."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    global _tracer
    _record_to(service, SimpleSpanProcessor(exporter))
    try:
        yield
    finally:
        _tracer = None


def tracing_is_on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def span(name: str, parent: str = "", **attributes: Attribute) -> AbstractContextManager[Span]:
    """Makes a span the current one for the block; an exception that leaves it marks it failed.

    Not for a block in which an asynchronous generator yields: there the context is its caller's;
    use `start_span`.

    Args:
        name: what is done.
        parent: a `traceparent`; empty or malformed: the current span.
        attributes: recorded with it.
    """
    if _tracer is None:
        return nullcontext(_OFF)
    return _current_span(_tracer, name, parent, attributes)


def start_span(
    name: str, parent: str = "", *, start_s: float | None = None, **attributes: Attribute
) -> Span:
    """A span that the caller ends; the current one only where `as_current` says so.

    Args:
        name: what is done.
        parent: as for `span`.
        start_s: when it began, as `time.time()`; None: now.
        attributes: recorded with it.
    """
    if _tracer is None:
        return _OFF
    started = None if start_s is None else _nanoseconds(start_s)
    return _Recorded(
        _tracer.start_span(name, _context_of(parent), attributes=attributes, start_time=started)
    )


def record_span(
    name: str, parent: str, start_s: float, duration_s: float, **attributes: Attribute
) -> None:
    """A span that is over, measured elsewhere; `start_s` as `time.time()`."""
    if _tracer is not None:
        start_span(name, parent, start_s=start_s, **attributes).end(start_s + duration_s)


def traceparent() -> str:
    """The current span's `traceparent`; empty: there is none, or tracing is off."""
    if _tracer is None:
        return ""
    from opentelemetry.trace import get_current_span

    current = get_current_span()
    return _Recorded(current).traceparent if current.get_span_context().is_valid else ""


@contextmanager
def _current_span(
    tracer: "Tracer", name: str, parent: str, attributes: dict[str, Attribute]
) -> Generator[Span]:
    with tracer.start_as_current_span(name, _context_of(parent), attributes=attributes) as current:
        yield _Recorded(current)


def _context_of(parent: str) -> "Context | None":
    """None stands for the current context."""
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent})


def _record_to(service: str, processor: object) -> None:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    global _tracer
    assert isinstance(processor, SpanProcessor)
    provider = TracerProvider(resource=Resource.create({"service.name": f"triptych-{service}"}))
    provider.add_span_processor(processor)
    _tracer = provider.get_tracer("triptych")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


__all__ = [
    "TRACEPARENT", "Span", "exporting_to", "record_span", "setup_tracing", "span", "start_span",
    "traceparent", "tracing_is_on",
]  # fmt: skip
