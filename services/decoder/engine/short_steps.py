"""What a step leaves for the next one on a device whose steps last longer with each token: a CPU.
Pure Python.

A GPU reads all weights in each step, however few its tokens. Why each rule is as it is, with
figures: ADR 0040.
"""

from operator import attrgetter

from services.decoder.engine.sequence import Sequence
from services.decoder.engine.tenants import Tenants

_SHARED_STEPS = 100  # after the last one with several tenants
_PROMPTS_SHARE = 4  # prompts have a quarter of a short step's tokens
# Each chunk of a long prompt reads all of its context, so on a CPU smaller ones cost more than they
# are worth.
MIN_SHORT_CHUNK = 32
# The time of a prompt token's attention to a context with as many bytes as the weights, in times of
# its GEMMs (demonstration model, torch: 2.3). With 2, steps behind 5,000 tokens last 60 to 80 ms;
# with 3, 45 ms, and such prompts take as long in all.
_ATTENTION = 3


class ShortSteps:
    """The length of a CPU's steps.

    Chunks behind long contexts are short. While several tenants share the device, those that hold
    no row have their first chunks in a step of their own, at most every second one. In the others
    prompts have a part of the tokens, and decodes a part of their contexts, so that a newcomer
    waits for less; for some time after the last newcomer, too, because the next one meets a step
    that is under way.

    Args:
        max_context: tokens of the contexts that the decodes of a step read. Reading as many bytes
            as the weights have, it at most doubles the time of a step of few tokens.
    """

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self._left = 0  # short steps
        self._turns = 0  # of decodes
        self._took_newcomers = False

    def takes_newcomers(self, *, several: bool) -> bool:
        """Begins a step; whether it is the first chunks', if there are any."""
        self._left = _SHARED_STEPS if several else max(0, self._left - 1)
        found = several and not self._took_newcomers
        self._took_newcomers = False
        return found

    def took(self, *, newcomers: bool) -> None:
        """The step that has begun computes first chunks alone, or not."""
        self._took_newcomers = newcomers

    def prompt_tokens(self, room: int, max_batched_tokens: int) -> int:
        """How many of a step's `room` tokens prompts may have."""
        return min(room, max_batched_tokens // _PROMPTS_SHARE) if self._left else room

    def chunk(self, start: int, budget: int) -> tuple[int, int]:
        """The most tokens of a prompt's chunk that begins at `start`, and what each costs of a
        step's budget: those behind a long context, to which they all attend, cost more, whether or
        not tenants share.
        """
        cost = self._cost(start)
        return max(budget // cost, min(budget, MIN_SHORT_CHUNK)), cost

    def least(self, sequence: Sequence) -> int:
        """The least budget that is worth a chunk of a sequence's prompt."""
        return MIN_SHORT_CHUNK * self._cost(sequence.num_computed_tokens)

    def _cost(self, start: int) -> int:
        return 1 + _ATTENTION * start // max(1, self._max_context)

    def decodes(self, sequences: list[Sequence], tenants: Tenants) -> list[Sequence]:
        """Those of the decoding sequences that the step computes, one at least: tenants in turn,
        within each those first whose last one is the longest ago.
        """
        left = self._max_context
        if not self._left or sum([s.num_computed_tokens for s in sequences]) <= left:
            return sequences
        found: list[Sequence] = []
        for sequence in tenants.take_turns(sorted(sequences, key=attrgetter("last_turn"))):
            if left <= 0 and found:
                break
            left -= sequence.num_computed_tokens
            sequence.last_turn = self._turns = self._turns + 1
            found.append(sequence)
        return found
