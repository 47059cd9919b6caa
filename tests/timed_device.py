"""A simulated device whose steps and drafts take stated times, for tests of when drafts pay.

The times are those of an H200 with a model of 27B parameters in bf16 and its layer for multi-token
prediction: steps without drafts were measured, and what drafts add is what kernels should take.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.decoder.engine.messages import AddSequence
from services.decoder.engine.schedule.draft_pace import DraftPace
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import Int32Array, Step, StepOutput
from tests.engine_harness import Harness, prompt_of
from tests.fake_runner import FakePending, FakeRunner, add_message
from tests.known_drafts import KnownDrafts, KnownSources

NUM_DRAFTS = 3
# Milliseconds: of the host before a launch and after a result, and of three drafts for all rows.
LAUNCH_MS, POSTPROCESS_MS, HEAD_MS = 1.0, 0.5, 1.6


def step_ms(num_rows: int, num_drafts: int, num_prompt: int = 0) -> float:
    """Returns the milliseconds of a step of so many decodes with so many drafts."""
    verification = 1.0 + 0.055 * num_drafts if num_drafts else 0.0
    return 13.84 + 0.16 * num_rows + verification + 0.03 * num_prompt


class Clock:
    """Simulated time in milliseconds, which is read in seconds."""

    ms = 0.0

    def __call__(self) -> float:
        return self.ms * 1e-3


@dataclass
class Device(FakeRunner):
    """A `FakeRunner` with a clock, and a draft head whose drafts cost time.

    Attributes:
        clock: the simulated time.
        first_draft_ms: milliseconds that the first step with drafts takes longer.
        num_head_steps: number of steps behind which the head has drafted.
        drafted: number of drafts of each step.
    """

    clock: Clock = field(default_factory=Clock)
    first_draft_ms: float = 0.0
    num_head_steps: int = 0
    drafted: list[int] = field(default_factory=list[int])
    _free_ms: float = 0.0  # when the device has computed what was launched

    def execute(self, step: Step) -> TimedPending:  # type: ignore[override]
        pending = super().execute(step)
        compute = step.compute
        num_rows = len(set(compute.rows.tolist()))
        num_drafts = len(compute.rows) - num_rows
        num_prompt = compute.num_tokens - len(compute.rows)
        self.clock.ms += LAUNCH_MS
        started = max(self.clock.ms, self._free_ms)
        self._free_ms = started + step_ms(num_rows, num_drafts, num_prompt)
        if num_drafts and not any(self.drafted):
            self._free_ms += self.first_draft_ms
        self.drafted.append(num_drafts)
        timed = TimedPending(self, pending, self._free_ms)
        if compute.num_head_drafts:
            self.num_head_steps += 1
            self._free_ms += HEAD_MS
            timed.drafts_ms = self._free_ms
            timed.num_chunks = num_rows
        return timed


@dataclass
class TimedPending:
    """A launched step whose results are there at a stated time."""

    device: Device
    pending: FakePending
    ms: float
    drafts_ms: float | None = None
    num_chunks: int = 0

    def is_computed(self) -> bool:
        return True

    def is_done(self) -> bool:
        return self.device.clock.ms >= self.ms

    def result(self) -> StepOutput:
        self.device.clock.ms = max(self.device.clock.ms, self.ms) + POSTPROCESS_MS
        return self.pending.result()

    def drafts(self) -> Int32Array | None:
        if self.drafts_ms is None:
            return None
        self.device.clock.ms = max(self.device.clock.ms, self.drafts_ms)
        return np.ones((self.num_chunks, NUM_DRAFTS), np.int32)


class OfferedDrafts(KnownDrafts):
    """Drafts of a stated quality, as many as came with the tokens and are not outdated."""

    _num_offered = 0

    def read(self, token_ids: array[int]) -> None:
        self._num_offered = max(0, self._num_offered - len(token_ids) + self._num_tokens)
        super().read(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        self._num_offered = sum(1 for _ in drafts)

    def propose(self, most: int) -> list[int]:
        return super().propose(min(most, self._num_offered))


@dataclass(slots=True)
class OfferedSources:
    """Makes `OfferedDrafts`.

    Attributes:
        known: source of the right tokens.
        shares: probabilities that a draft is right, which sequences get in turn.
    """

    known: KnownSources
    shares: Sequence[float]

    def of(self, message: AddSequence) -> OfferedDrafts:
        """Returns the source of a sequence."""
        number = message.sequence_id
        share = self.shares[number % len(self.shares)]
        return OfferedDrafts(lambda index: self.known.token(message, index), share, seed=number)


class Timed(NamedTuple):
    """The times of a run.

    Attributes:
        ms: milliseconds between the last first token and the ends of answers, on average.
        drafted: number of drafts of each step behind the last first token.
        num_head_steps: number of steps behind which the layer has drafted.
    """

    ms: float
    drafted: list[int]
    num_head_steps: int


def calibrated_cost() -> StepCost:
    """Returns the cost as the calibration finds it, without overlap and drafts."""
    cost = StepCost(40_000)
    host_ms = LAUNCH_MS + POSTPROCESS_MS
    prompt = StepLoad(0, 256, pairs=256 * 128.0)
    steps = [(StepLoad(n, n, keys=200 * n), step_ms(n, 0) + host_ms) for n in (1, 64)]
    cost.fit([*steps, (prompt, step_ms(0, 0, 256) + host_ms)])
    return cost


def simulate(
    count: int,
    shares: Sequence[float] = (),
    *,
    num_tokens: int = 160,
    num_prompt: int = 16,
    first_draft_ms: float = 0.0,
    pace: DraftPace | None = None,
) -> Timed:
    """Runs sequences that begin together.

    Args:
        count: number of sequences.
        shares: see `OfferedSources`. Empty if there is no speculation.
        num_tokens, num_prompt: numbers of tokens of each answer and of each prompt.
        first_draft_ms: milliseconds that the first step with drafts takes longer.
        pace: the decision when drafts pay, if it is not the engine's own.
    """
    clock = Clock()
    harness = Harness(
        max_drafts=NUM_DRAFTS if shares else 0, step_cost=calibrated_cost(), step_ms=40.0,
        clock=clock, runner=Device, num_blocks=4000, block_size=16, max_num_sequences=64,
        max_batched_tokens=512, max_model_len=1024, has_draft_head=True,
    )  # fmt: skip
    device, speculation = harness.runner, harness.engine.speculation
    assert isinstance(device, Device) and isinstance(speculation.sources, KnownSources)
    device.clock, device.first_draft_ms = clock, first_draft_ms
    speculation.sources = OfferedSources(speculation.sources, shares)
    speculation.pace = pace or speculation.pace
    for number in range(count):
        # The runner does not get the message, with which it would check its whole cache each step.
        message = add_message(number, prompt_of(number, num_prompt), max_tokens=num_tokens)
        harness.added[number] = message
        harness.engine.add(message)
    began_ms, first = 0.0, 0
    ends: dict[int, float] = {}
    while harness.engine.has_work:
        harness.step()
        ends |= {number: clock.ms for number in harness.ends if number not in ends}
        if not began_ms and len([ids for ids in harness.tokens.values() if ids]) == count:
            began_ms, first = clock.ms, len(device.drafted)
    harness.assert_all_as_alone()
    return Timed(
        sum(ends.values()) / count - began_ms, device.drafted[first:], device.num_head_steps
    )
