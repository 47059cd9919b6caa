"""Limits per tenant: what its requests use now, and what they used in the last minute.

A request that would go over a limit is a 429 that says when to come back. Tokens are counted when
the prompt is known: the prompt's, and as many as the completion may have. When the request ends,
those that it did not use are given back.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec import Struct

from services.common.errors import RateLimited
from services.gateway.tenancy.tenants import Limits, Tenant

_WINDOW_S = 60.0
Clock = Callable[[], float]


class _Entry(Struct, eq=False, gc=False):  # a flood leaves 100,000 of them in a minute
    at: float
    amount: int


class Window:
    """Amounts of the last 60 seconds, against a limit."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: deque[_Entry] = deque()
        self.total = 0

    def add(self, amount: int) -> _Entry:
        """Counts an amount; `correct` may change it."""
        entry = _Entry(self._clock(), amount)
        self._entries.append(entry)
        self.total += amount
        return entry

    def correct(self, entry: _Entry, amount: int) -> None:
        """Changes an amount; one that has left the window is forgotten."""
        self.expire()
        if entry.at > self._clock() - _WINDOW_S:
            self.total += amount - entry.amount
            entry.amount = amount

    def expire(self) -> None:
        """Forgets what is older than the window."""
        start = self._clock() - _WINDOW_S
        while self._entries and self._entries[0].at <= start:
            self.total -= self._entries.popleft().amount

    def wait_s(self, amount: int, limit: int) -> float:
        """Seconds until `amount` fits; 0: now. More than the limit fits into an empty window."""
        self.expire()
        over = self.total + amount - limit
        if over <= 0 or not self.total:
            return 0.0
        for entry in self._entries:
            over -= entry.amount
            if over <= 0:
                return entry.at + _WINDOW_S - self._clock()
        return self._entries[-1].at + _WINDOW_S - self._clock()

    def reset_s(self) -> float:
        """Seconds until the window is empty."""
        self.expire()
        return self._entries[-1].at + _WINDOW_S - self._clock() if self._entries else 0.0


class Quota:
    """What one tenant uses. Only the event loop's thread uses it."""

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self.num_requests = 0
        self.num_sequences = 0
        self.requests = Window(clock)
        self.tokens = Window(clock)
        self.pixels = Window(clock)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's `x-ratelimit-*` headers, for the limits that there are."""
        found: list[tuple[bytes, bytes]] = []
        for name, limit, window in (
            (b"requests", self.limits.requests_per_minute, self.requests),
            (b"tokens", self.limits.tokens_per_minute, self.tokens),
        ):
            if limit is not None:
                reset_s = window.reset_s()
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(0, limit - window.total)),
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % reset_s),
                ]
        return found

    def check(self, name: str, window: Window, amount: int, limit: int | None) -> None:
        """Raises RateLimited if an amount does not fit into a window."""
        wait_s = 0.0 if limit is None else window.wait_s(amount, limit)
        if wait_s > 0:
            raise RateLimited(
                f"the limit of {limit} {name} per minute is reached", retry_after_s=wait_s
            )

    def check_at_a_time(self, name: str, number: int, more: int, limit: int | None) -> None:
        """Raises RateLimited if this many more at a time are over the limit."""
        if limit is not None and number + more > limit:
            raise RateLimited(f"the limit of {limit} {name} at a time is reached", retry_after_s=1)


@dataclass(slots=True)
class Usage:
    """What one request has taken of its tenant's quota. Valid inside the `with` that made it."""

    quota: Quota
    num_sequences: int = 0
    _tokens: list[_Entry] = field(default_factory=list[_Entry])

    def charge_pixels(self, num_pixels: int) -> None:
        """Counts the pixels of the request's images, before they are encoded.

        Raises:
            RateLimited: they are too many for now.
        """
        quota = self.quota
        quota.check("pixels", quota.pixels, num_pixels, quota.limits.pixels_per_minute)
        quota.pixels.add(num_pixels)

    def charge(self, prompt_tokens: int, max_tokens: int, num_choices: int) -> None:
        """Counts a prompt and the completions that it may have.

        Raises:
            RateLimited: they are too many for now.
        """
        quota, limits = self.quota, self.quota.limits
        tokens = prompt_tokens + num_choices * max_tokens
        quota.check_at_a_time("sequences", quota.num_sequences, num_choices, limits.max_sequences)
        quota.check("tokens", quota.tokens, tokens, limits.tokens_per_minute)
        quota.num_sequences += num_choices
        self.num_sequences += num_choices
        self._tokens.append(quota.tokens.add(tokens))

    def correct(self, used_tokens: Sequence[int]) -> None:
        """Gives back what was not used: prompt and completion tokens, charge by charge."""
        for index, entry in enumerate(self._tokens):
            used = used_tokens[index] if index < len(used_tokens) else 0
            self.quota.tokens.correct(entry, used)


class Quotas:
    """Owner of all tenants' quotas.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_tenant: dict[str, Quota] = {}

    def of(self, tenant: Tenant) -> Quota:
        """A tenant's; made at its first request. Limits may have changed since."""
        found = self._by_tenant.get(tenant.name)
        if found is None:
            found = self._by_tenant[tenant.name] = Quota(tenant.limits, self._clock)
        found.limits = tenant.limits
        return found

    @contextmanager
    def request(self, tenant: Tenant) -> Generator[Usage]:
        """Counts one request for the duration of a `with`.

        Raises:
            RateLimited: the tenant has as many as it may have.
        """
        quota = self.of(tenant)
        limits = quota.limits
        quota.check_at_a_time("requests", quota.num_requests, 1, limits.max_requests)
        quota.check("requests", quota.requests, 1, limits.requests_per_minute)
        quota.check("tokens", quota.tokens, 1, limits.tokens_per_minute)
        quota.requests.add(1)
        quota.num_requests += 1
        usage = Usage(quota)
        try:
            yield usage
        finally:
            quota.num_requests -= 1
            quota.num_sequences -= usage.num_sequences
