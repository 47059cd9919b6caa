"""The scheduler: which tokens of which sequences a step computes. Pure Python.

A step computes the next token of every decoding sequence, then prompts, in chunks, as far as its
time goes (see step_cost.py). Scheduling runs one step ahead of sampling (see step.py): it needs the
number of tokens, not their ids. Stop ids are found when the ids arrive.

    waiting ──admit──▶ prefilling ──last token──▶ decoding ──▶ finished
     ▲   ▲                │   ▲                    │    ▲
     │ input              ▼   │ input              ▼    │ token and mask
    parked ◀──preempt── stalled                   awaiting

Inputs that a sequence may have to wait for are its images and, to sample, its token mask.

Stalled: the sequence has computed all tokens before a missing input that are worth a step. It keeps
its row and its blocks until another sequence needs them.
Parked: the sequence has neither row nor blocks, and nothing worth computing before its input
arrives. The few tokens before an image would cost a step of their own and save almost nothing.
Awaiting: a sequence that does not plan ahead is not planned again before its last token has
arrived, and its mask if it needs one. The others are planned every step meanwhile. With
`late_masks`, a sequence with masks is planned ahead, too: its mask arrives while the step is
computed; if not, it loses that step's token and awaits.

Where a step may yield up to k tokens, the device alone knows a row's length until the ids arrive.
The plan goes by upper bounds: a sequence has blocks for all that its steps in flight may yield, and
`num_computed_tokens` is corrected when less came. A sequence that may have reached its last token
is not planned before that is known.

Any running sequence can be preempted: it loses its blocks and computes all its tokens again. Images
that were released after they were read are requested again unless the prefix cache holds them.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.decoder.engine.messages import EngineInfo, ImagesOf
from services.decoder.engine.schedule.admission import Admission, latest
from services.decoder.engine.schedule.batch import Batch, Chunk
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.step_cost import Limit, StepCost, StepLoad

# The step of a lone prompt delays only what arrives meanwhile.
_ALONE = 4  # times as long


class CannotSchedule(ValueError):
    """The sequence can never run on this engine; the message says why."""


class Scheduler:
    """Owner of the queues and the rows.

    Args:
        info: how many rows there are, one for each running sequence, and how many tokens a step and
            a sequence may have.
        blocks: the KV blocks; no other object allocates or frees them.
        late_masks: steps may be planned before the masks for their samples are there.
        step_ms: bound of a step, see `StepCost.bound`; prompts are cut to fit, to
            `StepCost.min_chunk` tokens at least. The step of a prompt that is alone may last four
            times as long.
        step_cost: how long a step lasts.

    Attributes:
        min_partial_tokens: a chunk that ends before a missing image has at least as many tokens.
            Below 512 a step's time is dominated by kernel launches and weight reads, so that a
            smaller chunk saves nothing.
    """

    min_partial_tokens = 512

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
        self._max_batched_tokens = info.max_batched_tokens
        self._max_model_len = info.max_model_len
        self._max_tokens_per_step = info.max_tokens_per_step
        self._late_masks = late_masks and info.max_tokens_per_step == 1
        self._num_masked = 0  # sequences with token masks
        self._step_ms = step_ms
        self._cost = step_cost
        self.num_preemptions = self.num_prefix_hit_tokens = 0
        self._rows = list(range(info.max_num_sequences - 1, -1, -1))
        # Blocks that admissions leave free, so that running sequences are not preempted at once.
        self._watermark = blocks.num_blocks // 100
        self._waiting = Admission()
        self._parked_for_images: dict[int, Sequence] = {}
        self._parked_for_masks: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}  # in order of admission
        self._stalled: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}  # planned ahead
        self._awaiting: dict[int, Sequence] = {}  # decoding, not planned ahead
        self._running = self._decoding, self._awaiting, self._prefilling, self._stalled
        # Since the last step that was launched, see Batch.
        self._admitted: list[Sequence] = []
        self._extended: list[Sequence] = []
        self._lacking_images: list[Sequence] = []
        self.step = self._arrivals = self._admissions = 0
        # The head of the queue when it last did not fit, and what its blocks depended on then.
        self._blocked: tuple[int, int, int] = (-1, 0, 0)
        # The head of the queue cannot be admitted before a message or a token arrives.
        self._admission_blocked = False

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return sum([len(group) for group in self._running])

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no row."""
        return len(self._waiting) + len(self._parked_for_images) + len(self._parked_for_masks)

    @property
    def num_lacking_images(self) -> int:
        """Sequences without a row that wait for an image, not for a mask, rows or blocks."""
        return len(self._parked_for_images)

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned now, or may be when those in flight have finished."""
        waiting = len(self._waiting) and not self._admission_blocked
        return bool(self._decoding or self._prefilling or waiting or self._ready())

    @property
    def is_steady(self) -> bool:
        """Whether the next step has decodes alone, planned ahead, for which blocks are free."""
        others = self._prefilling or len(self._waiting) or self._ready()
        return not others and len(self._decoding) <= self.blocks.num_free

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            CannotSchedule: it does not fit even alone.
        """
        num_prompt, message = sequence.num_prompt_tokens, sequence.message
        if num_prompt == 0:
            raise CannotSchedule("the prompt is empty")
        if num_prompt >= self._max_model_len:
            raise CannotSchedule(
                f"the prompt has {num_prompt} tokens; prompt and completion may have "
                f"{self._max_model_len} together"
            )
        sequence.max_length = min(num_prompt + message.sampling.max_tokens, self._max_model_len)
        sequence.arrival = self._arrivals = self._arrivals + 1
        sequence.plans_ahead |= self._late_masks
        self._num_masked += message.token_masks
        self._wait(sequence)

    def image_ready(self, sequence: Sequence, key: bytes, arena_offset: int) -> None:
        """Notes where an image of the sequence is; the sequence may be planned again."""
        sequence.image_offsets[key] = arena_offset
        self._input_arrived(sequence)

    def mask_ready(self, sequence: Sequence, mask: npt.NDArray[np.int32]) -> None:
        """Takes the mask for the sequence's next token; the sequence may be planned again."""
        sequence.token_mask = mask
        self._input_arrived(sequence)

    def mask_missed(self, sequence: Sequence) -> None:
        """The mask of a step that was launched did not arrive in time: the step yields nothing for
        the sequence, which is planned again when its mask is there.
        """
        self._awaiting[sequence.sequence_id] = self._decoding.pop(sequence.sequence_id)

    def finish(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Ends a sequence in any state; its row and its blocks are free when this returns.

        A step in flight may still write to them, which is harmless: their next owner uses them in
        later steps, and the device runs steps in order.

        Args:
            sequence: not finished yet.
            poisoned: what it computed is wrong and must not be found in the prefix cache.
        """
        if poisoned:
            self.blocks.invalidate(sequence)
        else:
            self.blocks.register(sequence)
        self._leave(sequence)
        self._num_masked -= sequence.message.token_masks
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> Batch:
        """Plans one step."""
        self.step += 1
        if self._waiting.may_preempt:
            self._make_room()
        chunks, num_tokens = self._decode_chunks()
        batch = Batch(chunks, num_tokens, self._admitted, self._extended)
        if self._prefilling or len(self._waiting):
            keys = sum([chunk.start + 1 for chunk in chunks])
            batch.load = StepLoad(len(chunks), num_tokens, keys=keys)
            self._fill(chunks, batch.load)
            batch.num_tokens = batch.load.tokens
        if self._num_masked:
            batch.late = [c for c in chunks if c.from_device and c.sequence.message.token_masks]
            for chunk in batch.late:
                chunk.is_late = True
        if chunks:
            self._admitted, self._extended = [], []
        return batch

    def take_wanted_images(self) -> list[ImagesOf]:
        """Released images that sequences have to read again, since the last call."""
        wanted: list[ImagesOf] = []
        for sequence in self._lacking_images:
            if sequence.images_read:
                wanted.append(ImagesOf(sequence.sequence_id, sequence.images_read))
                sequence.images_read = []
        self._lacking_images = []
        return wanted

    def roll_back(self, batch: Batch) -> None:
        """Reverts a batch that was not launched. One of decodes from the device alone is scheduled
        again as it was.
        """
        for chunk in batch.chunks:
            chunk.sequence.num_computed_tokens = chunk.start
            if chunk.samples:
                chunk.sequence.num_in_flight -= 1
        for sequence in (*batch.admitted, *batch.extended):
            sequence.num_sent_blocks = 0
        self._admitted = batch.admitted + self._admitted
        self._extended = batch.extended + self._extended

    def abandon(self, batch: Batch) -> None:
        """Reverts a batch whose launch has failed: its sequences begin again, because their rows
        on the device are undefined.
        """
        self.roll_back(batch)
        for chunk in batch.chunks:
            self.blocks.states.abandon(chunk.checkpoints)
            self._preempt(chunk.sequence)

    # Decoding.

    def _decode_chunks(self) -> tuple[list[Chunk], int]:
        """One chunk for each decoding sequence that can be planned, and the most tokens that they
        compute together.
        """
        # All their tokens but the last are computed: without those whose last one may be in flight.
        decoding = [s for s in self._decoding.values() if s.num_computed_tokens + 1 < s.max_length]
        most = self._max_tokens_per_step
        lacking = [s for s in decoding if s.num_computed_tokens + most > s.capacity]
        if most > 1:
            lacking = [s for s in lacking if self._num_lacking_blocks(s)]
        known = self._ready()
        lacking += [s for s in known if self._num_lacking_blocks(s)]
        if lacking:
            self._append_blocks(lacking)
            decoding = [s for s in decoding if s.state is SequenceState.RUNNING]
            known = [s for s in known if s.state is SequenceState.RUNNING]
        chunks: list[Chunk] = []
        num_tokens = 0
        for sequence in decoding:
            start = sequence.num_computed_tokens
            limit = 1 if most == 1 else self._limit(sequence)
            sequence.num_computed_tokens = start + limit
            sequence.num_in_flight += 1
            chunks.append(Chunk(sequence, start, 1, True, True, limit))
            num_tokens += limit
        for sequence in known:
            start, limit = sequence.num_computed_tokens, self._limit(sequence)
            sequence.num_computed_tokens = start + limit
            sequence.num_in_flight += 1
            if sequence.plans_ahead:
                number = sequence.sequence_id
                self._decoding[number] = self._awaiting.pop(number)
            chunks.append(Chunk(sequence, start, 1, False, True, limit))
            num_tokens += limit
        return chunks, num_tokens

    def _ready(self) -> list[Sequence]:
        """Awaiting sequences whose last token has arrived, and the mask of the next."""
        return [s for s in self._awaiting.values() if not (s.num_in_flight or s.awaits_mask)]

    def _limit(self, sequence: Sequence) -> int:
        """The most tokens that the next step may yield for a decoding sequence."""
        if sequence.message.token_masks:
            return 1  # a mask is for one token
        room = sequence.max_length - 1 - sequence.num_computed_tokens
        return min(self._max_tokens_per_step, room)

    def _num_lacking_blocks(self, sequence: Sequence) -> int:
        """Blocks that a decoding sequence has to be given for its next step."""
        needed = sequence.num_computed_tokens + self._limit(sequence)
        return max(0, self.blocks.num_blocks_for(needed) - len(sequence.block_table))

    def _append_blocks(self, sequences: list[Sequence]) -> None:
        """Gives sequences the blocks they lack; preempts while too few are free."""
        while sum([self._num_lacking_blocks(s) for s in sequences]) > self.blocks.num_free:
            self._preempt(self._victim())
            sequences = [s for s in sequences if s.state is SequenceState.RUNNING]
        for sequence in sequences:
            for _ in range(self._num_lacking_blocks(sequence)):
                self.blocks.append_block(sequence)
        self._extended += sequences

    # Prompts.

    def _prompts(self) -> Iterator[Sequence]:
        """Prompts under way, and new ones while they can be admitted."""
        for sequence in self._waiting.ordered(self._prefilling.values()):
            while (head := self._waiting.head()) is not None and self._waiting.precedes(
                head, sequence
            ):
                if (admitted := self._try_admit()) is None:
                    break
                yield admitted
            yield sequence
        while (admitted := self._try_admit()) is not None:
            yield admitted

    def _fill(self, chunks: list[Chunk], load: StepLoad) -> None:
        """Adds chunks of prompts, in order, while the step has time.

        The first prompt that is too long for a whole step leaves half of it to those behind.
        """
        alone = not chunks and len(self._prefilling) + len(self._waiting) == 1
        factor = _ALONE if alone else 1
        least = min(self._max_batched_tokens, load.tokens + factor * self._cost.min_chunk)
        whole = Limit(factor * self._cost.bound(self._step_ms), self._max_batched_tokens, least)
        longest, long = self._cost.room(load, 0, whole), None
        if not alone:
            whole = whole._replace(tokens=min(whole.tokens, self._cost.efficient_tokens))
        limit = whole
        prompts = self._prompts()
        while self._cost.room(load, 0, limit) and (sequence := next(prompts, None)) is not None:
            start = sequence.num_computed_tokens
            if long is None and self._chunk_limit(sequence, start) - start > longest:
                long, limit = sequence, self._cost.half(load, whole)
            elif room := self._cost.room(load, start, limit):
                self._prefill(sequence, room, chunks, load)
        if long is not None:
            room = self._cost.room(load, long.num_computed_tokens, whole)
            self._prefill(long, room, chunks, load)

    def _prefill(self, sequence: Sequence, most: int, chunks: list[Chunk], load: StepLoad) -> None:
        """Appends the sequence's next chunk, of at most `most` tokens."""
        start = sequence.num_computed_tokens
        end = min(self._chunk_limit(sequence, start), start + most)
        end, checkpoints = self.blocks.states.plan(sequence, start, end, self._admitted)
        length = end - start
        samples = end == len(sequence.token_ids)
        sequence.num_computed_tokens = end
        sequence.last_prefill_step = self.step
        number = sequence.sequence_id
        if samples:
            sequence.num_in_flight += 1
            group = self._decoding if sequence.plans_ahead else self._awaiting
            group[number] = self._prefilling.pop(number)
        elif self._chunk_limit(sequence, end) == end:
            self._stalled[number] = self._prefilling.pop(number)
            self._admission_blocked = False
            self._lacking_images.append(sequence)
        if length:
            chunks.append(Chunk(sequence, start, length, False, samples, checkpoints=checkpoints))
            load.add_chunk(start, length)

    def _try_admit(self) -> Sequence | None:
        """Gives the head of the queue a row and blocks; None if it has to wait."""
        while (sequence := self._waiting.head()) is not None:
            if sequence.num_in_flight:
                return None  # preempted, and its last token has not arrived
            blocks = self.blocks
            now = (sequence.sequence_id, blocks.num_free, blocks.num_registrations)
            self._admission_blocked = not self._stalled and (not self._rows or self._blocked == now)
            if self._admission_blocked:
                return None
            prefix = self.blocks.find_prefix(sequence)
            if self._parks(sequence, prefix):
                continue
            others = self._decoding or self._awaiting or self._prefilling
            keep_free = self._watermark if others else 0
            fits = self.blocks.can_allocate(len(sequence.token_ids), prefix, keep_free)
            if fits and self._rows:
                self._admit(sequence, prefix)
                return sequence
            # A sequence that stalled in this step is part of its batch.
            victims = [s for s in self._stalled.values() if s.last_prefill_step != self.step]
            if not victims:
                if self._rows:  # it is blocks that it lacks
                    self._blocked = now
                self._admission_blocked = not self._stalled
                return None
            self._preempt(max(victims, key=latest))
        return None

    def _parks(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Takes a sequence out of the queue that has nothing worth computing behind its prefix."""
        computed = len(prefix) * self.blocks.block_size
        if self._chunk_limit(sequence, computed) > computed:
            return False
        self._waiting.remove(sequence)
        self._park(sequence, computed)
        self._lacking_images.append(sequence)
        return True

    def _park(self, sequence: Sequence, computed: int) -> None:
        lacks_image = sequence.missing_image(computed) is not None
        group = self._parked_for_images if lacks_image else self._parked_for_masks
        group[sequence.sequence_id] = sequence

    def _unpark(self, sequence: Sequence) -> bool:
        """Whether it was parked."""
        groups = self._parked_for_images, self._parked_for_masks
        return any(group.pop(sequence.sequence_id, None) for group in groups)

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.allocate(sequence, len(sequence.token_ids), prefix)
        computed = sequence.num_computed_tokens = len(prefix) * self.blocks.block_size
        self.blocks.states.admitted(sequence)
        if sequence.admission == 0:
            # Of a sequence that is continued, tokens of the completion may have been found, too.
            sequence.num_cached_tokens = min(computed, sequence.num_prompt_tokens)
            self.num_prefix_hit_tokens += sequence.num_cached_tokens
        self._admissions += 1
        sequence.admission = self._admissions
        sequence.state = SequenceState.RUNNING
        sequence.row = self._rows.pop()
        self._waiting.admitted(sequence)
        self._prefilling[sequence.sequence_id] = sequence
        self._admitted.append(sequence)

    def _input_arrived(self, sequence: Sequence) -> None:
        """Plans the sequence again if it waited for what arrived, and for nothing else."""
        number = sequence.sequence_id
        self._admission_blocked = False
        if self._unpark(sequence):
            self._wait(sequence)
        elif number in self._stalled:
            start = sequence.num_computed_tokens
            if self._chunk_limit(sequence, start) > start:
                self._prefilling[number] = self._stalled.pop(number)

    def _chunk_limit(self, sequence: Sequence, start: int) -> int:
        """The latest end of a chunk from `start` on; `start` if none is worth a step."""
        limit = sequence.num_ready_tokens(start)
        if limit == len(sequence.token_ids):
            return limit
        limit = self.blocks.states.boundary(limit)
        return limit if limit - start >= self.min_partial_tokens else start

    # Leaving.

    def _victim(self) -> Sequence:
        """The sequence to preempt next: a stalled one if there is any."""
        if self._stalled:
            return max(self._stalled.values(), key=latest)
        return self._waiting.victim(self._all_running())

    def _make_room(self) -> None:
        """Preempts sequences that must yield to the head of the queue, until it fits."""
        running = self._all_running()
        while (head := self._waiting.head()) is not None and not head.num_in_flight:
            victim = self._waiting.yielding(head, running)
            if victim is None:
                return
            prefix = self.blocks.find_prefix(head)
            if self._parks(head, prefix):
                continue
            if self._rows and self.blocks.can_allocate(
                len(head.token_ids), prefix, self._watermark
            ):
                return
            self._preempt(victim)
            running.remove(victim)

    def _all_running(self) -> list[Sequence]:
        return [s for group in self._running for s in group.values()]

    def _preempt(self, sequence: Sequence) -> None:
        stalled = sequence.sequence_id in self._stalled
        self.blocks.register(sequence)
        self._leave(sequence)
        computed, sequence.num_computed_tokens = sequence.num_computed_tokens, 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        if stalled:
            self._park(sequence, computed)
        else:
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        self._admission_blocked = False
        self._waiting.wait(sequence)

    def _leave(self, sequence: Sequence) -> None:
        number = sequence.sequence_id
        self._admission_blocked = False
        if sequence.state is SequenceState.WAITING:
            if not self._unpark(sequence):
                self._waiting.remove(sequence)
            return
        for group in self._running:
            group.pop(number, None)
        self.blocks.free(sequence)
        self._rows.append(sequence.row)
        self._waiting.released(sequence)
        sequence.row = -1
