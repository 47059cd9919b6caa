"""Lines of a batch beside requests: the first tokens of requests come as soon as without the batch.

A simulated day of a scheduler, in the time of a simulated device: each step takes as long as about
that of the 8B in bf16 on one H200, and the scheduler learns it from the steps. Requests of 1,000
tokens arrive at random; the batch always has as many lines of 500 tokens as `LineTurns` allows.
"""

import random
from dataclasses import dataclass, field

import pytest

from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.schedule.sequence import Sequence
from services.decoder.engine.schedule.speculation import Speculation
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.gateway.batches.line_turns import LineTurns
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, runner_info
from tests.integrity import check_scheduler

STEP_MS = 40.0  # the setting's default
MOST_LINES = 128
TICK_MS = 500.0


def duration(load: StepLoad) -> float:
    """Milliseconds of a step: weights, tokens of prompts, keys that decodes read."""
    prompts = load.tokens - load.rows
    return 4.0 + 0.018 * load.tokens + 3.4e-5 * load.keys + (1e-6 * load.pairs if prompts else 0)


def known_cost() -> StepCost:
    cost = StepCost(10**5)
    loads = [StepLoad(0, n, pairs=n * n / 2) for n in (1, 16, 64, 256, 512, 1024)]
    loads += [StepLoad(n, n, keys=n * 600) for n in (1, 16, 64, 128)]
    for _ in range(40):
        for load in loads:
            cost.observe(load, duration(load))
    cost.efficient_tokens = 960
    return cost


@dataclass
class Day:
    """The times of a simulated day.

    Attributes:
        first_ms: time to the first token of each request, ascending.
        num_lines: number of lines that have ended.
    """

    first_ms: list[float] = field(default_factory=list)
    num_lines: int = 0

    @property
    def p99(self) -> float:
        return self.first_ms[int(0.99 * len(self.first_ms))]


def load_of(batch: Batch) -> StepLoad:
    load = StepLoad()
    for chunk in batch.chunks:
        if chunk.start >= chunk.sequence.num_prompt_tokens:
            load = StepLoad(load.rows + 1, load.tokens + 1, load.pairs, load.keys + chunk.start + 1)
        else:
            load.add_chunk(chunk.start, chunk.length)
    return load


class Simulation:
    """One decoder.

    Args:
        rate: requests a second.
        seconds: length of the day.
        has_batch: True if a batch without an end runs.
    """

    def __init__(self, rate: float, seconds: float, *, has_batch: bool) -> None:
        info = runner_info(
            num_blocks=20_000, max_num_sequences=256, max_batched_tokens=8192,
            max_model_len=8192, block_size=16,
        )  # fmt: skip
        self.cost, self.now, self.day = known_cost(), 0.0, Day()
        self.scheduler = Scheduler(
            info, BlockManager(20_000, 16), late_masks=False, step_ms=STEP_MS, step_cost=self.cost,
            speculation=Speculation(info, 0, self.cost, step_ms=STEP_MS, overlap=False),
        )  # fmt: skip
        self._rng, self._seconds, self._has_batch = random.Random(1), seconds, has_batch
        self._arrivals: list[float] = []
        while not self._arrivals or self._arrivals[-1] < seconds * 1e3:
            last = self._arrivals[-1] if self._arrivals else 0.0
            self._arrivals.append(last + self._rng.expovariate(rate) * 1e3)
        self._turns, self._ticked_at, self._number = LineTurns(MOST_LINES), 0.0, 0
        self._arrived_at: dict[int, float] = {}

    def run(self) -> Day:
        while self.now < self._seconds * 1e3:
            while self._arrivals[0] <= self.now:
                self._arrived_at[self._add(1000, background=False)] = self._arrivals.pop(0)
            if self._has_batch:
                self._add_lines()
            batch = self.scheduler.schedule()
            if not batch.chunks:
                self.now = self._arrivals[0]
                continue
            load = load_of(batch)
            self.now += duration(load)
            self.cost.observe(load, duration(load))
            for chunk in batch.chunks:
                self.scheduler.blocks.register(chunk.sequence)
                if chunk.samples:
                    self._token_arrived(chunk.sequence)
        check_scheduler(self.scheduler)
        self.day.first_ms.sort()
        return self.day

    def _add_lines(self) -> None:
        if self.now - self._ticked_at > TICK_MS:
            self._ticked_at = self.now
            self._turns.adapt(self.scheduler.num_waiting)
        while self._turns.num_running < self._turns.limit:
            self._turns.num_running += 1
            self._add(500, background=True)

    def _add(self, length: int, *, background: bool) -> int:
        self._number += 1
        tokens = [self._rng.randrange(97) for _ in range(length)]
        tenant = "x/batch" if background else "x"
        message = add_message(
            self._number, tokens, tenant=tenant, max_tokens=100, background=background
        )
        self.scheduler.add(Sequence(message))
        return self._number

    def _token_arrived(self, sequence: Sequence) -> None:
        sequence.num_in_flight -= 1
        sequence.token_ids.append(self._rng.randrange(97))
        if (arrived := self._arrived_at.pop(sequence.sequence_id, None)) is not None:
            self.day.first_ms.append(self.now - arrived)
        if len(sequence.token_ids) >= sequence.max_length:
            self.scheduler.finish(sequence)
            if sequence.message.background:
                self._turns.release()
                self.day.num_lines += 1


@pytest.mark.parametrize("rate", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_a_batch_delays_first_tokens_by_a_tenth_at_most(rate: float) -> None:
    seconds = 30
    alone = Simulation(rate, seconds, has_batch=False).run()
    beside = Simulation(rate, seconds, has_batch=True).run()
    print(f"{alone.p99:.1f} and {beside.p99:.1f} ms, {beside.num_lines / seconds:.1f} lines/s")
    assert len(beside.first_ms) >= 0.9 * rate * seconds
    assert beside.p99 <= 1.1 * alone.p99
    # 49 lines a second ran beside two requests a second before the batch gave way to them.
    assert beside.num_lines / seconds > 15


def never(_: object) -> bool:
    return False


def ignored(_: object, __: object) -> None:
    pass


@pytest.mark.parametrize("rule", ["held back", "short steps"])
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the rules, the batch delays first tokens by more than a tenth."""
    module = "services.decoder.engine.schedule"
    if rule == "held back":
        monkeypatch.setattr(
            f"{module}.background.Background.holds", property(never, ignored), raising=False
        )
    else:
        monkeypatch.setattr(f"{module}.background._QUIET_STEPS", 0)
    alone = Simulation(2, 30, has_batch=False).run()
    beside = Simulation(2, 30, has_batch=True).run()
    assert beside.p99 > 1.1 * alone.p99


def test_a_step_with_a_prompt_of_a_request_leaves_the_batch_out() -> None:
    simulation = Simulation(1, 1, has_batch=False)
    scheduler = simulation.scheduler

    def step() -> set[bool]:
        batch = scheduler.schedule()
        for chunk in batch.chunks:
            if chunk.samples:
                simulation._token_arrived(chunk.sequence)
        check_scheduler(scheduler)
        return {chunk.sequence.message.background for chunk in batch.chunks}

    for _ in range(3):
        simulation._add(500, background=True)
    while scheduler.prefills.prefilling or len(scheduler.prefills.waiting):
        assert step() == {True}
    simulation._add(1000, background=False)
    simulation._add(500, background=True)
    kinds = [step()]
    while any(not s.message.background for s in scheduler.prefills.prefilling.values()):
        kinds.append(step())
    assert kinds == [{False}] * len(kinds)
    # Then all decode together, and the batch's last prompt is computed.
    assert step() == {False, True}


def test_a_line_waits_without_work_for_a_row_of_a_request_that_waits_for_its_image() -> None:
    """Otherwise the engine would plan empty steps until the image comes."""
    harness = Harness(max_num_sequences=1)
    image = ImageSpan(KEYS[0], 4, 2)
    harness.add(add_message(0, prompt_of(0, 8), images=(image,), max_tokens=2), images_ready=False)
    harness.step()
    harness.add(add_message(1, prompt_of(1, 8), max_tokens=2, background=True, tenant="x/batch"))
    for _ in range(4):
        harness.step()
    assert not harness.engine.has_work
    harness.image(0, image.key)
    harness.run()
    harness.assert_all_as_alone()
