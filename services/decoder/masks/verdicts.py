"""Verdicts on grammars, which are kept so that a text is not compiled again and again.

Pure state of the front: no process and no waiting here.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from blake3 import blake3
from msgspec import msgpack

from services.decoder.masks.grammar import GrammarSource

_KEPT = 4096  # verdicts, and texts that have killed a fork
_MAX_DEATHS = 2
_REFUSED_S = 3600.0


class Known(NamedTuple):
    """A verdict on a grammar.

    Attributes:
        error: reason why the grammar cannot be compiled; empty if it can be.
        is_slow: whether the compilation takes more CPU time than the quick lane allows.
    """

    error: str
    is_slow: bool = False


class _Deaths(NamedTuple):
    number: int
    until: float
    error: str


class Verdicts:
    """Keeps verdicts by the digest of the grammar's text, the least recently used going first.

    A fork that dies while it compiles a grammar may have died of something else, such as the
    kernel's need for memory. So the first death is only counted; a second one within an hour is
    a verdict, which is kept for an hour.

    Args:
        clock: clock of the hour, in seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()

    def find(self, key: bytes) -> Known | None:
        """Returns the verdict on a grammar; None if the grammar has to be compiled."""
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        deaths = self._deaths.get(key)
        if deaths is None or deaths.number < _MAX_DEATHS or self._clock() >= deaths.until:
            return None
        return Known(deaths.error)

    def keep(self, key: bytes, known: Known) -> None:
        """Keeps a verdict that another compilation would not change."""
        self._known[key] = known
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def died(self, key: bytes, error: str) -> None:
        """Counts a death of the fork that compiled the grammar."""
        now, before = self._clock(), self._deaths.pop(key, None)
        number = before.number if before is not None and now < before.until else 0
        self._deaths[key] = _Deaths(number + 1, now + _REFUSED_S, error)
        if len(self._deaths) > _KEPT:
            self._deaths.popitem(last=False)


def key_of(source: GrammarSource) -> bytes:
    """Returns the digest under which the verdict on a grammar is kept."""
    return blake3(msgpack.encode(source)).digest()
