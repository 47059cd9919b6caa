"""The vision tower as the last tier of the encoder's embedding store: it computes embeddings.

The engine process runs the tower. This file decides which images the engine gets, and in which
order.
"""

import asyncio
import time
from dataclasses import dataclass

import msgspec

from services.common.embeddings.embedding_write import EmbeddingWrite
from services.common.embeddings.store import Lookup, Tier
from services.common.errors import Overloaded
from services.encoder.engine.messages import StageTimes
from services.encoder.front.admission import Admission, AdmittedImage
from services.encoder.front.engine_client import EngineClient, EngineJob
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.metrics import EncoderMetrics

_MAX_RETRY_AFTER_S = 60.0  # OpenAI's clients ignore a longer wait


@dataclass(frozen=True, slots=True)
class _Encode:
    """An image that the engine has, from the start of its lookup to the end.

    Attributes:
        job: the engine's job.
        image: the image as it was admitted.
        begun_at: time at which the lookup started, as `time.monotonic()`.
        num_queued_patches: number of patches of all images that the engine had at that time, with
            this image.
    """

    job: EngineJob
    image: AdmittedImage
    begun_at: float
    num_queued_patches: int


class TowerTier(Tier[Work]):
    """Computes embeddings in the engine process.

    The engine gets an image as soon as its lookup starts, and decodes the file while Redis is
    asked, because Redis rarely has the embedding. If Redis has it, the engine's job is cancelled.

    Args:
        engine: the client of the engine process.
        admission: bounds the number of images that the engine has, and orders them fairly among
            tenants.
        metrics: the encoder's metrics.
        sources: store of the inputs of recent embeddings. If an embedding is evicted before it is
            fetched, it is computed again from these inputs.
        max_queued_bytes: largest total size of the image files that are queued in the engine.
            Further images are refused.
    """

    name = "tower"

    def __init__(
        self,
        engine: EngineClient,
        admission: Admission,
        metrics: EncoderMetrics,
        sources: SourceStore,
        *,
        max_queued_bytes: int = 1 << 30,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._sources = sources
        self._max_queued_bytes = max_queued_bytes
        self._encodes: dict[Lookup[Work], _Encode] = {}
        self._queued_bytes = 0
        self._s_per_patch = 0.0  # seconds per patch, measured on the last image; 0 before
        metrics.backlog_seconds.set_function(self._backlog_s)
        metrics.queue_images.set_function(lambda: len(self._encodes))
        metrics.queue_patches.set_function(lambda: admission.num_patches)

    def begin(self, lookup: Lookup[Work]) -> None:
        """Admits an image, and sends it to the engine.

        Raises:
            Overloaded: the engine has too much work. The error says when to try again.
            Unavailable: the engine process has ended.
        """
        source, unit, share, tower = lookup.inputs
        is_full = self._queued_bytes + source.num_bytes > self._max_queued_bytes
        image = None if is_full else self._admission.enter(share, unit.num_patches)
        if image is None:
            retry_after_s = min(max(self._backlog_s(), 1.0), _MAX_RETRY_AFTER_S)
            raise Overloaded("too many images are being encoded", retry_after_s=retry_after_s)
        try:
            job = self._engine.submit(source, unit, image.rank, share.tenant, tower)
        except BaseException:
            self._admission.leave(image)
            raise
        self._queued_bytes += source.num_bytes
        self._encodes[lookup] = _Encode(job, image, time.monotonic(), self._admission.num_patches)

    async def find(self, lookup: Lookup[Work]) -> bool:
        """Gives the engine the memory for the embedding, and waits until the embedding is there."""
        if (write := await lookup.place()) is None:
            return True
        encode = self._encodes[lookup]
        write.retain()  # The engine is a writer. It may write even after this call was cancelled.
        self._engine.place(encode.job, write)
        encode.job.done.add_done_callback(lambda done: self._written(write, encode, done))
        times = await asyncio.shield(encode.job.done)
        lookup.seconds |= {
            stage.removesuffix("_s"): seconds
            for stage, seconds in msgspec.structs.asdict(times).items()
        }
        for stage, seconds in lookup.seconds.items():
            self._metrics.stages.labels(stage).observe(seconds)
        # The time includes the computing of the images that were queued before this one. Therefore
        # it is divided by the patches of all of them.
        self._s_per_patch = (time.monotonic() - encode.begun_at) / encode.num_queued_patches
        return True

    def join(self, lookup: Lookup[Work], inputs: Work) -> None:
        """Moves an image from the background to the foreground if a caller in the foreground joins
        its lookup. The image is then charged to this caller.
        """
        if inputs.share.background or not lookup.inputs.share.background:
            return
        encode = self._encodes[lookup]
        lookup.inputs = lookup.inputs._replace(share=inputs.share)
        self._admission.move(encode.image, inputs.share)
        self._engine.move(encode.job, encode.image.rank)

    def end(self, lookup: Lookup[Work], *, succeeded: bool) -> None:
        """Ends the work on an image: its patches and bytes no longer count as queued. Stores the
        image's inputs if the lookup has succeeded.
        """
        encode = self._encodes.pop(lookup)
        self._engine.cancel(encode.job)  # Has no effect if the job has ended.
        self._admission.leave(encode.image)
        self._queued_bytes -= lookup.inputs.source.num_bytes
        if succeeded:
            self._sources.put(lookup.key, lookup.inputs)

    def _written(
        self, write: EmbeddingWrite, encode: _Encode, done: "asyncio.Future[StageTimes]"
    ) -> None:
        """Handles the end of an engine's job: commits the embedding unless the job has failed, and
        ends the engine's work as a writer.
        """
        if done.exception() is None:
            self._admission.ran(encode.image)
            self._metrics.images_encoded.inc()
            write.commit()
        write.release()

    def _backlog_s(self) -> float:
        """Returns the seconds that the engine's images take at the speed of the last image."""
        return self._admission.num_patches * self._s_per_patch
