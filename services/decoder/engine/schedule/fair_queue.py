"""Fair queueing: the order of the prompts of a model for search. Pure Python.

A request to a model for search has many prompts: the inputs of an embedding request, or the pairs
of a query and its documents. In the order of arrival, a single query would wait for all prompts of
all requests before it. Here, requests are computed in the order in which they would be complete if
all of them shared the device evenly, by weighted fair queueing with equal weights.

Virtual time is the number of tokens that each request would have had computed so far if all
requests advanced at once, token by token. The *finish tag* of a request is the virtual time at
which it would then be complete: its number of tokens after the virtual time of its arrival. For
example, two requests that arrive at time 0 and at time 100 with 16 inputs of 500 tokens each have
the tags 8,000 and 8,100, so the second waits for the first. A query of 30 tokens that arrives at
time 3,000 gets the tag 3,030, and so is computed before the rest of both. Virtual time advances
with each computed token, so no request waits forever. Each is complete about as early as if the
device was shared evenly, or earlier.

A token advances virtual time by one part in n, the number of *active* requests: with an even share
they would not be complete yet, because their tags are later than the present virtual time. Most of
them may be complete, because one request is computed after the other. If only unfinished requests
counted, virtual time would pass the tags of the last requests of a crowd, and a query would wait
for all of these.

But n is at most twice the *crowd*, the largest number of requests that were unfinished together,
until virtual time passes the tags of that moment. Otherwise, a client that sends one request after
the other would count many times, because its requests are complete earlier than with an even share,
and a long request would wait for ever more of them.
"""

from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count

# Most active requests that count, relative to the crowd.
_MOST_ACTIVE = 2


@dataclass(slots=True)
class Flow:
    """The sequences of one request.

    Attributes:
        num_sequences: number of sequences that have not finished.
        finish_tag: virtual time at which the prompts that have arrived so far are complete.
        is_active: True if the finish tag is later than the present virtual time.
        is_cut: True if a sequence has finished before its prompt was computed.
    """

    num_sequences: int = 0
    finish_tag: float = 0.0
    is_active: bool = False
    is_cut: bool = False


class FairQueue:
    """Owner of the virtual time and of the unfinished requests."""

    def __init__(self) -> None:
        self._has_changed = False  # whether a finish tag has changed since `take_change`
        self._time = 0.0
        self._flows: dict[tuple[str, str], Flow] = {}
        # Requests by finish tag: all active ones, and some that were cut short. A tag may have
        # become later since it was entered, which is found out when it is the first.
        self._tags: list[tuple[float, int, Flow]] = []
        self._num_active = 0
        self._orders = count()
        self._crowd = 0
        self._crowd_until = 0.0  # virtual time up to which the size of the crowd counts
        self._last_tag = 0.0  # the latest finish tag so far

    def add(self, tenant: str, request: str, num_tokens: int) -> Flow:
        """Adds a sequence, which makes the finish tag of its request later. Returns the request."""
        flow = self._flows.setdefault((tenant, request), Flow())
        flow.num_sequences += 1
        flow.finish_tag = max(flow.finish_tag, self._time) + num_tokens
        self._last_tag = max(self._last_tag, flow.finish_tag)
        if len(self._flows) >= self._crowd or self._time >= self._crowd_until:
            self._crowd, self._crowd_until = len(self._flows), self._last_tag
        if not flow.is_active:
            flow.is_active = True
            self._num_active += 1
            heappush(self._tags, (flow.finish_tag, next(self._orders), flow))
        self._has_changed = True
        return flow

    def take_change(self) -> bool:
        """Returns whether a finish tag has changed since the last call, so that queues that are
        ordered by finish tags have to be sorted.
        """
        changed, self._has_changed = self._has_changed, False
        return changed

    def advance(self, num_tokens: int) -> None:
        """Notes that so many tokens of prompts were planned, or found in the prefix cache."""
        left = float(num_tokens)
        while left > 0 and self._tags:
            tag, order, flow = self._tags[0]
            if not flow.is_active:
                heappop(self._tags)
            elif flow.finish_tag > tag:
                heapreplace(self._tags, (flow.finish_tag, order, flow))
            elif (needed := (tag - self._time) * self._num_sharing) > left:
                self._time += left / self._num_sharing
                return
            else:
                self._time, left = tag, left - needed
                self._deactivate(flow)
                heappop(self._tags)

    def remove(self, tenant: str, request: str, *, is_cut: bool = False) -> None:
        """Removes a sequence that has finished; `is_cut` if before its prompt was computed."""
        flow = self._flows[tenant, request]
        flow.num_sequences -= 1
        flow.is_cut |= is_cut
        if not flow.num_sequences:
            del self._flows[tenant, request]
            if flow.is_cut:  # The rest of its tokens will not be computed.
                self._deactivate(flow)
        if not self._flows:
            self._tags.clear()
            self._num_active = 0

    @property
    def _num_sharing(self) -> int:
        """Number of requests that share the next token; not 0 if a request is active."""
        return min(self._num_active, _MOST_ACTIVE * self._crowd)

    def _deactivate(self, flow: Flow) -> None:
        """Lets a request no longer count as active. Its entry in `_tags` stays."""
        self._num_active -= flow.is_active
        flow.is_active = False
