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
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Flow:
    """The sequences of one request.

    Attributes:
        num_sequences: number of sequences that have not finished.
        finish_tag: virtual time at which the prompts that have arrived so far are complete.
    """

    num_sequences: int = 0
    finish_tag: float = 0.0


class FairQueue:
    """Owner of the virtual time and of the unfinished requests."""

    def __init__(self) -> None:
        self._has_changed = False  # whether a finish tag has changed since `take_change`
        self._time = 0.0
        self._flows: dict[tuple[str, str], Flow] = {}

    def add(self, tenant: str, request: str, num_tokens: int) -> Flow:
        """Adds a sequence, which makes the finish tag of its request later. Returns the request."""
        flow = self._flows.setdefault((tenant, request), Flow())
        flow.num_sequences += 1
        flow.finish_tag = max(flow.finish_tag, self._time) + num_tokens
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
        if self._flows:
            self._time += num_tokens / len(self._flows)

    def remove(self, tenant: str, request: str) -> None:
        """Removes a sequence that has finished."""
        flow = self._flows[tenant, request]
        flow.num_sequences -= 1
        if not flow.num_sequences:
            del self._flows[tenant, request]
