"""The engine: schedule → run → sample → postprocess, one step after the other.

No torch, no sockets, no text: messages in, `StepDone` out, a runner for the device. With `overlap`
the engine plans and launches step n + 1 before it reads the tokens of step n, so that the device
never waits for Python. A step may be sampled later than it is launched, when its gate opens
(`sampling_gate`). If a sequence turns out to have ended
with step n, its token of step n + 1 is discarded.
"""

import logging
import math
import time
from collections import deque

import numpy as np

from kernels.sampling import ALL_MASKED, NOT_FINITE
from services.decoder.engine.messages import (
    AbortSequence,
    AddSequence,
    EndOfSequence,
    EngineStats,
    ImageReady,
    ImagesOf,
    PromptLogprobs,
    ResetPrefixCache,
    SequenceEvent,
    StartOfSequence,
    StepDone,
    TokenMasks,
)
from services.decoder.engine.sampling_gate import SamplingGate
from services.decoder.engine.schedule.batch import Batch, Chunk
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.row_states import row_states
from services.decoder.engine.schedule.scheduler import CannotSchedule, Scheduler
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import PendingStep, Runner, Scores, Step, StepOutput

log = logging.getLogger(__name__)

_FAILURES = {
    NOT_FINITE: ("failed", "the model's output is not finite"),
    ALL_MASKED: (
        "refused",
        "every token is masked out: the request's demands leave none that may come next",
    ),
}


class Engine:
    """All sequences of one device.

    Attributes:
        info: the runner's.
        gate: what sampling waits for. At first, nothing.

    Args:
        overlap: launch a step before the last one's ids are read. With a runner whose `execute`
            blocks until the step is done, this only delays every token by a step.
        out_of_memory: exceptions of `Runner.execute` that end one sequence, not the engine.
        step_ms: how long a step may last, see `Scheduler`.
        step_cost: learns how long steps last.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        overlap: bool,
        out_of_memory: tuple[type[BaseException], ...] = (),
        step_ms: float = math.inf,
        step_cost: StepCost | None = None,
    ) -> None:
        info = self.info = runner.info
        self._runner = runner
        self._overlap = overlap
        self._out_of_memory = out_of_memory
        self._step_cost = StepCost() if step_cost is None else step_cost
        self._blocks = BlockManager(info.num_blocks, info.block_size, row_states(info))
        self.scheduler = Scheduler(
            info,
            self._blocks,
            # A step without its mask is computed again, which recurrent states do not allow.
            late_masks=overlap and not info.has_states,
            step_ms=step_ms,
            step_cost=self._step_cost,
        )
        self._sequences: dict[int, Sequence] = {}
        self._pending: deque[tuple[int, Batch, PendingStep]] = deque()
        # The next step, while the last one that was launched is not sampled.
        self._planned: tuple[Batch, Step] | None = None
        self.gate = SamplingGate()
        self._num_steps = 0
        self._events: list[SequenceEvent] = []
        self._images_read: list[ImagesOf] = []
        # End events that wait for a step in flight which may read the sequence's images.
        self._delayed: list[tuple[int, SequenceEvent]] = []
        self._num_prompt_tokens = 0
        self._read_at = 0.0  # the last step's result
        self._busy_s = 0.0
        self._busy_since = 0.0  # while a step is in flight
        self._sent = _gauges(self.stats())

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do before another message arrives."""
        return bool(self._pending or self._events or self._delayed) or self.scheduler.has_work

    @property
    def waits(self) -> bool:
        """Whether `step` is better called after further messages."""
        return self.gate.waits

    def find(self, sequence_id: int) -> Sequence | None:
        """A sequence that has not ended."""
        return self._sequences.get(sequence_id)

    def fail(self, sequence: Sequence, message: str) -> None:
        self._finish(sequence, "failed", message)

    def plan(self) -> None:
        """Plans the next step while the engine waits, so that the device gets it sooner. Whatever
        else the front sends takes part in it, so that it is then planned anew.
        """
        if self._planned is None and self.scheduler.is_steady:
            batch = self.scheduler.schedule()
            if batch.chunks:
                self._planned = batch, batch.to_step()
                self._runner.prepare(self._planned[1])

    def handle(
        self, message: AddSequence | ImageReady | TokenMasks | AbortSequence | ResetPrefixCache
    ) -> None:
        """Takes one message of the front."""
        match message:
            case TokenMasks():
                self.gate.handle(message)
            case AddSequence():
                self.add(message)
            case ImageReady():
                self.image_ready(message.sequence_id, message.key, message.arena_offset)
            case AbortSequence():
                self.abort(message.sequence_id)
            case ResetPrefixCache():
                self.discard_plan()
                self._blocks.reset()

    def add(self, message: AddSequence) -> None:
        """Queues a sequence; one that can never run fails at once."""
        self.discard_plan()
        sequence = Sequence(message)
        sequence.received_at = time.monotonic()
        try:
            if sequence.message.images and not self.info.num_features:
                raise CannotSchedule("the model takes no images")
            self.scheduler.add(sequence)
        except CannotSchedule as error:
            self._end(sequence, "failed", str(error))
            return
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self._sequences[sequence.sequence_id] = sequence

    def image_ready(self, sequence_id: int, key: bytes, arena_offset: int) -> None:
        """An image is in the arena. Unknown sequences have ended already and are ignored."""
        if (sequence := self._sequences.get(sequence_id)) is not None:
            self.discard_plan()
            self.scheduler.image_ready(sequence, key, arena_offset)

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence; its blocks are free when this returns."""
        if (sequence := self._sequences.get(sequence_id)) is not None:
            self._finish(sequence, "aborted")

    def step(self) -> StepDone | None:
        """Launches the next step and reads the one before; returns the events, if any."""
        self.gate.sample()
        batch = self._planned[0] if self._planned is not None else self.scheduler.schedule()
        if batch.chunks:
            self._launch(batch)
        if self._pending and (not self._overlap or not batch.chunks or len(self._pending) > 1):
            _, done, pending = self._pending[0]
            output = pending.result()
            self._pending.popleft()
            now = time.monotonic()
            self.gate.read(self._pending[0][1] if self._pending else None, now)
            if not self._pending:
                self._busy_s += now - self._busy_since
            self._measure(done, now)
            self._postprocess(done, output)
        if self._delayed:
            first = self._first_in_flight()
            self._events += [event for step, event in self._delayed if step < first]
            self._delayed = [(step, event) for step, event in self._delayed if step >= first]
        wanted = self.scheduler.take_wanted_images()
        stats = self.stats()
        gauges = _gauges(stats)
        if not (self._events or wanted or batch.chunks) and gauges == self._sent:
            return None
        self._sent = gauges
        done = StepDone(self._events, stats, self._images_read, wanted)
        self._events, self._images_read = [], []
        return done

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._blocks.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_steps=self._num_steps,
            num_late_masks=self.gate.num_missed,
            num_lacking_images=scheduler.num_lacking_images,
            busy_s=self._busy_s + (time.monotonic() - self._busy_since if self._pending else 0.0),
        )

    def _launch(self, batch: Batch) -> None:
        now = time.monotonic()
        for sequence in batch.admitted:
            if sequence.first_scheduled_at == 0.0:
                sequence.first_scheduled_at = now
        batch.launched_at = now
        if not self._pending:
            self._busy_since = now
        step = batch.to_step() if self._planned is None else self._planned[1]
        self._planned = None
        try:
            pending = self._runner.execute(step)
        except self._out_of_memory as error:
            self._fail_largest(batch, error)
            return
        self._num_steps += 1
        self._pending.append((self.scheduler.step, batch, pending))
        self.gate.launched(batch, pending)
        for chunk in reversed(batch.chunks):
            if chunk.from_device:
                break
            self._blocks.register(chunk.sequence)
            if chunk.checkpoints:
                self._blocks.states.commit(chunk.checkpoints)

    def _measure(self, batch: Batch, now: float) -> None:
        """Learns from a step whose result was just read, at `now`. It began when the one before it
        was read, or when it was launched. Steps that waited for masks say nothing; of those of
        decodes alone, some are enough.
        """
        ms = (now - max(self._read_at, batch.launched_at)) * 1e3
        self._read_at = now
        load = batch.load
        if load is None and self._num_steps % self._step_cost.decode_period == 0:
            load = StepLoad(len(batch.chunks), batch.num_tokens)
            load.keys = sum([chunk.start + 1 for chunk in batch.chunks])
        if load is not None and not batch.late:
            self._step_cost.observe(load, ms)

    def discard_plan(self) -> None:
        """To be called before a sequence leaves the planned step, or joins it."""
        if self._planned is not None:
            batch, _ = self._planned
            self._planned = None
            self.scheduler.roll_back(batch)

    def _fail_largest(self, batch: Batch, error: BaseException) -> None:
        """Fails one sequence of a step that did not fit into the device's memory."""
        largest = max(batch.chunks, key=lambda chunk: (chunk.length, chunk.sequence.admission))
        self.scheduler.abandon(batch)
        log.warning(
            "the device is out of memory: the longest sequence of a step ends; lower "
            "DECODER_MAX_NUM_SEQUENCES, DECODER_MAX_MODEL_LEN or DECODER_MEMORY_FRACTION"
        )
        detail = f"the device is out of memory: {error}".splitlines()[0]
        self._finish(largest.sequence, "failed", detail)

    def _postprocess(self, batch: Batch, output: StepOutput) -> None:
        """Appends the sampled ids to their sequences and finds those that have ended."""
        for chunk, scores in zip(batch.scored, output.scores, strict=True):
            self._send_scores(chunk, scores)
        now = time.monotonic()
        block_size = self._blocks.block_size
        finished = SequenceState.FINISHED
        events = self._events
        logprobs = output.logprobs
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        rows, counts = output.token_ids.tolist(), output.num_tokens.tolist()
        if batch.late:
            counts = [0 if c.is_void else n for c, n in zip(sampling, counts, strict=True)]
        for index, (chunk, ids, count) in enumerate(zip(sampling, rows, counts, strict=True)):
            sequence = chunk.sequence
            sequence.num_in_flight -= 1
            if sequence.state is finished:
                continue
            if count != chunk.limit:
                if sequence.state is SequenceState.RUNNING:  # else it begins again
                    sequence.num_computed_tokens -= chunk.limit - count
                if count == 0:
                    continue
            if ids[0] < 0:
                poisoned = ids[0] == NOT_FINITE
                self._finish(sequence, *_FAILURES[ids[0]], poisoned=poisoned)
                continue
            if sequence.image_offsets:
                self._release_images(sequence)
            if count < len(ids):
                ids = ids[:count]
            token_ids, stop_ids, reason = sequence.token_ids, sequence.stop_ids, None
            known, min_tokens = len(token_ids), sequence.message.sampling.min_tokens
            for token_id in ids:
                token_ids.append(token_id)
                if token_id in stop_ids and sequence.num_generated > min_tokens:
                    reason = "stop"
                elif len(token_ids) >= sequence.max_length:
                    reason = "length"
                else:
                    continue
                del ids[len(token_ids) - known :]
                break
            event = SequenceEvent(sequence.sequence_id, ids)
            if sequence.first_token_at == 0.0:
                sequence.first_token_at = now
                event.start = StartOfSequence(
                    sequence.num_cached_tokens,
                    sequence.first_scheduled_at - sequence.received_at,
                    now - sequence.received_at,
                )
            if logprobs and index in logprobs:
                event.logprobs = logprobs[index][: len(ids)]
            if reason is not None:
                self._finish(sequence, reason, event=event)
                continue
            events.append(event)
            if len(token_ids) % block_size <= count:
                self._blocks.register(sequence)

    def _send_scores(self, chunk: Chunk, scores: Scores) -> None:
        """Sends logprobs of prompt tokens that were not sent already: a preempted sequence computes
        its prompt again.
        """
        sequence = chunk.sequence
        known = max(0, sequence.num_scored - chunk.start)
        if sequence.state is SequenceState.FINISHED or known >= len(scores.logprobs):
            return
        found = PromptLogprobs(
            chunk.start + known + 1,
            *(np.ascontiguousarray(part[known:]).tobytes() for part in scores),
        )
        sequence.num_scored = chunk.start + len(scores.logprobs)
        self._events.append(SequenceEvent(sequence.sequence_id, [], prompt_logprobs=found))

    def _release_images(self, sequence: Sequence) -> None:
        """Tells the front that it may reuse the memory of the sequence's images.

        The prompt is computed, and no step in flight computes it again, because a preempted
        sequence is admitted again only after its in-flight tokens have arrived.
        """
        read = list(sequence.image_offsets)
        sequence.image_offsets.clear()
        sequence.images_read += read
        self._images_read.append(ImagesOf(sequence.sequence_id, read))

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        message: str = "",
        *,
        poisoned: bool = False,
        event: SequenceEvent | None = None,
    ) -> None:
        self.discard_plan()
        self.scheduler.finish(sequence, poisoned=poisoned)
        del self._sequences[sequence.sequence_id]
        self._end(sequence, reason, message, event)

    def _end(
        self, sequence: Sequence, reason: str, message: str = "", event: SequenceEvent | None = None
    ) -> None:
        event = event or SequenceEvent(sequence.sequence_id, [])
        event.end = EndOfSequence(reason, message, sequence.num_preemptions)
        if sequence.message.images and sequence.last_prefill_step >= self._first_in_flight():
            self._delayed.append((sequence.last_prefill_step, event))
        else:
            self._events.append(event)

    def _first_in_flight(self) -> int:
        """The oldest step that was launched and not read yet; if there is none, the next step."""
        return self._pending[0][0] if self._pending else self.scheduler.step + 1


def _gauges(stats: EngineStats) -> tuple[int, ...]:
    """What of the stats is sent whenever it has changed."""
    return stats.num_running, stats.num_waiting, stats.num_lacking_images, stats.num_free_blocks
