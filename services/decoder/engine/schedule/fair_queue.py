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
they would not be complete yet, because their tags are later than the present virtual time. Many of
them are complete already, because requests are computed one by one. If only unfinished requests
counted, virtual time would pass the tags of the last requests of a crowd, and a query would wait
for all of these.

This order alone lets a long request wait for a long time: a client whose short requests follow each
other counts many times, because each is complete earlier than with an even share. So a request also
has a *due time*, on a clock that a token advances by one part in the number of unfinished requests.
A request whose due time has passed is *overdue*, and overdue requests get the first half of each
step (`Prefills.plan`). The tokens of an overdue request do not advance virtual time. They make the
request's tag earlier, but no earlier than if its remaining tokens arrived now. The second half of
each step is thus left to other requests.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count


@dataclass(slots=True)
class Flow:
    """The sequences of one request.

    Attributes:
        num_sequences: number of sequences that have not finished.
        num_left: number of tokens that were not planned yet.
        finish_tag: virtual time at which the prompts that have arrived so far are complete.
        due: due time of these prompts, on a clock of its own.
        is_active: True if the finish tag is later than the present virtual time.
        is_cut: True if a sequence has finished before its prompt was computed.
    """

    num_sequences: int = 0
    num_left: int = 0
    finish_tag: float = 0.0
    due: float = 0.0
    is_active: bool = False
    is_cut: bool = False


class FairQueue:
    """Owner of the virtual time and of the unfinished requests."""

    def __init__(self) -> None:
        self._has_changed = False  # whether a finish tag has changed since `take_change`
        # Virtual time, and the clock of due times.
        self._time = self._due_time = 0.0
        self._flows: dict[tuple[str, str], Flow] = {}
        # Active requests by finish tag. An entry with another tag than its request's, or whose
        # request is not active, does not count.
        self._tags: list[tuple[float, int, Flow]] = []
        self._num_active = 0
        self._orders = count()

    @property
    def has_overdue(self) -> bool:
        """True if a request is overdue."""
        return any([flow.due <= self._due_time for flow in self._flows.values()])

    def is_overdue(self, flow: Flow) -> bool:
        """Returns whether a request is overdue."""
        return flow.due <= self._due_time

    def add(self, tenant: str, request: str, num_tokens: int) -> Flow:
        """Adds a sequence, which makes the finish tag of its request later. Returns the request."""
        flow = self._flows.setdefault((tenant, request), Flow())
        flow.num_sequences += 1
        flow.num_left += num_tokens
        flow.finish_tag = max(flow.finish_tag, self._time) + num_tokens
        flow.due = max(flow.due, self._due_time) + num_tokens
        self._enter(flow)
        self._has_changed = True
        return flow

    def take_change(self) -> bool:
        """Returns whether a finish tag has changed since the last call, so that queues that are
        ordered by finish tags have to be sorted.
        """
        changed, self._has_changed = self._has_changed, False
        return changed

    def advance(self, flow: Flow, num_tokens: int) -> None:
        """Notes that so many tokens of a request were planned, or found in the prefix cache."""
        self._due_time += num_tokens / max(1, len(self._flows))
        flow.num_left = max(0, flow.num_left - num_tokens)
        if self.is_overdue(flow):
            flow.finish_tag = max(flow.finish_tag - num_tokens, self._time + flow.num_left)
            self._has_changed = True
            self._enter(flow)
            return
        left = float(num_tokens)
        while left > 0 and self._tags:
            tag, _, first = self._tags[0]
            if not first.is_active or tag != first.finish_tag:
                heappop(self._tags)
            elif (needed := (tag - self._time) * self._num_active) > left:
                self._time += left / self._num_active
                return
            else:
                self._time, left = tag, left - needed
                self._deactivate(first)
                heappop(self._tags)

    def remove(self, tenant: str, request: str, *, is_cut: bool = False) -> None:
        """Removes a sequence that has finished.

        Args:
            tenant: tenant of the request.
            request: id of the request.
            is_cut: True if the sequence has finished before its whole prompt was computed.
        """
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

    def _enter(self, flow: Flow) -> None:
        """Notes a request's new finish tag, which decides whether the request is active."""
        if flow.finish_tag <= self._time:
            self._deactivate(flow)
            return
        self._num_active += not flow.is_active
        flow.is_active = True
        heappush(self._tags, (flow.finish_tag, next(self._orders), flow))

    def _deactivate(self, flow: Flow) -> None:
        """Lets a request no longer count as active. Its entries in `_tags` stay."""
        self._num_active -= flow.is_active
        flow.is_active = False
