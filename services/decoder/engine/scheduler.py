"""The scheduler: which tokens of which sequences a step computes. Pure Python.

A step has the decoding sequences' next token first, then prompts, in chunks, up to a budget of
tokens. Scheduling runs one step ahead of sampling (see batch.py), so whatever can be decided on
counts is decided here, and stop ids are found when they arrive.

    waiting ──admit──▶ prefilling ──last token──▶ decoding ──▶ finished
     ▲   ▲                │   ▲
     │ image              ▼   │ image
    parked ◀──preempt── stalled

A stalled sequence has computed what is worth computing before an image that is not there yet; it
keeps its row and its blocks until somebody who can run needs them. A parked one has neither, and
nothing it could compute: the few tokens that a chat has before its image would cost a step of their
own and spare the later one next to nothing, while the encoder wants the same device. Any running
sequence can be preempted: it loses its blocks and computes again, its completion so far included.
Images that it has read and let go are wanted once more if no prefix in the cache has them.
"""

from bisect import insort
from collections.abc import Iterator

from services.decoder.engine.batch import Batch, Chunk
from services.decoder.engine.block_manager import BlockManager
from services.decoder.engine.messages import ImagesOf
from services.decoder.engine.sequence import Sequence, SequenceState

# Fewer cost a step what its launches and the weights cost, whatever their number.
LEAST_PARTIAL_TOKENS = 512


class CannotSchedule(ValueError):
    """The sequence could never run here; the message says why."""


class Scheduler:
    """Owner of the queues and the rows.

    Args:
        blocks: the KV blocks; nobody else allocates or frees.
        max_num_sequences: rows, each held by one running sequence.
        max_batched_tokens: most tokens of a step, at least `max_num_sequences`.
        max_model_len: most tokens of a sequence, prompt and completion.
        least_partial_tokens: fewer tokens than that wait for the image behind them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_sequences: int,
        max_batched_tokens: int,
        max_model_len: int,
        least_partial_tokens: int = LEAST_PARTIAL_TOKENS,
    ) -> None:
        if max_batched_tokens < max_num_sequences:
            raise ValueError(
                f"max_batched_tokens ({max_batched_tokens}) is less than max_num_sequences "
                f"({max_num_sequences}): a step could not advance each sequence"
            )
        self.blocks = blocks
        self.max_batched_tokens = max_batched_tokens
        self.max_model_len = max_model_len
        self._least_partial_tokens = least_partial_tokens
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._rows = list(range(max_num_sequences - 1, -1, -1))
        # Blocks that admissions leave alone, so that those who run can grow for a while.
        self._watermark = blocks.num_blocks // 100
        self._waiting: list[Sequence] = []  # by arrival
        self._parked: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}  # in order of admission
        self._stalled: dict[int, Sequence] = {}
        self._decoding: dict[int, Sequence] = {}
        self._admitted: list[Sequence] = []
        self._wanting: list[Sequence] = []
        self.step = 0
        self._arrivals = 0
        self._admissions = 0
        # The head of the queue when it did not fit last, and how many blocks were free then.
        self._blocked: tuple[int, int] = (-1, 0)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._decoding) + len(self._prefilling) + len(self._stalled)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not."""
        return len(self._waiting) + len(self._parked)

    @property
    def has_work(self) -> bool:
        """Whether anything could be computed now or when the steps in flight are done."""
        return bool(self._decoding or self._prefilling or self._waiting)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        groups = (self._decoding, self._prefilling, self._stalled, self._parked)
        return [s for group in groups for s in group.values()] + self._waiting

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            CannotSchedule: it would not fit even alone.
        """
        num_prompt = sequence.num_prompt_tokens
        if num_prompt == 0:
            raise CannotSchedule("the prompt is empty")
        if num_prompt >= self.max_model_len:
            raise CannotSchedule(
                f"the prompt has {num_prompt} tokens; prompt and completion may have "
                f"{self.max_model_len} together"
            )
        sequence.max_length = min(num_prompt + sequence.sampling.max_tokens, self.max_model_len)
        # The last token is sampled, never computed.
        needed = self.blocks.num_blocks_for(sequence.max_length - 1)
        if needed > self.blocks.num_blocks:
            raise CannotSchedule(
                f"prompt and completion of up to {sequence.max_length} tokens need {needed} "
                f"KV blocks; there are {self.blocks.num_blocks}"
            )
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._wait(sequence)

    def image_ready(self, sequence: Sequence, key: bytes, arena_offset: int) -> None:
        """Notes where an image of the sequence is, and lets the sequence go on."""
        sequence.image_offsets[key] = arena_offset
        number = sequence.sequence_id
        if number in self._parked:
            self._wait(self._parked.pop(number))
        elif number in self._stalled and self._is_computable(sequence):
            self._prefilling[number] = self._stalled.pop(number)

    def finish(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Ends a sequence in whatever state; its row and its blocks are free at once.

        A step in flight may still write to them. That does no harm: whoever gets them writes and
        reads in later steps, and the device keeps the order.

        Args:
            sequence: not finished yet.
            poisoned: what it computed is not right, and nobody may find it.
        """
        if poisoned:
            self.blocks.forget(sequence)
        else:
            self.blocks.register(sequence)
        self._leave(sequence)
        sequence.state = SequenceState.FINISHED

    def schedule(self) -> tuple[Batch, list[Sequence]]:
        """Plans one step.

        Returns:
            The batch, and the sequences that were given a row for it.
        """
        self.step += 1
        self._admitted = []
        chunks = self._decode_chunks()
        num_tokens = len(chunks)
        if self._prefilling or self._waiting:
            num_tokens += self._fill(self._prompts(), self.max_batched_tokens - num_tokens, chunks)
        return Batch(chunks, num_tokens), self._admitted

    def take_wanted_images(self) -> list[ImagesOf]:
        """Those that sequences had let go, and have come to once more since the last call."""
        wanted: list[ImagesOf] = []
        for sequence in self._wanting:
            if sequence.images_read:
                wanted.append(ImagesOf(sequence.sequence_id, sequence.images_read))
                sequence.images_read = []
        self._wanting = []
        return wanted

    def roll_back(self, batch: Batch) -> None:
        """Takes back a batch that was not launched: its chunks will be scheduled again."""
        for chunk in batch.chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.start
            if chunk.samples:
                sequence.num_in_flight -= 1
            if not chunk.from_device:
                self._decoding.pop(sequence.sequence_id, None)
                self._stalled.pop(sequence.sequence_id, None)
                self._prefilling[sequence.sequence_id] = sequence

    def check_integrity(self) -> None:
        """Raises AssertionError unless rows, blocks and states agree."""
        groups = (self._decoding, self._prefilling, self._stalled)
        running = [s for group in groups for s in group.values()]
        rows = [s.row for s in running]
        assert len(set(rows)) == len(rows) and not set(rows) & set(self._rows), "a row held twice"
        assert all(s.state is SequenceState.RUNNING for s in running)
        idle = [*self._waiting, *self._parked.values()]
        assert all(s.state is SequenceState.WAITING and s.row == -1 for s in idle)
        assert not any(s.block_table for s in idle), "a waiting sequence holds blocks"
        assert len({s.sequence_id for s in running + idle}) == len(running) + len(idle)
        self.blocks.check_integrity(running)

    # Decoding.

    def _decode_chunks(self) -> list[Chunk]:
        # A decoding sequence has computed all its tokens but the last, so this leaves out those
        # whose last possible token is in flight.
        decoding = self._decoding.values()
        ready = [s for s in decoding if s.num_computed_tokens + 1 < s.max_length]
        needy = [s for s in ready if s.num_computed_tokens == s.capacity]
        if needy:
            ready = self._grow(ready, needy)
        chunks: list[Chunk] = []
        for sequence in ready:
            start = sequence.num_computed_tokens
            sequence.num_computed_tokens = start + 1
            sequence.num_in_flight += 1
            generated = start + 1 - sequence.num_prompt_tokens
            chunks.append(Chunk(sequence, start, 1, True, True, generated))
        return chunks

    def _grow(self, ready: list[Sequence], needy: list[Sequence]) -> list[Sequence]:
        """Gives each needy sequence a block, preempting where there is none; who is left of all."""
        while len(needy) > self.blocks.num_free:
            self._preempt(self._victim())
            needy = [s for s in needy if s.state is SequenceState.RUNNING]
        for sequence in needy:
            self.blocks.grow(sequence)
        return [s for s in ready if s.state is SequenceState.RUNNING]

    # Prompts.

    def _prompts(self) -> Iterator[Sequence]:
        """Those who prefill, in order, then new ones as long as they can be admitted."""
        yield from list(self._prefilling.values())
        while (sequence := self._try_admit()) is not None:
            yield sequence

    def _fill(self, prompts: Iterator[Sequence], budget: int, chunks: list[Chunk]) -> int:
        """Spends up to `budget` tokens on prompts in order; the tokens spent.

        A prompt that takes several steps by itself leaves half of the budget to those behind it.
        """
        spent = 0
        while spent < budget and (sequence := next(prompts, None)) is not None:
            left = budget - spent
            remaining = len(sequence.token_ids) - sequence.num_computed_tokens
            if remaining > self.max_batched_tokens:
                behind = self._fill(prompts, left // 2, chunks)
                spent += behind
                left -= behind
            spent += self._prefill(sequence, left, chunks)
        return spent

    def _prefill(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Appends the sequence's next chunk; its length."""
        start = sequence.num_computed_tokens
        length = min(self._chunk_limit(sequence, start) - start, budget)
        end = start + length
        samples = end == len(sequence.token_ids)
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        sequence.num_computed_tokens = end
        sequence.last_prefill_step = self.step
        number = sequence.sequence_id
        if samples:
            sequence.num_in_flight += 1
            self._decoding[number] = self._prefilling.pop(number)
        elif self._chunk_limit(sequence, end) == end:
            self._stalled[number] = self._prefilling.pop(number)
            self._wanting.append(sequence)
        if length:
            chunks.append(Chunk(sequence, start, length, False, samples, generated))
        return length

    def _try_admit(self) -> Sequence | None:
        """Gives the head of the queue a row and blocks; None where it has to wait."""
        while self._waiting:
            sequence = self._waiting[0]
            if sequence.num_in_flight:
                return None  # preempted, and the id of its last token is not back yet
            if not self._rows and not self._stalled:
                return None
            num_free = self.blocks.num_free
            if self._blocked == (sequence.sequence_id, num_free) and not self._stalled:
                return None
            prefix = self.blocks.find_prefix(sequence)
            computed = len(prefix) * self.blocks.block_size
            if self._chunk_limit(sequence, computed) == computed:
                self._parked[sequence.sequence_id] = self._waiting.pop(0)
                self._wanting.append(sequence)
                continue
            keep_free = self._watermark if self._decoding or self._prefilling else 0
            fits = self.blocks.can_allocate(len(sequence.token_ids), prefix, keep_free)
            if fits and self._rows:
                self._admit(self._waiting.pop(0), prefix)
                return sequence
            # Who stalled in this very step is part of it.
            victims = [s for s in self._stalled.values() if s.last_prefill_step != self.step]
            if not victims:
                self._blocked = (sequence.sequence_id, num_free)
                return None
            self._preempt(max(victims, key=_admission))
        return None

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.allocate(sequence, len(sequence.token_ids), prefix)
        sequence.num_computed_tokens = len(prefix) * self.blocks.block_size
        if sequence.admission == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_prefix_hit_tokens += sequence.num_computed_tokens
        self._admissions += 1
        sequence.admission = self._admissions
        sequence.state = SequenceState.RUNNING
        sequence.row = self._rows.pop()
        self._prefilling[sequence.sequence_id] = sequence
        self._admitted.append(sequence)

    def _is_computable(self, sequence: Sequence) -> bool:
        start = sequence.num_computed_tokens
        return self._chunk_limit(sequence, start) > start

    def _chunk_limit(self, sequence: Sequence, start: int) -> int:
        """Where a chunk from `start` on may end at the latest; `start` itself: not worth a step."""
        limit = sequence.computable_until(start)
        worthwhile = limit - start >= self._least_partial_tokens
        return limit if worthwhile or limit == len(sequence.token_ids) else start

    # Leaving.

    def _victim(self) -> Sequence:
        """Who is preempted next: a stalled sequence if there is one, else the latest admitted."""
        pool = self._stalled or (self._decoding | self._prefilling)
        return max(pool.values(), key=_admission)

    def _preempt(self, sequence: Sequence) -> None:
        stalled = sequence.sequence_id in self._stalled
        self.blocks.register(sequence)
        self._leave(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        if stalled:
            self._parked[sequence.sequence_id] = sequence
        else:
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_arrival)

    def _leave(self, sequence: Sequence) -> None:
        number = sequence.sequence_id
        if sequence.state is SequenceState.WAITING:
            if self._parked.pop(number, None) is None:
                self._waiting.remove(sequence)
            return
        for group in (self._decoding, self._prefilling, self._stalled):
            group.pop(number, None)
        self.blocks.free(sequence)
        self._rows.append(sequence.row)
        sequence.row = -1


def _admission(sequence: Sequence) -> int:
    return sequence.admission


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
