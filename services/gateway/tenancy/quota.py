"""Limits of one tenant on one gateway: amounts that requests use, and leases on the limits.

A limit bounds either an amount within any 60 seconds (`Window`) or an amount at a time (`Count`).
The gateways that serve a tenant divide its limits among themselves: each gateway has a lease on a
part of every limit and admits the requests that fit into its leases. The sum of the leases of all
gateways never exceeds the limit. `leases.Leases` obtains the leases; this file only counts.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from services.common.clock import Clock
from services.common.errors import RateLimited

# The kinds of limits, as indices of `Amounts`: the first three bound an amount within any 60
# seconds, the last two an amount at a time.
REQUESTS, TOKENS, PIXELS, RUNNING, SEQUENCES = KINDS = range(5)
_NAMES = (
    "requests per minute",
    "tokens per minute",
    "pixels per minute",
    "requests at a time",
    "sequences at a time",
)
# For this long after a refusal, requests of at least the refused size are refused without asking
# Redis, so that a flood of requests does not become a flood of Redis commands.
_REFUSAL_MEMORY_S = 0.1

# One number for each kind of limit.
Amounts = Sequence[int]
NOTHING: Amounts = (0,) * len(KINDS)


class Entry(Struct, eq=False, gc=False):  # a flood leaves 100,000 of them in a minute
    """An amount, and the time at which it was counted."""

    at: float
    amount: int


class Window:
    """Sum of the amounts that were counted in the last 60 seconds.

    Args:
        clock: monotonic clock, in seconds.
        window_s: length of the window, in seconds.
    """

    def __init__(self, clock: Clock, window_s: float) -> None:
        self._clock = clock
        self._window_s = window_s
        self._entries: deque[Entry] = deque()
        self._total = 0
        self._mark, self._recent = 0.0, 0

    @property
    def used(self) -> int:
        """Sum of the amounts in the window."""
        self._expire()
        return self._total

    @property
    def recent(self) -> int:
        """Part of `used` that was counted since the last `mark`."""
        self._expire()
        return self._recent

    def mark(self) -> None:
        """Resets `recent` to zero."""
        self._mark, self._recent = self._clock(), 0

    def add(self, amount: int) -> Entry:
        """Counts an amount, and returns the entry by which `correct` can change the amount."""
        entry = Entry(self._clock(), amount)
        self._entries.append(entry)
        self._change(entry, amount)
        return entry

    def correct(self, entry: Entry, amount: int) -> None:
        """Changes the amount of an entry. Does nothing if the entry has left the window."""
        self._expire()
        if entry.at > self._clock() - self._window_s:
            self._change(entry, amount - entry.amount)
            entry.amount = amount

    def wait_s(self, amount: int, limit: int) -> float:
        """Returns the seconds until `amount` fits, or 0 if it fits now.

        An amount above the limit fits into an empty window.
        """
        over = self.used + amount - limit
        if over <= 0 or not self._total:
            return 0.0
        for entry in self._entries:
            over -= entry.amount
            if over <= 0:
                return entry.at + self._window_s - self._clock()
        return self.reset_s()

    def reset_s(self) -> float:
        """Returns the seconds until the window is empty."""
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
    """Number of things that exist at the moment, such as running requests."""

    def __init__(self) -> None:
        self.used = 0

    @property
    def recent(self) -> int:
        """Same as `used`, since everything that is counted still exists."""
        return self.used

    def mark(self) -> None:
        """Does nothing; `Window.mark` resets `recent`."""

    def add(self, amount: int) -> None:
        """Adds an amount. A negative amount is given back."""
        self.used += amount

    def wait_s(self, amount: int, limit: int) -> float:
        """Returns 0 if `amount` fits, and otherwise one second.

        The real time is unknown, since it depends on when running requests end.
        """
        return 1.0 if self.used + amount > limit else 0.0


@dataclass(frozen=True, slots=True)
class Division:
    """Equal division of all limits among the gateways, used while Redis does not count for them.

    Attributes:
        gateways: number of gateways that share the limits.
        since: time at which the division began, in seconds of the clock. During the first window
            after this time a gateway keeps its lease and gets its share of the unleased rest, since
            amounts that were counted under the leases are still in the windows.
    """

    gateways: int
    since: float = float("-inf")

    def share(self, limit: int) -> int:
        """Returns the share of a limit that each gateway may use, which is at least 1."""
        return max(1, limit // self.gateways)


class Quota:
    """Usage and leases of one tenant on this gateway. Only the event loop's thread uses it.

    Args:
        tenant: name of the tenant.
        limits: limit of each kind. None for a kind without a limit.
        clock: monotonic clock, in seconds.
        window_s: length of the windows, in seconds.

    Attributes:
        limits: limit of each kind. None for a kind without a limit.
        leases: amount of each kind that this gateway may use. The used amount can be larger if the
            lease has shrunk since.
        leased_by_others: amount of each kind that the other gateways held at the last report.
        has_changed: true if an amount was counted since the last report to Redis.
        has_refused: true if a request was refused since the last report to Redis.
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
        self.leased_by_others = [0] * len(KINDS)
        self.has_changed = self.has_refused = False
        self._refused: list[tuple[float, int]] = [(0.0, 0)] * len(
            KINDS
        )  # end of the memory, amount

    @property
    def is_limited(self) -> bool:
        """True if the tenant has a limit of any kind."""
        return any(limit is not None for limit in self.limits)

    def used(self) -> list[int]:
        """Returns the used amount of each kind."""
        return [meter.used for meter in self.meters]

    def take(self, amounts: Amounts, entry_of: int = TOKENS) -> Entry | None:
        """Counts amounts without checking limits.

        Args:
            amounts: amount of each kind.
            entry_of: kind whose entry is returned: TOKENS or PIXELS.

        Returns:
            The entry of that kind. None if the kind has no limit or its amount is 0.
        """
        found, self.has_changed = None, True
        for kind, amount in enumerate(amounts):
            if not amount or (self.limits[kind] is None and kind <= PIXELS):
                continue
            entry = self.meters[kind].add(amount)
            if kind == entry_of:
                found = entry
        return found

    def exceeded_half(
        self,
        amounts: Amounts,
        division: Division | None,
        waiting: Amounts = NOTHING,
    ) -> int | None:
        """Returns the first kind of which a line of a batch would use more than half of the limit.

        Requests of the tenant count toward the half, too, and find the rest of the limit free. A
        line that is larger than the half may use more while less than the half is used. It could
        never run otherwise.

        `leased_by_others` may be old, and the sum is exact still: a line is admitted only within
        this gateway's lease, and other gateways learn of the lease before theirs grow.

        Args:
            amounts: amount of each kind that the line asks for.
            division: current division. None while Redis counts for all gateways.
            waiting: amounts for which other charges wait.

        Returns:
            The kind. None if all amounts fit.
        """
        is_steady = division is not None and self._clock() - division.since >= self._window_s
        for kind, limit in enumerate(self.limits):
            if limit is None or not (amount := amounts[kind]):
                continue
            used = self.meters[kind].used + waiting[kind]
            share = limit if division is None else division.share(limit)
            # Once a division is a window old, the others' last report says nothing any more.
            used_by_all = used if is_steady else used + self.leased_by_others[kind]
            if not (_fits_half(used, amount, share) and _fits_half(used_by_all, amount, limit)):
                return kind
        return None

    def check_half(
        self,
        amounts: Amounts,
        division: Division | None,
        waiting: Amounts = NOTHING,
    ) -> None:
        """Checks that a line of a batch uses at most half of each limit, see `exceeded_half`.

        The refusal is not remembered: the tenant's requests may still fit, and other gateways need
        not leave anything to this one.

        Raises:
            RateLimited: an amount does not fit.
        """
        if (kind := self.exceeded_half(amounts, division, waiting)) is not None:
            message = f"the half of {self.limits[kind]} {_NAMES[kind]} that batches may use is used"
            raise RateLimited(message, retry_after_s=1)

    # While Redis counts for all gateways

    def exceeded_kind(self, amounts: Amounts, *, is_current: bool = False) -> int | None:
        """Returns the first kind whose lease is too small, or None if all amounts fit.

        Args:
            amounts: amount of each kind.
            is_current: whether `leased_by_others` was received just now. Only then can the gateway
                tell that a window is empty, into which an amount above the limit fits.
        """
        for kind, limit in enumerate(self.limits):
            if limit is None or not amounts[kind]:
                continue
            used, lease = self.meters[kind].used, self.leases[kind]
            if used + amounts[kind] <= lease:
                continue
            is_empty = is_current and not used and not self.leased_by_others[kind]
            if is_empty and amounts[kind] > limit and kind <= PIXELS:
                continue
            return kind
        return None

    def check_last_refusal(self, kind: int, amount: int) -> None:
        """Refuses an amount that is at least as large as an amount refused a moment ago.

        Raises:
            RateLimited: the amount is at least as large.
        """
        until, refused = self._refused[kind]
        if amount >= refused and self._clock() < until:
            raise self.refusal(kind, amount)

    def record_refusal(self, kind: int, amount: int) -> None:
        """Remembers a refused amount for `check_last_refusal`."""
        self._refused[kind] = (self._clock() + _REFUSAL_MEMORY_S, amount)

    def refusal(self, kind: int, amount: int) -> RateLimited:
        """Returns the error for an amount that does not fit now.

        Its `retry_after_s` is an estimate: the amounts of other gateways are assumed to leave the
        window as this gateway's do, or at the rate of the limit if this gateway has none.
        """
        self.has_refused = True
        limit, meter, others = (
            self.limits[kind] or 1,
            self.meters[kind],
            self.leased_by_others[kind],
        )
        wait_s = 1.0
        if isinstance(meter, Window):
            wait_s = min(self._window_s, self._window_s * amount / limit)
            if used := meter.used:
                over = max(1, used + others + amount - limit)
                wait_s = meter.wait_s(math.ceil(over * used / (used + others)), used)
        return RateLimited(f"the limit of {limit} {_NAMES[kind]} is reached", retry_after_s=wait_s)

    # While the limits are divided

    def divide(self, division: Division) -> None:
        """Begins a division, in which the usage of other gateways is unknown.

        Each lease grows by this gateway's share of what no gateway had leased.
        """
        for kind, limit in enumerate(self.limits):
            if limit is not None:
                held = max(self.leases[kind], self.meters[kind].used)
                free = max(0, limit - self.leased_by_others[kind] - held)
                self.leases[kind] = held + free // division.gateways
        for meter in self.meters:
            meter.mark()

    def bound(self, kind: int, division: Division) -> int:
        """Returns the amount that this gateway may use of a kind with a limit."""
        is_steady = self._clock() - division.since >= self._window_s
        return division.share(self.limits[kind] or 0) if is_steady else self.leases[kind]

    def check_divided(self, amounts: Amounts, division: Division) -> None:
        """Checks that amounts fit into this gateway's share of the limits.

        Raises:
            RateLimited: an amount does not fit.
        """
        for kind, limit in enumerate(self.limits):
            if limit is None or not amounts[kind]:
                continue
            share = division.share(limit)
            if (wait_s := self._divided_wait_s(kind, amounts[kind], division, share)) > 0:
                own = f" (this gateway's share is {share})" if division.gateways > 1 else ""
                raise RateLimited(
                    f"the limit of {limit} {_NAMES[kind]} is reached{own}", retry_after_s=wait_s
                )

    def _divided_wait_s(self, kind: int, amount: int, division: Division, share: int) -> float:
        """Returns the seconds until an amount may fit, or 0 if it fits now."""
        meter, lease = self.meters[kind], self.leases[kind]
        steady_s = division.since + self._window_s - self._clock()
        if steady_s <= 0:
            return meter.wait_s(amount, share)
        if meter.used + amount <= lease and meter.recent + amount <= share:
            return 0.0
        return min(steady_s, meter.wait_s(amount, min(lease, share)) or steady_s)

    def headers(self, division: Division | None) -> list[tuple[bytes, bytes]]:
        """Returns OpenAI's `x-ratelimit-*` headers for the limits that the tenant has.

        Args:
            division: current division. None while Redis counts for all gateways.
        """
        found: list[tuple[bytes, bytes]] = []
        for name, kind in ((b"requests", REQUESTS), (b"tokens", TOKENS)):
            if (limit := self.limits[kind]) is None:
                continue
            window = self.requests if kind == REQUESTS else self.tokens
            if division is None:
                left = limit - self.leased_by_others[kind] - window.used
            else:
                limit = division.share(limit)
                left = min(limit, self.bound(kind, division)) - window.used
            found += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, left)),
                (b"x-ratelimit-reset-" + name, b"%.3fs" % window.reset_s()),
            ]
        return found


@dataclass(slots=True, eq=False)
class Charge:
    """Amounts that a request asks of the tenant's quota.

    Attributes:
        quota: quota of the request's tenant.
        amounts: amount of each kind that is counted.
        required: amount of each kind that has to fit before anything is counted.
        entry_of: kind that `entry` belongs to, TOKENS or PIXELS.
        is_of_line: True if the request is a line of a batch, which may only use half of each limit.
        entry: entry of that kind. None if the charge was not taken or the kind has no limit.
        is_taken: true if the amounts were counted.
    """

    quota: Quota
    amounts: Amounts
    required: Amounts
    entry_of: int = TOKENS
    is_of_line: bool = False
    entry: Entry | None = None
    is_taken: bool = False

    def take(self) -> None:
        """Counts the amounts without checking limits."""
        self.entry, self.is_taken = self.quota.take(self.amounts, self.entry_of), True


def _fits_half(used: int, amount: int, limit: int) -> bool:
    """Returns whether an amount of a line fits into half of a limit; see `Quota.exceeded_half`.

    Args:
        used: used amount, without that of the line.
        amount: amount that the line asks for.
        limit: the limit.
    """
    half = max(1, limit // 2)
    return used + amount <= half or (amount > half > used)
