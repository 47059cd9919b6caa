"""The engine's loop: messages → preprocessing pool → batches → device → messages.

Four kinds of thread share one mailbox. The receiver reads the channel and gives images to the pool
at once, so the next batch is prepared while the device works. The pool's threads decode and resize,
the image of the lowest rank first, a video's frames in their order, and never one tenant's videos
in all threads. The waiter reports when the device is done with a batch. The loop alone uses the
batcher and the device. The loop and the waiter both send, one at a time.

`engine_main` runs it. It knows neither front nor gRPC, only messages. A bad image ends its own job;
a batch that fails is split until the image that fails is alone; a broken device ends the process.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from services.common.errors import Cancelled, InternalError, Overloaded, TriptychError
from services.common.geometry import Unit
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.heartbeat import Ping, Pong
from services.encoder.engine.batcher import Batcher
from services.encoder.engine.job import Job
from services.encoder.engine.messages import (
    NOTHING,
    CancelImage,
    EncodeImage,
    EngineStats,
    FeatureDone,
    FrontMessage,
    ImageDone,
    InHand,
    PlaceImage,
    Shutdown,
    Source,
    StageTimes,
)
from services.encoder.engine.preparation_queue import PreparationQueue
from services.encoder.engine.runner import LaunchedBatch, Runner
from services.encoder.engine.video_turns import VideoTurns

# Batches on the device: one runs, one is queued behind it, so that the device is never idle.
_MAX_LAUNCHED = 2

Prepare = Callable[[Source, Unit, Callable[[], None]], Tensor]


class Engine:
    """Runs until the front sends `Shutdown` or closes the channel.

    Args:
        prepare: source and unit → resized pixels; called in the pool's threads; raises
            `TriptychError` for a bad image. What it is given calls once a video's frames are
            decoded, so that the next may be while these are resized.
        workers: threads of the preprocessing pool, of which videos of one tenant have all but one.
    """

    def __init__(
        self,
        channel: EngineChannel[FrontMessage],
        runner: Runner,
        prepare: Prepare,
        *,
        max_batch_patches: int,
        workers: int,
    ) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._in_hand: set[int] = set()  # under `_sending`
        self._runner = runner
        self._prepare = prepare
        self._batcher = Batcher(max_batch_patches)
        self._workers = workers
        self._encoded = PreparationQueue(max(1, workers - 1))
        self._turns = VideoTurns()
        self._mailbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._awaited: queue.SimpleQueue[LaunchedBatch | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # until their end; the receiver adds, the loop removes
        self._launched: deque[LaunchedBatch] = deque()
        self._stopping = False
        self._num_images = self._num_patches = 0
        self._busy_s = self._busy_since = 0.0

    def run(self) -> None:
        """The loop. Returns after `Shutdown`, or when the channel is closed."""
        pool = [(self._preprocess_all, f"preprocess-{index}") for index in range(self._workers)]
        for target, name in ((self._receive, "receiver"), (self._wait, "waiter"), *pool):
            threading.Thread(target=target, name=name, daemon=True).start()
        try:
            while not self._stopping or self._launched:
                self._read_mailbox()
                self._finish_done()  # before a launch, which takes the host some time
                self._launch_next()
                self._finish_done()
        except ChannelClosed:
            logging.warning("the front has closed the channel")
        finally:
            self._awaited.put(None)
            self._encoded.close()

    # The receiver's thread.

    def _receive(self) -> None:
        try:
            while True:
                for message in self._channel.receive(None):
                    self._accept(message)
        except ChannelClosed:
            self._mailbox.put(Shutdown())

    def _accept(self, message: FrontMessage) -> None:
        match message:
            case EncodeImage():
                self._jobs[message.job_id] = Job(
                    message.job_id, message.unit, message.source, message.rank, message.tenant,
                    received_at=time.monotonic(),
                )  # fmt: skip
                self._queue(message)
            case PlaceImage() | Ping() | Shutdown():
                self._mailbox.put(message)
            case CancelImage():
                if job := self._jobs.get(message.job_id):
                    job.cancelled = True
                self._mailbox.put(message)

    def _queue(self, message: EncodeImage) -> None:
        turn = message.rank, message.job_id
        video, frames = message.source.video, message.unit.frames
        if video is None or frames is None:
            self._encoded.put(turn)
        elif (own := self._turns.add(video.file.name, frames, turn)) is not None:
            self._encoded.put(own, message.tenant)

    # The waiter's thread.

    def _wait(self) -> None:
        while (batch := self._awaited.get()) is not None:
            jobs = [image.job_id for image in batch.images]
            try:
                for feature in self._runner.wait(batch):
                    self._send(FeatureDone(jobs, feature))
            except ChannelClosed:
                pass  # the loop handles it
            except Exception:  # the loop handles it when it finishes the batch
                logging.exception("waiting for the device failed")
            self._mailbox.put(None)

    # The pool's threads.

    def _preprocess_all(self) -> None:
        while (taken := self._encoded.get()) is not None:
            job_id, tenant = taken
            job = self._jobs[job_id]
            with ExitStack() as in_work:
                if tenant is not None and job.source.video is not None:
                    name = job.source.video.file.name
                    job = self._jobs[self._turns.take(name)]
                    in_work.callback(self._give_turn, name, tenant)
                self._preprocess(job, decoded=in_work.close)

    def _give_turn(self, video: str, tenant: str) -> None:
        self._encoded.done(tenant)
        if (following := self._turns.done(video)) is not None:
            self._encoded.put(following, self._jobs[following[1]].tenant)

    def _preprocess(self, job: Job, decoded: Callable[[], None]) -> None:
        start = time.monotonic()
        try:
            if not job.cancelled:
                self._hold(job.job_id)
                job.pixels = self._prepare(job.source, job.unit, decoded)
                self._release(job.job_id)
        except ChannelClosed:
            job.cancelled = True
        except TriptychError as error:
            job.error = error.with_traceback(None)  # whose frames have the job, and its file
        except Exception:
            logging.exception("preprocessing failed")
            job.error = InternalError("preprocessing failed")
        job.source = NOTHING
        job.preprocess_s = time.monotonic() - start
        self._mailbox.put(job)

    # The loop's thread.

    def _read_mailbox(self) -> None:
        """Takes all items; waits for one if nothing can be launched."""
        try:
            item = self._mailbox.get(block=False)
        except queue.Empty:
            if len(self._batcher) > 0 and len(self._launched) < _MAX_LAUNCHED:
                return
            item = self._mailbox.get()
        self._take(item)
        with suppress(queue.Empty):
            while True:
                self._take(self._mailbox.get(block=False))

    def _take(self, item: "_Item") -> None:
        match item:
            case None:  # the device is done with a batch
                pass
            case Shutdown():
                self._stopping = True
            case Ping():
                if not self._launched:  # else the end of a batch shows that this process works
                    self._send(Pong())
            case CancelImage():
                job = self._jobs.get(item.job_id)
                if job is not None and (job.waits or self._batcher.remove(item.job_id)):
                    self._end(item.job_id, Cancelled("the image was cancelled"))
            case PlaceImage():
                if job := self._jobs.get(item.job_id):
                    job.arena_offset = item.arena_offset
                    if job.waits:
                        job.waits = False
                        self._add(job)
            case Job():
                if item.cancelled or item.error or item.pixels is None:
                    self._end(item.job_id, item.error or Cancelled("the image was cancelled"))
                elif item.arena_offset is None:
                    item.waits = True
                else:
                    self._add(item)

    def _add(self, job: Job) -> None:
        is_pair = job.unit.frames is not None
        self._batcher.add(job.job_id, job.unit.num_patches, job.rank, is_pair=is_pair)

    def _launch_next(self) -> None:
        if len(self._launched) >= _MAX_LAUNCHED or self._stopping:
            return
        if chosen := self._batcher.next_batch():
            if not self._launched:
                self._busy_since = time.monotonic()
            self._launch(chosen)

    def _launch(self, chosen: Sequence[int]) -> None:
        now = time.monotonic()
        images = [self._jobs[job_id] for job_id in chosen]
        for job in images:
            job.launched_at = now
        self._hold(*chosen)
        try:
            batch = self._runner.launch(images)
        except ChannelClosed:
            raise
        except Exception:
            logging.exception("a batch of %d images failed; trying smaller ones", len(images))
            while self._launched:
                self._finish(self._launched.popleft())
            self._runner.recover()
            self._busy_since = time.monotonic()
            self._run_apart(images)
        else:
            self._launched.append(batch)
            if not self._runner.is_done(batch):
                self._awaited.put(batch)

    def _run_apart(self, images: Sequence[Job]) -> None:
        """After a failure: halves the batch until an image that fails is alone."""
        try:
            launched = self._runner.launch(images)
        except Exception as error:
            self._runner.recover()
            if len(images) == 1:
                self._end(images[0].job_id, _device_error(error))
                return
            by_size = sorted(images, key=lambda image: image.unit.num_patches)
            self._run_apart(by_size[: len(by_size) // 2])
            self._run_apart(by_size[len(by_size) // 2 :])
        else:
            self._finish(launched)

    def _finish_done(self) -> None:
        while self._launched and self._runner.is_done(self._launched[0]):
            self._finish(self._launched.popleft())

    def _finish(self, batch: LaunchedBatch) -> None:
        finite = self._runner.finish(batch)
        now = time.monotonic()
        self._busy_s += now - self._busy_since
        self._busy_since = now  # of the batch that runs now, if there is one
        self._num_images += len(batch.images)
        self._num_patches += sum(image.unit.num_patches for image in batch.images)
        for image, is_finite in zip(batch.images, finite, strict=True):
            error = None if is_finite else InternalError("the embedding is not finite")
            self._end(image.job_id, error)
        calls = self._runner.kernel_calls
        self._send(EngineStats(self._num_images, self._num_patches, calls, self._busy_s))

    def _end(self, job_id: int, error: TriptychError | None) -> None:
        job = self._jobs.pop(job_id)
        with self._sending:
            self._in_hand.discard(job_id)
        now = time.monotonic()
        launched_at = job.launched_at or now
        queue_s = max(0.0, launched_at - job.received_at - job.preprocess_s)
        self._send(
            ImageDone(
                job_id=job_id,
                times=StageTimes(queue_s, job.preprocess_s, forward_s=now - launched_at),
                error_code=error.code if error else "",
                message=error.message if error else "",
            )
        )

    def _hold(self, *job_ids: int) -> None:
        """Tells the front what is worked on, before the work begins."""
        with self._sending:
            self._in_hand.update(job_ids)
            self._channel.send(InHand(sorted(self._in_hand)))

    def _release(self, job_id: int) -> None:
        with self._sending:
            self._in_hand.discard(job_id)
            self._channel.send(InHand(sorted(self._in_hand)))

    def _send(self, message: FeatureDone | ImageDone | EngineStats | Pong) -> None:
        with self._sending:
            self._channel.send(message)


_Item = Job | PlaceImage | CancelImage | Ping | Shutdown | None


def _device_error(error: Exception) -> TriptychError:
    if isinstance(error, torch.OutOfMemoryError):
        return Overloaded("the device has no memory for this image now")
    return InternalError("the image could not be encoded")
