"""Drafts of a stated quality, made from tokens that are known beforehand."""

import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.decoder.engine.messages import AddSequence


class KnownDrafts:
    """A `lookup.DraftSource` whose drafts are right with a given probability each.

    Args:
        token: returns the sequence's token at an index.
        share: probability that a draft is right.
        seed: seed of the wrong ones.
        is_prediction: as if the client had sent the drafts.

    Attributes:
        offered: drafts that came with the tokens, by the number of tokens before them.
    """

    def __init__(
        self, token: Callable[[int], int], share: float, seed: int, *, is_prediction: bool = False
    ) -> None:
        self._token, self._share = token, share
        self._random = random.Random(seed)
        self._num_tokens = 0
        self.is_prediction = is_prediction
        self.offered: dict[int, list[int]] = {}

    def read(self, token_ids: "array[int]") -> None:
        self._num_tokens = len(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        if found := [int(draft) for draft in drafts]:
            self.offered[self._num_tokens] = found

    def num_equal(self) -> int:
        return 0

    def prospect(self) -> float:
        return 0.0

    def propose(self, most: int) -> list[int]:
        indices = range(self._num_tokens, self._num_tokens + most)
        return [self._draft(index) for index in indices]

    def _draft(self, index: int) -> int:
        right = self._token(index)
        if self._random.random() < self._share:
            return right
        wrong = self._random.randrange(90)
        return wrong + (wrong == right)


@dataclass(slots=True)
class KnownSources:
    """A `lookup.DraftSources` whose drafts are right with a given probability each.

    Attributes:
        token: returns the token of a sequence at an index.
        share: probability that a draft is right.
    """

    token: Callable[[AddSequence, int], int]
    share: float

    def of(self, message: AddSequence) -> KnownDrafts:
        return KnownDrafts(
            lambda index: self.token(message, index), self.share, seed=message.sequence_id
        )


def from_answer(message: AddSequence, answer: list[int], index: int) -> int:
    """The token of a sequence with this answer at an index; 0 behind its end."""
    place = index - len(message.prompt_token_ids) // 4
    return answer[place] if place < len(answer) else 0
