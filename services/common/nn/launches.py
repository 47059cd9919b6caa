"""Whether launches cost the host anything where they are made.

A step that is captured once and replayed pays for no launch; one that is launched kernel by kernel
may keep the device waiting for the host. Who chooses between kernels asks here. One thread of a
process launches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

# Of an H100 or H200, for which tiles are chosen: other devices get them, too, less well.
PROCESSORS = 132
# Steps of so many tokens keep the device busy for longer than their launches take.
_MANY_TOKENS = 2048

_captured = False


@contextmanager
def captured() -> Iterator[None]:
    """What is launched within is for a CUDA graph, or warms up for its capture."""
    global _captured
    before, _captured = _captured, True
    try:
        yield
    finally:
        _captured = before


def share_in_use(tiles: int) -> float:
    """Of the processors, while so many tiles, one a processor, go through them in waves."""
    return tiles / (-(-tiles // PROCESSORS) * PROCESSORS)


def are_free(num_tokens: int) -> bool:
    """Whether a kernel that takes the host longer may serve a step of so many tokens."""
    return _captured or num_tokens >= _MANY_TOKENS
