"""How many cases a test has that repeats itself: some in `make test`, all in `make nightly`.

Modules or tests that ask are marked `thorough`.
"""

import os
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")
THOROUGH = os.environ.get("TESTS") == "thorough"


def cases(usual: int, thorough: int) -> int:
    """The number for this run."""
    return thorough if THOROUGH else usual


def first(usual: int, values: Sequence[Value]) -> Sequence[Value]:
    """The values of a parameter for this run: so many, or all."""
    return values if THOROUGH else values[:usual]
