"""How many cases a test has that repeats itself: some in `make test`, all in `make nightly`.

Modules that ask are marked `thorough`.
"""

import os

THOROUGH = os.environ.get("TESTS") == "thorough"


def cases(usual: int, thorough: int) -> int:
    """The number for this run."""
    return thorough if THOROUGH else usual
