"""Numbers of a schema that the decoder's library holds exactly.

The library reads each number as a double, without correct rounding if it has more than 15 digits
or a power of ten above `_MAX_POWER`, and computes with bounds as doubles or 64-bit integers. A
number that it would replace by a neighbour is found here, so that no answer has the neighbour.
"""

import sys
from decimal import Decimal
from typing import Any, cast

_MAX_EXACT = 1 << 53  # all integers up to it are doubles
_MAX_INTEGER = (1 << 63) - 1
_MAX_BOUND = 10**18  # of a bound that keeps integers away from zero
_MAX_POWER = 22
_MAX_MULTIPLE, _MAX_FRACTION_DIGITS = 10**8, 7
LOWER_BOUNDS = frozenset(("minimum", "exclusiveMinimum"))
UPPER_BOUNDS = frozenset(("maximum", "exclusiveMaximum"))


def whole(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """A value of JSON with an integer for each number without a fraction, whose digits the library
    reads exactly.

    Args:
        value: parsed JSON, of bounded nesting.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [whole(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: whole(item) for name, item in cast("dict[str, Any]", value).items()}
    return value


def inexact_value(value: object) -> int | float | None:
    """The first number in a value of `const` or `enum` that is not held exactly; None if all are.

    Args:
        value: parsed JSON, of bounded nesting.
    """
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += cast("dict[str, Any]", item).values()
        elif isinstance(item, list):
            left += cast("list[Any]", item)
        elif isinstance(item, int | float) and not (abs(item) <= _MAX_INTEGER and _is_exact(item)):
            return item
    return None


def is_exact_bound(keyword: str, value: float, types: object) -> bool:
    """Whether a bound is held exactly.

    Args:
        types: value of the schema's `type`.
    """
    if types == "integer" and keyword in ("minimum", "maximum") and value == int(value):
        if allows_zero(keyword, value):
            is_largest = keyword == "maximum" and value == _MAX_INTEGER
            return is_largest or (abs(value) <= _MAX_INTEGER and _is_exact(value))
        return abs(value) < _MAX_BOUND and _is_exact(value)
    return abs(value) < _MAX_EXACT and _is_exact(value)


def is_exact_multiple(value: float) -> bool:
    """Whether a value of `multipleOf` is held exactly."""
    power = Decimal(repr(value)).normalize().as_tuple().exponent
    return value <= _MAX_MULTIPLE and isinstance(power, int) and power >= -_MAX_FRACTION_DIGITS


def allows_zero(keyword: str, value: float) -> bool:
    """Whether zero is within a bound: a large one is the limit of a type rather than of a value."""
    return value < 0 if keyword in LOWER_BOUNDS else value > 0


def allows_all(keyword: str, value: float) -> bool:
    """Whether every double is within a bound."""
    return allows_zero(keyword, value) and abs(value) >= sys.float_info.max


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return int(float(value)) == value
    written = Decimal(repr(value))
    if value.is_integer():  # `whole` makes it an integer
        return written == int(value)
    _, figures, power = written.as_tuple()
    return (
        len(figures) <= sys.float_info.dig and isinstance(power, int) and abs(power) <= _MAX_POWER
    )
