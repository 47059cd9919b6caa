"""The answer to the wish for an embedding."""

from dataclasses import dataclass
from enum import Enum

from services.common.arena import ArenaEntry
from services.encoder.engine_client import StageTimes

_NO_TIMES = StageTimes()


class Origin(Enum):
    """Where an embedding came from."""

    COMPUTED = "computed"
    MEMORY = "memory"
    REDIS = "redis"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Encoded:
    """An embedding is available.

    Attributes:
        entry: the bytes in memory; None: they are in Redis.
    """

    origin: Origin
    entry: ArenaEntry | None = None
    lookup_s: float = 0.0
    times: StageTimes = _NO_TIMES
