"""Prompt lookup: drafts that are copied from the sequence's own text, without a model. Pure Python.

An answer often repeats a part of its prompt or of itself: a quotation, a table, JSON keys, edited
code. If the last tokens of a sequence stand earlier in its text, the tokens that followed there are
copied as drafts. A client may also predict the answer (`prediction` of OpenAI's API). The
prediction is a second text to copy from, and is tried before the sequence's own text.

An answer that leaves the text which it repeats often returns to it soon, behind a new value in JSON
or a changed name in code. A single equal token shows the place then: the nearest one behind the
place where the answer has left the text.

Only the sequence's own text is searched. Drafts never cross requests.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from services.decoder.engine.messages import AddSequence

# Tokens before a place that have to be equal to the sequence's last tokens.
MIN_MATCH = 3
# Of several places, the one is chosen before which the most tokens are equal, up to this number.
_MAX_MATCH = 24
# The most places that are compared.
_MAX_PLACES = 8
# Within so many tokens an answer may return to the text that it has left.
_MAX_GAP = 16
# A token that is never proposed and never matches: an image's placeholder.
NO_TOKEN = -1
_ID_BITS = 21
_ID_MASK = (1 << _ID_BITS) - 1


class DraftSource(Protocol):
    """A source of drafts for one sequence.

    `PromptLookup` needs the sequence's ids alone. `HeadDrafts` gets its drafts with the output of
    the step that samples.
    """

    def read(self, token_ids: "array[int]") -> None:
        """Reads the new tokens of the sequence.

        Args:
            token_ids: int32 ids of prompt and completion, of which the first are known.
        """
        ...

    def offer(self, drafts: Iterable[int]) -> None:
        """Takes drafts behind the tokens that were read last, up to the first id below 0."""
        ...

    def propose(self, most: int) -> list[int]:
        """Returns up to `most` tokens that may come next."""
        ...

    @property
    def is_prediction(self) -> bool:
        """True if the last proposal is from the client's prediction."""
        ...


class DraftSources(Protocol):
    """Maker of a source of drafts for each sequence."""

    def of(self, message: AddSequence) -> DraftSource:
        """Returns the source of the drafts of a sequence that the front has sent."""
        ...


class Lookups:
    """Makes a `PromptLookup` for each sequence."""

    def of(self, message: AddSequence) -> DraftSource:
        text = array("i", message.prompt_token_ids)
        for span in message.images:
            empty = array("i", [NO_TOKEN]) * span.num_tokens
            text[span.offset : span.offset + span.num_tokens] = empty
        return PromptLookup(text, array("i", message.prediction))


class PromptLookup:
    """A `DraftSource` that copies from the sequence's own text, or from the client's prediction.

    Args:
        token_ids: int32 ids of the sequence, with `NO_TOKEN` for each image placeholder.
        prediction: int32 ids that the client predicts for the completion. Empty if there are none.
    """

    def __init__(self, token_ids: "array[int]", prediction: "array[int]") -> None:
        self._own = _Text(token_ids)
        self._prediction = _Text(prediction) if prediction else None
        # The text that the completion repeats now, and the place in it of the next token.
        self._source = self._prediction
        self._at = 0
        # The text that the completion has left, the place in it of the token that differed, and the
        # number of the sequence's tokens then.
        self._left: tuple[_Text, int, int] | None = None
        self._returned_at = -1  # the place to which the completion has returned, not confirmed yet

    @property
    def is_prediction(self) -> bool:
        return self._source is not None and self._source is self._prediction

    def read(self, token_ids: "array[int]") -> None:
        own, source, at = self._own, self._source, self._at
        for token_id in token_ids[len(own.ids) :]:
            if source is not None:
                if at < len(source.ids) and source.ids[at] == token_id:
                    at += 1
                else:
                    # A return whose first token was wrong is not tried again.
                    is_wrong = at == self._returned_at
                    self._left = None if is_wrong else (source, at, len(own.ids))
                    source, self._returned_at = None, -1
            own.append(token_id)
        self._source, self._at = source, at

    def offer(self, drafts: Iterable[int]) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        if self._source is None or self._at >= len(self._source.ids):
            self._find()
        if (source := self._source) is None:
            return []
        at, ids = self._at, source.ids
        found = ids[at : at + most].tolist()
        if source is self._own:  # what repeats itself up to its end goes on as it began
            for place in range(len(found), most):
                found.append(found[place - (len(ids) - at)])
        if NO_TOKEN in found:
            del found[found.index(NO_TOKEN) :]
        return found

    def _find(self) -> None:
        """Looks for the longest part of the texts that is equal to the sequence's last tokens."""
        self._source, longest = None, 0
        last = self._own.ids[-_MAX_MATCH:]
        if len(last) < MIN_MATCH or NO_TOKEN in last[-MIN_MATCH:]:
            return
        for text in (self._prediction, self._own):
            if text is None:
                continue
            for place in text.places(last[-MIN_MATCH:]):
                length = text.num_equal(place, last)
                if length > longest:
                    self._source, self._at, longest = text, place, length
        if self._source is None:
            self._return()

    def _return(self) -> None:
        """Looks for the sequence's last token close behind the place where it left its source."""
        if (left := self._left) is None:
            return
        source, at, num_tokens = left
        if len(self._own.ids) - num_tokens > _MAX_GAP:
            self._left = None
            return
        last, end = self._own.ids[-1], min(at + _MAX_GAP, len(source.ids) - 1)
        if source is self._own:  # the tokens since then are not what it has left
            end = min(end, num_tokens)
        if last in (found := source.ids[at:end]):
            self._source, self._at = source, at + found.index(last) + 1
            self._left, self._returned_at = None, self._at


class _Text:
    """Token ids with an index of their n-grams of `MIN_MATCH` tokens.

    The ids at the start are indexed by sorting, at the first search, because a dictionary of a long
    prompt would take a hundred bytes a token. Later ids are indexed as they come.
    """

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids[:]
        self._num_sorted = len(ids)
        self._keys: array[int] | None = None
        self._ends = array("i")
        self._later: dict[int, list[int]] = {}

    def append(self, token_id: int) -> None:
        """Appends a token."""
        ids = self.ids
        ids.append(token_id)
        if len(ids) >= MIN_MATCH:
            self._later.setdefault(_key(ids[-MIN_MATCH:]), []).append(len(ids))

    def places(self, gram: "array[int]") -> Iterator[int]:
        """Yields places right behind occurrences of an n-gram, the last first. A place at the end
        of the text is left out, because nothing follows there.
        """
        key, count = _key(gram), 0
        for place in reversed(self._later.get(key, ())):
            if place < len(self.ids):
                yield place
                count += 1
                if count == _MAX_PLACES:
                    return
        if (keys := self._keys) is None:
            keys = self._keys = self._sort()
        end = bisect_right(keys, key)
        start = bisect_left(keys, key, 0, end)
        for place in reversed(self._ends[max(start, end - _MAX_PLACES + count) : end]):
            if place < len(self.ids):
                yield place

    def num_equal(self, place: int, last: "array[int]") -> int:
        """Returns how many tokens before a place are equal to the last ones of `last`."""
        ids, count = self.ids, MIN_MATCH
        most = min(place, len(last))
        while count < most and ids[place - 1 - count] == last[-1 - count] != NO_TOKEN:
            count += 1
        return count

    def _sort(self) -> "array[int]":
        """Fills `_ends` and returns the n-grams' keys, both in the order of the keys."""
        ids = np.frombuffer(self.ids[: self._num_sorted], np.int32).astype(np.int64) & _ID_MASK
        count = max(0, len(ids) - MIN_MATCH + 1)
        keys = np.zeros(count, np.int64)
        for offset in range(MIN_MATCH):
            keys = keys << _ID_BITS | ids[offset : offset + count]
        order = np.argsort(keys, kind="stable")
        self._ends.frombytes((order + MIN_MATCH).astype(np.int32).tobytes())
        return array("q", keys[order].tobytes())


def _key(gram: "array[int]") -> int:
    key = 0
    for token_id in gram:
        key = key << _ID_BITS | token_id & _ID_MASK
    return key
