"""A runner without a model: a simulated device whose tokens betray every wrong schedule.

Its KV cache is a list of integers. Computing token i stores a hash of the token, its position, its
image feature and the entry before it; sampling reads *all* entries of the sequence through the
block table it was launched with, checks each, and hashes the last. So a block that was shared
wrongly, given away too early or registered too soon is an error, and `expected_tokens` says what
any right schedule must produce.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.decoder.engine.batch import Batch, Chunk, RunnerInfo, StepOutput
from services.decoder.engine.messages import AddSequence, ImageSpan, Logprobs, SamplingParams
from services.decoder.engine.sequence import Sequence

VOCAB_SIZE = 1000


def runner_info(**overrides: int) -> RunnerInfo:
    values = {
        "num_features": 2, "hidden": 8, "vocab_size": VOCAB_SIZE, "max_model_len": 256,
        "block_size": 4, "num_blocks": 64, "max_num_sequences": 8, "max_batched_tokens": 64,
    }  # fmt: skip
    return RunnerInfo(model_name="fake", dtype="bfloat16", **(values | overrides))


def next_entry(previous: int, token: int, position: tuple[int, ...], feature: int) -> int:
    return hash((previous, token, position, feature)) & 0x7FFFFFFFFFFF


def token_of(entry: int, seed: int, generated: int) -> int:
    return hash((entry, seed, generated)) % VOCAB_SIZE


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
    )


def _position(message: AddSequence | Sequence, index: int, num_prompt: int) -> tuple[int, ...]:
    positions = message.positions
    if isinstance(positions, bytes):
        positions = np.frombuffer(positions, "<i4").reshape(3, -1) if positions else None
    if index >= num_prompt:
        return (index + message.position_delta,) * 3
    return (index,) * 3 if positions is None else tuple(int(p) for p in positions[:, index])


def expected_tokens(message: AddSequence, max_model_len: int) -> tuple[list[int], str]:
    """The tokens and the reason to end of a sequence that runs alone and undisturbed."""
    tokens = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
    num_prompt = len(tokens)
    sampling = message.sampling
    entry = 0
    done = 0
    while True:
        for index in range(done, len(tokens)):
            feature = image_feature(message.images, index)[1]
            position = _position(message, index, num_prompt)
            entry = next_entry(entry, tokens[index], position, feature)
        done = len(tokens)
        token = token_of(entry, sampling.seed, done - num_prompt)
        tokens.append(token)
        if token in sampling.stop_token_ids and len(tokens) - num_prompt > sampling.min_tokens:
            return tokens[num_prompt:], "stop"
        if len(tokens) >= min(num_prompt + sampling.max_tokens, max_model_len):
            return tokens[num_prompt:], "length"


@dataclass(slots=True)
class _Launch:
    """A step with all that the device would read, as it was at the launch."""

    chunks: list[Chunk]
    rows: list[int]
    tables: list[list[int]]
    token_ids: list[list[int]]
    offsets: list[dict[bytes, int]]


@dataclass(slots=True)
class FakePending:
    runner: FakeRunner
    output: StepOutput | None = None

    def result(self) -> StepOutput:
        while self.output is None:
            self.runner.run_oldest()
        return self.output


@dataclass
class FakeRunner:
    """Launched steps run in order, each when somebody waits for it or for a later one.

    Attributes:
        arena: arena offset → key; an image is read here when its step *runs*.
        poisoned: keys whose features make logits non-finite.
        on_execute: called with each batch before it is launched; may raise.
    """

    info: RunnerInfo = field(default_factory=runner_info)
    arena: dict[int, bytes] = field(default_factory=dict)
    poisoned: set[bytes] = field(default_factory=set)
    on_execute: Callable[[Batch], None] | None = None
    batches: list[list[tuple[int, int, int]]] = field(default_factory=list)
    _cache: dict[int, int] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _rows: dict[int, int] = field(default_factory=dict)
    _queue: deque[tuple[_Launch, FakePending]] = field(default_factory=deque)

    def start_sequence(self, sequence: Sequence) -> None:
        assert 0 <= sequence.row < self.info.max_num_sequences
        assert sequence.num_in_flight == 0 or sequence.num_computed_tokens > 0
        self._rows[sequence.row] = sequence.sequence_id

    def execute(self, batch: Batch) -> FakePending:
        if self.on_execute is not None:
            self.on_execute(batch)
        chunks = batch.chunks
        assert 0 < batch.num_tokens <= self.info.max_batched_tokens
        assert batch.num_tokens == sum(c.length for c in chunks)
        kinds = [c.from_device for c in chunks]
        assert kinds == sorted(kinds, reverse=True), "decode chunks come first"
        rows = [c.sequence.row for c in chunks]
        assert len(set(rows)) == len(rows)
        assert all(self._rows[c.sequence.row] == c.sequence.sequence_id for c in chunks)
        self.batches.append([(c.sequence.sequence_id, c.start, c.length) for c in chunks])
        launch = _Launch(
            [
                Chunk(c.sequence, c.start, c.length, c.from_device, c.samples, c.generated)
                for c in chunks
            ],
            rows,
            [list(c.sequence.block_table) for c in chunks],
            [
                [] if c.from_device else c.sequence.token_ids[c.start : c.start + c.length]
                for c in chunks
            ],
            [dict(c.sequence.image_offsets) for c in chunks],
        )
        pending = FakePending(self)
        self._queue.append((launch, pending))
        return pending

    def run_oldest(self) -> None:
        launch, pending = self._queue.popleft()
        token_ids: list[int] = []
        logprobs: dict[int, Logprobs] = {}
        for index in range(len(launch.chunks)):
            sampled = self._run_chunk(launch, index)
            if sampled is not None:
                if launch.chunks[index].sequence.sampling.top_logprobs is not None:
                    logprobs[len(token_ids)] = Logprobs(-float(sampled), [sampled], [-1.0])
                token_ids.append(sampled)
        pending.output = StepOutput(token_ids, logprobs)

    def _run_chunk(self, launch: _Launch, index: int) -> int | None:
        chunk, table = launch.chunks[index], launch.tables[index]
        sequence, size = chunk.sequence, self.info.block_size
        tokens = [self._last[launch.rows[index]]] if chunk.from_device else launch.token_ids[index]
        assert len(tokens) == chunk.length >= 1
        assert len(table) * size >= chunk.start + chunk.length
        poison = False
        for number, token in enumerate(tokens, chunk.start):
            key, feature = image_feature(sequence.images, number)
            if key is not None:
                assert self.arena[launch.offsets[index][key]] == key, "the image is gone"
                poison |= key in self.poisoned
            position = _position(sequence, number, sequence.num_prompt_tokens)
            previous = self._read(table, number - 1)
            self._cache[table[number // size] * size + number % size] = next_entry(
                previous, token, position, feature
            )
        if not chunk.samples:
            return None
        last = chunk.start + chunk.length - 1
        self._check_all(sequence, table, last, tokens)
        sampled = token_of(self._read(table, last), sequence.sampling.seed, chunk.generated)
        self._last[launch.rows[index]] = sampled
        return -1 if poison else sampled

    def _check_all(
        self, sequence: Sequence, table: list[int], last: int, tokens: list[int]
    ) -> None:
        """Each entry of the cache, not just the last, is what the tokens say."""
        known = [*sequence.token_ids[:last], *tokens[-1:]]
        entry = 0
        for number, token in enumerate(known[: last + 1]):
            feature = image_feature(sequence.images, number)[1]
            position = _position(sequence, number, sequence.num_prompt_tokens)
            entry = next_entry(entry, token, position, feature)
            found = self._read(table, number)
            assert found == entry, f"token {number} of {last + 1}: the cache is not the sequence's"

    def _read(self, table: list[int], number: int) -> int:
        if number < 0:
            return 0
        size = self.info.block_size
        return self._cache[table[number // size] * size + number % size]


class InstantRunner:
    """For measuring the engine's own cost: every token is 1, at no cost."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info

    def start_sequence(self, sequence: Sequence) -> None:
        pass

    def execute(self, batch: Batch) -> FakePending:
        size = sum([c.samples for c in batch.chunks])
        return FakePending(FakeRunner(), StepOutput([1] * size, {}))


@contextlib.contextmanager
def failing(runner: FakeRunner, when: Callable[[Batch], bool], error: BaseException):
    """The runner's next batch that `when` picks raises instead."""

    def raise_once(batch: Batch) -> None:
        if when(batch):
            runner.on_execute = None
            raise error

    runner.on_execute = raise_once
    yield
    runner.on_execute = None
