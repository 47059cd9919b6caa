"""Spans of a request's time, recorded where an OpenTelemetry endpoint is set.

`tracing` installs a recorder with `record_with`. Until then each call here returns at once. The
current span is a context variable, so a task inherits the current span of the task that creates it.
Between services the span is passed as a W3C `traceparent`: in HTTP headers, gRPC metadata and
`Submit`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

TRACEPARENT = "traceparent"
Attribute = str | int | float | bool


class Span:
    """A span of a request's time. This class itself is the span that nothing records.

    Attributes:
        traceparent: identity of the span for another service or for `start_span`. Empty if the span
            is not recorded.
    """

    traceparent = ""

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def end(self, end_s: float | None = None) -> None:
        """Ends a span of `start_span`.

        Args:
            end_s: time of the end, by `time.time()`. Defaults to now.
        """

    def as_current(self, *, ends: bool = False) -> AbstractContextManager["Span"]:
        """Makes the span the current span within the block. An exception that leaves the block
        marks the span as failed.

        Args:
            ends: True if the span ends with the block.
        """
        return nullcontext(self)


class SpanRecorder:
    """Starts spans. This class itself records nothing."""

    def start(
        self, name: str, parent: str, start_s: float | None, attributes: Mapping[str, Attribute]
    ) -> Span:
        """Starts a span.

        Args:
            parent: a `traceparent`. The current span if it is empty or malformed.
            start_s: time of the start, by `time.time()`. Now if it is None.
        """
        return _NOT_RECORDED

    def current_traceparent(self) -> str:
        """Returns the `traceparent` of the current span, or an empty string if there is none."""
        return ""


_NOT_RECORDED = Span()
_recorder = SpanRecorder()


def record_with(recorder: SpanRecorder) -> None:
    """Makes a recorder start all spans from now on."""
    global _recorder
    _recorder = recorder


def span(name: str, parent: str = "", **attributes: Attribute) -> AbstractContextManager[Span]:
    """Starts a span that is the current span within the block and ends with it. An exception that
    leaves the block marks the span as failed.

    The function must not be used around a `yield` of an asynchronous generator, whose context is
    that of its caller. Use `start_span` there.

    Args:
        parent: a `traceparent`. The current span if it is empty or malformed.
    """
    return _recorder.start(name, parent, None, attributes).as_current(ends=True)


def start_span(
    name: str, parent: str = "", *, start_s: float | None = None, **attributes: Attribute
) -> Span:
    """Starts a span that the caller ends. It is the current span only within `Span.as_current`.

    Args:
        parent: a `traceparent`. The current span if it is empty or malformed.
        start_s: time of the start, by `time.time()`. Defaults to now.
    """
    return _recorder.start(name, parent, start_s, attributes)


def record_span(
    name: str, parent: str, start_s: float, duration_s: float, **attributes: Attribute
) -> None:
    """Records a span that has ended and was measured elsewhere.

    Args:
        parent: a `traceparent`. The current span if it is empty or malformed.
        start_s: time of the start, by `time.time()`.
        duration_s: duration in seconds.
    """
    start_span(name, parent, start_s=start_s, **attributes).end(start_s + duration_s)


def traceparent() -> str:
    """Returns the `traceparent` of the current span, or an empty string if none is recorded."""
    return _recorder.current_traceparent()
