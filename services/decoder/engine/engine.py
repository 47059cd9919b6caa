"""The engine: one step after another is scheduled, run, sampled and postprocessed.

The engine takes messages, returns a `StepDone` for each step, and leaves the device to a runner. It
knows no torch, no sockets and no text. With `overlap`, the engine plans and launches step n + 1
before it reads the tokens of step n, so that the device never waits for Python. If a sequence turns
out to have ended with step n, its token of step n + 1 is discarded. A step whose token masks arrive
late is sampled some time after its launch, when `MaskGate` says so.
"""

import logging
import math
import time
from collections import deque

import numpy as np

from kernels.sampling import ALL_MASKED, NOT_FINITE
from services.common.clock import Clock
from services.common.errors import InternalError, InvalidRequest, NoTokenAllowed, TriptychError
from services.decoder.engine.mask_gate import MaskGate
from services.decoder.engine.messages import (
    AbortSequence,
    AddSequence,
    EndOfSequence,
    EngineStats,
    ImageReady,
    ImagesOf,
    NewTokens,
    PromptLogprobs,
    ResetPrefixCache,
    SequenceEvent,
    StartOfSequence,
    StepDone,
    TokenMasks,
)
from services.decoder.engine.schedule.batch import Batch, Chunk
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.recurrent_states import states_of
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import (
    Int32Array,
    PendingStep,
    Runner,
    Scores,
    Step,
    StepOutput,
)

log = logging.getLogger(__name__)

# Errors by the number that the sampler returns in place of a token id.
_SAMPLING_ERRORS: dict[int, TriptychError] = {
    NOT_FINITE: InternalError("the model's output is not finite"),
    ALL_MASKED: NoTokenAllowed("the request's constraints leave no token that may come next"),
}


class Engine:
    """Owner of all sequences of one device.

    Args:
        runner: the owner of the device.
        overlap: True if a step is launched before the ids of the step before it are read. With a
            runner whose `execute` blocks until the step is done, overlap only delays every token by
            one step.
        out_of_memory: exceptions of `Runner.execute` that end one sequence, not the engine.
        step_ms: milliseconds that a step may last, see `Scheduler`.
        step_cost: the model that learns how long steps last. Defaults to a new one.
        clock: the clock that times steps and deadlines.

    Attributes:
        runner: the owner of the device.
        info: the runner's limits.
        gate: the gate that decides when a launched step with late token masks is sampled.
        scheduler: the scheduler of the engine's sequences.
        sequences: the sequences that have not ended, by id.
        pending: the steps in flight, oldest first: number of the step, its batch, its result.
        planned: the next step, which `plan` has planned while the launched step waits to be
            sampled. None if there is no such plan.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        overlap: bool,
        out_of_memory: tuple[type[BaseException], ...] = (),
        step_ms: float = math.inf,
        step_cost: StepCost | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        info = self.info = runner.info
        self.runner = runner
        self._clock = clock
        self._overlap = overlap
        self._out_of_memory = out_of_memory
        self._step_cost = StepCost() if step_cost is None else step_cost
        self._blocks = BlockManager(info.num_blocks, info.block_size, states_of(info))
        self.scheduler = Scheduler(
            info,
            self._blocks,
            # If a mask comes too late, the same token is computed again in a later step. That would
            # change a recurrent state twice.
            late_masks=overlap and not info.has_states,
            step_ms=step_ms,
            step_cost=self._step_cost,
        )
        self.sequences: dict[int, Sequence] = {}
        self.pending: deque[tuple[int, Batch, PendingStep]] = deque()
        self.planned: tuple[Batch, Step] | None = None
        self.gate = MaskGate(info.vocab_size, clock)
        self._num_steps = 0
        self._events: list[SequenceEvent] = []
        self._images_read: list[ImagesOf] = []
        # End events of sequences whose images a step in flight may read, with the step's number.
        # The front may reuse the memory of the images once it has the event, so the event waits.
        self._delayed: list[tuple[int, SequenceEvent]] = []
        self._num_prompt_tokens = 0
        self._read_at = 0.0  # when the last step's result was read
        self._busy_s = 0.0  # how long steps were in flight
        self._busy_since = 0.0  # when a step was last launched while none was in flight
        self._sent = _gauges(self.stats())  # the gauges of the last `StepDone`

    @property
    def has_work(self) -> bool:
        """True if `step` can do something before another message arrives."""
        return bool(self.pending or self._events or self._delayed) or self.scheduler.has_work

    @property
    def waits(self) -> bool:
        """True if `step` should be called later, because the launched step waits for masks."""
        return self.gate.waits

    def find(self, sequence_id: int) -> Sequence | None:
        """Returns a sequence that has not ended, or None."""
        return self.sequences.get(sequence_id)

    def plan(self) -> None:
        """Plans the next step while the engine waits, so that the device gets the step sooner.

        If another message arrives meanwhile, the plan is discarded and made again.
        """
        if self.planned is None and self.scheduler.is_steady:
            batch = self.scheduler.schedule()
            if batch.chunks:
                self.planned = batch, batch.to_step()
                self.runner.prepare(self.planned[1])

    def handle(
        self, message: AddSequence | ImageReady | TokenMasks | AbortSequence | ResetPrefixCache
    ) -> None:
        """Obeys one message of the front."""
        match message:
            case TokenMasks():
                for number, num_generated, mask in self.gate.masks(message):
                    self.mask_ready(number, num_generated, mask)
            case AddSequence():
                self.add(message)
            case ImageReady():
                self.image_ready(message.sequence_id, message.key, message.arena_offset)
            case AbortSequence():
                self.abort(message.sequence_id)
            case ResetPrefixCache():
                self._discard_plan()
                self._blocks.reset()

    def add(self, message: AddSequence) -> None:
        """Queues a sequence. A sequence that can never run is refused at once."""
        self._discard_plan()
        sequence = Sequence(message)
        sequence.received_at = self._clock()
        try:
            if sequence.message.images and not self.info.num_features:
                raise InvalidRequest("the model takes no images")
            self.scheduler.add(sequence)
        except InvalidRequest as error:
            self._end(sequence, error=error)
            return
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self.sequences[sequence.sequence_id] = sequence

    def image_ready(self, sequence_id: int, key: bytes, arena_offset: int) -> None:
        """Notes where an image is in the arena; sequences that have ended already are ignored."""
        if (sequence := self.find(sequence_id)) is not None:
            self._discard_plan()
            self.scheduler.image_ready(sequence, key, arena_offset)

    def mask_ready(self, sequence_id: int, num_generated: int, mask: Int32Array) -> None:
        """Takes the mask for a sequence's next token; a mask for another token is an error.

        A mask that the sequence has had already is ignored: a mask process that replaces one that
        has ended may send the same masks again.

        Args:
            sequence_id: id of the sequence, which may have ended.
            num_generated: number of completion tokens before the token of the mask.
            mask: words of the mask; empty if every token is allowed.
        """
        sequence = self.find(sequence_id)
        if sequence is None or num_generated <= sequence.num_masked:
            return
        expected = sequence.num_generated
        if not sequence.awaits_mask or num_generated != expected:
            problem = f"a token mask for token {num_generated} came, at token {expected}"
            self._finish(sequence, error=InternalError(problem))
            return
        sequence.num_masked = num_generated
        # If no launched step waits for the mask, the sequence joins the next step, which has to be
        # planned with it.
        if not self.gate.put(sequence, mask):
            self._discard_plan()
        self.scheduler.mask_ready(sequence, mask)

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence; its blocks are free when this returns."""
        if (sequence := self.find(sequence_id)) is not None:
            self._finish(sequence, "aborted")

    def step(self) -> StepDone | None:
        """Launches the next step, and reads and postprocesses the result of the step before.

        Returns what has changed for the front. None if there is nothing to report.
        """
        self._sample()
        batch = self.planned[0] if self.planned is not None else self.scheduler.schedule()
        if batch.chunks:
            self._launch(batch)
        if self.pending and (not self._overlap or not batch.chunks or len(self.pending) > 1):
            _, done, pending = self.pending[0]
            output = pending.result()
            self.pending.popleft()
            now = self._clock()
            # The gate learns which step the device computes from now on.
            self.gate.read(self.pending[0][1] if self.pending else None, now)
            if not self.pending:
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

    def new_tokens(self, events: list[SequenceEvent]) -> NewTokens:
        """Returns the tokens of unfinished sequences with masks, for the next masks."""
        tokens = NewTokens([], [], [])
        for event in events:
            sequence = self.find(event.sequence_id)
            if sequence is not None and sequence.message.token_masks and event.token_ids:
                tokens.sequence_ids.append(event.sequence_id)
                tokens.token_ids.append(event.token_ids)
                tokens.num_generated.append(sequence.num_generated)
        return tokens

    def stats(self) -> EngineStats:
        """Returns the gauges and counters of the engine."""
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
            busy_s=self._busy_s + (self._clock() - self._busy_since if self.pending else 0.0),
        )

    def _sample(self) -> None:
        """Samples the step that waits for masks, if any, without the masks that are missing."""
        if missed := self.gate.sample():
            self._discard_plan()
            for sequence in missed:
                self.scheduler.mask_missed(sequence)

    def _launch(self, batch: Batch) -> None:
        """Hands a batch to the device and registers the blocks that the batch fills."""
        now = self._clock()
        for sequence in batch.admitted:
            if sequence.first_scheduled_at == 0.0:
                sequence.first_scheduled_at = now
        batch.launched_at = now
        if not self.pending:
            self._busy_since = now
        step = batch.to_step() if self.planned is None else self.planned[1]
        self.planned = None
        try:
            pending = self.runner.execute(step)
        except self._out_of_memory as error:
            self._fail_largest(batch, error)
            return
        self._num_steps += 1
        self.pending.append((self.scheduler.step, batch, pending))
        self.gate.launched(batch, pending)
        # Blocks of chunks from the device, which come first, are registered when the ids arrive.
        for chunk in reversed(batch.chunks):
            if chunk.from_device:
                break
            self._blocks.register(chunk.sequence)
            if chunk.checkpoints:
                self._blocks.states.commit(chunk.checkpoints)

    def _measure(self, batch: Batch, now: float) -> None:
        """Corrects the step cost by a step whose result was read at `now`.

        The step is taken to begin when the result of the step before was read, or at its own launch
        if that was later. A step that waited for masks is left out. Of the steps that have only
        decodes, one in `decode_period` is used.
        """
        ms = (now - max(self._read_at, batch.launched_at)) * 1e3
        self._read_at = now
        load = batch.load
        if load is None and self._num_steps % self._step_cost.decode_period == 0:
            load = StepLoad(len(batch.chunks), batch.num_tokens)
            load.keys = sum([chunk.start + 1 for chunk in batch.chunks])
        if load is not None and not batch.late:
            self._step_cost.observe(load, ms)

    def _discard_plan(self) -> None:
        """Reverts the planned step, if any, because the sequences that it should have change."""
        if self.planned is not None:
            batch, _ = self.planned
            self.planned = None
            self.scheduler.roll_back(batch)

    def _fail_largest(self, batch: Batch, error: BaseException) -> None:
        """Fails one sequence of a step that did not fit into the device's memory.

        It is the sequence with the longest chunk. All others of the step begin again.
        """
        largest = max(batch.chunks, key=lambda chunk: (chunk.length, chunk.sequence.admission))
        self.scheduler.abandon(batch)
        log.warning(
            "the device is out of memory: the longest sequence of a step ends; lower "
            "DECODER_MAX_NUM_SEQUENCES, DECODER_MAX_MODEL_LEN or DECODER_MEMORY_FRACTION"
        )
        detail = f"the device is out of memory: {error}".splitlines()[0]
        self._finish(largest.sequence, error=InternalError(detail))

    def _postprocess(self, batch: Batch, output: StepOutput) -> None:
        """Appends the sampled ids to their sequences and finds those that have ended."""
        for chunk, scores in zip(batch.scored, output.scores, strict=True):
            self._send_scores(chunk, scores)
        now = self._clock()
        block_size = self._blocks.block_size
        finished = SequenceState.FINISHED
        events = self._events
        logprobs = output.logprobs
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        rows, counts = output.token_ids.tolist(), output.num_tokens.tolist()
        if batch.late:  # a sample whose mask came too late is no token
            counts = [0 if c.is_void else n for c, n in zip(sampling, counts, strict=True)]
        for index, (chunk, ids, count) in enumerate(zip(sampling, rows, counts, strict=True)):
            sequence = chunk.sequence
            sequence.num_in_flight -= 1
            if sequence.state is finished:
                continue
            if count != chunk.limit:
                # The plan counted `limit` tokens. A preempted sequence begins again at 0 anyway.
                if sequence.state is SequenceState.RUNNING:
                    sequence.num_computed_tokens -= chunk.limit - count
                if count == 0:
                    continue
            if ids[0] < 0:
                poisoned = ids[0] == NOT_FINITE
                self._finish(sequence, error=_SAMPLING_ERRORS[ids[0]], poisoned=poisoned)
                continue
            if sequence.image_offsets:
                self._release_images(sequence)
            if count < len(ids):
                ids = ids[:count]
            reason = _append(sequence, ids)
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
            # These tokens, or the one before them, have filled a block.
            if len(sequence.token_ids) % block_size <= count:
                self._blocks.register(sequence)

    def _send_scores(self, chunk: Chunk, scores: Scores) -> None:
        """Sends logprobs of prompt tokens that were not sent yet.

        A preempted sequence computes its prompt again. The followers of its first `num_scored`
        tokens have their logprobs sent already, so only those of the chunk's others are sent.
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

        The prompt is computed. No step in flight computes it again, even if the sequence was
        preempted: it is admitted again only after its tokens in flight have arrived.
        """
        read = list(sequence.image_offsets)
        sequence.image_offsets.clear()
        sequence.images_read += read
        self._images_read.append(ImagesOf(sequence.sequence_id, read))

    def _finish(
        self,
        sequence: Sequence,
        reason: str = "",
        *,
        error: TriptychError | None = None,
        poisoned: bool = False,
        event: SequenceEvent | None = None,
    ) -> None:
        """Ends a sequence and frees its row and blocks.

        Args:
            sequence: a sequence that has not ended.
            reason: see `EndOfSequence`. Empty if there is an error, from which it follows.
            error: error that ends the sequence. None if the sequence ends without an error.
            poisoned: True if the keys and values of the sequence are wrong.
            event: event of the sequence's last tokens. None if there are no further tokens.
        """
        self._discard_plan()
        self.scheduler.finish(sequence, poisoned=poisoned)
        del self.sequences[sequence.sequence_id]
        self._end(sequence, reason, error, event)

    def _end(
        self,
        sequence: Sequence,
        reason: str = "",
        error: TriptychError | None = None,
        event: SequenceEvent | None = None,
    ) -> None:
        """Sends the last event, once no step in flight reads the sequence's images any more."""
        event = event or SequenceEvent(sequence.sequence_id, [])
        event.end = end = EndOfSequence(reason, num_preemptions=sequence.num_preemptions)
        if error is not None:
            end.reason = "refused" if isinstance(error, InvalidRequest) else "failed"
            end.message, end.code = error.message, error.code
        if sequence.message.images and sequence.last_prefill_step >= self._first_in_flight():
            self._delayed.append((sequence.last_prefill_step, event))
        else:
            self._events.append(event)

    def _first_in_flight(self) -> int:
        """Returns the number of the oldest step in flight. The next step's if none is in flight."""
        return self.pending[0][0] if self.pending else self.scheduler.step + 1


def _append(sequence: Sequence, ids: list[int]) -> str | None:
    """Appends sampled ids up to the end of the sequence, and removes the rest from `ids`.

    Returns the reason why the sequence ends, or None if it goes on.
    """
    token_ids, stop_ids = sequence.token_ids, sequence.stop_ids
    known, min_tokens = len(token_ids), sequence.message.sampling.min_tokens
    for token_id in ids:
        token_ids.append(token_id)
        if token_id in stop_ids and sequence.num_generated > min_tokens:
            reason = "stop"
        elif len(token_ids) >= sequence.max_length:
            reason = "length"
        else:
            continue
        del ids[len(token_ids) - known :]  # these were sampled behind the end
        return reason
    return None


def _gauges(stats: EngineStats) -> tuple[int, ...]:
    """Returns the gauges whose changes are sent even if no step was launched."""
    return stats.num_running, stats.num_waiting, stats.num_lacking_images, stats.num_free_blocks
