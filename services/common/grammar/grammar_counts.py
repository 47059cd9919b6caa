"""Sums over the whole text of a grammar, with their bounds, and bounds on regular expressions.

`grammar_bounds` has the bounds of grammars, and `schema_bounds` those of schemas.
"""

import math
import re
from dataclasses import dataclass

from services.common.errors import InvalidGrammar

MAX_LITERAL_BYTES = 1 << 16  # constants and strings, which take 0.15 s and 60 MiB
MAX_VALUES = 5000  # values of enumerations and choices; objects take 0.3 s and 30 MiB
MAX_PATTERN_CHARS = 1 << 15  # they take 0.2 s and 80 MiB
MAX_REPEATS = 100_000  # product of nested counted repeats
MAX_COUNTED = 1000  # repeats of lists and rules; a thousand pairs take 0.4 s and 130 MiB

_PARTS = re.compile(
    r"\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*+\])|(?P<unclosed>\[)|(?P<open>\()|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<more>[*+?])",
    re.DOTALL,
)


@dataclass(slots=True)
class Counts:
    """Sums over one text. Each `add` raises InvalidGrammar if a sum exceeds its bound.

    Attributes:
        literal_bytes: bytes of constants and strings.
        values: number of values of enumerations and choices.
        pattern_chars: characters of regular expressions.
        counted: number of counted repeats of lists and rules.
    """

    literal_bytes: int = 0
    values: int = 0
    pattern_chars: int = 0
    counted: int = 0

    def add_literal(self, text: str, values: int = 0) -> None:
        """Adds constants or strings, as they are written, with a number of values."""
        self.literal_bytes += len(text.encode("utf-8", "surrogatepass"))
        self.values += values
        refuse(self.literal_bytes, MAX_LITERAL_BYTES, "bytes of constants and strings")
        refuse(self.values, MAX_VALUES, "values in enumerations")

    def add_counted(self, repeats: int = 1) -> None:
        """Adds counted repeats of lists or rules."""
        self.counted += repeats
        refuse(self.counted, MAX_COUNTED, "counted repeats")

    def add_pattern(self, pattern: str) -> None:
        """Adds a regular expression and checks its repeats."""
        self.pattern_chars += len(pattern)
        refuse(self.pattern_chars, MAX_PATTERN_CHARS, "characters of regular expressions")
        refuse_repeats(_repeats(pattern))


def refuse(count: float, most: int, what: str) -> None:
    """Checks a count against its bound.

    Args:
        count: the count.
        most: the bound.
        what: name of the counted things, for the message.

    Raises:
        InvalidGrammar: the count exceeds the bound.
    """
    if count > most:
        raise InvalidGrammar(f"it has more than {most} {what}")


def refuse_repeats(repeats: float) -> None:
    """Checks the product of counted repeats.

    Raises:
        InvalidGrammar: the product exceeds `MAX_REPEATS`.
    """
    if repeats > MAX_REPEATS:
        raise InvalidGrammar(f"its counted repeats multiply to more than {MAX_REPEATS}")


class Product:
    """The largest product of nested counted repeats in a text that is read from left to right."""

    def __init__(self) -> None:
        self._most = 1.0  # largest product on this level
        self._last = 1.0  # product of the item that a repeat would repeat
        self._outer: list[float] = []  # largest products on the outer levels

    def item(self) -> None:
        """Reads an item without repeats inside."""
        self._last = 1.0

    def open(self) -> None:
        """Reads the beginning of a group."""
        self._outer.append(self._most)
        self._most = self._last = 1.0

    def close(self) -> None:
        """Reads the end of a group."""
        self._last = self._most
        self._most = max(self._most, self._outer.pop() if self._outer else 1.0)

    def repeat(self, times: float) -> None:
        """Reads a repeat of the last item."""
        self._last *= max(times, 1.0)
        self._most = max(self._most, self._last)

    def total(self) -> float:
        """Returns the largest product of all that was read."""
        return max(self._most, *self._outer, 1.0)


def times_of(written: str) -> float:
    """Parses the number of a repeat. A number of more than 15 digits is infinite."""
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
