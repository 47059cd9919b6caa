"""The prefill phase: sequences from their arrival to their last prompt token. Pure Python."""

from collections.abc import Iterator

from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.schedule.admission import Admission, latest
from services.decoder.engine.schedule.batch import Chunk
from services.decoder.engine.schedule.block_manager import BlockManager
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
        waiting: sequences without a row, in the order in which they are admitted.
        parked_for_images: sequences by id without a row, which wait for an image.
        parked_for_masks: sequences by id without a row, which wait for a token mask.
        prefilling: sequences by id with a row and tokens to compute, in order of admission.
        stalled: sequences by id with a row, whose next tokens wait for an image or a mask.
        admitted: sequences that got a row since the last step that was launched.
        lacking_images: sequences that were parked or stalled since the scheduler last asked.
        num_preemptions: number of preemptions so far.
        num_prefix_hit_tokens: number of prompt tokens found in the prefix cache so far.
        min_partial_tokens: smallest number of tokens of a chunk that ends before a missing image.
            Below 512 a step's time is dominated by kernel launches and weight reads, so that a
            smaller chunk saves nothing.
    """

    def __init__(self, info: EngineInfo, blocks: BlockManager, decodes: Decodes) -> None:
        self._blocks = blocks
        self._decodes = decodes
        # Blocks that admissions leave free, so that running sequences are not preempted at once.
        self.watermark = blocks.num_blocks // 100
        self.min_partial_tokens = 512
        self.waiting = Admission(info.max_num_sequences)
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
        # `_fitting_state` of the head that last did not fit. The head is tried again if it changes.
        self._refused = (-1, 0, 0)

    @property
    def num_without_row(self) -> int:
        """Number of sequences that hold no row."""
        return len(self.waiting) + len(self.parked_for_images) + len(self.parked_for_masks)

    @property
    def has_work(self) -> bool:
        """True if a chunk could be planned before another message or token arrives."""
        head = self.waiting.head()
        return bool(self.prefilling) or (head is not None and not self._is_blocked(head))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that has neither row nor blocks."""
        self.waiting.wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence without a row out of its queue."""
        if not self._unpark(sequence):
            self.waiting.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes back the row and the blocks of a sequence, which leaves this phase's queues."""
        self.prefilling.pop(sequence.sequence_id, None)
        self.stalled.pop(sequence.sequence_id, None)
        self._blocks.free(sequence)
        self.waiting.release_row(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes back the row and the blocks of a sequence, which computes all its tokens again.

        The full blocks stay in the prefix cache. A sequence of the decode phase has to be removed
        from there first.
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
        """Lets a sequence be planned again whose image or mask has arrived."""
        number = sequence.sequence_id
        if self._unpark(sequence):
            self.add(sequence)
        elif number in self.stalled:
            start = sequence.num_computed_tokens
            if self._chunk_end(sequence, start) > start:
                self.prefilling[number] = self.stalled.pop(number)

    def plan(self, budget: StepBudget, step: int) -> list[Chunk]:
        """Returns chunks of prompts, in order, as far as the budget goes.

        The first prompt that is too long for a whole step is planned last. Half of the budget is
        withheld for it, and it also gets what the prompts behind it leave of the other half.

        Args:
            budget: time and tokens of the step that prompts may use.
            step: number of the step.
        """
        self._step = step
        chunks: list[Chunk] = []
        long: Sequence | None = None
        prompts = self._prompts()
        while not budget.is_spent and (sequence := next(prompts, None)) is not None:
            start = sequence.num_computed_tokens
            if long is None and budget.exceeds_step(self._chunk_end(sequence, start) - start):
                long = sequence
                budget.reserve_half()
            elif budget.fitting_tokens(start):  # a later prompt, with fewer keys, may still fit
                chunks += self._advance(sequence, budget)
        if long is not None:
            budget.release_half()
            chunks += self._advance(long, budget)
        return chunks

    def parks(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Parks a waiting sequence that has nothing worth computing behind its cached prefix.

        Returns whether the sequence was parked.
        """
        computed = len(prefix) * self._blocks.block_size
        if self._chunk_end(sequence, computed) > computed:
            return False
        self.waiting.remove(sequence)
        self._park(sequence, computed)
        self.lacking_images.append(sequence)
        return True

    def fits(self, sequence: Sequence, prefix: list[int], keep_free: int) -> bool:
        """Returns whether there is a row, and blocks with `keep_free` of them left over."""
        num_tokens = len(sequence.token_ids)
        return self.waiting.has_free_row and self._blocks.can_allocate(
            num_tokens, prefix, keep_free
        )

    def _prompts(self) -> Iterator[Sequence]:
        """Yields prefilling and waiting sequences in fair order.

        A waiting sequence is admitted when its turn comes, as far as rows and blocks go.
        """
        for sequence in self.waiting.ordered(self.prefilling.values()):
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
        """Returns the next chunk of a sequence, if any, and moves the sequence to its queue."""
        start = sequence.num_computed_tokens
        end = min(self._chunk_end(sequence, start), start + budget.fitting_tokens(start))
        # Admitted sequences read checkpoints in this step, whose slots must not be given away.
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
        budget.spend(start, length)
        return [Chunk(sequence, start, length, False, samples, checkpoints=checkpoints)]

    def _try_admit(self) -> Sequence | None:
        """Gives the head of the queue a row and blocks. Returns None if the head has to wait."""
        while (head := self.waiting.head()) is not None:
            # A preempted sequence whose last token has not arrived has to wait for the token.
            if head.num_in_flight or self._is_blocked(head):
                return None
            prefix = self._blocks.find_prefix(head)
            if self.parks(head, prefix):
                continue
            others = len(self._decodes) or self.prefilling
            if self.fits(head, prefix, self.watermark if others else 0):
                self._admit(head, prefix)
                return head
            # A sequence that stalled in this step is part of its batch.
            victims = [s for s in self.stalled.values() if s.last_prefill_step != self._step]
            if not victims:
                if self.waiting.has_free_row:
                    self._refused = self._fitting_state(head)
                return None
            self.preempt(max(victims, key=latest))
        return None

    def _is_blocked(self, head: Sequence) -> bool:
        """Returns whether the head cannot be admitted before a message or a token arrives."""
        if self.stalled:
            return False  # a stalled sequence can be preempted
        return not self.waiting.has_free_row or self._refused == self._fitting_state(head)

    def _fitting_state(self, head: Sequence) -> tuple[int, int, int]:
        """Returns all that decides whether the blocks of the head fit.

        The longest prefix of any sequence stays the same while no block is registered.
        """
        return head.sequence_id, self._blocks.num_free, self._blocks.num_registrations

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        self._blocks.allocate(sequence, len(sequence.token_ids), prefix)
        computed = sequence.num_computed_tokens = len(prefix) * self._blocks.block_size
        self._blocks.states.admitted(sequence)
        if sequence.admission == 0:
            # A sequence that another decoder began may find completion tokens in the cache, too.
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
        """Returns whether the sequence was parked."""
        parked = self.parked_for_images, self.parked_for_masks
        return any(queue.pop(sequence.sequence_id, None) for queue in parked)

    def _chunk_end(self, sequence: Sequence, start: int) -> int:
        """Returns the latest end of a chunk from `start` on, before the first missing input.

        Returns `start` if the chunk would be too short to be worth a step.
        """
        end = sequence.num_ready_tokens(start)
        if end == len(sequence.token_ids):
            return end
        end = self._blocks.states.boundary(end)
        return end if end - start >= self.min_partial_tokens else start
