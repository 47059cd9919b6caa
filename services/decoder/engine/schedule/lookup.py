"""Prompt lookup: drafts that are copied from the sequence's own text, without a model. Pure Python.

An answer often repeats a part of its prompt or of itself: a quotation, a table, JSON keys, edited
code. If the last tokens of a sequence stand earlier in its text, the tokens that followed there are
copied as drafts. A client may also predict the answer (`prediction` of OpenAI's API). The
prediction is a second text to copy from, and is tried before the sequence's own text.

An answer often leaves the text that it repeats and soon returns, behind a new value in JSON or a
changed name in code. A single equal token shows the place then: the nearest one behind the
place where the answer has left the text.

Where there are no drafts, they may start behind the next token: if two tokens are equal, or if the
answer has left a text. How often they did in this sequence, and how often the first was right, says
whether the sequence should wait for that token (`DraftSource.prospect`).

Only the sequence's own text is searched. Drafts never cross requests.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Protocol

import numpy as np

from services.decoder.engine.messages import AddSequence

# Tokens before a place that have to be equal to the sequence's last tokens.
MIN_MATCH = 3
# Tokens that have to be equal for drafts to be expected behind the next token.
_PAIR = 2
# Of several places, the one is chosen before which the most tokens are equal, up to this number.
_MAX_MATCH = 24
# The most places that are compared.
_MAX_PLACES = 8
# Within so many tokens an answer may return to the text that it has left.
_MAX_GAP = 16
# First guess of two shares: of the expected drafts that were found, and of the found ones that were
# right. The guess has the weight of one case, and the first case counts 1/2. Later, a case counts
# 1/16, so that about the last 16 decide.
_FIRST_SHARE, _FIRST_WEIGHT, _LEAST_WEIGHT = 0.5, 1 / 2, 1 / 16
# Steps that a wrong first draft costs: its verification, and the drafts that pause behind it. A
# sequence that does not wait loses none, because the token in flight shows that the draft is wrong.
_WRONG_START = 1.5
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

    def num_equal(self) -> int:
        """Returns the length of the match: the number of the sequence's last tokens that were
        compared with the tokens before the copied drafts and are equal. 0 if there are no drafts.
        """
        ...

    def prospect(self) -> float:
        """Returns how many steps a sequence may expect to gain if it waits for its next token.

        Called when the last proposal was empty: drafts may start behind the next token. Whether
        they do is counted at the next proposal. The time of waiting is not subtracted.
        """
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
        # The text that the completion repeats now, the place in it of the next token, and the
        # number of equal tokens before that place, as far as they were compared.
        self._source = self._prediction
        self._at = self._num_equal = 0
        # The text that the completion has left, the place in it of the token that differed, and the
        # number of the sequence's tokens then.
        self._left: tuple[_Text, int, int] | None = None
        self._returned_at = -1  # the place to which the completion has returned, not confirmed yet
        # Why drafts may start behind the next token, the number of tokens with that token, and how
        # often drafts did start for each reason.
        self._reason: _Reason | None = None
        self._expected_at = 0
        self._starts = {reason: _Starts() for reason in _Reason}
        # The counts of the reason for which the drafts have started. None if the first draft was
        # compared already, or if there was no reason.
        self._started: _Starts | None = None

    @property
    def is_prediction(self) -> bool:
        return self._source is not None and self._source is self._prediction

    def num_equal(self) -> int:
        self._look()
        return self._num_equal

    def read(self, token_ids: "array[int]") -> None:
        own, source, at = self._own, self._source, self._at
        if self._started is not None and len(token_ids) > len(own.ids):
            assert source is not None
            self._started.right.add(is_true=source.ids[at] == token_ids[len(own.ids)])
            self._started = None
        for token_id in token_ids[len(own.ids) :]:
            if source is not None:
                if at < len(source.ids) and source.ids[at] == token_id:
                    at += 1
                    self._num_equal += 1
                else:
                    # A return whose first token was wrong is not tried again.
                    is_wrong = at == self._returned_at
                    self._left = None if is_wrong else (source, at, len(own.ids))
                    source, self._returned_at, self._num_equal = None, -1, 0
            own.append(token_id)
        self._source, self._at = source, at

    def offer(self, drafts: Iterable[int]) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        self._look()
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

    def prospect(self) -> float:
        self._reason, self._expected_at = self._find_reason(), len(self._own.ids) + 1
        return 0.0 if self._reason is None else self._starts[self._reason].gain

    def _look(self) -> None:
        """Looks for a text that the completion repeats, unless the last one still goes on."""
        if self._source is None or self._at >= len(self._source.ids):
            self._find()
        if self._reason is None:
            return
        if len(self._own.ids) == self._expected_at:
            starts = self._starts[self._reason]
            starts.found.add(is_true=self._source is not None)
            self._started = None if self._source is None else starts
        self._reason = None

    def _find(self) -> None:
        """Looks for the longest part of the texts that is equal to the sequence's last tokens."""
        self._source, self._num_equal, longest = None, 0, 0
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
        self._num_equal = longest
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
            self._source, self._at, self._num_equal = source, at + found.index(last) + 1, 1
            self._left, self._returned_at = None, self._at

    def _find_reason(self) -> "_Reason | None":
        """Returns why there may be drafts behind the next token, though there are none now."""
        last = self._own.ids[-_PAIR:]
        if len(last) == _PAIR and NO_TOKEN not in last:
            for text in (self._prediction, self._own):
                if text is not None and text.has_pair(last):
                    return _Reason.PAIR
        return None if self._left is None else _Reason.LEFT


class _Reason(Enum):
    """A reason to expect drafts behind the next token.

    Attributes:
        PAIR: the last two tokens stand earlier in the text.
        LEFT: the completion has left a text that it may return to.
    """

    PAIR = auto()
    LEFT = auto()


class _Share:
    """A share that is learned case by case.

    Attributes:
        rate: the share.
    """

    __slots__ = ("_weight", "rate")

    def __init__(self) -> None:
        self.rate, self._weight = _FIRST_SHARE, _FIRST_WEIGHT

    def add(self, *, is_true: bool) -> None:
        """Counts a case."""
        self.rate += self._weight * (is_true - self.rate)
        self._weight = max(_LEAST_WEIGHT, self._weight / (1 + self._weight))


class _Starts:
    """Counts of drafts that start for the same reason.

    Attributes:
        found: share of the tokens behind which there were drafts.
        right: share of these drafts of which the first was right.
    """

    __slots__ = ("found", "right")

    def __init__(self) -> None:
        self.found, self.right = _Share(), _Share()

    @property
    def gain(self) -> float:
        """Number of steps that a sequence gains if it waits, see `DraftSource.prospect`."""
        right = self.right.rate
        return self.found.rate * (right - _WRONG_START * (1 - right))


class _Text:
    """Token ids with an index of their n-grams of `MIN_MATCH` tokens.

    The ids at the start are indexed by sorting, at the first search, because a dictionary of a long
    prompt would take a hundred bytes a token. Later ids are indexed as they come. A key
    begins with the last token of its n-gram, so that n-grams with the same last two tokens have
    neighbouring keys.
    """

    def __init__(self, ids: "array[int]") -> None:
        self.ids = ids[:]
        self._num_sorted = len(ids)
        self._keys: array[int] | None = None
        self._ends = array("i")
        self._later: dict[int, list[int]] = {}
        # The pairs of tokens among the later ids, but for the last one.
        self._pairs: set[int] = set()

    def append(self, token_id: int) -> None:
        """Appends a token."""
        ids = self.ids
        if len(ids) >= _PAIR:
            self._pairs.add(_key(ids[-_PAIR:]))
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
        keys = self._sorted()
        end = bisect_right(keys, key)
        start = bisect_left(keys, key, 0, end)
        for place in reversed(self._ends[max(start, end - _MAX_PLACES + count) : end]):
            if place < len(self.ids):
                yield place

    def has_pair(self, pair: "array[int]") -> bool:
        """Returns whether two tokens stand in the text, before its last tokens."""
        key = _key(pair)
        if key in self._pairs:
            return True
        keys, bits = self._sorted(), _ID_BITS * (MIN_MATCH - _PAIR)
        start = bisect_left(keys, key << bits)
        end = bisect_left(keys, key + 1 << bits, start)
        return any([place < len(self.ids) for place in self._ends[start : min(end, start + 2)]])

    def num_equal(self, place: int, last: "array[int]") -> int:
        """Returns how many tokens before a place are equal to the last ones of `last`."""
        ids, count = self.ids, MIN_MATCH
        most = min(place, len(last))
        while count < most and ids[place - 1 - count] == last[-1 - count] != NO_TOKEN:
            count += 1
        return count

    def _sorted(self) -> "array[int]":
        """Returns the keys of the n-grams at the start, and sorts them at the first call."""
        if self._keys is None:
            self._keys = self._sort()
        return self._keys

    def _sort(self) -> "array[int]":
        """Fills `_ends` and returns the n-grams' keys, both in the order of the keys."""
        ids = np.frombuffer(self.ids[: self._num_sorted], np.int32).astype(np.int64) & _ID_MASK
        count = max(0, len(ids) - MIN_MATCH + 1)
        keys = np.zeros(count, np.int64)
        for offset in reversed(range(MIN_MATCH)):
            keys = keys << _ID_BITS | ids[offset : offset + count]
        order = np.argsort(keys, kind="stable")
        self._ends.frombytes((order + MIN_MATCH).astype(np.int32).tobytes())
        return array("q", keys[order].tobytes())


def _key(gram: "array[int]") -> int:
    key = 0
    for token_id in reversed(gram):
        key = key << _ID_BITS | token_id & _ID_MASK
    return key
