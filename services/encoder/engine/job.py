"""An image in the engine, from its arrival to its `ImageDone`."""

from dataclasses import dataclass

from torch import Tensor

from services.common.errors import TriptychError
from services.common.geometry import Unit
from services.encoder.decoding.source import EMPTY_SOURCE, Source
from services.encoder.engine.messages import EncodeImage


@dataclass(slots=True, eq=False)
class Job:
    """The state of one image. A thread of the preprocessing pool, the loop and the runner work on
    it in this order, one at a time.

    Attributes:
        job_id: number of the job, assigned by the front. Later images have higher numbers.
        unit: the still image or pair of frames to encode.
        source: encoded file. Empty when the file has been decoded.
        rank: place in the order of all waiting images: the image of the lowest rank is the next.
        tenant: tenant that sent the image. Empty for a caller without a key.
        tower: index of the tower that encodes the unit, see `EncodeImage.tower`.
        pixels: `[height, width, channels]` uint8 on the host, or `[2, height, width, channels]` if
            the unit is a pair of frames. None until the file is decoded. Pinned memory is the
            fastest.
        arena_offset: first byte of the embedding `[features, num_tokens, hidden]` in the arena.
            None until the front has sent it.
        waits_for_place: True if the image is prepared and its `arena_offset` is not known yet.
        cancelled: True if the front has cancelled the image.
        error: reason why the image cannot be encoded. None if there was no error.
        received_at: monotonic time of the job's arrival.
        launched_at: monotonic time of the launch. 0 until the image is launched.
        preprocess_s: seconds that decoding and resizing took.
    """

    job_id: int
    unit: Unit
    source: Source = EMPTY_SOURCE
    rank: float = 0.0
    tenant: str = ""
    tower: int = 0
    pixels: Tensor | None = None
    arena_offset: int | None = None
    waits_for_place: bool = False
    cancelled: bool = False
    error: TriptychError | None = None
    received_at: float = 0.0
    launched_at: float = 0.0
    preprocess_s: float = 0.0

    @classmethod
    def of(cls, message: EncodeImage, received_at: float) -> "Job":
        """Makes the job of a message, which has arrived at this monotonic time."""
        return cls(
            message.job_id,
            message.unit,
            message.source,
            message.rank,
            message.tenant,
            message.tower,
            received_at=received_at,
        )
