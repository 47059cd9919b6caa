"""What of a grammar is counted over its whole text, and the bounds on regular expressions.

`grammar_bounds` has the bounds of whole texts, `schema_bounds` those of schemas.
"""

import math
import re
from dataclasses import dataclass

from services.common.errors import InvalidGrammar

MAX_LITERAL_BYTES = 1 << 16  # of constants and strings: 0.15 s, 60 MiB
MAX_VALUES = 5000  # of enumerations and choices: objects take 0.3 s, 30 MiB
MAX_PATTERN_CHARS = 1 << 15  # 0.2 s, 80 MiB
MAX_REPEATS = 100_000  # what counted repeats multiply to
MAX_COUNTED = 1000  # repeats of lists and rules: a thousand pairs take 0.4 s, 130 MiB

_PARTS = re.compile(
    r"\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+\])|(?P<unclosed>\[)|(?P<open>\()|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<more>[*+?])",
    re.DOTALL,
)


@dataclass(slots=True)
class Counts:
    """Sums over one text; each `add` raises InvalidGrammar where a sum is beyond its bound."""

    literal_bytes: int = 0
    values: int = 0
    pattern_chars: int = 0
    counted: int = 0

    def add_literal(self, text: str, values: int = 0) -> None:
        """Constants and strings, as they are written."""
        self.literal_bytes += len(text.encode("utf-8", "surrogatepass"))
        self.values += values
        refuse(self.literal_bytes, MAX_LITERAL_BYTES, "bytes of constants and strings")
        refuse(self.values, MAX_VALUES, "values in enumerations")

    def add_counted(self, repeats: int = 1) -> None:
        """Counted repeats of lists or rules."""
        self.counted += repeats
        refuse(self.counted, MAX_COUNTED, "counted repeats")

    def add_pattern(self, pattern: str) -> None:
        """A regular expression, which is checked."""
        self.pattern_chars += len(pattern)
        refuse(self.pattern_chars, MAX_PATTERN_CHARS, "characters of regular expressions")
        refuse_repeats(_repeats(pattern))


def refuse(count: float, most: int, what: str) -> None:
    """Raises InvalidGrammar where the text has more than `most` of something."""
    if count > most:
        raise InvalidGrammar(f"it has more than {most} {what}")


def refuse_repeats(repeats: float) -> None:
    """Raises InvalidGrammar where counted repeats multiply to more than `MAX_REPEATS`."""
    if repeats > MAX_REPEATS:
        raise InvalidGrammar(f"its counted repeats multiply to more than {MAX_REPEATS}")


class Product:
    """What counted repeats multiply to, read from left to right."""

    def __init__(self) -> None:
        self._most = 1.0  # on this level
        self._last = 1.0  # of what a repeat would repeat
        self._outer: list[float] = []

    def item(self) -> None:
        """Something that is not repeated within."""
        self._last = 1.0

    def open(self) -> None:
        """A group begins."""
        self._outer.append(self._most)
        self._most = self._last = 1.0

    def close(self) -> None:
        """A group ends."""
        self._last = self._most
        self._most = max(self._most, self._outer.pop() if self._outer else 1.0)

    def repeat(self, times: float) -> None:
        """What came last is repeated."""
        self._last *= max(times, 1.0)
        self._most = max(self._most, self._last)

    def total(self) -> float:
        """Of all that was read."""
        return max(self._most, *self._outer, 1.0)


def times_of(written: str) -> float:
    """A repeat's number."""
    return math.inf if len(written) > 15 else float(written)


def _repeats(pattern: str) -> float:
    product, end = Product(), 0
    for match in _PARTS.finditer(pattern):
        if match["unclosed"]:
            raise InvalidGrammar("a regular expression has a [ without its ]")
        repeats = match["least"] is not None or match["more"] is not None
        if not repeats or match.start() != end:
            product.item()
        if match["open"]:
            product.open()
        elif match["close"]:
            product.close()
        elif match["least"]:
            product.repeat(times_of(match["most"] or match["least"]))
        end = match.end()
    return product.total()
