"""The engine plans, launches and postprocesses one step after another.

The engine obeys the front's messages and returns a `StepDone` for each step. The scheduler plans
the steps, and a runner computes them on the device. The engine knows no torch, no sockets and no
text.

With `overlap`, the engine plans and launches step n + 1 before it reads the tokens of step n, so
that the device never waits for Python. This has two consequences. A sequence may turn out to have
ended with its token of step n; its token of step n + 1 is then discarded. And the token mask of a
sequence for step n + 1 depends on its token of step n, so the mask arrives while step n + 1 is
computed. Such a step is launched in two parts. The model comes first. The sampling follows when the
masks have arrived, or when the device would become idle otherwise; `MaskGate` decides that.

If an encoder uses the same GPU, steps run in the engine's turns (`DeviceTurns`). A turn is taken
before a launch. When it is due to end, the engine launches no further step, reads the results of
the steps in flight, and ends the turn.
"""

import logging
import math
import time
from collections import deque

import numpy as np

from kernels.sampling import ALL_MASKED, NOT_FINITE
from services.common.clock import Clock
from services.common.errors import InternalError, InvalidRequest, NoTokenAllowed, TriptychError
from services.common.process.device_turns import NO_TURNS, Turns
from services.decoder.engine.draft_reader import DraftReader
from services.decoder.engine.launch_gate import LaunchGate
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
from services.decoder.engine.runner import PendingStep, Runner
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.chunk import Chunk, accept
from services.decoder.engine.schedule.recurrent_states import states_of
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.speculation import Speculation
from services.decoder.engine.schedule.step_cost import StepCost
from services.decoder.engine.step import Int32Array, Scores, Step, StepOutput
from services.decoder.engine.step_times import StepTimes

log = logging.getLogger(__name__)

# The error for each negative number that the sampler returns in place of a token id.
_SAMPLING_ERRORS: dict[int, TriptychError] = {
    NOT_FINITE: InternalError("the model's output is not finite"),
    ALL_MASKED: NoTokenAllowed("the request's constraints leave no token that may come next"),
}


class Engine:
    """Owner of all sequences of one device.

    Args:
        runner: the owner of the device.
        overlap: True if a step is launched before the tokens of the step before it are read. It is
            off on a CPU, where `Runner.execute` returns when the step is done, so that overlap
            would only delay each token by a step.
        out_of_memory: exceptions of `Runner.execute` that end one sequence and not the engine.
        step_ms: milliseconds that a step may last, see `Scheduler`.
        step_cost: the model that learns how long steps last. Defaults to a new one.
        max_drafts: the most drafts of a sequence in a step, see `Speculation`.
        clock: the clock that times steps and deadlines.
        turns: the engine's turns on a device that it shares. By default it shares none.

    Attributes:
        runner: the owner of the device.
        info: the runner's limits.
        gate: the gate that decides when a launched step with late token masks is sampled.
        speculation: decides how many drafts each sequence verifies.
        scheduler: the scheduler of the engine's sequences.
        drafts: the reader of drafts that come behind tokens.
        turns: the engine's turns on a device that it shares.
        sequences: the sequences that have not ended, by id.
        pending: the steps that were launched and whose results were not read, oldest first: number
            of the step, its plan, its result. These steps are *in flight*.
        planned: the next step, if `plan` has planned it ahead. None if there is no such plan.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        overlap: bool,
        out_of_memory: tuple[type[BaseException], ...] = (),
        step_ms: float = math.inf,
        step_cost: StepCost | None = None,
        max_drafts: int = 0,
        clock: Clock = time.monotonic,
        turns: Turns = NO_TURNS,
    ) -> None:
        info = self.info = runner.info
        self.runner = runner
        self.turns = turns
        self._clock = clock
        self._overlap = overlap
        self._out_of_memory = out_of_memory
        self._times = StepTimes(StepCost() if step_cost is None else step_cost)
        self._blocks = BlockManager(
            info.num_blocks, info.block_size, states_of(info), info.num_host_blocks
        )
        self.speculation = Speculation(
            info, max_drafts, self._times.cost, step_ms=step_ms, overlap=overlap
        )
        self.scheduler = Scheduler(
            info,
            self._blocks,
            # If a mask comes too late, the token is computed again in a later step. With recurrent
            # states this would be wrong, because both computations of the token change the state.
            late_masks=overlap and not info.has_states,
            step_ms=step_ms,
            step_cost=self._times.cost,
            speculation=self.speculation,
        )
        self.drafts = DraftReader(self.scheduler, self._times, clock, ahead=overlap)
        self.sequences: dict[int, Sequence] = {}
        self.pending: deque[tuple[int, Batch, PendingStep]] = deque()
        self.planned: tuple[Batch, Step] | None = None
        self.gate = MaskGate(info.vocab_size, clock)
        self._launch_gate = LaunchGate(self.scheduler, self._times, clock)
        self._events: list[SequenceEvent] = []
        self._images_read: list[ImagesOf] = []
        # At the end event of a sequence, the front gives the memory of its images to other images.
        # If a step in flight may still read them, the event waits here, with that step's number.
        self._delayed: list[tuple[int, SequenceEvent]] = []
        self._num_prompt_tokens = 0
        self._sent = _gauges(self.stats())  # the gauges of the last `StepDone`

    @property
    def has_work(self) -> bool:
        """True if `step` has something to do even if no further message arrives."""
        launches = self.pending or self.planned is not None or self.turns.is_waiting
        return bool(launches or self._events or self._delayed) or self.scheduler.has_work

    @property
    def waits(self) -> bool:
        """True if `step` should be called later, for token masks or requests that may arrive."""
        return self.gate.waits if self.gate.unsampled else self._launch_gate.waits(self.pending)

    def find(self, sequence_id: int) -> Sequence | None:
        """Returns the sequence with this id. None if it has ended."""
        return self.sequences.get(sequence_id)

    def plan(self) -> None:
        """Plans the next step ahead, while the launched step waits for token masks. If a message
        changes which sequences take part in the next step, the plan is discarded and made again.
        """
        if self.planned is None and self.gate.waits and self.scheduler.is_steady:
            batch = self.scheduler.schedule()
            if batch.chunks:
                self.planned = batch, self._blocks.copies.add_to(batch.to_step())
                self.runner.prepare(self.planned[1])

    def handle(
        self, message: AddSequence | ImageReady | TokenMasks | AbortSequence | ResetPrefixCache
    ) -> None:
        """Obeys one message of the front or of a mask process."""
        match message:
            case TokenMasks():
                for number, num_generated, masks in self.gate.masks(message):
                    self.mask_ready(number, num_generated, *masks)
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
        """Notes where in the arena an image of a sequence is. Ignored if the sequence has ended."""
        if (sequence := self.find(sequence_id)) is not None:
            self._discard_plan()
            self.scheduler.image_ready(sequence, key, arena_offset)

    def mask_ready(
        self, sequence_id: int, num_generated: int, mask: Int32Array, *draft_masks: Int32Array
    ) -> None:
        """Takes the mask for a sequence's next token. A mask for another token is an error, which
        ends the sequence. A mask that the sequence has had already is ignored: if a mask process
        dies, another process takes its place, and may send the same masks again.

        Args:
            sequence_id: id of the sequence, which may have ended.
            num_generated: number of completion tokens before the token of the mask.
            mask: words of the mask. Empty if every token is allowed.
            draft_masks: masks of the tokens that follow each draft. The list ends before
                the first draft that the grammar forbids.
        """
        sequence = self.find(sequence_id)
        if sequence is None or num_generated <= sequence.num_masked:
            return
        expected = sequence.num_generated
        if not sequence.awaits_mask or num_generated != expected:
            problem = f"a mask came for token {num_generated}, but token {expected} is next"
            self._finish(sequence, error=InternalError(problem))
            return
        sequence.num_masked, sequence.draft_masks = num_generated, list(draft_masks)
        # If no launched step waits for the mask, the sequence takes part in the next step.
        if not self.gate.put(sequence, mask):
            self._discard_plan()
        self.scheduler.mask_ready(sequence, mask)

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence. Its blocks are free when the method returns."""
        if (sequence := self.find(sequence_id)) is not None:
            self._finish(sequence, "aborted")

    def step(self) -> StepDone | None:
        """Launches the next step, and reads and postprocesses the result of the oldest one.

        Returns new tokens, ends of sequences and gauges for the front. None if nothing has changed.
        """
        self._sample()
        begun = self._clock()
        batch = self._next_batch()
        if batch.chunks:
            self._launch(batch)
            launch_s = self._clock() - begun
            self._launch_gate.launched(launch_s)
            if len(self.pending) > 1:
                _, before, pending = self.pending[0]
                self._times.launched(batch, launch_s, before, is_late=pending.is_done())
        if self.pending and (not self._overlap or not batch.chunks or len(self.pending) > 1):
            _, oldest, pending = self.pending[0]
            output = pending.result()
            self.pending.popleft()
            now = self._clock()
            # The gate learns which step the device computes now: the next one in flight, if any.
            self.gate.read(self.pending[0][1] if self.pending else None, now)
            self.drafts.read_ids(oldest)
            self._postprocess(oldest, output)
            in_flight = bool(self.pending)
            # The engine waits with a step in flight if it begins to take turns again after a pause.
            # With a later step in flight none is launched here, so the locks are not looked at.
            is_last = not in_flight and (self.turns.is_due or self.turns.is_waiting)
            if following := self.drafts.look(
                oldest, pending, now, in_flight=in_flight, is_last=is_last
            ):
                self._launch(following)
        if not self.pending and not self._needs_turn:
            self.turns.release()
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
        """Returns the new tokens of all unfinished sequences with token masks. The mask processes
        need them to compute the next masks.
        """
        tokens = NewTokens([], [], [], [])
        for event in events:
            sequence = self.find(event.sequence_id)
            if sequence is not None and sequence.message.token_masks and event.token_ids:
                tokens.sequence_ids.append(event.sequence_id)
                tokens.token_ids.append(event.token_ids)
                tokens.num_generated.append(sequence.num_generated)
                tokens.drafts.append(sequence.known_drafts)
        return tokens

    def stats(self) -> EngineStats:
        """Returns the gauges and counters of the engine."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._blocks.num_blocks,
            num_preemptions=scheduler.prefills.num_preemptions,
            num_prefix_hit_tokens=scheduler.prefills.num_prefix_hit_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_steps=self._times.num_steps,
            num_late_masks=self.gate.num_missed,
            num_lacking_images=len(scheduler.prefills.parked_for_images),
            busy_s=self._times.busy_s(self._clock(), in_flight=bool(self.pending)),
            drafts=self.speculation.totals,
            num_blocks_to_host=self._blocks.host.num_saved,
            num_blocks_from_host=self._blocks.host.num_loaded,
            num_turns=self.turns.num_turns,
            turn_wait_s=self.turns.waited_s,
        )

    def _next_batch(self) -> Batch:
        """Returns the batch to launch now. The batch is empty if there is nothing to launch, if the
        engine waits for its turn, or if its turn is due to end.
        """
        is_due = self.turns.is_due
        if is_due and not self.pending:
            self.turns.release()
            is_due = False
        if is_due or (self.sequences and not self._take_turn()):
            self._discard_plan()
            return Batch([], 0)
        return self.planned[0] if self.planned is not None else self.scheduler.schedule()

    @property
    def _needs_turn(self) -> bool:
        """True if the engine should keep its turn, or go on waiting, with no step in flight."""
        turns = self.turns
        if turns.is_waiting:
            return bool(self.sequences)
        return self.scheduler.has_work and not turns.is_due

    def _take_turn(self) -> bool:
        """Returns whether the engine has its turn, which may begin now."""
        was_waiting = self.turns.is_waiting
        has_turn = self.turns.try_take()
        if was_waiting and has_turn:  # Steps have not lasted for as long as the engine waited.
            self._times.resumed(self._clock())
            self.gate.resumed()
        return has_turn

    def _sample(self) -> None:
        """Samples the launched step that waits for token masks, if there is one. Sequences whose
        mask is still missing get no token from the step.
        """
        if missed := self.gate.sample():
            self._discard_plan()
            for sequence in missed:
                self.scheduler.mask_missed(sequence)

    def _launch(self, batch: Batch) -> None:
        """Launches a batch, and registers the blocks that it fills in the prefix cache."""
        now = self._clock()
        for sequence in batch.admitted:
            if sequence.first_scheduled_at == 0.0:
                sequence.first_scheduled_at = now
        self._times.launching(batch, now, in_flight=bool(self.pending))
        planned, self.planned = self.planned, None
        step = self._blocks.copies.add_to(batch.to_step()) if planned is None else planned[1]
        batch.has_loads = step.compute.block_loads is not None
        try:
            pending = self.runner.execute(step)
        except self._out_of_memory as error:
            self._fail_largest(batch, error)
            return
        self._blocks.copies.launched()
        self._times.num_steps += 1
        self.pending.append((self.scheduler.step, batch, pending))
        self.gate.launched(batch, pending)
        # A block is registered under its token ids. A chunk with `from_device` has an id that is
        # not known yet, so `_postprocess` registers its blocks. Such chunks come first in a batch.
        for chunk in reversed(batch.chunks):
            if chunk.from_device:
                break
            self._blocks.register(chunk.sequence)
            if chunk.checkpoints:
                self._blocks.states.commit(chunk.checkpoints)

    def _discard_plan(self) -> None:
        """Reverts the step that was planned ahead, if any, because a message or the end of a
        sequence changes which sequences take part in it.
        """
        if self.planned is not None:
            batch, _ = self.planned
            self.planned = None
            self.scheduler.roll_back(batch)

    def _fail_largest(self, batch: Batch, error: BaseException) -> None:
        """Fails the sequence with the longest chunk of a step for which the device had too little
        memory. All other sequences of the step compute their tokens again.
        """
        largest = max(batch.chunks, key=lambda chunk: (chunk.length, chunk.sequence.admission))
        self.scheduler.abandon(batch)
        log.warning(
            "the device is out of memory: the sequence with most tokens in the step fails; lower "
            "DECODER_MAX_NUM_SEQUENCES, DECODER_MAX_MODEL_LEN or DECODER_MEMORY_FRACTION"
        )
        detail = f"the device is out of memory: {error}".splitlines()[0]
        self._finish(largest.sequence, error=InternalError(detail))

    def _postprocess(self, batch: Batch, output: StepOutput) -> None:
        """Appends the tokens of a step to their sequences, and ends sequences that are complete."""
        for chunk, scores in zip(batch.scored, output.scores, strict=True):
            self._send_scores(chunk, scores)
        now = self._clock()
        block_size = self._blocks.block_size
        finished = SequenceState.FINISHED
        events = self._events
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        rows, counts, logprobs = accept(sampling, output)
        if batch.late:  # A chunk is void if its mask came too late: its token is discarded.
            counts = [0 if c.is_void else n for c, n in zip(sampling, counts, strict=True)]
        for index, (chunk, ids, count) in enumerate(zip(sampling, rows, counts, strict=True)):
            sequence = chunk.sequence
            sequence.num_in_flight -= 1
            if sequence.state is finished:
                continue
            if count != chunk.limit:
                # A step may yield up to `limit` tokens for a sequence, and the scheduler has
                # counted them all as computed. A sequence that was preempted meanwhile has no
                # computed tokens and is not admitted again while tokens are in flight, so there
                # is nothing to correct.
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
            if chunk.drafts:
                event.predicted = self.speculation.verified(chunk, count - 1, len(ids))
            if sequence.first_token_at == 0.0:
                sequence.first_token_at = now
                event.start = StartOfSequence(
                    sequence.num_cached_tokens,
                    sequence.first_scheduled_at - sequence.received_at,
                    now - sequence.received_at,
                )
            if logprobs and index in logprobs:
                event.logprobs = logprobs[index][: len(ids)]
            if output.vectors is not None:
                event.vector = output.vectors[index].tobytes()
            if reason is not None:
                self._finish(sequence, reason, event=event)
                continue
            events.append(event)
            # `register` registers complete blocks. The newest token is not computed yet. Therefore
            # a block can have been completed only if the last block has at most `count` tokens.
            if len(sequence.token_ids) % block_size <= count:
                self._blocks.register(sequence)

    def _send_scores(self, chunk: Chunk, scores: Scores) -> None:
        """Sends the logprobs of a chunk's prompt tokens that were not sent yet. A sequence that was
        preempted computes its prompt, and the logprobs, a second time.

        Entry i of `scores` is the logprob of token `chunk.start + i + 1` of the prompt, because
        each token of the chunk predicts the next token.
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
        """Tells the front that the memory of the sequence's images may be reused, because the whole
        prompt is computed. If a sequence is preempted after that and needs its images again, the
        front obtains them again.
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
            reason: see `EndOfSequence`. Empty if there is an error, because the error decides it.
            error: error that ends the sequence. None if the sequence ends without an error.
            poisoned: True if the keys and values of the sequence are wrong, so that the prefix
                cache must not have them.
            event: event with the sequence's last tokens. None if there are no further tokens.
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
        """Sends the last event of a sequence, once no step in flight reads its images."""
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
        """Returns the number of the oldest step in flight, or of the next step if there is none."""
        return self.pending[0][0] if self.pending else self.scheduler.step + 1


def _append(sequence: Sequence, ids: list[int]) -> str | None:
    """Appends sampled ids to a sequence, up to the id that ends the sequence. Removes the ids
    after that id from `ids`. Returns the reason of the end, or None if the sequence goes on.
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
        del ids[len(token_ids) - known :]
        return reason
    return None


def _gauges(stats: EngineStats) -> tuple[int, ...]:
    """Returns the gauges whose changes the front has to learn even if no step was launched."""
    return stats.num_running, stats.num_waiting, stats.num_lacking_images, stats.num_free_blocks
