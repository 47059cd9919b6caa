"""One tenant's limits on one gateway: what its requests use, and how much of each limit is leased.

Two kinds of amounts have limits: those of the last 60 seconds (`Window`) and those at a time
(`Count`). The gateways that serve a tenant divide its limits among them: a gateway admits what fits
into its leases, whose sum over all gateways is never more than the limit. `leases` obtains them;
this file only counts.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from services.common.errors import RateLimited

Clock = Callable[[], float]

# What is counted, as indices of `Amounts`: the first three in any 60 seconds, the others at a time.
REQUESTS, TOKENS, PIXELS, RUNNING, SEQUENCES = KINDS = range(5)
_NAMES = (
    "requests per minute", "tokens per minute", "pixels per minute",
    "requests at a time", "sequences at a time",
)  # fmt: skip
# After a refusal, requests of at least its size are refused at once for so long: the gateway does
# not ask for each request of a flood.
_HOLD_OFF_S = 0.1

# One number of each kind.
Amounts = Sequence[int]
NOTHING: Amounts = (0,) * len(KINDS)


class Entry(Struct, eq=False, gc=False):  # a flood leaves 100,000 of them in a minute
    """An amount, and when it was counted."""

    at: float
    amount: int


class Window:
    """Amounts of the last 60 seconds."""

    def __init__(self, clock: Clock, window_s: float) -> None:
        self._clock = clock
        self._window_s = window_s
        self._entries: deque[Entry] = deque()
        self._total = 0
        self._mark, self._recent = 0.0, 0

    @property
    def used(self) -> int:
        self._expire()
        return self._total

    @property
    def recent(self) -> int:
        """The part of `used` since the mark."""
        self._expire()
        return self._recent

    def mark(self) -> None:
        """Begins `recent` anew."""
        self._mark, self._recent = self._clock(), 0

    def add(self, amount: int) -> Entry:
        """Counts an amount; `correct` may change it."""
        entry = Entry(self._clock(), amount)
        self._entries.append(entry)
        self._change(entry, amount)
        return entry

    def correct(self, entry: Entry, amount: int) -> None:
        """Changes an amount; one that has left the window is forgotten."""
        self._expire()
        if entry.at > self._clock() - self._window_s:
            self._change(entry, amount - entry.amount)
            entry.amount = amount

    def wait_s(self, amount: int, limit: int) -> float:
        """Seconds until `amount` fits; 0: now. More than the limit fits into an empty window."""
        over = self.used + amount - limit
        if over <= 0 or not self._total:
            return 0.0
        for entry in self._entries:
            over -= entry.amount
            if over <= 0:
                return entry.at + self._window_s - self._clock()
        return self.reset_s()

    def reset_s(self) -> float:
        """Seconds until the window is empty."""
        self._expire()
        return self._entries[-1].at + self._window_s - self._clock() if self._entries else 0.0

    def _expire(self) -> None:
        start = self._clock() - self._window_s
        while self._entries and self._entries[0].at <= start:
            entry = self._entries.popleft()
            self._change(entry, -entry.amount)

    def _change(self, entry: Entry, amount: int) -> None:
        self._total += amount
        if entry.at >= self._mark:
            self._recent += amount


class Count:
    """An amount at a time."""

    def __init__(self) -> None:
        self.used = 0

    @property
    def recent(self) -> int:
        """All of it: what runs is not older than it is."""
        return self.used

    def mark(self) -> None:
        """There is nothing to begin anew."""

    def add(self, amount: int) -> None:
        """Counts an amount, or gives it back if it is negative."""
        self.used += amount

    def wait_s(self, amount: int, limit: int) -> float:
        """A second, if `amount` does not fit: when requests end is not known."""
        return 1.0 if self.used + amount > limit else 0.0


@dataclass(frozen=True, slots=True)
class Division:
    """How limits are divided while nothing counts for all gateways together.

    Attributes:
        gateways: among which.
        since: when it began, in the clock's seconds. Until all that was counted before has left the
            windows, a gateway keeps its lease and has its part of what was not leased.
    """

    gateways: int
    since: float = float("-inf")

    def share(self, limit: int) -> int:
        """A gateway's part of a limit. Each lets at least one in."""
        return max(1, limit // self.gateways)


class Quota:
    """What one tenant uses. Only the event loop's thread uses it.

    Attributes:
        limits: by kind; None: none.
        leases: what this gateway may use, by kind. It may have used more: what was never checked,
            or before the lease shrank.
        others: what other gateways have leased, when this one heard last.
        is_busy, is_short: something has been counted, or refused, since Redis was told.
    """

    def __init__(
        self, tenant: str, limits: tuple[int | None, ...], clock: Clock, window_s: float
    ) -> None:
        self.tenant = tenant
        self.limits = limits
        self._clock = clock
        self._window_s = window_s
        self.requests, self.tokens, self.pixels = (Window(clock, window_s) for _ in range(3))
        self.meters = (self.requests, self.tokens, self.pixels, Count(), Count())
        self.leases = [0] * len(KINDS)
        self.others = [0] * len(KINDS)
        self.is_busy = self.is_short = False
        self._refused: list[tuple[float, int]] = [(0.0, 0)] * len(KINDS)  # until when, amount

    @property
    def is_limited(self) -> bool:
        return any(limit is not None for limit in self.limits)

    def used(self) -> list[int]:
        return [meter.used for meter in self.meters]

    def take(self, amounts: Amounts, entry_of: int = TOKENS) -> Entry | None:
        """Counts amounts. Returns the entry of the kind `entry_of`, or None if that is not limited
        or has no amount.
        """
        found, self.is_busy = None, True
        for kind, amount in enumerate(amounts):
            if not amount or (self.limits[kind] is None and kind <= PIXELS):
                continue
            entry = self.meters[kind].add(amount)
            if kind == entry_of:
                found = entry
        return found

    # Counted together

    def lacking(self, amounts: Amounts, *, heard: bool = False) -> int | None:
        """The first kind whose lease is too small; None: all amounts fit.

        Args:
            heard: `others` is of now: what is larger than the limit fits into an empty window.
        """
        for kind, limit in enumerate(self.limits):
            if limit is None or not amounts[kind]:
                continue
            used, lease = self.meters[kind].used, self.leases[kind]
            if used + amounts[kind] <= lease:
                continue
            is_alone = heard and not used and not self.others[kind]
            if is_alone and amounts[kind] > limit and kind <= PIXELS:
                continue
            return kind
        return None

    def check_hold_off(self, kind: int, amount: int) -> None:
        """Raises RateLimited for what is as large as what has just been refused."""
        until, refused = self._refused[kind]
        if amount >= refused and self._clock() < until:
            raise self.refusal(kind, amount)

    def hold_off(self, kind: int, amount: int) -> None:
        """An amount of a kind has been refused."""
        self._refused[kind] = (self._clock() + _HOLD_OFF_S, amount)

    def refusal(self, kind: int, amount: int) -> RateLimited:
        """The error for an amount that does not fit now. When it will is an estimate: others'
        amounts leave the window as this gateway's do; if it has none, at the pace of the limit.
        """
        self.is_short = True
        limit, meter, others = self.limits[kind] or 1, self.meters[kind], self.others[kind]
        wait_s = 1.0
        if isinstance(meter, Window):
            wait_s = min(self._window_s, self._window_s * amount / limit)
            if used := meter.used:
                over = max(1, used + others + amount - limit)
                wait_s = meter.wait_s(math.ceil(over * used / (used + others)), used)
        return RateLimited(f"the limit of {limit} {_NAMES[kind]} is reached", retry_after_s=wait_s)

    # Divided

    def divide(self, division: Division) -> None:
        """Begins a division: nobody will say what other gateways use from now on."""
        for kind, limit in enumerate(self.limits):
            if limit is not None:
                held = max(self.leases[kind], self.meters[kind].used)
                free = max(0, limit - self.others[kind] - held)
                self.leases[kind] = held + free // division.gateways
        for meter in self.meters:
            meter.mark()

    def bound(self, kind: int, division: Division) -> int:
        """What may be used of a kind that has a limit."""
        is_steady = self._clock() - division.since >= self._window_s
        return division.share(self.limits[kind] or 0) if is_steady else self.leases[kind]

    def check_divided(self, amounts: Amounts, division: Division) -> None:
        """Raises RateLimited for what does not fit into this gateway's part."""
        for kind, limit in enumerate(self.limits):
            if limit is None or not amounts[kind]:
                continue
            share = division.share(limit)
            if (wait_s := self._divided_wait_s(kind, amounts[kind], division, share)) > 0:
                part = f" (this gateway's part of it is {share})" if division.gateways > 1 else ""
                raise RateLimited(
                    f"the limit of {limit} {_NAMES[kind]} is reached{part}", retry_after_s=wait_s
                )

    def _divided_wait_s(self, kind: int, amount: int, division: Division, share: int) -> float:
        """Seconds until an amount may fit; 0: it does now."""
        meter, lease = self.meters[kind], self.leases[kind]
        steady_s = division.since + self._window_s - self._clock()
        if steady_s <= 0:
            return meter.wait_s(amount, share)
        if meter.used + amount <= lease and meter.recent + amount <= share:
            return 0.0
        return min(steady_s, meter.wait_s(amount, min(lease, share)) or steady_s)

    def headers(self, division: Division | None) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-*` headers, for the limits that there are."""
        found: list[tuple[bytes, bytes]] = []
        for name, kind in ((b"requests", REQUESTS), (b"tokens", TOKENS)):
            if (limit := self.limits[kind]) is None:
                continue
            window = self.requests if kind == REQUESTS else self.tokens
            if division is None:
                left = limit - self.others[kind] - window.used
            else:
                limit = division.share(limit)
                left = min(limit, self.bound(kind, division)) - window.used
            found += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, left)),
                (b"x-ratelimit-reset-" + name, b"%.3fs" % window.reset_s()),
            ]
        return found
