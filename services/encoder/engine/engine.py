"""The encoder engine: it decodes images and runs them through the vision tower in batches.

The front sends each image (or pair of video frames) as a job. A job is *prepared* when the image is
decoded and resized, and *placed* when the front has reserved its memory in the arena. A job that is
both can run. Jobs pass through four kinds of threads:

1. The receiver reads messages from the front. It queues each job for preparation at once, so that
   the next batch is prepared while the device works.
2. The threads of the preprocessing pool prepare jobs. The job of the lowest rank comes first; ranks
   are assigned by the front, fairly among tenants. The frames of a video are decoded in their
   order, by one thread, or by several threads from different key frames while other threads are
   free. If there are several threads, the videos of one tenant never occupy all threads.
3. The loop puts jobs that can run into the batcher, launches batches on the device, and reports the
   end of each job to the front. No other thread uses the batcher.
4. The waiter waits for the device, and reports each feature of a batch when it is in the arena.
   Only the loop and the waiter use the runner.

The other threads hand results to the loop through one mailbox. If an image cannot be decoded, its
job fails alone. If a batch fails on the device, its jobs run again, together and then in ever
smaller batches, until the job that fails is alone. If the device is broken, the process ends.

If decoders use the same GPU, a large batch runs in a turn of the encoder (`DeviceTurns`), which
ends with the batch. Until the turn begins, the loop chooses no other large batch, and launches
batches that need no turn. The loop polls for the turn and does not stop meanwhile.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from services.common.clock import Clock
from services.common.errors import Cancelled, InternalError, Overloaded, TriptychError
from services.common.process.channel import ChannelClosed, EngineChannel
from services.common.process.device_turns import NO_TURNS, TURN_POLL_S, Turns
from services.common.process.heartbeat import Ping, Pong
from services.common.threads import NamedThread
from services.encoder.decoding.clips.questions import LANE_THREADS
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import EMPTY_SOURCE
from services.encoder.engine.batcher import Batcher
from services.encoder.engine.job import Job
from services.encoder.engine.messages import (
    ActiveJobs,
    CancelImage,
    EncodeImage,
    EngineStats,
    FeatureDone,
    FrontMessage,
    ImageDone,
    MoveImage,
    PlaceImage,
    Shutdown,
    StageTimes,
)
from services.encoder.engine.preparation_queue import PreparationQueue
from services.encoder.engine.runner import LaunchedBatch, Runner
from services.encoder.engine.video_queue import VideoQueue

# Number of batches that may be launched at a time. One runs, and one is queued on the device after
# it, so that the device is never idle.
_MAX_LAUNCHED = 2


class Engine:
    """The encoder's engine. `run` ends when the front sends `Shutdown` or closes the channel.

    Args:
        channel: connection to the front.
        runner: owner of the device, which runs the vision tower.
        preprocessor: decoder and resizer of images, which the threads of the pool use.
        max_batch_patches: most patches of a batch. These are the patches that the tower reads, of
        which several later become one image token.
        workers: number of threads of the preprocessing pool. The videos of one tenant
            occupy at most `workers` - 1 of them. The only thread may be occupied by them.
        turns: the engine's turns on a GPU that decoders use, too. By default large batches take no
            turns.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        channel: EngineChannel[FrontMessage],
        runner: Runner,
        preprocessor: Preprocessor,
        *,
        max_batch_patches: int,
        workers: int,
        turns: Turns = NO_TURNS,
        clock: Clock = time.monotonic,
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._sending = threading.Lock()
        self._active: set[int] = set()  # job ids, guarded by `_sending`
        self._runner = runner
        self._preprocessor = preprocessor
        self._batcher = Batcher(max_batch_patches)
        self._workers = workers
        self._unprepared = PreparationQueue(max(1, workers - 1))
        self._mailbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._awaited: queue.SimpleQueue[LaunchedBatch | None] = queue.SimpleQueue()
        # Jobs that have not ended, by id. The receiver adds them, and the loop removes them.
        self._jobs: dict[int, Job] = {}
        max_further = max(0, int((workers - 1) / LANE_THREADS) - 1)
        self._videos = VideoQueue(self._unprepared, self._jobs, preprocessor, max_further)
        self._launched: deque[LaunchedBatch] = deque()
        self._turns = turns
        self._takes_turns = turns is not NO_TURNS
        self._most_small_patches = max_batch_patches  # most patches of a batch without a turn
        if self._takes_turns:
            self._most_small_patches = runner.most_patches_without_turn(max_batch_patches)
        self._large: list[int] = []  # jobs of a batch that waits for its turn
        self._with_turn: LaunchedBatch | None = None  # the batch on the device that has a turn
        # Whether no queued image may be launched before the batch that waits for its turn.
        self._is_held_up = False
        self._stopping = False
        self._num_images = 0
        self._num_patches = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    @property
    def jobs(self) -> Mapping[int, Job]:
        """Jobs that have not ended, by job id."""
        return self._jobs

    @property
    def num_unprepared(self) -> int:
        """Number of images and videos that wait for a thread of the preprocessing pool."""
        return len(self._unprepared)

    @property
    def num_free(self) -> int:
        """Number of threads of the preprocessing pool that have no work. Negative if work waits."""
        return self._unprepared.num_free

    @property
    def num_ready(self) -> int:
        """Number of jobs that can run and wait for a batch."""
        return len(self._batcher)

    def run(self) -> None:
        """Runs the loop until `Shutdown` was received or the channel was closed."""
        pool = [(self._preprocess_all, f"preprocess-{index}") for index in range(self._workers)]
        for target, name in ((self._receive, "receiver"), (self._wait, "waiter"), *pool):
            NamedThread(target=target, name=name, daemon=True).start()
        try:
            while not self._stopping or self._launched:
                self._read_mailbox()
                self._finish_done()  # A launch takes some time, so ended jobs are reported first.
                self._launch_next()
                self._finish_done()
        except ChannelClosed:
            logging.warning("the front has closed the channel")
        finally:
            self._awaited.put(None)
            self._unprepared.close()
            self._turns.release()

    # Methods of the receiver's thread.

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
                self._jobs[message.job_id] = Job.of(message, self._clock())
                self._queue_preparation(message)
            case PlaceImage() | Ping() | Shutdown():
                self._mailbox.put(message)
            case MoveImage():
                if job := self._jobs.get(message.job_id):
                    self._move_preparation(job, message.rank)
                self._mailbox.put(message)
            case CancelImage():
                if job := self._jobs.get(message.job_id):
                    job.cancelled = True
                self._mailbox.put(message)

    def _queue_preparation(self, message: EncodeImage) -> None:
        """Queues a job for the pool.

        Each image has an entry of its own in the queue. A video has at most one entry per lane,
        however many of its frames wait.
        """
        turn = message.rank, message.job_id
        video, frames = message.source.video, message.unit.frames
        if video is None or frames is None:
            self._unprepared.put(turn)
        else:
            max_lanes = self._preprocessor.max_decoders(video)
            self._videos.add(video, frames, turn, message.tenant, max_lanes)

    def _move_preparation(self, job: Job, rank: float) -> None:
        """Gives a job another rank, also in the queue for the pool if the job waits there."""
        if (video := job.source.video) is None:
            self._unprepared.move((job.rank, job.job_id), rank)
        else:
            self._videos.move(video, job.job_id, rank)
        job.rank = rank

    # Methods of the waiter's thread.

    def _wait(self) -> None:
        while (batch := self._awaited.get()) is not None:
            jobs = [image.job_id for image in batch.images]
            try:
                for feature in self._runner.wait(batch):
                    self._send(FeatureDone(jobs, feature))
            except ChannelClosed:
                pass  # The loop notices it, too, and ends the process.
            except Exception:  # The loop gets the same error when it finishes the batch.
                logging.exception("waiting for the device failed")
            self._mailbox.put(None)

    # Methods of the pool's threads.

    def _preprocess_all(self) -> None:
        while (taken := self._unprepared.get()) is not None:
            job_id, tenant = taken
            job, lane = self._jobs[job_id], 0
            # Closing the stack ends the video's turn, so that another thread may take the next one.
            with ExitStack() as video_turn:
                if tenant is not None and job.source.video is not None:
                    name = job.source.video.file.name
                    job, lane = self._videos.take(job)
                    video_turn.callback(self._videos.done, name, lane, tenant)
                self._preprocess(job, lane, video_turn)

    def _preprocess(self, job: Job, lane: int, video_turn: ExitStack) -> None:
        start = self._clock()
        try:
            if not job.cancelled:
                self._report_begun(job.job_id)
                job.pixels = self._prepare(job, lane, video_turn)
                self._report_paused(job.job_id)
        except ChannelClosed:
            job.cancelled = True
        except TriptychError as error:
            # The traceback refers to local variables of functions, and so to the image's file.
            job.error = error.with_traceback(None)
        except Exception:
            logging.exception("preprocessing failed")
            job.error = InternalError("preprocessing failed")
        job.source = EMPTY_SOURCE
        job.preprocess_s = self._clock() - start
        self._mailbox.put(job)

    def _prepare(self, job: Job, lane: int, video_turn: ExitStack) -> Tensor:
        """Decodes and resizes a job's image. The turn of a video ends after the decoding, so that
        another thread can decode the video's next frames during the resizing.
        """
        if job.source.video is None:
            return self._preprocessor.prepare(job.source, job.unit)
        frames = self._preprocessor.decode_video(job.source.video, job.unit, lane)
        video_turn.close()
        return self._preprocessor.resize_frames(frames, job.unit)

    # Methods of the loop's thread.

    def _read_mailbox(self) -> None:
        """Handles all items of the mailbox. If there are none, waits for an item, unless a batch
        can be launched. While a batch waits for its turn, the wait is short.
        """
        try:
            item = self._mailbox.get(block=False)
        except queue.Empty:
            has_images = len(self._batcher) > 0 and not self._is_held_up
            if has_images and len(self._launched) < _MAX_LAUNCHED:
                return
            is_waiting = self._turns.is_waiting
            if self._may_take_turn and not is_waiting and not self._stopping:
                return  # the turn may begin at once
            try:
                item = self._mailbox.get(timeout=TURN_POLL_S if is_waiting else None)
            except queue.Empty:
                return
        self._handle(item)
        with suppress(queue.Empty):
            while True:
                self._handle(self._mailbox.get(block=False))

    def _handle(self, item: "_Item") -> None:
        match item:
            case None:  # The waiter has seen the end of a batch; `run` goes on to finish it.
                pass
            case Shutdown():
                self._stopping = True
            case Ping():
                # A reply tells the front that the engine works. While the device computes batches,
                # a reply could hide that the device hangs, so there is none: the messages at the
                # end of these batches tell the front that the engine works.
                if not self._launched:
                    self._send(Pong())
            case CancelImage():
                job = self._jobs.get(item.job_id)
                # A job that is being prepared ends when the pool has returned it, and a job on the
                # device ends with its batch. Only other jobs end here.
                if job is not None and (job.waits_for_place or self._unqueue(item.job_id)):
                    self._end(item.job_id, Cancelled("the image was cancelled"))
            case MoveImage():
                self._batcher.move(item.job_id, item.rank)
            case PlaceImage():
                if job := self._jobs.get(item.job_id):
                    job.arena_offset = item.arena_offset
                    if job.waits_for_place:
                        job.waits_for_place = False
                        self._add_to_batcher(job)
            case Job():
                if item.cancelled or item.error or item.pixels is None:
                    self._end(item.job_id, item.error or Cancelled("the image was cancelled"))
                elif item.arena_offset is None:
                    item.waits_for_place = True
                else:
                    self._add_to_batcher(item)

    def _add_to_batcher(self, job: Job) -> None:
        self._batcher.add(
            job.job_id,
            job.unit.num_patches,
            job.rank,
            is_pair=job.unit.frames is not None,
            tower=job.tower,
        )

    def _unqueue(self, job_id: int) -> bool:
        """Takes a job out of the queue or out of the batch that waits for its turn. Returns whether
        the job was there.
        """
        if job_id not in self._large:
            return self._batcher.remove(job_id)
        self._large.remove(job_id)
        if not self._large and self._with_turn is None:
            self._turns.release()  # Nothing waits for the turn any more.
        return True

    def _launch_next(self) -> None:
        if self._stopping:
            return
        if self._may_take_turn and self._turns.try_take():
            # At once, even if this is one batch more than `_MAX_LAUNCHED`, because decoders wait.
            large, self._large = self._large, []
            self._is_held_up = False  # the next large batch may be chosen
            self._launch(large, has_turn=True)
        elif len(self._launched) < _MAX_LAUNCHED and (chosen := self._next_batch()):
            self._launch(chosen)

    @property
    def _may_take_turn(self) -> bool:
        """True if a large batch waits and would begin soon in a turn: before it, the device has at
        most small batches. A turn would otherwise stop decoders until another large batch ends.
        """
        return bool(self._large) and all(
            sum(image.unit.num_patches for image in batch.images) <= self._most_small_patches
            for batch in self._launched
        )

    def _next_batch(self) -> list[int]:
        """Returns the jobs of the next batch that needs no turn. Empty if there is none."""
        self._is_held_up = False
        if not self._large:
            chosen = self._batcher.next_batch()
            if not self._takes_turns or not chosen:
                return chosen
            if not self._runner.needs_turn([self._jobs[job_id] for job_id in chosen]):
                return chosen
            self._large = chosen
        chosen = self._batcher.next_batch(self._most_small_patches)
        self._is_held_up = not chosen
        return chosen

    def _launch(self, chosen: Sequence[int], *, has_turn: bool = False) -> None:
        now = self._clock()
        if not self._launched:
            self._busy_since = now
        images = [self._jobs[job_id] for job_id in chosen]
        for job in images:
            job.launched_at = now
        self._report_begun(*chosen)
        try:
            batch = self._runner.launch(images)
        except ChannelClosed:
            raise
        except Exception:
            logging.exception(
                "a batch of %d images failed; it runs again, if necessary in parts", len(images)
            )
            while self._launched:  # `recover` needs a device without running batches.
                self._finish(self._launched.popleft())
            self._runner.recover()
            self._busy_since = self._clock()
            self._run_apart(images)
            if has_turn:
                self._turns.release()
        else:
            self._launched.append(batch)
            if has_turn:
                self._with_turn = batch
            # On a CPU, `launch` returns when the batch is done, so there is nothing to wait for.
            if not self._runner.is_done(batch):
                self._awaited.put(batch)

    def _run_apart(self, images: Sequence[Job]) -> None:
        """Runs the jobs of a failed batch again. If they fail again, runs the half with the smaller
        images and the half with the larger images apart. A job that fails alone ends with the
        error.
        """
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
        if batch is self._with_turn:
            self._with_turn = None
            self._turns.release()
        now = self._clock()
        self._busy_s += now - self._busy_since
        self._busy_since = now  # The next batch, if one was launched, begins now.
        self._num_images += len(batch.images)
        self._num_patches += sum(image.unit.num_patches for image in batch.images)
        for image, is_finite in zip(batch.images, finite, strict=True):
            error = None if is_finite else InternalError("the embedding is not finite")
            self._end(image.job_id, error)
        calls = self._runner.kernel_calls
        self._send(
            EngineStats(
                self._num_images,
                self._num_patches,
                calls,
                self._busy_s,
                num_turns=self._turns.num_turns,
                turn_wait_s=self._turns.waited_s,
            )
        )

    def _end(self, job_id: int, error: TriptychError | None) -> None:
        """Ends a job and reports its end to the front.

        Args:
            job_id: the job.
            error: reason why the job has no embedding. None if its embedding is in the arena.
        """
        job = self._jobs.pop(job_id)
        with self._sending:
            self._active.discard(job_id)
        now = self._clock()
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

    # Methods of several threads: messages to the front.

    def _report_begun(self, *job_ids: int) -> None:
        """Tells the front that work on these jobs is about to begin. If this process then dies, the
        front knows which images may have killed it.
        """
        with self._sending:
            self._active.update(job_ids)
            self._channel.send(ActiveJobs(sorted(self._active)))

    def _report_paused(self, job_id: int) -> None:
        """Tells the front that the job waits for its batch, and that nothing works on the job."""
        with self._sending:
            self._active.discard(job_id)
            self._channel.send(ActiveJobs(sorted(self._active)))

    def _send(self, message: FeatureDone | ImageDone | EngineStats | Pong) -> None:
        with self._sending:
            self._channel.send(message)


# Items of the mailbox. A `Job` has come back from the pool. The waiter puts the value
# `None` when a batch has ended.
_Item = Job | PlaceImage | MoveImage | CancelImage | Ping | Shutdown | None


def _device_error(error: Exception) -> TriptychError:
    if isinstance(error, torch.OutOfMemoryError):
        return Overloaded("the device has no memory for this image now")
    return InternalError("the image could not be encoded")
