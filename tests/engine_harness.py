"""An engine on a FakeRunner, driven step by step; all of its output is recorded and checked."""

import math
import time
from collections.abc import Iterable

import numpy as np

from services.common.clock import Clock
from services.common.process.device_turns import NO_TURNS, Turns
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, StepDone
from services.decoder.engine.schedule.recurrent_states import RecurrentStates
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from tests.fake_runner import FakeRunner, Reference, expected_tokens, mask_of, runner_info
from tests.integrity import check_engine
from tests.known_drafts import KnownSources
from tests.random_turns import RandomTurns

KEYS = tuple(bytes([n]) * 32 for n in range(1, 5))


class Untimed(StepCost):
    """Learns nothing: some tests stop the clock."""

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        pass


class Harness:
    """An engine, its output, and a front that holds image references and supplies token masks.

    Images that the engine requests again arrive `again_after` steps later; a token mask arrives
    `mask_after` steps after the token before it. With `plans`, the engine plans while it waits.
    `clock` is the engine's clock, and `turns` are its turns. With `max_drafts`, sequences verify
    drafts, of which a share of `right_drafts` is right.
    Without `prefix_caching`, no sequence finds the blocks of others.
    """

    def __init__(
        self,
        *,
        overlap: bool = True,
        prefix_caching: bool = True,
        again_after: int = 0,
        mask_after: int = 0,
        plans: bool = False,
        step_ms: float = math.inf,
        step_cost: StepCost | None = None,
        clock: Clock = time.monotonic,
        runner: type[FakeRunner] = FakeRunner,
        max_drafts: int = 0,
        right_drafts: float = 0.8,
        turns: Turns = NO_TURNS,
        **info: int | str,
    ) -> None:
        self.runner = runner(runner_info(max_drafts=max_drafts, **info))
        self.engine = Engine(
            self.runner,
            overlap=overlap,
            out_of_memory=(MemoryError,),
            step_ms=step_ms,
            step_cost=step_cost or Untimed(),
            clock=clock,
            max_drafts=max_drafts,
            turns=turns,
        )
        if isinstance(turns, RandomTurns):
            turns.watch(self.engine)
        alone: dict[int, Reference] = {}

        def token(message: AddSequence, index: int) -> int:
            return alone.setdefault(message.sequence_id, Reference(message)).token(index)

        self.engine.speculation.sources = KnownSources(token, right_drafts)
        small_pieces(self.engine)
        if not prefix_caching:
            self.engine.scheduler.blocks.find_prefix = lambda sequence: []
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[int]] = {}  # prompt tokens that had a logprob, in order
        self.ends: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        self.codes: dict[int, str] = {}  # of errors; empty for sequences that ended without one
        self.event_steps: list[int] = []
        self.added: dict[int, AddSequence] = {}
        self._next_offset = 0
        self._idle_steps = 0
        self._held: dict[int, dict[bytes, int]] = {}
        self._again_after = again_after
        self._wanted: list[tuple[int, int, bytes]] = []  # step, sequence, key
        self._now = 0
        self.num_wanted = 0
        self.launches: list[set[int]] = []  # sequences in each step of the engine; may be none
        self.mask_after = mask_after
        self._plans = plans
        self.masks_due: list[tuple[int, int, int]] = []  # step, sequence, tokens before

    def add(self, message: AddSequence, *, images_ready: bool = True) -> None:
        self.added[message.sequence_id] = message
        self.runner.messages[message.sequence_id] = message
        self.engine.add(message)
        if message.token_masks:
            due = self._now + self.mask_after
            self.masks_due.append((due, message.sequence_id, num_continued(message)))
        if images_ready:
            for span in message.images:
                self.image(message.sequence_id, span.key)

    def image(self, sequence_id: int, key: bytes) -> None:
        if sequence_id in self.ends:
            return
        self._next_offset += 4096
        self.runner.arena[self._next_offset] = key
        held = self._held.setdefault(sequence_id, {})
        assert key not in held, "an image was requested that is there"
        held[key] = self._next_offset
        self.engine.image_ready(sequence_id, key, self._next_offset)

    def step(self) -> None:
        launched = len(self.runner.batches)
        done = self.engine.step()
        batches = self.runner.batches[launched:]
        self.launches.append({number for batch in batches for number, _, _ in batch})
        check_engine(self.engine)
        # A step that only reads the last one's end may come to nothing; two of them are a deadlock.
        waits = done is None and self.engine.has_work and not self.engine.turns.is_waiting
        self._idle_steps = self._idle_steps + 1 if waits else 0
        assert self._idle_steps < 2, "there is work, and nothing runs"
        for event in done.events if done else ():
            assert event.sequence_id not in self.ends, "an event after the end"
            if (found := event.prompt_logprobs) is not None:
                scores = self.scores.setdefault(event.sequence_id, [])
                assert found.start == len(scores) + 1, "logprobs of the prompt have a hole"
                ranks = np.frombuffer(found.ranks, "<i4").tolist()
                assert np.frombuffer(found.logprobs, "<f4").tolist() == ranks
                most = self.added[event.sequence_id].sampling.prompt_logprobs or 0
                assert len(found.top_token_ids) == len(found.top_logprobs) == 4 * most * len(ranks)
                scores += ranks
            tokens = self.tokens.setdefault(event.sequence_id, [])
            tokens.extend(event.token_ids)
            message = self.added[event.sequence_id]
            if event.end is None and event.token_ids and message.token_masks:
                due = self._now + self.mask_after
                generated = num_continued(message) + len(tokens)
                self.masks_due.append((due, event.sequence_id, generated))
            if event.end is not None:
                self.ends[event.sequence_id] = event.end.reason
                self.messages[event.sequence_id] = event.end.message
                self.codes[event.sequence_id] = event.end.code
                self._evict(self._held.pop(event.sequence_id, {}).values())
        if self._plans:
            self.engine.plan()
            check_engine(self.engine)
        self._serve_images(done)
        self._serve_masks()

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.engine.has_work and not self._wanted and not self.masks_due:
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    def held_images(self, sequence_id: int) -> set[bytes]:
        return set(self._held.get(sequence_id, ()))

    def _serve_images(self, done: StepDone | None) -> None:
        self._now += 1
        for read in done.images_read if done else ():
            if read.sequence_id not in self.ends:
                self._evict([self._held[read.sequence_id].pop(key) for key in read.keys])
        for wanted in done.images_wanted if done else ():
            due = self._now + self._again_after
            self._wanted += [(due, wanted.sequence_id, key) for key in wanted.keys]
            self.num_wanted += len(wanted.keys)
        for _, number, key in [w for w in self._wanted if w[0] <= self._now]:
            self.image(number, key)
        self._wanted = [w for w in self._wanted if w[0] > self._now]

    def _serve_masks(self) -> None:
        for _, number, generated in [m for m in self.masks_due if m[0] <= self._now]:
            seed, sequence = self.added[number].sampling.seed, self.engine.find(number)
            masks = [_words_of(mask_of(seed, generated))]
            for place, draft in enumerate(sequence.known_drafts if sequence else ()):
                words = masks[-1]
                if len(words) and not words[draft >> 5] >> (draft & 31) & 1:
                    break
                masks.append(_words_of(mask_of(seed, generated + 1 + place)))
            self.engine.mask_ready(number, generated, *masks)
        self.masks_due = [m for m in self.masks_due if m[0] > self._now]

    def _evict(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            # A step that still reads there sees another image.
            self.runner.arena[offset] = b"evicted"

    def assert_all_as_alone(self) -> None:
        for number, message in self.added.items():
            tokens, reason = expected_tokens(message, self.runner.info.max_model_len)
            tokens = tokens[num_continued(message) :]
            if self.ends[number] in ("aborted", "failed", "refused"):
                assert self.tokens.get(number, []) == tokens[: len(self.tokens.get(number, []))]
            else:
                assert (self.tokens[number], self.ends[number]) == (tokens, reason)
                scored = message.sampling.prompt_logprobs is not None
                prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
                assert self.scores.get(number, []) == (prompt[1:] if scored else [])

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks


def _words_of(mask: np.ndarray | None) -> np.ndarray:
    return np.empty(0, np.int32) if mask is None else mask.view(np.int32)


def num_continued(message: AddSequence) -> int:
    """Tokens of the completion that the sequence begins with."""
    return len(message.generated_token_ids) // 4


def small_pieces(engine: Engine) -> None:
    """Prompts of tests are short: chunks before a missing image may be, too, and checkpoints may be
    close to each other.
    """
    engine.scheduler.prefills.min_partial_tokens = 1
    if isinstance(states := engine.scheduler.blocks.states, RecurrentStates):
        states.least = 1


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7) % 997 for i in range(length)]
