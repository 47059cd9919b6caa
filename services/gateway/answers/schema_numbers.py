"""Checks whether llguidance represents the numbers of a schema exactly.

The library reads each number as a double, without correct rounding if it has more than 15 digits
or a power of ten above `_MAX_POWER`, and computes with bounds as doubles or 64-bit integers. The
functions here find numbers that the library would replace by a neighbouring number, so that no
answer contains the neighbour.
"""

import sys
from decimal import Decimal
from typing import Any, cast

_MAX_EXACT = 1 << 53  # all smaller integers are exact as doubles
_MAX_INTEGER = (1 << 63) - 1
_MAX_BOUND = 10**18  # largest bound that excludes zero
_MAX_POWER = 22
_MAX_MULTIPLE, _MAX_FRACTION_DIGITS = 10**8, 7
LOWER_BOUNDS = frozenset(("minimum", "exclusiveMinimum"))
UPPER_BOUNDS = frozenset(("maximum", "exclusiveMaximum"))


def whole(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Returns a JSON value in which each float without a fraction is replaced by an integer.

    The library reads the digits of integers exactly.

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
    """Returns the first number in a value of `const` or `enum` that is not exact, or None.

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
    """Returns whether the library represents a bound exactly.

    Args:
        keyword: keyword of the bound, such as `minimum`.
        value: value of the bound.
        types: value of the schema's `type`.
    """
    if types == "integer" and keyword in ("minimum", "maximum") and value == int(value):
        if allows_zero(keyword, value):
            is_largest = keyword == "maximum" and value == _MAX_INTEGER
            return is_largest or (abs(value) <= _MAX_INTEGER and _is_exact(value))
        return abs(value) < _MAX_BOUND and _is_exact(value)
    return abs(value) < _MAX_EXACT and _is_exact(value)


def is_exact_multiple(value: float) -> bool:
    """Returns whether the library represents a value of `multipleOf` exactly."""
    power = Decimal(repr(value)).normalize().as_tuple().exponent
    return value <= _MAX_MULTIPLE and isinstance(power, int) and power >= -_MAX_FRACTION_DIGITS


def allows_zero(keyword: str, value: float) -> bool:
    """Returns whether a bound allows zero. A large bound that does is the limit of a type."""
    return value < 0 if keyword in LOWER_BOUNDS else value > 0


def allows_all(keyword: str, value: float) -> bool:
    """Returns whether a bound allows every double."""
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
