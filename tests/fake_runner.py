"""A runner without a model: a simulated device whose tokens reveal every wrong schedule.

It knows sequences from steps alone, of each of which it has a copy. Its KV cache is a list of
integers. Computing token i stores a hash of the token, its position, its image feature and the
entry before it, which for the first token is the slot of the adapter plus one; sampling reads *all*
entries of the sequence through the row's block table, checks each against those of the sequence
running alone, and hashes the last. So a block that was shared wrongly, reused too early or
registered too soon is an error, and `expected_tokens` says what every right schedule must
produce.

With `info.has_states`, each row has a recurrent state, too, which is what the cache holds for its
last token: a state that was not kept, not restored, restored from another prefix, or changed twice
differs from the cache. A row's state is garbage when it is given to a sequence. A draft does not
change it, but is kept, until a step says how many of them are folded in.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kernels.sampling import ALL_MASKED, NOT_FINITE
from services.decoder.engine.messages import (
    AddSequence,
    EngineInfo,
    ImageSpan,
    Logprobs,
    SamplingParams,
)
from services.decoder.engine.step import ComputeStep, RowStart, Scores, Step, StepOutput

VOCAB_SIZE = 1000
_GARBAGE = -7  # the entry of a token that was not accepted


def runner_info(**overrides: int | str) -> EngineInfo:
    values: dict[str, Any] = {
        "num_features": 2, "hidden": 8, "vocab_size": VOCAB_SIZE, "max_model_len": 256,
        "block_size": 4, "num_blocks": 64, "max_num_sequences": 8, "max_batched_tokens": 64,
        "num_weight_tokens": 60,
    }  # fmt: skip
    values |= overrides
    room = values["num_blocks"] * values["block_size"] + 1  # the last token is not computed
    values["max_model_len"] = min(values["max_model_len"], room)
    return EngineInfo(model_name="fake", dtype="bfloat16", **values)


def next_entry(previous: int, token: int, position: tuple[int, ...], feature: int) -> int:
    return hash((previous, token, position, feature)) & 0x7FFFFFFFFFFF


def token_of(entry: int, seed: int, generated: int, mask: np.ndarray | None = None) -> int:
    """The next token: the first one that the mask allows, from the one without a mask on."""
    token = hash((entry, seed, generated)) % VOCAB_SIZE
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
    if len(allowed) == 0:
        return ALL_MASKED
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def mask_of(seed: int, generated: int) -> np.ndarray | None:
    """What a sequence with `token_masks` may have next: few tokens, many, or any; never none."""
    chooser = np.random.default_rng((seed, generated))
    kind = chooser.integers(3)
    if kind == 0:
        return None
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    bits[chooser.integers(0, VOCAB_SIZE, 3 if kind == 1 else 500)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def feature_of(key: bytes, index: int) -> int:
    return int.from_bytes(key[:4], "little") * 1000 + index + 1


def image_feature(images: list[ImageSpan], index: int) -> tuple[bytes | None, int]:
    for span in images:
        if span.offset <= index < span.offset + span.num_tokens:
            return span.key, feature_of(span.key, index - span.offset)
    return None, 0


def add_message(
    sequence_id: int,
    prompt: list[int],
    *,
    images: tuple[ImageSpan, ...] = (),
    positions: np.ndarray | None = None,
    delta: int = 0,
    salt: bytes = b"",
    adapter: int = -1,
    token_masks: bool = False,
    tenant: str = "",
    tenant_weight: float = 1.0,
    priority: int = 0,
    background: bool = False,
    request: str = "",
    **sampling: object,
) -> AddSequence:
    return AddSequence(
        sequence_id=sequence_id,
        prompt_token_ids=np.asarray(prompt, dtype="<i4").tobytes(),
        positions=b"" if positions is None else positions.astype("<i4").tobytes(),
        position_delta=delta,
        images=list(images),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        cache_salt=salt,
        adapter=adapter,
        token_masks=token_masks,
        tenant=tenant,
        tenant_weight=tenant_weight,
        priority=priority,
        background=background,
        request=request,
    )


class Reference:
    """A sequence that runs alone and undisturbed, and never ends."""

    def __init__(self, message: AddSequence) -> None:
        self._message = message
        self.tokens = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
        self.num_prompt = len(self.tokens)
        self._positions = None
        if message.positions:
            self._positions = np.frombuffer(message.positions, "<i4").reshape(3, -1)
        self._entries: list[int] = []

    def position(self, index: int) -> tuple[int, ...]:
        if index >= self.num_prompt:
            return (index + self._message.position_delta,) * 3
        if self._positions is None:
            return (index,) * 3
        return tuple(int(p) for p in self._positions[:, index])

    def entry(self, index: int) -> int:
        """What the cache holds for token `index`."""
        while len(self._entries) <= index:
            number = len(self._entries)
            previous = self._entries[-1] if self._entries else self._message.adapter + 1
            feature = image_feature(self._message.images, number)[1]
            token = self.token(number)
            self._entries.append(next_entry(previous, token, self.position(number), feature))
        return self._entries[index]

    def token(self, index: int) -> int:
        while len(self.tokens) <= index:
            generated = len(self.tokens) - self.num_prompt
            seed = self._message.sampling.seed
            mask = mask_of(seed, generated) if self._message.token_masks else None
            entry = self.entry(len(self.tokens) - 1)
            self.tokens.append(token_of(entry, seed, generated, mask))
        return self.tokens[index]


def expected_tokens(message: AddSequence, max_model_len: int) -> tuple[list[int], str]:
    """The tokens and the finish reason of a sequence that runs alone and undisturbed."""
    alone, sampling = Reference(message), message.sampling
    length = alone.num_prompt
    while True:
        token = alone.token(length)
        length += 1
        found = alone.tokens[alone.num_prompt : length]
        if token in sampling.stop_token_ids and len(found) > sampling.min_tokens:
            return found, "stop"
        if length >= min(alone.num_prompt + sampling.max_tokens, max_model_len):
            return found, "length"


class FakeRow(NamedTuple):
    row: int
    sequence_id: int
    position_delta: int
    sampling: SamplingParams
    num_prompt: int


@dataclass(slots=True)
class FakePending:
    runner: FakeRunner
    step: Step
    output: StepOutput | None = None
    sampled: bool = False
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    made: np.ndarray | None = None  # drafts of the model's own layer

    def is_computed(self) -> bool:
        return self.runner.computes_at_once

    def is_done(self) -> bool:
        return self.output is not None

    def put_mask(self, index: int, mask: np.ndarray) -> None:
        assert not self.sampled and self.runner.newest_step is self.step
        self.masks[index] = mask.copy()

    def sample(self) -> None:
        step = self.step
        assert not self.sampled and self.runner.newest_step is step
        assert set(self.masks) == set(range(len(step.sample.late))) != set()
        self.sampled = True
        step.sample.masked = np.concatenate((step.sample.masked, step.sample.late))
        late = [self.masks[index] for index in range(len(step.sample.late))]
        step.sample.token_masks = np.stack([*step.sample.token_masks, *late])

    def result(self) -> StepOutput:
        while self.output is None:
            self.runner.run_oldest()
        return self.output

    def drafts(self) -> np.ndarray | None:
        assert self.output is not None, "the host reads tokens first"
        return self.made


@dataclass
class FakeRunner:
    """Launched steps run in order, each when its result or a later one is read.

    With `info.max_tokens_per_step` above 1, a step yields a random number of tokens from 1 on, and
    leaves garbage in the cache where tokens were not accepted. A decode from the device begins at
    the row's length, which is known here alone until the ids are read.

    Attributes:
        arena: arena offset → key; an image is read here when its step *runs*.
        poisoned: keys whose features make logits non-finite.
        messages: sequence id → the front's message, if the test sets it; to check the cache.
        on_execute: called with each step before it is launched; may raise.
        computes_at_once: whether launched steps count as computed before their result is read.
        prepared: steps that the engine has prepared. One of them runs as it was then, because
            other ranks have got it.
        num_as_prepared: number of launched steps that had been prepared.
        batches: sequence id, start and length of each chunk of each launched step.
    """

    info: EngineInfo = field(default_factory=runner_info)
    arena: dict[int, bytes] = field(default_factory=dict)
    poisoned: set[bytes] = field(default_factory=set)
    messages: dict[int, AddSequence] = field(default_factory=dict)
    on_execute: Callable[[Step], None] | None = None
    batches: list[list[tuple[int, int, int]]] = field(default_factory=list)
    computes_at_once: bool = False
    prepared: list[Step] = field(default_factory=list)
    num_as_prepared: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    _staged: bytes = b""  # the last step of `prepared`
    _cache: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)  # by row, with the last token
    _starts: dict[int, FakeRow] = field(default_factory=dict)  # by row, as of the launches
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _states: dict[int, int] = field(default_factory=dict)  # by row
    _kept: dict[int, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)  # by row
    num_folded: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)  # by slot
    host: dict[int, list[int]] = field(default_factory=dict)  # entries of a block, by slot
    host_states: dict[int, int] = field(default_factory=dict)  # by slot
    num_restored: int = 0
    num_restored_from_host: int = 0
    num_saved: int = 0
    _references: dict[int, Reference] = field(default_factory=dict)
    _num_right: int = 0  # tokens up to the first wrong draft of the chunk that is computed
    _queue: deque[tuple[Step, list[FakeRow], list[list[int]], FakePending]] = field(
        default_factory=deque
    )

    @property
    def newest_step(self) -> Step:
        """The step that was launched last, of those that have not run."""
        return self._queue[-1][0]

    def prepare(self, step: Step) -> None:
        self.prepared.append(step)
        self._staged = step.compute.to_bytes()

    def execute(self, step: Step) -> FakePending:
        as_prepared = bool(self.prepared) and self.prepared[-1] is step
        self.num_as_prepared += as_prepared
        data = self._staged if as_prepared else step.compute.to_bytes()
        compute = ComputeStep.from_bytes(data)
        step = Step(compute, copy.deepcopy(step.sample))
        if self.on_execute is not None:
            try:
                self.on_execute(step)
            except BaseException:
                self._damage_rows(step)
                raise
        for start, sampling in zip(step.compute.row_starts, step.sample.row_starts, strict=True):
            assert 0 <= start.row == sampling.row < self.info.max_num_sequences
            self._starts[start.row] = FakeRow(
                start.row,
                start.sequence_id,
                start.position_delta,
                sampling.params,
                sampling.num_prompt_tokens,
            )
            self._tables[start.row] = []
        taken = 0
        for row, first, count in step.compute.block_updates.tolist():
            assert first <= len(self._tables[row])
            self._tables[row][first:] = step.compute.block_ids[taken : taken + count].tolist()
            taken += count
        assert taken == len(step.compute.block_ids)
        rows, lengths = step.compute.rows.tolist(), step.compute.lengths.tolist()
        assert 0 < step.compute.num_tokens <= self.info.max_batched_tokens
        assert step.compute.num_tokens == sum(lengths)
        assert lengths[: step.compute.num_from_device] == [1] * step.compute.num_from_device
        if step.compute.has_drafts:  # parts of one chunk follow each other
            parts = list(zip(rows, step.compute.starts.tolist(), lengths, strict=True))
            for before, after in itertools.pairwise(parts):
                assert before[0] != after[0] or after == (before[0], before[1] + 1, 1)
            assert len({row for row, _ in itertools.groupby(rows)}) == len(set(rows))
        else:
            assert len(set(rows)) == len(rows)
        starts = [self._starts[row] for row in rows]
        tables = [list(self._tables[row]) for row in rows]
        ids = [start.sequence_id for start in starts]
        self.batches.append(list(zip(ids, step.compute.starts.tolist(), lengths, strict=True)))
        assert not set(step.sample.late.tolist()) & set(step.sample.masked.tolist())
        assert all(i < step.compute.num_from_device for i in step.compute.samples[step.sample.late])
        if self._queue:
            assert self._queue[-1][3].sampled, "the last step was not sampled"
        pending = FakePending(self, step, sampled=len(step.sample.late) == 0)
        self._queue.append((step, starts, tables, pending))
        return pending

    def run_oldest(self) -> None:
        step, starts, tables, pending = self._queue.popleft()
        assert pending.sampled
        most = self.info.max_tokens_per_step
        samples, limits = step.compute.samples.tolist(), step.compute.limits
        found = np.full((len(samples), most), -99, np.int32)
        counts = np.ones(len(samples), np.int32)
        logprobs: dict[int, list[Logprobs]] = {}
        first = 0
        self._copy_blocks(step)
        for start in step.compute.row_starts:
            self.start_state(start)
        for index, length in enumerate(step.compute.lengths.tolist()):
            row, at = starts[index].row, int(step.compute.starts[index])
            excess = 0
            if index < step.compute.num_from_device:
                excess = at + 1 - self._lengths[row]
                assert excess >= 0 and (most > 1 or excess == 0), "not an upper bound"
                at -= excess
            poison = self._compute(step, index, first, at, starts[index], tables[index])
            first += length
            if index not in samples:
                continue
            sample = samples.index(index)
            end = at + length
            limit = 1 if limits is None else int(limits[sample])
            assert 1 <= limit <= most
            generated = end - starts[index].num_prompt
            begins = index == 0 or starts[index - 1].row != row
            self._num_right = end if begins else self._num_right
            tokens = self._sample(step, sample, starts[index], tables[index], end, limit, generated)
            if poison:
                self._last[row], tokens = tokens[-1], [NOT_FINITE]
            elif most > 1 and tokens != [ALL_MASKED]:
                tokens = tokens[: self.random.randint(1, limit)]
                for number in range(end + len(tokens) - 1, end + limit - 1):
                    self._write(tables[index], number, _GARBAGE)
            self._lengths[row] = end + len(tokens)
            if tokens and not poison:
                self._last[starts[index].row] = tokens[-1]
            found[sample, : len(tokens)] = tokens
            counts[sample] = len(tokens)
            if starts[index].sampling.top_logprobs is not None:
                logprobs[sample] = [Logprobs(-float(t), [t], [-1.0]) for t in tokens]
        pending.output = StepOutput(found, counts, logprobs, self._scores(step))
        self._copy_idle_blocks(step)

    def _scores(self, step: Step) -> list[Scores]:
        """Of each follower: its id as logprob, and ids after it as alternatives."""
        taken, scores = 0, []
        for first, count, most in step.compute.scored.tolist():
            ids = step.sample.followers[taken : taken + count]
            taken += count
            known = first - step.compute.num_from_device
            assert (ids[:-1] == step.compute.token_ids[known + 1 : known + count]).all()
            tops = ids[:, None] + np.arange(most, dtype=np.int32)
            scores.append(Scores(ids.astype(np.float32), ids, tops, tops.astype(np.float32)))
        assert taken == len(step.sample.followers)
        return scores

    def _copy_blocks(self, step: Step) -> None:
        size = self.info.block_size
        for block, slot in _pairs(step.compute.block_saves):
            assert 0 <= slot < self.info.num_host_blocks
            self.host[slot] = [self._cache[block * size + index] for index in range(size)]
        for block, slot in _pairs(step.compute.block_loads):
            for index, entry in enumerate(self.host[slot]):
                self._cache[block * size + index] = entry
        for checkpoint, slot in _pairs(step.compute.checkpoint_saves):
            assert 0 <= slot < self.info.num_host_states
            self.host_states[slot] = self.checkpoints[checkpoint]

    def _copy_idle_blocks(self, step: Step) -> None:
        """Comes last, so that a test fails if the step changes a block that it calls idle."""
        size = self.info.block_size
        for block, slot in _pairs(step.compute.idle_block_saves):
            assert 0 <= slot < self.info.num_host_blocks
            self.host[slot] = [self._cache[block * size + index] for index in range(size)]
        for checkpoint, slot in _pairs(step.compute.idle_checkpoint_saves):
            assert 0 <= slot < self.info.num_host_states
            self.host_states[slot] = self.checkpoints[checkpoint]

    def _damage_copies(self, step: Step) -> None:
        """A step that raises may have changed its blocks before it copied them."""
        size, changed = self.info.block_size, _pairs(step.compute.block_loads)
        for block, slot in _pairs(step.compute.block_saves):
            self.host[slot] = [_GARBAGE] * size
            changed.append([block, slot])
        for checkpoint, slot in _pairs(step.compute.checkpoint_saves):
            self.host_states[slot] = self.checkpoints[checkpoint] = _GARBAGE
        for _, slot in _pairs(step.compute.idle_block_saves):
            self.host[slot] = [_GARBAGE] * size
        for _, slot in _pairs(step.compute.idle_checkpoint_saves):
            self.host_states[slot] = _GARBAGE
        for block, _ in changed:
            self._cache |= dict.fromkeys(range(block * size, (block + 1) * size), _GARBAGE)

    def start_state(self, start: RowStart) -> None:
        self._states[start.row] = _GARBAGE
        if start.checkpoint >= 0:
            self._states[start.row] = self.checkpoints[start.checkpoint]
            self.num_restored += 1
        elif start.checkpoint < -1:
            self._states[start.row] = self.host_states[-2 - start.checkpoint]
            self.num_restored += 1
            self.num_restored_from_host += 1

    def _damage_rows(self, step: Step) -> None:
        """A step that raises may have run and sampled: what its rows keep is undefined, and their
        states are perhaps copied.
        """
        while self._queue:
            self.run_oldest()
        for of_row in (self._last, self._lengths, self._states):
            of_row |= dict.fromkeys(step.compute.rows.tolist(), _GARBAGE)
        self._damage_copies(step)
        if step.compute.state_saves is not None:
            self.checkpoints |= dict.fromkeys(step.compute.state_saves[:, 1].tolist(), _GARBAGE)

    def _compute(
        self, step: Step, index: int, first: int, at: int, start: FakeRow, table: list[int]
    ) -> bool:
        """Writes a chunk's entries, from token `at` on; whether an image of it is poisoned."""
        known = first - step.compute.num_from_device
        length, saves = int(step.compute.lengths[index]), step.compute.state_saves
        features = self._features(step, first, length)
        slots = {} if saves is None else dict(saves.tolist())
        for offset in range(length):
            number = at + offset
            if index < step.compute.num_from_device:
                token, position = self._last[start.row], (number + start.position_delta,) * 3
            else:
                token = int(step.compute.token_ids[known + offset])
                position = tuple(step.compute.positions[:, known + offset].tolist())
                self._last[start.row] = token
            previous = self._read(table, number - 1) if number else _first(step, index)
            feature = features.get(offset, (b"", 0))[1]
            entry = next_entry(previous, token, position, feature)
            self._write(table, number, entry)
            if self.info.has_states:
                state = self._next_state(step, index, number, token, position, feature)
                assert state == entry, "the recurrent state is another one's"
            if (slot := slots.get(first + offset)) is not None:
                assert 0 <= slot < self.info.num_checkpoints and length > 1
                assert (offset + 1) % self.info.state_tokens == 0, "within a piece"
                self.checkpoints[slot] = self._states[start.row]
                self.num_saved += 1
        return any(key in self.poisoned for key, _ in features.values())

    def _next_state(
        self,
        step: Step,
        index: int,
        number: int,
        token: int,
        position: tuple[int, ...],
        feature: int,
    ) -> int:
        """The state after a token of a chunk, which changes the row's if it is not a draft."""
        compute = step.compute
        row, kept = int(compute.rows[index]), self._kept.setdefault(int(compute.rows[index]), [])
        state = self._states[row] if number else _first(step, index)
        if index and compute.rows[index - 1] == row:  # a draft
            for before in kept:
                state = next_entry(state, *before, 0)
            kept.append((token, position))
            assert len(kept) <= self.info.max_drafts
            return next_entry(state, token, position, feature)
        folds = {} if compute.folds is None else dict(compute.folds.tolist())
        count = folds.get(index, 0)
        self.num_folded += count
        for before in kept[:count]:
            state = next_entry(state, *before, 0)
        kept.clear()
        self._states[row] = state = next_entry(state, token, position, feature)
        return state

    def _features(self, step: Step, first: int, length: int) -> dict[int, tuple[bytes, int]]:
        """Image keys and features of a chunk's tokens, read from the arena now."""
        found = {}
        for row, num_rows, arena_offset, num_tokens, first_token in step.compute.images.tolist():
            if first <= row < first + length:
                assert row + num_rows <= first + length and first_token + num_rows <= num_tokens
                key = self.arena[arena_offset]
                assert key != b"evicted", "the image was released"
                for i in range(num_rows):
                    found[row - first + i] = key, feature_of(key, first_token + i)
        return found

    def _sample(
        self,
        step: Step,
        sample: int,
        start: FakeRow,
        table: list[int],
        end: int,
        limit: int,
        generated: int,
    ) -> list[int]:
        """`limit` tokens after the first `end` ones; computes all but the last."""
        self._check_all(start, table, end)
        mask = None
        if sample in step.sample.masked.tolist():
            mask = step.sample.token_masks[step.sample.masked.tolist().index(sample)]
        tokens: list[int] = []
        for ahead in range(limit):
            entry = self._read(table, end - 1 + ahead)
            tokens.append(token_of(entry, start.sampling.seed, generated + ahead, mask))
            if ahead < limit - 1:
                number = end + ahead
                position = (number + start.position_delta,) * 3
                self._write(table, number, next_entry(entry, tokens[-1], position, 0))
        return tokens

    def _check_all(self, start: FakeRow, table: list[int], end: int) -> None:
        """Each entry of the sequence, not just the last, is what it is when it runs alone."""
        message = self.messages.get(start.sequence_id)
        if message is None:
            return
        if self._last[start.row] < 0:  # nothing was allowed, and its sequence was planned ahead
            end -= 1
        alone = self._references.setdefault(start.sequence_id, Reference(message))
        # Drafts behind a wrong draft are computed, but none of what follows from them is used.
        if self._num_right == end - 1 and self._last[start.row] == alone.token(end - 1):
            self._num_right = end
        for number in range(min(end, self._num_right)):
            right = self._read(table, number) == alone.entry(number)
            assert right, f"token {number} of {end}: the cache is not the sequence's"

    def _read(self, table: list[int], number: int) -> int:
        size = self.info.block_size
        return self._cache[table[number // size] * size + number % size]

    def _write(self, table: list[int], number: int, entry: int) -> None:
        size = self.info.block_size
        self._cache[table[number // size] * size + number % size] = entry


def _first(step: Step, index: int) -> int:
    slots = step.compute.adapters
    return 0 if slots is None else int(slots[index]) + 1


def _pairs(copies: np.ndarray | None) -> list[list[int]]:
    return [] if copies is None else copies.tolist()


@contextlib.contextmanager
def failing(runner: FakeRunner, when: Callable[[Step], bool], error: BaseException):
    """The runner's next step that `when` picks raises instead."""

    def raise_once(step: Step) -> None:
        if when(step):
            runner.on_execute = None
            raise error

    runner.on_execute = raise_once
    yield
    runner.on_execute = None
