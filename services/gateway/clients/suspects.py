"""Images that may have cost an encoder its life or its time limit: no second one is risked lightly.

An encoder decodes each image in a process with limits, so that an image can end no encoder that we
know of. If its engine crashes or hangs all the same, the encoder says which images it worked on: if
it was one, the image is refused for ten minutes and no second encoder gets it; images that only
waited are innocent. If it worked on several, or is lost as a whole, or does not answer within the
time limit, the images it had are suspects, most of them innocent: an operator's hand, a node, or
another image ended it. A suspect is tried again alone, one at a time. If that encoder ends as well,
or the time does, it is refused, too. `EncoderPool` owns the suspects; `Attempts` reports.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from services.common.errors import InvalidImage

_TTL_S = 600.0
_MAX_IMAGES = 4096


class Suspects:
    """By image key, so that no tenant can condemn another's image."""

    def __init__(self, ttl_s: float = _TTL_S) -> None:
        self._ttl_s = ttl_s
        self._found: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()  # expiry, condemned
        self._alone = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, key: bytes) -> AsyncGenerator[bool]:
        """A turn at an encoder: at once, or, for a suspect, when no other one has it.

        Yields:
            Whether the image is a suspect.

        Raises:
            InvalidImage: it has been condemned.
        """
        if not self._is_suspect(key):
            yield False
            return
        async with self._alone:
            yield self._is_suspect(key)

    def suspect(self, key: bytes) -> None:
        """An encoder was lost while it had the image."""
        self._put(key, condemned=False)

    def condemn(self, key: bytes) -> InvalidImage:
        """An encoder ended while it had the image alone; the error of the image."""
        self._put(key, condemned=True)
        return _error()

    def clear(self, key: bytes) -> None:
        """An encoder has encoded the image."""
        self._found.pop(key, None)

    def _is_suspect(self, key: bytes) -> bool:
        expires_at, condemned = self._found.get(key, (0.0, False))
        if expires_at <= time.monotonic():
            self._found.pop(key, None)
            return False
        if condemned:
            raise _error()
        return True

    def _put(self, key: bytes, *, condemned: bool) -> None:
        self._found[key] = time.monotonic() + self._ttl_s, condemned
        self._found.move_to_end(key)
        if len(self._found) > _MAX_IMAGES:
            self._found.popitem(last=False)


def _error() -> InvalidImage:
    return InvalidImage("encoders ended, or took too long, while they had the image")
