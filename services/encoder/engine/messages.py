"""What the encoder's front and its engine say to each other."""

import msgspec


class EncodeImage(msgspec.Struct, tag="encode"):
    """An image to encode. It is decoded at once, and runs when it has its place."""

    job_id: int  # minted by the front, never reused
    image: bytes  # the encoded file
    grid: tuple[int, int, int]  # checked against the decoded image


class PlaceImage(msgspec.Struct, tag="place"):
    """Where the embedding goes; once per job. A job that has ended by then is ignored."""

    job_id: int
    arena_offset: int  # bytes; room for [levels, num_tokens, hidden] is reserved there


class CancelImage(msgspec.Struct, tag="cancel"):
    """Nobody waits for the job any more. It still ends in one `ImageDone`."""

    job_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """The engine ends after this."""


FrontMessage = EncodeImage | PlaceImage | CancelImage | Shutdown


class EngineReady(msgspec.Struct, tag="ready"):
    """Weights are loaded and each kernel has run once."""

    model_name: str
    dtype: str
    num_features: int
    hidden: int
    merge_size: int
    key_prefix: bytes


class LevelDone(msgspec.Struct, tag="level"):
    """One level of these images lies in the arena. The rest follows, or an error."""

    job_ids: list[int]
    level: int


class ImageDone(msgspec.Struct, tag="done"):
    """The end of a job. `error_code` is empty, or a code of services/common/errors.py."""

    job_id: int
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    error_code: str = ""
    message: str = ""


class EngineStats(msgspec.Struct, tag="stats"):
    """Counters of the engine, sent after each batch."""

    num_images: int  # total
    num_patches: int  # total


EngineMessage = EngineReady | LevelDone | ImageDone | EngineStats
