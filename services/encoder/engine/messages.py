"""The messages between the encoder's front process and its engine process.

The front's side is `front/engine_client.py`, the engine's side is `engine/engine.py`, and
`common/process/channel.py` sends the messages. Pure data.
"""

import msgspec

from services.common.geometry import Unit
from services.common.process.heartbeat import Ping, Pong
from services.encoder.decoding.source import Source


class EncodeImage(msgspec.Struct, tag="encode"):
    """Submits a unit. The engine decodes the file at once, and runs the unit after `PlaceImage`.

    Attributes:
        job_id: number of the job, assigned by the front and never reused.
        source: encoded file of the unit.
        unit: the still image or pair of frames. The engine checks it against the decoded image.
        rank: place in the order of all waiting images: the image of the lowest rank is decoded and
            run next.
        tenant: tenant that sent the image. Its videos never occupy all threads. Empty for a caller
            without a key.
        tower: index of the tower that encodes the unit: 0 is the model's, and the towers of
            adapters follow in the order of `EngineReady.adapters`.
    """

    job_id: int
    source: Source
    unit: Unit
    rank: float = 0.0
    tenant: str = ""
    tower: int = 0


class PlaceImage(msgspec.Struct, tag="place"):
    """Assigns the range of the arena for a job's embedding, once per job. It is ignored if the job
    has ended.

    Attributes:
        job_id: number of the job.
        arena_offset: first byte of the range, which has space for `[features, num_tokens, hidden]`.
    """

    job_id: int
    arena_offset: int


class MoveImage(msgspec.Struct, tag="move"):
    """Gives a job another rank, wherever it waits. It is ignored if the job runs or has ended.

    Attributes:
        job_id: number of the job.
        rank: the new rank, see `EncodeImage.rank`.
    """

    job_id: int
    rank: float


class CancelImage(msgspec.Struct, tag="cancel"):
    """Cancels a job, which still ends in one `ImageDone`."""

    job_id: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Ends the engine."""


FrontMessage = EncodeImage | PlaceImage | MoveImage | CancelImage | Ping | Shutdown


class EngineReady(msgspec.Struct, tag="ready"):
    """Reports that the weights are loaded and that each kernel has run once.

    Attributes:
        model_name: name of the model.
        dtype: data type of the embeddings, as torch names it.
        num_features: number of features of an embedding.
        hidden: width of an embedding's rows.
        key_prefix: digest of the model and its configuration, which begins each image key.
        on_gpu: True if the engine runs on a GPU.
        adapters: digests of the adapters for which the engine has towers.
    """

    model_name: str
    dtype: str
    num_features: int
    hidden: int
    key_prefix: bytes
    on_gpu: bool = False
    adapters: list[bytes] = []


class FeatureDone(msgspec.Struct, tag="feature"):
    """Reports that one feature of these images is in the arena. Messages about the other features,
    or about an error, follow.
    """

    job_ids: list[int]
    feature: int


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds that an image spent in the engine's stages."""

    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0


NO_TIMES = StageTimes()


class ImageDone(msgspec.Struct, tag="done"):
    """Reports the end of a job.

    Attributes:
        job_id: number of the job.
        times: seconds that the image spent in each stage.
        error_code: code of an error in `services/common/errors.py`. Empty if the embedding is in
            the arena.
        message: text of the error.
    """

    job_id: int
    times: StageTimes = NO_TIMES
    error_code: str = ""
    message: str = ""


class ActiveJobs(msgspec.Struct, tag="active"):
    """Reports all jobs that the engine works on from now on, in its threads or on the device. If
    the engine ends, one of these jobs may have caused it. An `ImageDone` removes its job.
    """

    job_ids: list[int]


class EngineStats(msgspec.Struct, tag="stats"):
    """Reports the engine's counters after each batch. All are totals since the start.

    Attributes:
        num_images: number of images that were run.
        num_patches: number of patches that were run, before merging.
        kernel_calls: number of kernel calls, by "operation=implementation".
        busy_s: seconds during which a batch was on the device.
        num_turns: number of turns on a GPU that is shared with decoders.
        turn_wait_s: seconds for which large batches waited for their turns.
    """

    num_images: int
    num_patches: int
    kernel_calls: dict[str, int] = {}
    busy_s: float = 0.0
    num_turns: int = 0
    turn_wait_s: float = 0.0


EngineMessage = EngineReady | FeatureDone | ImageDone | ActiveJobs | EngineStats | Pong
