"""The messages between the encoder's front process and its engine process.

Front: `engine_client`; engine: `engine/engine.py`. Pure data: `common/process/channel.py` sends it.
"""

import msgspec

from services.common.embeddings.shared_memory import MemoryAddress
from services.common.geometry import Size, Unit
from services.common.process.heartbeat import Ping, Pong


class Video(msgspec.Struct, frozen=True):
    """A file in the front's memory."""

    file: MemoryAddress
    size: Size  # of its upright frames


class Source(msgspec.Struct, frozen=True):
    """What a unit is made from: an image; two, whose unit has frames; or a video."""

    image: bytes = b""  # the encoded file
    second: bytes = b""  # empty: the first again, if the unit has frames
    video: Video | None = None

    @property
    def num_bytes(self) -> int:
        """That it holds itself."""
        return len(self.image) + len(self.second)


NOTHING = Source()


class EncodeImage(msgspec.Struct, tag="encode"):
    """A unit to encode. It is decoded at once, and runs once `PlaceImage` has come."""

    job_id: int  # minted by the front, never reused
    source: Source
    unit: Unit  # checked against the decoded image
    rank: float = 0.0  # of those that wait, the image of the lowest is decoded and run next
    tenant: str = ""  # whose videos never have all threads; empty for a caller without a key


class PlaceImage(msgspec.Struct, tag="place"):
    """Where the embedding goes; once per job. A job that has ended by then is ignored."""

    job_id: int
    arena_offset: int  # bytes; room for [features, num_tokens, hidden] is reserved there


class CancelImage(msgspec.Struct, tag="cancel"):
    """The image is no longer wanted. The job still ends in one `ImageDone`."""

    job_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The engine ends after this."""


FrontMessage = EncodeImage | PlaceImage | CancelImage | Ping | Shutdown


class EngineReady(msgspec.Struct, tag="ready"):
    """Weights are loaded and each kernel has run once."""

    model_name: str
    dtype: str
    num_features: int
    hidden: int
    key_prefix: bytes
    on_gpu: bool = False


class FeatureDone(msgspec.Struct, tag="feature"):
    """One feature of these images is in the arena. The others follow, or an error."""

    job_ids: list[int]
    feature: int


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds an image spent in the engine's stages."""

    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0


NO_TIMES = StageTimes()


class ImageDone(msgspec.Struct, tag="done"):
    """The end of a job. `error_code` is empty, or a code of services/common/errors.py."""

    job_id: int
    times: StageTimes = NO_TIMES
    error_code: str = ""
    message: str = ""


class InHand(msgspec.Struct, tag="in_hand"):
    """The images that the engine works on from now on: in its threads, or in batches on the device.
    If it ends, one of them may have ended it. An `ImageDone` takes its image away.
    """

    job_ids: list[int]


class EngineStats(msgspec.Struct, tag="stats"):
    """Counters of the engine, sent after each batch."""

    num_images: int  # total
    num_patches: int  # total
    kernel_calls: dict[str, int] = {}  # "operation=implementation" → total
    busy_s: float = 0.0  # total; a batch was on the device


EngineMessage = EngineReady | FeatureDone | ImageDone | InHand | EngineStats | Pong
