"""Stored verdicts on grammars, so that the same text is not compiled again and again.

The verdicts are plain state of the front process.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from blake3 import blake3
from msgspec import msgpack

from services.decoder.masks.grammar import GrammarSource

_MAX_STORED = 4096  # verdicts, and also grammars whose compilation ended a fork
_MAX_DEATHS = 2
_REFUSED_S = 3600.0


class StoredVerdict(NamedTuple):
    """The verdict on a grammar.

    Attributes:
        error: reason why the grammar cannot be compiled. Empty if the grammar can be compiled.
        is_slow: True if the compilation takes more CPU time than the quick lane allows.
    """

    error: str
    is_slow: bool = False


class _Deaths(NamedTuple):
    """The forks that ended while they compiled a grammar.

    Attributes:
        number: number of forks.
        until: time until which the number counts.
        error: error message of the last compilation.
    """

    number: int
    until: float
    error: str


class Verdicts:
    """Stores verdicts by the digest of the grammar, up to a number of entries. The least recently
    used verdict is dropped first.

    The death of a fork may have another cause than the grammar, such as a lack of memory of the
    machine. The first death is therefore only counted. A second death within an hour is a verdict,
    which is valid for an hour.

    Args:
        clock: function that returns monotonic time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, StoredVerdict] = OrderedDict()
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()

    def find(self, key: bytes) -> StoredVerdict | None:
        """Returns the verdict on a grammar. None if the grammar has to be compiled."""
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        deaths = self._deaths.get(key)
        if deaths is None or deaths.number < _MAX_DEATHS or self._clock() >= deaths.until:
            return None
        return StoredVerdict(deaths.error)

    def store(self, key: bytes, known: StoredVerdict) -> None:
        """Stores a verdict that another compilation would not change."""
        self._known[key] = known
        if len(self._known) > _MAX_STORED:
            self._known.popitem(last=False)

    def died(self, key: bytes, error: str) -> None:
        """Counts a death of the fork that compiled the grammar.

        Args:
            key: digest of the grammar.
            error: error message, in case the death becomes a verdict.
        """
        now, before = self._clock(), self._deaths.pop(key, None)
        number = before.number if before is not None and now < before.until else 0
        self._deaths[key] = _Deaths(number + 1, now + _REFUSED_S, error)
        if len(self._deaths) > _MAX_STORED:
            self._deaths.popitem(last=False)


def key_of(source: GrammarSource) -> bytes:
    """Returns the digest under which the verdict on a grammar is stored."""
    return blake3(msgpack.encode(source)).digest()
