"""What happened, and whether it was right.

A request's right outcomes: the answer that it gets alone; 400 if it has a mistake; a loss, if its
gateway was killed meanwhile; 503 with Retry-After, and an error event, only where `Window` says so.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# After a fault's end: connections, breakers and health checks have been restored by then.
_SETTLE_S = 2.0
_AFTER_S = 3.0
_NUM_SLOWEST = 25


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Times are of `time.monotonic()`.

    Attributes:
        ttft_s: of a stream that had content; else 0.
        gateway: name and process id.
        outcome: answered, mistake (and 400), left, refused (503), error event, lost, wrong,
            wrong status.
        note: more about it.
    """

    start: float
    end: float
    ttft_s: float
    gateway: str
    outcome: str
    note: str = ""


@dataclass(slots=True)
class Window:
    """One fault.

    Attributes:
        detection_s: the most that the stack may need to notice it.
        start: when it was injected.
        whole: when its cause was gone and all was there again.
        may_refuse: a 503 is right. So it is if another fault overlaps.
        may_break: an error event is right. So it is if another fault overlaps.
    """

    kind: str
    detail: str
    detection_s: float
    start: float
    whole: float = float("inf")
    may_refuse: bool = False
    may_break: bool = False

    def overlaps(self, start: float, end: float) -> bool:
        return self.start <= end and start <= self.whole + _SETTLE_S


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A front process's end.

    Attributes:
        name: and process id.
        seen_at: when it was last seen to run.
        at: when its end was seen.
    """

    name: str
    seen_at: float
    at: float
    status: int


@dataclass(slots=True)
class History:
    """All requests and faults of a run."""

    asks: list[Ask] = field(default_factory=list[Ask])
    windows: list[Window] = field(default_factory=list[Window])
    ends: list[ProcessEnd] = field(default_factory=list[ProcessEnd])

    def add(self, ask: Ask) -> None:
        self.asks.append(ask)

    def failures(self) -> list[str]:
        """A line for each request that ended otherwise than it may."""
        return [
            f"{kind} after {ask.end - ask.start:.2f} s ({ask.note}; {ask.gateway}): "
            f"{self._context(ask)}"
            for ask in self.asks
            if (kind := self._failure(ask))
        ]

    def outcomes(self) -> Counter[str]:
        """How requests ended; what is not right is marked as a failure."""
        return Counter(
            f"FAILED: {kind}" if (kind := self._failure(ask)) else ask.outcome for ask in self.asks
        )

    def _failure(self, ask: Ask) -> str:
        windows = [w for w in self.windows if w.overlaps(ask.start, ask.end)]
        match ask.outcome:
            case "answered" | "mistake" | "left":
                return ""
            case "refused":
                right = len(windows) > 1 or any(w.may_refuse for w in windows)
            case "error event":
                right = len(windows) > 1 or any(w.may_break for w in windows)
            case "lost":
                right = any(
                    end.name == ask.gateway
                    and end.status == -9
                    and ask.start <= end.at
                    and ask.end >= end.seen_at
                    for end in self.ends
                )
            case _:
                right = False
        return "" if right else ask.outcome

    def _context(self, ask: Ask) -> str:
        found = [
            f"{w.kind} {w.detail} {ask.start - w.start:+.2f} s after it began"
            for w in self.windows
            if w.overlaps(ask.start, ask.end)
        ]
        return ", ".join(found) or "no fault"

    def seconds_without_end(self, kind: str) -> float:
        """Since a process of this kind ended last."""
        ends = [end.at for end in self.ends if end.name.startswith(f"{kind}-")]
        return time.monotonic() - max(ends, default=0.0)

    # --- times ----------------------------------------------------------------------------------

    def normal_ttfts(self) -> list[float]:
        """Of requests that met no fault."""
        return [
            ask.ttft_s
            for ask in self.asks
            if ask.ttft_s and not any(w.overlaps(ask.start, ask.end) for w in self.windows)
        ]

    def report(self) -> dict[str, Any]:
        """Figures as JSON."""
        normal = self.normal_ttfts()
        p99 = percentile(normal, 99)
        kinds: dict[str, dict[str, Any]] = {}
        groups: dict[str, list[Window]] = {}
        for window in self.windows:
            groups.setdefault(self._group(window), []).append(window)
        for kind, windows in sorted(groups.items()):
            during = self._ttfts((w.start, w.whole) for w in windows)
            after = self._ttfts((w.whole, self._after(w)) for w in windows)
            kinds[kind] = {
                "faults": len(windows),
                "detection_s": max(w.detection_s for w in windows),
                "during": during,
                "after": after,
                "recovery_s": [self._recovery_s(w, 2 * p99) for w in windows],
                "whole_s": [w.whole - w.start for w in windows],
            }
        return {"outcomes": dict(self.outcomes()), "normal": normal, "kinds": kinds}

    def slowest(self) -> list[str]:
        """A line for each of the latest first tokens."""
        found = sorted(self.asks, key=lambda ask: -ask.ttft_s)[:_NUM_SLOWEST]
        return [f"{a.ttft_s:.2f} s ({a.gateway}): {self._context(a)}" for a in found]

    def _after(self, window: Window) -> float:
        """The end of the time after a fault: at most until the first request that met another."""
        later = [w.start for w in self.windows if w.start > window.whole]
        met = [a.start for a in self.asks if any(a.end >= at for at in later[:1])]
        return min([window.whole + _AFTER_S, *(at for at in met if at >= window.whole)])

    def _group(self, window: Window) -> str:
        alone = not any(
            other is not window and other.overlaps(window.start, window.whole)
            for other in self.windows
        )
        return window.kind if alone else "two at once"

    def _ttfts(self, spans: Iterable[tuple[float, float]]) -> list[float]:
        """Of requests that began in one of the spans."""
        found = list(spans)
        return [
            ask.ttft_s
            for ask in self.asks
            if ask.ttft_s and any(start <= ask.start < end for start, end in found)
        ]

    def _recovery_s(self, window: Window, bound_s: float) -> float:
        """From the fault's beginning until the last first token that was late because of it, before
        the next fault.
        """
        later = [w.start for w in self.windows if w.start > window.start]
        until = min([window.whole + 2 * _SETTLE_S, *later])
        late = [
            ask.start + ask.ttft_s
            for ask in self.asks
            if ask.ttft_s > bound_s and window.start - ask.ttft_s <= ask.start < until
        ]
        return max(0.0, max(late, default=window.start) - window.start)


def percentile(values: Sequence[float], percent: float) -> float:
    """0 where there is no value."""
    return float(np.percentile(values, percent)) if values else 0.0
