"""The prefill phase: sequences from their arrival to the last token of their prompt. Pure Python.

`scheduler` describes the queues. A preempted sequence comes back to this phase, where its
completion tokens so far are computed like tokens of its prompt.
"""

from collections.abc import Iterator
from itertools import chain, takewhile

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.schedule.admission import Admission, latest
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.chunk import Chunk
from services.decoder.engine.schedule.decodes import Decodes
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.step_budget import StepBudget


class Prefills:
    """Owner of the queues of sequences whose prompts are not computed yet.

    Args:
        info: the engine's limits.
        blocks: the KV blocks, which are allocated when a sequence is admitted.
        decodes: the next phase, which takes each sequence whose last prompt token is planned.

    Attributes:
        waiting: sequences without a row, in the order in which they will be admitted.
        parked_for_images: sequences without a row that wait for an image, by id.
        parked_for_masks: sequences without a row that wait for a token mask, by id.
        prefilling: sequences with a row and tokens to compute, by id, in order of admission.
        stalled: sequences with a row whose next tokens need an image or a token mask that has not
            arrived, by id.
        admitted: sequences that were given a row since the last launched step. The runner has to
            be told about them with the next step.
        lacking_images: sequences that have begun to wait for images or token masks since
            `Scheduler.take_wanted_images` was last called. Their images may have been released and
            have to be obtained again.
        num_preemptions: number of preemptions so far.
        num_prefix_hit_tokens: number of prompt tokens found in the prefix cache so far.
        min_partial_tokens: if an image or a token mask is missing, the tokens before its place are
            computed only if they are at least this many. Otherwise they are computed with those
            after them, because a step with few tokens takes hardly less time than with 512.
    """

    def __init__(self, info: EngineInfo, blocks: BlockManager, decodes: Decodes) -> None:
        self._blocks = blocks
        self._decodes, self._background = decodes, decodes.background
        # Number of blocks that stay free when a sequence is admitted, because running sequences
        # will soon need further blocks and would otherwise be preempted at once.
        self.watermark = blocks.num_blocks // 100
        self.min_partial_tokens = 512
        is_search = info.task != "generate"
        self.waiting = Admission(info.max_num_sequences, fair=is_search)
        # A chat model's prompts share blocks from the next step on: a layer for drafts would have
        # to compute its own keys for the shared tokens first.
        self._shares_in_step = is_search
        self.parked_for_images: dict[int, Sequence] = {}
        self.parked_for_masks: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.stalled: dict[int, Sequence] = {}
        self.admitted: list[Sequence] = []
        self.lacking_images: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._num_admissions = 0
        self._step = 0
        # The value of `_fitting_state` at the last time that the first waiting sequence did not
        # fit. The sequence is tried again only when this value has changed.
        self._refused = (-1, 0, 0)

    @property
    def num_without_row(self) -> int:
        """Number of sequences that hold no row."""
        return len(self.waiting) + len(self.parked_for_images) + len(self.parked_for_masks)

    @property
    def has_work(self) -> bool:
        """True if a chunk can be planned even if no further message or token arrives."""
        head = self.waiting.head()
        return bool(self.prefilling) or (head is not None and not self._is_blocked(head))

    def has_more_than(self, num_tokens: int) -> bool:
        """Returns whether more than `num_tokens` tokens of prompts are left to compute.

        Prompts in the background do not count, nor do those that wait for an image or a token mask.
        Tokens of a waiting prompt count even if they are in the prefix cache.
        """
        for sequence in chain(self.prefilling.values(), self.waiting):
            if not sequence.message.background:
                num_tokens -= len(sequence.token_ids) - sequence.num_computed_tokens
                if num_tokens < 0:
                    return True
        return False

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that has neither row nor blocks."""
        self.waiting.wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence without a row out of its queue."""
        if not self._unpark(sequence):
            self.waiting.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes the row and the blocks from a sequence, and takes it out of this phase's queues."""
        self.prefilling.pop(sequence.sequence_id, None)
        self.stalled.pop(sequence.sequence_id, None)
        self._blocks.free(sequence)
        self.waiting.release_row(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the row and the blocks from a sequence, which waits again. It will compute its
        tokens again, except those whose blocks it still finds in the prefix cache then. A sequence
        of the decode phase has to be removed there first.
        """
        stalled = sequence.sequence_id in self.stalled
        self._blocks.register(sequence)
        self.release(sequence)
        computed, sequence.num_computed_tokens = sequence.num_computed_tokens, 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        if stalled:
            self._park(sequence, computed)
        else:
            self.add(sequence)

    def input_arrived(self, sequence: Sequence) -> None:
        """Makes a sequence plannable again after an image or a mask has arrived. A parked sequence
        becomes waiting. A stalled sequence becomes prefilling, if further tokens can be computed.
        """
        number = sequence.sequence_id
        if self._unpark(sequence):
            self.add(sequence)
        elif number in self.stalled:
            start = sequence.num_computed_tokens
            if self._chunk_end(sequence, start) > start:
                self.prefilling[number] = self.stalled.pop(number)

    def plan(self, budget: StepBudget, step: int) -> list[Chunk]:
        """Returns the step's chunks of prompts, as many as the budget allows.

        A prompt is long if its tokens do not fit into a whole step (`StepBudget`). Shorter prompts
        after the first long prompt would otherwise wait for it. Therefore they get one half of the
        budget, and the long prompt gets the other half and what they have not used. A second long
        prompt waits if it needs at least as many tokens as the first, because attention of two
        small chunks leaves SMs idle. The prompts after the second one then wait, too. Prompts of
        overdue requests get up to half of the budget before all of them.

        Args:
            budget: time and tokens of the step that prompts may use.
            step: number of the step.
        """
        self._step = step
        chunks: list[Chunk] = []
        overdue = self._plan_overdue(budget, chunks) if self.waiting.has_overdue else None
        long = overdue
        prompts: Iterator[Sequence] = self._prompts()
        while True:
            while not budget.is_spent and (sequence := next(prompts, None)) is not None:
                start = sequence.num_computed_tokens
                # An overdue prompt may have a chunk already, which ends before its prompt does.
                if sequence is long or sequence.last_prefill_step == step:
                    continue
                length = self._chunk_end(sequence, start) - start
                if long is None and budget.exceeds_step(length):
                    long = sequence
                    budget.reserve_half()
                elif long is not None and self._waits_for(long, length, budget):
                    prompts = chain((sequence,), prompts)
                    break
                # If not even one token fits, a later prompt may still fit, because its next tokens
                # may attend to fewer keys.
                elif budget.fitting_tokens(start, length):
                    chunks += self._advance(sequence, budget)
            if long is None or long.last_prefill_step == step:
                return chunks
            budget.release_half()
            chunks += self._advance(long, budget)
            if long is not overdue:  # Otherwise, it may need less than the other half.
                return chunks

    def _waits_for(self, long: Sequence, length: int, budget: StepBudget) -> bool:
        """Returns whether a prompt with `length` tokens left waits until `long` is computed."""
        start = long.num_computed_tokens
        return (
            long.last_prefill_step != self._step
            and budget.exceeds_step(length)
            and length >= self._chunk_end(long, start) - start
        )

    def _plan_overdue(self, budget: StepBudget, chunks: list[Chunk]) -> Sequence | None:
        """Appends chunks of overdue requests (`fair_queue`) for at most half of the budget. Returns
        the first prompt that does not fit, which counts as long.
        """
        long: Sequence | None = None
        self.waiting.prefers_overdue = True
        budget.reserve_half()
        for sequence in takewhile(self.waiting.is_overdue, self._prompts()):
            start = sequence.num_computed_tokens
            length = self._chunk_end(sequence, start) - start
            if length > budget.fitting_tokens(start, length):
                long = sequence
                break
            chunks += self._advance(sequence, budget)
        self.waiting.prefers_overdue = False
        if long is None:
            budget.release_half()
        else:
            budget.reserve_half()  # of what is left, for the prompts after it
        return long

    def try_park(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Parks a waiting sequence if no chunk can be planned after its cached `prefix`, because
        of a missing input. Returns whether the sequence was parked.
        """
        computed = len(prefix) * self._blocks.block_size
        if self._chunk_end(sequence, computed) > computed:
            return False
        self.waiting.remove(sequence)
        self._park(sequence, computed)
        self.lacking_images.append(sequence)
        return True

    def fits(self, sequence: Sequence, prefix: list[int], keep_free: int) -> bool:
        """Returns whether there are a free row and enough free blocks for a sequence. At least
        `keep_free` blocks must then stay free.
        """
        num_tokens = len(sequence.token_ids)
        return self.waiting.has_free_row and self._blocks.can_allocate(
            num_tokens, prefix, keep_free
        )

    def _prompts(self) -> Iterator[Sequence]:
        """Yields prefilling and waiting sequences in the order in which the step computes them,
        which is fair among tenants (`Admission`). Waiting sequences are admitted before they are
        yielded. The first that cannot be admitted stops the admission of all after it.
        """
        for sequence in self.waiting.ordered(self.prefilling.values()):
            if self._background.leaves_out(sequence):
                break  # All after it are in the background, too.
            while (head := self.waiting.head()) is not None and self.waiting.precedes(
                head, sequence
            ):
                if (admitted := self._try_admit()) is None:
                    break
                yield admitted
            yield sequence
        while (admitted := self._try_admit()) is not None:
            yield admitted

    def _advance(self, sequence: Sequence, budget: StepBudget) -> list[Chunk]:
        """Returns the next chunk of a sequence, or no chunk, and moves the sequence to the queue
        where it belongs then.
        """
        start = sequence.num_computed_tokens
        left = self._chunk_end(sequence, start) - start
        end = start + min(left, budget.fitting_tokens(start, left))
        # The step may save recurrent states, and `states.plan` chooses their slots. The slots from
        # which sequences in `admitted` start in this step must not be overwritten.
        end, checkpoints = self._blocks.states.plan(sequence, start, end, self.admitted)
        length = end - start
        samples = end == len(sequence.token_ids)
        sequence.num_computed_tokens = end
        sequence.last_prefill_step = self._step
        if samples:
            sequence.num_in_flight += 1
            del self.prefilling[sequence.sequence_id]
            self._decodes.add(sequence)
        elif self._chunk_end(sequence, end) == end:
            self.stalled[sequence.sequence_id] = self.prefilling.pop(sequence.sequence_id)
            self.lacking_images.append(sequence)
        if not length:
            return []
        # A chunk of one token may be computed by a kernel that stores its key while others attend.
        if self._shares_in_step and length > 1:
            self._blocks.register(sequence)
        budget.spend(start, length)
        self.waiting.planned(sequence, length)
        return [Chunk(sequence, start, length, False, samples, checkpoints=checkpoints)]

    def _try_admit(self) -> Sequence | None:
        """Admits and returns the first waiting sequence (the head). Returns None if no sequence
        waits, or if the head cannot be admitted now.
        """
        while (head := self.waiting.head()) is not None:
            # If the head was preempted while a token of it was in flight, that token has to arrive
            # before the head is admitted.
            if head.num_in_flight or self._background.leaves_out(head) or self._is_blocked(head):
                return None
            prefix = self._blocks.find_prefix(head)
            if self.try_park(head, prefix):
                continue
            others = len(self._decodes) or self.prefilling
            if self.fits(head, prefix, self.watermark if others else 0):
                self._admit(head, prefix)
                return head
            # A stalled sequence may be preempted if this step has no chunk of it. Background work
            # preempts only background work.
            stalled = [s for s in self.stalled.values() if s.last_prefill_step != self._step]
            victims = [s for s in stalled if s.message.background >= head.message.background]
            if not victims:
                if self.waiting.has_free_row:
                    self._refused = self._fitting_state(head)
                return None
            self.preempt(max(victims, key=latest))
        return None

    def _is_blocked(self, head: Sequence) -> bool:
        """Returns whether the head certainly cannot be admitted now."""
        if any([s.message.background >= head.message.background for s in self.stalled.values()]):
            return False  # A stalled sequence can be preempted for it.
        return not self.waiting.has_free_row or self._refused == self._fitting_state(head)

    def _fitting_state(self, head: Sequence) -> tuple[int, int, int]:
        """Returns the values that decide whether the blocks of the head fit: the head, the number
        of free blocks, and the number of registrations, because a newly registered block may
        make the head's cached prefix longer.
        """
        return head.sequence_id, self._blocks.num_free, self._blocks.num_registrations

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        computed = sequence.num_computed_tokens = len(prefix) * self._blocks.block_size
        self._blocks.states.admitted(sequence)  # before blocks are taken, which may evict states
        self._blocks.allocate(sequence, len(sequence.token_ids), prefix)
        if sequence.admission == 0:
            # If another decoder has begun the answer, completion tokens may be cached, too. They do
            # not count as cached prompt tokens.
            sequence.num_cached_tokens = min(computed, sequence.num_prompt_tokens)
            self.num_prefix_hit_tokens += sequence.num_cached_tokens
        self._num_admissions += 1
        sequence.admission = self._num_admissions
        sequence.state = SequenceState.RUNNING
        self.waiting.admit(sequence)
        self.prefilling[sequence.sequence_id] = sequence
        self.admitted.append(sequence)

    def _park(self, sequence: Sequence, computed: int) -> None:
        lacks_image = sequence.missing_image(computed) is not None
        parked = self.parked_for_images if lacks_image else self.parked_for_masks
        parked[sequence.sequence_id] = sequence

    def _unpark(self, sequence: Sequence) -> bool:
        """Takes a sequence out of the parked sequences. Returns False if it was not parked."""
        parked = self.parked_for_images, self.parked_for_masks
        return any(queue.pop(sequence.sequence_id, None) for queue in parked)

    def _chunk_end(self, sequence: Sequence, start: int) -> int:
        """Returns the end of the longest chunk that begins at `start` and needs no missing input.
        Returns `start` if the chunk would be so short that it is not worth a step.
        """
        end = sequence.num_ready_tokens(start)
        if end == len(sequence.token_ids):
            return end
        end = self._blocks.states.boundary(end)
        return end if end - start >= self.min_partial_tokens else start
