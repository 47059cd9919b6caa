"""One image in the engine, from its arrival to its `ImageDone`."""

from dataclasses import dataclass

from torch import Tensor

from services.common.errors import TriptychError
from services.common.geometry import Unit
from services.encoder.engine.messages import NOTHING, Source


@dataclass(slots=True, eq=False)
class Job:
    """The pool's threads, the loop and the runner work on it in this order, one at a time.

    Attributes:
        job_id: given by the front; later images have higher ones.
        unit: what it is of its file.
        source: encoded; empty once it is decoded.
        rank: of all images that wait, the lowest is the next.
        tenant: the tenant whose unit it is; empty for a caller without a key.
        pixels: `[h * patch, w * patch, channels]` uint8, host; best pinned; of a pair of frames
            `[2, ...]`; None: not yet decoded.
        arena_offset: first byte of its `[features, num_tokens, hidden]`; None: not yet known.
        waits: it is decoded, but has no place yet.
    """

    job_id: int
    unit: Unit
    source: Source = NOTHING
    rank: float = 0.0
    tenant: str = ""
    pixels: Tensor | None = None
    arena_offset: int | None = None
    waits: bool = False
    cancelled: bool = False
    error: TriptychError | None = None
    received_at: float = 0.0
    launched_at: float = 0.0
    preprocess_s: float = 0.0
