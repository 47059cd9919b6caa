"""The state of batches and of their files: texts, hashes and sorted sets under keys.

All changes are transactions: writes that happen together if some values are as expected. So two
gateways that change the same batch at the same time cannot both succeed. `RedisState` keeps the
state of all gateways in Redis; `MemoryState` keeps the state of a single gateway.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.clock import Clock


@dataclass(frozen=True, slots=True)
class Check:
    """A condition of a transaction: the value of a text, or of a field of a hash.

    Attributes:
        key: key of the text or of the hash.
        value: expected value. None if there must be no value.
        field: field of the hash. None for a text.
    """

    key: str
    value: bytes | None
    field: str | None = None


# A write: its name, its key and its arguments, which are those of the command of Redis:
#   set KEY VALUE [MILLISECONDS]    del KEY    hset KEY FIELD VALUE    hincrby KEY FIELD NUMBER
#   zadd KEY SCORE MEMBER           zrem KEY MEMBER
Write = tuple[str, str, *tuple[str | bytes | int | float, ...]]


class State(Protocol):
    """The state of batches. Every method raises Unavailable if the state cannot be reached."""

    async def get(self, key: str) -> bytes | None:
        """Returns a text. None if the key has no text, or if the time of the text is over."""
        ...

    async def fields(self, key: str) -> list[str]:
        """Returns the fields of a hash, in any order."""
        ...

    async def values(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        """Returns the values of fields of a hash, in their order. None for a field without one."""
        ...

    async def members(self, key: str, most: float | None = None) -> list[str]:
        """Returns the members of a sorted set by score, those of equal score by name.

        Args:
            most: highest score. None for all members.
        """
        ...

    async def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        """Makes the writes if all checks hold. Returns whether they hold."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class MemoryState:
    """State of one gateway, in its memory.

    `BatchFiles` bounds its bytes.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._texts: dict[str, tuple[bytes, float | None]] = {}  # with the end of their time
        self._hashes: dict[str, dict[str, bytes]] = {}
        self._sets: dict[str, dict[str, float]] = {}

    async def get(self, key: str) -> bytes | None:
        return self._text(key)

    async def fields(self, key: str) -> list[str]:
        return list(self._hashes.get(key, ()))

    async def values(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        found = self._hashes.get(key, {})
        return [found.get(field) for field in fields]

    async def members(self, key: str, most: float | None = None) -> list[str]:
        found = [(score, name) for name, score in self._sets.get(key, {}).items()]
        return [name for score, name in sorted(found) if most is None or score <= most]

    async def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        for check in checks:
            if check.field is None:
                found = self._text(check.key)
            else:
                found = self._hashes.get(check.key, {}).get(check.field)
            if found != check.value:
                return False
        for write in writes:
            self._write(write[0], write[1], *write[2:])
        return True

    async def close(self) -> None:
        pass

    def _text(self, key: str) -> bytes | None:
        value, end = self._texts.get(key, (None, None))
        return None if end is not None and self._clock() >= end else value

    def _write(self, name: object, key: object, *given: str | bytes | float) -> None:
        key = str(key)
        match name:
            case "set":
                value, *time_ms = given
                end = self._clock() + float(time_ms[0]) / 1e3 if time_ms else None
                self._texts[key] = _data(value), end
            case "hset" | "hincrby":
                found = self._hashes.setdefault(key, {})
                field, value = str(given[0]), _data(given[1])
                if name == "hincrby":
                    value = b"%d" % (int(found.get(field, b"0")) + int(given[1]))
                found[field] = value
            case "zadd":
                self._sets.setdefault(key, {})[str(given[1])] = float(given[0])
            case "zrem":
                self._sets.get(key, {}).pop(str(given[0]), None)
            case _:
                assert name == "del", name
                self._texts.pop(key, None)
                self._hashes.pop(key, None)


def _data(value: str | bytes | float) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
