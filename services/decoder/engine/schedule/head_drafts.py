"""Drafts that the model's own layer for multi-token prediction has made on the device.

They come behind the tokens of a step. Pure Python.
"""

from array import array
from collections.abc import Iterable

from services.decoder.engine.messages import AddSequence
from services.decoder.engine.schedule.lookup import DraftSource, Lookups


class HeadSources(Lookups):
    """Makes a `HeadDrafts` for each sequence."""

    def of(self, message: AddSequence) -> DraftSource:
        return HeadDrafts(super().of(message) if message.prediction else None)


class HeadDrafts:
    """A `DraftSource` of drafts that come with the sampled tokens.

    The client's prediction is tried first, because it costs nothing and may be much longer.

    Args:
        prediction: source that knows the client's prediction. None if there is no prediction.
    """

    def __init__(self, prediction: DraftSource | None) -> None:
        self._prediction = prediction
        self._offered: list[int] = []
        self._num_tokens = 0
        self.is_prediction = False

    def read(self, token_ids: "array[int]") -> None:
        if self._prediction is not None:
            self._prediction.read(token_ids)
        for token_id in token_ids[self._num_tokens :] if self._offered else ():
            if self._offered[:1] != [token_id]:
                self._offered.clear()
                break
            del self._offered[0]
        self._num_tokens = len(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        offered: list[int] = []
        for draft in drafts:
            if draft < 0:
                break
            offered.append(int(draft))
        self._offered = offered

    def num_equal(self) -> int:
        return 0

    def prospect(self) -> float:
        return 0.0

    def propose(self, most: int) -> list[int]:
        self.is_prediction = False
        if self._prediction is not None:
            found = self._prediction.propose(most)
            if found and self._prediction.is_prediction:
                self.is_prediction = True
                return found
        return self._offered[:most]
