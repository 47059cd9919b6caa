"""The scheduler decides which tokens of which sequences the next step computes. Pure Python.

A step computes the next token of every decoding sequence first, and then prompts, in chunks, as far
as the time of a step goes (`StepBudget`). Scheduling runs one step ahead of sampling: it needs the
number of a sequence's tokens, not their ids. Stop ids are found when the ids arrive.

A sequence is always in exactly one of these queues, which belong to `Prefills` and `Decodes`:

    waiting ──admit──▶ prefilling ──last token──▶ decoding ──▶ finished
     ▲   ▲                │   ▲                    │    ▲
     │ input              ▼   │ input              ▼    │ token and mask
    parked ◀──preempt── stalled                   awaiting

An input is an image that has not arrived, or a token mask that the next sample needs. Not drawn: a
preempted sequence of any other queue waits again, a waiting sequence without anything to compute is
parked, and a sequence can finish in every queue.

- *stalled*: the sequence has computed its tokens up to the missing input, except a few that would
  not be worth a step. It keeps row and blocks until another sequence needs them.
- *parked*: the sequence has neither row nor blocks, and nothing worth computing before its input
  arrives. The few tokens before an image would cost a step of their own and save almost nothing.
- *awaiting*: the sequence has token masks. It is planned again once its last token and the next
  token's mask have arrived. Sequences without masks never await: they are *decoding* and planned in
  every step. With `late_masks`, sequences with masks are decoding, too, because a mask may arrive
  while its step is computed. If the mask comes too late, the sequence gets no token from that step
  and awaits.

A step may yield up to `max_tokens_per_step` tokens for a sequence. If that is more than one, only
the device knows how many tokens a row has until their ids arrive.
The plan therefore uses upper bounds: a sequence has blocks for all tokens that its steps in flight
may yield, and `num_computed_tokens` is corrected when fewer tokens come. A sequence is not planned
while its last token may be in flight.

Any running sequence can be preempted. The sequence loses its blocks and computes all tokens again.
Released images are requested again, unless the prefix cache covers their tokens.
"""

import numpy as np
import numpy.typing as npt

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.decoder.engine.messages import EngineInfo, ImagesOf
from services.decoder.engine.schedule.admission import latest
from services.decoder.engine.schedule.batch import Batch, Chunk
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.decodes import Decodes
from services.decoder.engine.schedule.prefills import Prefills
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.step_budget import StepBudget
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad


class Scheduler:
    """Plans steps from the two phases, and decides which sequence is preempted.

    Args:
        info: the engine's limits: rows, tokens of a step, tokens of a sequence.
        blocks: the KV blocks; only the scheduler and its phases allocate and free them.
        late_masks: True if a step may be planned before the masks for its samples have arrived.
        step_ms: milliseconds that a step may last; see `StepCost.bound`.
        step_cost: the model that predicts how long a step lasts.

    Attributes:
        prefills: the sequences whose prompts are not computed yet.
        decodes: the sequences whose prompts are computed.
        step: number of the last planned step.
        num_masked: number of unfinished sequences with token masks.
    """

    def __init__(
        self,
        info: EngineInfo,
        blocks: BlockManager,
        *,
        late_masks: bool,
        step_ms: float,
        step_cost: StepCost,
    ) -> None:
        self.blocks = blocks
        self.decodes = Decodes(info, blocks)
        self.prefills = Prefills(info, blocks, self.decodes)
        self.step = 0
        self._max_batched_tokens = info.max_batched_tokens
        self._max_model_len = info.max_model_len
        self._late_masks = late_masks and info.max_tokens_per_step == 1
        self._step_ms = step_ms
        self._cost = step_cost
        self._num_arrivals = 0
        self.num_masked = 0

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a row."""
        prefills = self.prefills
        return len(self.decodes) + len(prefills.prefilling) + len(prefills.stalled)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that hold no row."""
        return self.prefills.num_without_row

    @property
    def num_lacking_images(self) -> int:
        """Number of sequences without a row that wait for an image."""
        return len(self.prefills.parked_for_images)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self.prefills.num_preemptions

    @property
    def num_prefix_hit_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache so far."""
        return self.prefills.num_prefix_hit_tokens

    @property
    def has_work(self) -> bool:
        """True if a step could be planned now, or once the steps in flight have finished."""
        return bool(self.decodes.decoding or self.prefills.has_work or self.decodes.ready())

    @property
    def is_steady(self) -> bool:
        """True if the next step has only decodes whose tokens are on the device.

        A free block for each of them has to be left, so that the plan preempts nobody.
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
        self.num_masked += message.token_masks
        self.prefills.add(sequence)

    def image_ready(self, sequence: Sequence, key: bytes, arena_offset: int) -> None:
        """Notes where an image of the sequence is, which may let the sequence go on."""
        sequence.image_offsets[key] = arena_offset
        self.prefills.input_arrived(sequence)

    def mask_ready(self, sequence: Sequence, mask: npt.NDArray[np.int32]) -> None:
        """Takes the mask for the sequence's next token, which may let the sequence go on."""
        sequence.token_mask = mask
        self.prefills.input_arrived(sequence)

    def mask_missed(self, sequence: Sequence) -> None:
        """Notes that a launched step yields no token for the sequence, whose mask came too late."""
        self.decodes.await_mask(sequence)

    def finish(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Ends a sequence in any state; its row and its blocks are free when this returns.

        A step in flight may still write to the blocks. This is harmless: the next owner uses them
        in later steps, and the device runs steps in order.

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
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Batch:
        """Plans one step: decodes first, then prompts in the time that is left."""
        self.step += 1
        if self.prefills.waiting.may_preempt:
            self._yield_rows()
        self._extend_decodes()
        chunks = self.decodes.plan()
        num_tokens = sum([chunk.limit for chunk in chunks])
        batch = Batch(chunks, num_tokens, self.prefills.admitted, self.decodes.extended)
        if self.prefills.prefilling or len(self.prefills.waiting):
            batch.load = self._plan_prompts(chunks, num_tokens)
            batch.num_tokens = batch.load.tokens
        if self.num_masked:
            batch.late = [c for c in chunks if c.from_device and c.sequence.message.token_masks]
            for chunk in batch.late:
                chunk.is_late = True
        if chunks:  # else the next step that is launched has to send them
            self.prefills.admitted, self.decodes.extended = [], []
        return batch

    def take_wanted_images(self) -> list[ImagesOf]:
        """Returns the released images that sequences have to read again, since the last call."""
        wanted: list[ImagesOf] = []
        for sequence in self.prefills.lacking_images:
            if sequence.images_read:
                wanted.append(ImagesOf(sequence.sequence_id, sequence.images_read))
                sequence.images_read = []
        self.prefills.lacking_images = []
        return wanted

    def roll_back(self, batch: Batch) -> None:
        """Reverts a batch that was not launched.

        The sequences keep their rows and blocks, so that the same decodes can be planned again. The
        next step sends whole block tables of sequences whose changes this batch would have sent.
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
        """Reverts a batch whose launch has failed.

        Its sequences begin again, because their rows on the device are undefined.
        """
        self.roll_back(batch)
        for chunk in batch.chunks:
            self.blocks.states.abandon(chunk.checkpoints)
            self._preempt(chunk.sequence)

    def _plan_prompts(self, chunks: list[Chunk], num_tokens: int) -> StepLoad:
        """Appends chunks of prompts to the decodes, and returns the work of the whole step."""
        # A decode attends to the keys before its token and to the token's own.
        keys = sum([chunk.start + 1 for chunk in chunks])
        load = StepLoad(len(chunks), num_tokens, keys=keys)
        num_prompts = len(self.prefills.prefilling) + len(self.prefills.waiting)
        budget = StepBudget(
            self._cost,
            load,
            step_ms=self._step_ms,
            max_tokens=self._max_batched_tokens,
            alone=not chunks and num_prompts == 1,
        )
        chunks += self.prefills.plan(budget, self.step)
        return load

    def _extend_decodes(self) -> None:
        """Gives decodes the blocks of their next step, and preempts while too few are free."""
        if not (lacking := self.decodes.lacking_blocks()):
            return
        num_lacking = self.decodes.num_lacking_blocks
        while sum([num_lacking(sequence) for sequence in lacking]) > self.blocks.num_free:
            self._preempt(self._victim())
            lacking = [s for s in lacking if s.state is SequenceState.RUNNING]
        self.decodes.append_blocks(lacking)

    def _victim(self) -> Sequence:
        """Returns the sequence to preempt next.

        It is the stalled sequence that was admitted last. If none is stalled, `Admission` chooses.
        """
        if self.prefills.stalled:
            return max(self.prefills.stalled.values(), key=latest)
        return self.prefills.waiting.victim(self.running())

    def _yield_rows(self) -> None:
        """Preempts sequences of tenants with many rows until the head of the queue fits.

        A head with tokens in flight cannot be admitted, so nothing is preempted for it.
        """
        prefills = self.prefills
        running = self.running()
        while (head := prefills.waiting.head()) is not None and not head.num_in_flight:
            victim = prefills.waiting.yielding(head, running)
            if victim is None:
                return
            prefix = self.blocks.find_prefix(head)
            if prefills.parks(head, prefix):
                continue  # the queue has another head
            if prefills.fits(head, prefix, prefills.watermark):
                return
            self._preempt(victim)
            running.remove(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes back the row and the blocks of a running sequence, which waits again."""
        self.decodes.remove(sequence)
        self.prefills.preempt(sequence)
