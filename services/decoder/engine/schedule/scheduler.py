"""The scheduler decides which tokens of which sequences the next step computes. Pure Python.

A step first computes the next token of every decoding sequence. The time that is left in the step
goes to prompts, which are computed in chunks (`StepBudget`). A step is planned while the step
before it still runs, so the ids of the tokens of that step are not known. To plan, the number of a
sequence's tokens is enough. The engine finds stop tokens when the ids arrive.

Until it is finished, a sequence is in exactly one queue. They belong to `Prefills` and `Decodes`:

    waiting ──admit──▶ prefilling ──last token──▶ decoding ──▶ finished
         ▲                │   ▲                    │    ▲
         │ input          ▼   │ input              ▼    │ token and mask
    parked ◀──preempt── stalled                   awaiting

- *waiting*: the sequence has neither a row nor blocks, and waits to be *admitted*, which gives it
  both.
- *prefilling*: the sequence has a row and blocks, and tokens of its prompt to compute.
- *stalled*: the sequence has a row and blocks, but its next tokens need an *input* that has not
  arrived: an image, or the token mask for the next sample. The sequence keeps row and blocks
  until they are needed elsewhere.
- *parked*: the sequence waits for an input, as if stalled, but has neither a row nor blocks. A
  waiting sequence is parked instead of admitted if too few tokens precede its first missing input
  (`Prefills.min_partial_tokens`).
- *decoding*: the prompt is computed. Every step computes the sequence's next token.
- *awaiting*: the sequence takes part in no step until its newest token has arrived, because it has
  guesses of the next tokens (*drafts*, see `speculation`) or token masks. With token masks, it also
  waits for the next mask. If `late_masks` is set, masks may arrive while a step is computed: a
  sequence with token masks is *decoding* then. If its mask comes too late, it gets no token from
  the step and becomes *awaiting*.

The picture leaves out three transitions: a sequence that is preempted while prefilling, decoding or
awaiting waits again; a waiting sequence may be parked; and a sequence can finish in every queue.

A step may yield up to `max_tokens_per_step` tokens for a sequence. If that is more than one, the
host does not know how many tokens a step in flight yields. The plan assumes the largest number: the
sequence gets blocks for that many tokens, and `num_computed_tokens` is corrected when fewer arrive.
A sequence is not planned if the tokens in flight may bring it to its maximum length.

Any sequence with a row can be preempted: it loses row and blocks, and later computes again all
tokens that are not in the prefix cache by then. If images of these tokens have been released, the
front has to obtain them again.
"""

import numpy as np
import numpy.typing as npt

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.decoder.engine.messages import EngineInfo, ImagesOf
from services.decoder.engine.schedule.admission import latest
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.chunk import Chunk
from services.decoder.engine.schedule.decodes import Decodes
from services.decoder.engine.schedule.prefills import Prefills
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.speculation import Speculation
from services.decoder.engine.schedule.step_budget import StepBudget
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad


class Scheduler:
    """Plans steps from the sequences of `Prefills` and `Decodes`, and decides which is preempted.

    Args:
        info: the engine's limits: rows, tokens of a step, tokens of a sequence.
        blocks: the KV blocks. Only `Scheduler`, `Prefills` and `Decodes` allocate and free them.
        late_masks: True if a step may be planned before the masks for its samples have arrived.
        step_ms: milliseconds that a step may last; see `StepCost.bound`.
        step_cost: the model that predicts how long a step lasts.
        speculation: decides how many drafts each sequence verifies.

    Attributes:
        prefills: the sequences whose prompts are not computed yet.
        decodes: the sequences whose prompts are computed.
        step: number of the last planned step.
        num_masked: number of unfinished sequences with token masks.
        num_adapted: number of unfinished sequences with adapters.
    """

    def __init__(
        self,
        info: EngineInfo,
        blocks: BlockManager,
        *,
        late_masks: bool,
        step_ms: float,
        step_cost: StepCost,
        speculation: Speculation,
    ) -> None:
        self.blocks = blocks
        self.decodes = Decodes(info, blocks, speculation)
        self.background = self.decodes.background
        self.prefills = Prefills(info, blocks, self.decodes)
        self.step = 0
        self._max_batched_tokens = info.max_batched_tokens
        self._max_model_len = info.max_model_len
        self._late_masks = late_masks and info.max_tokens_per_step == 1
        self._step_ms = step_ms
        self._cost = step_cost
        self._num_arrivals = 0
        self.num_masked = self.num_adapted = 0

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a row."""
        return len(self.decodes) + len(self.prefills.prefilling) + len(self.prefills.stalled)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that hold no row."""
        return self.prefills.num_without_row

    @property
    def has_work(self) -> bool:
        """True if a step can be planned without a further message: at once, or after the tokens in
        flight have arrived.
        """
        return bool(self.decodes.decoding or self.prefills.has_work or self.decodes.ready())

    @property
    def is_steady(self) -> bool:
        """True if the next step can be planned ahead. It must consist of decoding sequences alone,
        and there must be a free block for each of them, so that none is preempted.
        """
        others = self.prefills.prefilling or len(self.prefills.waiting) or self.decodes.ready()
        return not others and len(self.decodes.decoding) <= self.blocks.num_free

    def running(self) -> list[Sequence]:
        """Returns all sequences that hold a row."""
        decodes, prefills = self.decodes, self.prefills
        queues = decodes.decoding, decodes.awaiting, prefills.prefilling, prefills.stalled
        return [sequence for queue in queues for sequence in queue.values()]

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence.

        Raises:
            InvalidRequest: the prompt is empty, or too long for the model's context.
        """
        num_prompt, message = sequence.num_prompt_tokens, sequence.message
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty")
        if num_prompt >= self._max_model_len:
            raise ContextLengthExceeded.of(num_prompt, self._max_model_len)
        sequence.max_length = min(num_prompt + message.sampling.max_tokens, self._max_model_len)
        sequence.arrival = self._num_arrivals = self._num_arrivals + 1
        sequence.plans_ahead |= self._late_masks
        self.decodes.speculation.start(sequence)
        self.num_masked += message.token_masks
        self.num_adapted += message.adapter >= 0
        self.background.add(sequence)
        self.prefills.waiting.arrived(sequence)
        self.prefills.add(sequence)

    def image_ready(self, sequence: Sequence, key: bytes, arena_offset: int) -> None:
        """Notes where in the arena an image is. A sequence that waited for it can be planned."""
        sequence.image_offsets[key] = arena_offset
        self.prefills.input_arrived(sequence)

    def mask_ready(self, sequence: Sequence, mask: npt.NDArray[np.int32]) -> None:
        """Takes the mask for the sequence's next token, so that the sequence can be planned."""
        sequence.token_mask = mask
        self.prefills.input_arrived(sequence)

    def mask_missed(self, sequence: Sequence) -> None:
        """Notes that a sequence gets no token from a launched step, because its mask is late."""
        self.decodes.await_tokens(sequence)

    def finish(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Ends a sequence in any state. Its row and its blocks are free when the method returns.

        A step in flight may still write to the blocks. This does no harm: the next owner writes to
        them in a later step, and the device runs the steps in order.

        Args:
            sequence: a sequence that has not finished.
            poisoned: True if the sequence's keys and values are wrong. The prefix cache then drops
                them.
        """
        if poisoned:
            self.blocks.invalidate(sequence)
        else:
            self.blocks.register(sequence)
        if sequence.state is SequenceState.WAITING:
            self.prefills.remove(sequence)
        else:
            self.decodes.remove(sequence)
            self.prefills.release(sequence)
        self.num_masked -= sequence.message.token_masks
        self.num_adapted -= sequence.message.adapter >= 0
        self.background.remove(sequence)
        self.prefills.waiting.finished(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Batch:
        """Plans one step: decodes first, then prompts in the time that is left."""
        self.step += 1
        if self.prefills.waiting.may_preempt:
            self._yield_rows()
        prefills, num_decodes = self.prefills, len(self.decodes)
        self.background.begin_step(self.step, prefills.prefilling, prefills.waiting, num_decodes)
        batch = self._plan()
        while not batch.chunks and self.background.let_in():
            batch = self._plan()
        return batch

    def _plan(self) -> Batch:
        self.decodes.choose_drafts(is_open=not self.prefills.has_work)
        self._extend_decodes()
        chunks = self.decodes.plan()
        num_tokens = sum([chunk.limit for chunk in chunks])
        batch = Batch(chunks, num_tokens, self.prefills.admitted, self.decodes.extended)
        batch.may_have_adapters = self.num_adapted > 0
        batch.num_drafts = sum([len(chunk.drafts) for chunk in chunks])
        if (self.prefills.prefilling or len(self.prefills.waiting)) and not batch.num_drafts:
            batch.load = self._plan_prompts(chunks, num_tokens)
            batch.num_tokens = batch.load.tokens
        batch.num_head_drafts = self.decodes.head_drafts(chunks, is_open=not self.prefills.has_work)
        if self.num_masked:
            batch.late = [c for c in chunks if c.from_device and c.sequence.message.token_masks]
            for chunk in batch.late:
                chunk.is_late = True
        if chunks:
            self.prefills.admitted, self.decodes.extended = [], []
        # A batch without chunks is not launched. Both lists then go with the next batch.
        return batch

    def take_wanted_images(self) -> list[ImagesOf]:
        """Returns the images that have to be obtained again: they were released after their
        sequence had read them, and then the sequence was preempted. Each is returned once.
        """
        wanted: list[ImagesOf] = []
        for sequence in self.prefills.lacking_images:
            if sequence.images_read:
                wanted.append(ImagesOf(sequence.sequence_id, sequence.images_read))
                sequence.images_read = []
        self.prefills.lacking_images = []
        return wanted

    def roll_back(self, batch: Batch) -> None:
        """Reverts a batch that was not launched. Its sequences keep their rows and blocks.

        `to_step` may have noted that the runner has the newest entries of the block tables, but the
        runner has not got them. Therefore the next step sends the whole tables of these sequences.
        """
        for chunk in batch.chunks:
            chunk.sequence.num_computed_tokens = chunk.start
            if chunk.samples:
                chunk.sequence.num_in_flight -= 1
        for sequence in (*batch.admitted, *batch.extended):
            sequence.num_sent_blocks = 0
        self.prefills.admitted = batch.admitted + self.prefills.admitted
        self.decodes.extended = batch.extended + self.decodes.extended

    def abandon(self, batch: Batch) -> None:
        """Reverts a batch whose launch has failed. Its sequences are preempted, because the
        contents of their rows on the device are undefined. So are sequences that were admitted
        without a chunk, which may share blocks of the batch.
        """
        self.roll_back(batch)
        self.blocks.copies.failed()
        for chunk in batch.chunks:
            self.blocks.states.abandon(chunk.checkpoints)
            self.blocks.retract(chunk.sequence, chunk.start)
        for sequence in dict.fromkeys([c.sequence for c in batch.chunks] + batch.admitted):
            if sequence.state is SequenceState.RUNNING:
                self._preempt(sequence)

    def _plan_prompts(self, chunks: list[Chunk], num_tokens: int) -> StepLoad:
        """Appends chunks of prompts to those of decodes. Returns the work of the whole step."""
        # The token of a decode attends to the `start` tokens before it and to itself.
        load = StepLoad(len(chunks), num_tokens, keys=sum([chunk.start + 1 for chunk in chunks]))
        num_prompts = len(self.prefills.prefilling) + len(self.prefills.waiting)
        crowd_tokens = self._cost.crowd_tokens(len(chunks))
        budget = StepBudget(
            self._cost,
            load,
            step_ms=self.background.step_ms(self._step_ms),
            max_tokens=self.background.max_tokens(self._max_batched_tokens, num_tokens),
            alone=not chunks and num_prompts == 1 and not self.background.is_short,
            max_chunks=self.background.max_chunks,
            is_crowded=crowd_tokens is not None and self.prefills.has_more_than(crowd_tokens),
        )
        chunks += self.prefills.plan(budget, self.step)
        return load

    def _extend_decodes(self) -> None:
        """Gives decoding sequences the blocks that they need in the next step. While too few blocks
        are free, sequences are preempted.
        """
        if not (lacking := self.decodes.lacking_blocks()):
            return
        num_lacking = self.decodes.num_lacking_blocks
        while sum([num_lacking(sequence) for sequence in lacking]) > self.blocks.num_free:
            self._preempt(self._victim())
            lacking = [s for s in lacking if s.state is SequenceState.RUNNING]
        self.decodes.append_blocks(lacking)

    def _victim(self) -> Sequence:
        """Returns the sequence to preempt next: one of a batch (`AddSequence.background`) if there
        is any, else the stalled one that was admitted last, else the one that `Admission` chooses.
        """
        victim = self.prefills.waiting.victim(self.running())
        if self.prefills.stalled and not victim.message.background:
            return max(self.prefills.stalled.values(), key=latest)
        return victim

    def _yield_rows(self) -> None:
        """Makes room for the first waiting sequence if its tenant has few rows: preempts sequences
        of tenants with many rows (`Admission.yielding`) until the waiting sequence can be admitted.
        Nothing is preempted while the waiting sequence has tokens in flight, as after its own
        preemption, because it cannot be admitted yet.
        """
        prefills = self.prefills
        running = self.running()
        while (head := prefills.waiting.head()) is not None and not head.num_in_flight:
            victim = prefills.waiting.yielding(head, running)
            if victim is None:
                return
            prefix = self.blocks.find_prefix(head)
            if prefills.try_park(head, prefix):
                continue  # Another sequence is the first of the queue now.
            if prefills.fits(head, prefix, prefills.watermark):
                return
            self._preempt(victim)
            running.remove(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes back the row and the blocks of a running sequence, which waits again."""
        self.decodes.remove(sequence)
        self.prefills.preempt(sequence)
