"""Fair queueing: the order of prompts of a model for search. Pure Python.

A request to a model for search has many prompts: the inputs of an embedding request, or the pairs
of a query and its documents. In the order of arrival, a single query would wait for all prompts of
all requests before it. Here, requests share the device evenly, by weighted fair queueing with equal
weights. Each prompt has a *finish tag*, and the lowest is computed first.

Virtual time is the number of tokens that each request would have had computed so far if all
requests advanced at once, token by token. The finish tag of a prompt is the virtual time at which
it would then be complete: its number of tokens after the present virtual time, or after the finish
tag of the request's previous prompt if that is later. For example, the tags of 16 inputs of 500
tokens each that arrive at time 0 are 500, 1,000 to 8,000. A query of 30 tokens that arrives at time
3,000 gets the tag 3,030, and so goes before the inputs that are tagged 3,500 to 8,000. Virtual time
advances with each computed token, so no prompt waits forever.
"""

from dataclasses import dataclass

from services.decoder.engine.schedule.sequence import Sequence


@dataclass(slots=True)
class _Flow:
    """The prompts of one request.

    Attributes:
        num_sequences: number of its sequences that have not finished.
        last_tag: finish tag of its last prompt.
    """

    num_sequences: int = 0
    last_tag: float = 0.0


class FairQueue:
    """Owner of the virtual time, and of what is known of each unfinished request."""

    def __init__(self) -> None:
        self._time = 0.0
        self._flows: dict[tuple[str, str], _Flow] = {}

    def add(self, sequence: Sequence) -> None:
        """Sets the finish tag of a new sequence."""
        flow = self._flows.setdefault(_key(sequence), _Flow())
        flow.num_sequences += 1
        flow.last_tag = max(flow.last_tag, self._time) + sequence.num_prompt_tokens
        sequence.finish_tag = flow.last_tag

    def advance(self, num_tokens: int) -> None:
        """Notes that so many tokens of prompts were planned, or found in the prefix cache."""
        if self._flows:
            self._time += num_tokens / len(self._flows)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has finished."""
        key = _key(sequence)
        flow = self._flows[key]
        flow.num_sequences -= 1
        if not flow.num_sequences:
            del self._flows[key]


def _key(sequence: Sequence) -> tuple[str, str]:
    return sequence.tenant, sequence.message.request
