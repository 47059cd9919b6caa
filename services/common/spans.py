"""Stretches of a request's time: where code says what it does, and for how long.

Whoever records them registers once, with `record_with`; until then every call here returns at once.
The current span is a context variable: a task inherits it from the task that creates it. Between
services it travels as a W3C `traceparent`, in HTTP headers, gRPC metadata and `Submit`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

TRACEPARENT = "traceparent"
Attribute = str | int | float | bool


class Span:
    """A stretch of a request's time. Also what callers hold while tracing is off."""

    traceparent = ""  # for another service, or for `start_span`

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def end(self, end_s: float | None = None) -> None:
        """Ends a span of `start_span`, now or at `end_s` (`time.time()`)."""

    def as_current(self, *, ends: bool = False) -> AbstractContextManager["Span"]:
        """Makes it the current span for the block, which an exception that leaves it marks failed;
        `ends`: and ends it behind the block.
        """
        return nullcontext(self)


# From name, parent, start and attributes, see `start_span`.
Start = Callable[[str, str, float | None, Mapping[str, Attribute]], Span]

_OFF = Span()


def _not_recorded(*_: object) -> Span:
    return _OFF


def record_with(start: Start = _not_recorded, current: Callable[[], str] = lambda: "") -> None:
    """Spans are started so from now on; `current`: the `traceparent` of the current one."""
    global _start, _current
    _start, _current = start, current


record_with()


def span(name: str, parent: str = "", **attributes: Attribute) -> AbstractContextManager[Span]:
    """Makes a span the current one for the block; an exception that leaves it marks it failed.

    Not for a block in which an asynchronous generator yields: there the context is its caller's;
    use `start_span`.

    Args:
        parent: a `traceparent`; empty or malformed: the current span.
    """
    return _start(name, parent, None, attributes).as_current(ends=True)


def start_span(
    name: str, parent: str = "", *, start_s: float | None = None, **attributes: Attribute
) -> Span:
    """A span that the caller ends; the current one only where `as_current` says so.

    Args:
        parent: as for `span`.
        start_s: when it began, as `time.time()`; None: now.
    """
    return _start(name, parent, start_s, attributes)


def record_span(
    name: str, parent: str, start_s: float, duration_s: float, **attributes: Attribute
) -> None:
    """A span that is over, measured elsewhere; `start_s` as `time.time()`."""
    start_span(name, parent, start_s=start_s, **attributes).end(start_s + duration_s)


def traceparent() -> str:
    """The current span's `traceparent`; empty: there is none, or none is recorded."""
    return _current()
