"""Lines of a batch beside requests: the first tokens of requests come as soon as without the batch.

A simulated day of an engine, in the time of a simulated device: each step takes as long as about
that of the 8B in bf16 on one H200, and the engine learns it from the steps. Requests of 210 or
1,000 tokens arrive at random; the batch always has as many lines of 500 tokens as `LineTurns`
allows.
"""

import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import EngineInfo, ImageSpan
from services.decoder.engine.schedule.background import Background
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import Int32Array, Step, StepOutput
from services.gateway.batches.line_turns import LineTurns
from tests.cases import cases
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, runner_info
from tests.integrity import check_scheduler

STEP_MS = 40.0  # the setting's default
MOST_LINES = 128
TICK_MS = 500.0
# Long enough that a request waits that the batch would delay, in each of the simulations.
SECONDS = cases(15, 30)
# Milliseconds in which the host plans and launches a step, and between two looks at messages.
HOST_MS, POLL_MS = 0.5, 0.02


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
        busy: share of the time in which the device has computed.
    """

    first_ms: list[float] = field(default_factory=list)
    num_lines: int = 0
    busy: float = 0.0

    @property
    def p99(self) -> float:
        return self.first_ms[int(0.99 * len(self.first_ms))]


class Device:
    """A runner in simulated time.

    Attributes:
        now: time in milliseconds.
        busy_ms: how long the device has computed.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.now = self.busy_ms = self._free_at = 0.0

    def clock(self) -> float:
        return self.now / 1e3

    def prepare(self, step: Step) -> None:
        raise NotImplementedError

    def execute(self, step: Step) -> "Launched":
        self.now += HOST_MS
        compute = step.compute
        is_prompt = (compute.lengths > 1) | (compute.starts == 0)
        load = StepLoad(int((~is_prompt).sum()), int(compute.lengths.sum()))
        load.keys = int((compute.starts[~is_prompt] + 1).sum())
        load.pairs = float(
            (compute.lengths * (compute.starts + compute.lengths / 2))[is_prompt].sum()
        )
        ms = duration(load)
        self.busy_ms += ms
        self._free_at = max(self._free_at, self.now) + ms
        return Launched(self, self._free_at, len(compute.samples))


@dataclass
class Launched:
    """A launched step of a `Device`."""

    device: Device
    ends_at: float
    num_samples: int

    def is_computed(self) -> bool:
        return True

    def is_done(self) -> bool:
        return self.device.now >= self.ends_at

    def put_mask(self, index: int, mask: Int32Array) -> None:
        raise NotImplementedError

    def sample(self) -> None:
        raise NotImplementedError

    def drafts(self) -> None:
        return None

    def result(self) -> StepOutput:
        self.device.now = max(self.device.now, self.ends_at)
        ones = np.ones(self.num_samples, np.int32)
        return StepOutput(ones[:, None], ones, {}, [])


class Simulation:
    """One decoder, whose engine launches steps before it has the tokens of the step before.

    Args:
        rate: requests a second.
        seconds: length of the day.
        has_batch: True if a batch without an end runs.
        num_prompt: number of tokens of a request's prompt.
    """

    def __init__(
        self, rate: float, seconds: float, *, has_batch: bool, num_prompt: int = 1000
    ) -> None:
        info = runner_info(
            num_blocks=20_000, max_num_sequences=256, max_batched_tokens=8192,
            max_model_len=8192, block_size=16,
        )  # fmt: skip
        self.device, self.day = Device(info), Day()
        self.engine = Engine(
            self.device, overlap=True, step_ms=STEP_MS, step_cost=known_cost(),
            clock=self.device.clock,
        )  # fmt: skip
        self._rng, self._seconds, self._has_batch = random.Random(1), seconds, has_batch
        self._num_prompt = num_prompt
        self._arrivals: list[float] = []
        while not self._arrivals or self._arrivals[-1] < seconds * 1e3:
            last = self._arrivals[-1] if self._arrivals else 0.0
            self._arrivals.append(last + self._rng.expovariate(rate) * 1e3)
        self._turns, self._ticked_at, self._number = LineTurns(MOST_LINES), 0.0, 0
        self._arrived_at: dict[int, float] = {}
        self._lines: set[int] = set()

    def run(self) -> Day:
        device, engine = self.device, self.engine
        end = self._arrivals.pop()
        while device.now < end:
            while self._arrivals and self._arrivals[0] <= device.now:
                number = self.add(self._num_prompt, background=False)
                self._arrived_at[number] = self._arrivals.pop(0)
            if self._has_batch:
                self._add_lines()
            if engine.waits:
                device.now += POLL_MS
            elif engine.has_work:
                self.step()
            else:
                device.now = self._arrivals[0] if self._arrivals else end
        check_scheduler(engine.scheduler)
        self.day.first_ms.sort()
        self.day.busy = device.busy_ms / device.now
        return self.day

    def step(self) -> None:
        """Runs a step, and notes the first tokens of requests and the ends of lines."""
        done = self.engine.step()
        for event in done.events if done is not None else ():
            arrived = self._arrived_at.pop(event.sequence_id, None)
            if arrived is not None:
                self.day.first_ms.append(self.device.now - arrived)
            if event.end is not None and event.sequence_id in self._lines:
                self._turns.release()
                self.day.num_lines += 1

    def add(self, length: int, *, background: bool) -> int:
        """Adds a request or a line, and returns its number."""
        self._number += 1
        tokens = [self._rng.randrange(97) for _ in range(length)]
        tenant = "x/batch" if background else "x"
        if background:
            self._lines.add(self._number)
        self.engine.add(
            add_message(self._number, tokens, tenant=tenant, max_tokens=100, background=background)
        )
        return self._number

    def _add_lines(self) -> None:
        if self.device.now - self._ticked_at > TICK_MS:
            self._ticked_at = self.device.now
            scheduler = self.engine.scheduler
            self._turns.adapt(scheduler.num_waiting, scheduler.num_running)
        while self._turns.num_running < self._turns.limit:
            self._turns.num_running += 1
            self.add(500, background=True)


@cache
def alone(rate: float, num_prompt: int, seconds: int) -> Day:
    return Simulation(rate, seconds, has_batch=False, num_prompt=num_prompt).run()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rate", "num_prompt", "seconds"),
    [(10, 210, SECONDS), pytest.param(2, 1000, 30, marks=pytest.mark.nightly)],
)
def test_a_batch_delays_first_tokens_by_a_tenth_at_most(
    rate: float, num_prompt: int, seconds: int
) -> None:
    without = alone(rate, num_prompt, seconds)
    beside = Simulation(rate, seconds, has_batch=True, num_prompt=num_prompt).run()
    print(f"{without.p99:.1f} and {beside.p99:.1f} ms, {beside.num_lines / seconds:.1f} lines/s")
    assert len(beside.first_ms) >= 0.9 * rate * seconds
    assert beside.p99 <= 1.1 * without.p99
    # 49 lines a second ran beside two requests a second before the batch gave way to them.
    assert beside.num_lines / seconds > 15
    assert beside.busy > 0.97  # The device waits for no launch.


def never(_: object) -> bool:
    return False


def ignored(_: object, __: object) -> None:
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["held back", "short steps", "late launches"])
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the rules, the batch delays first tokens by more than a tenth."""
    background = "services.decoder.engine.schedule.background.Background"
    match rule:
        case "held back":
            monkeypatch.setattr(f"{background}.holds", property(never, ignored), raising=False)
        case "short steps":
            monkeypatch.setattr(f"{background}.is_short", property(never, ignored), raising=False)
        case _:
            monkeypatch.setattr("services.decoder.engine.launch_gate._MARGIN_S", 1.0)
    beside = Simulation(10, SECONDS, has_batch=True, num_prompt=210).run()
    assert beside.p99 > 1.1 * alone(10, 210, SECONDS).p99


@pytest.mark.thorough
@pytest.mark.parametrize("learns", [True, False])
def test_steps_that_take_long_to_launch_are_launched_earlier(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the device would be idle while the host launches each step."""
    monkeypatch.setattr(f"{__name__}.HOST_MS", 2.0)
    if not learns:
        monkeypatch.setattr("services.decoder.engine.launch_gate.LaunchGate.launched", ignored)
    busy = Simulation(10, SECONDS, has_batch=True, num_prompt=210).run().busy
    assert busy > 0.97 if learns else busy < 0.9


@pytest.mark.parametrize(("num_decodes", "most"), [(1, 256), (60, 256), (61, 320), (300, 384)])
def test_a_short_step_has_the_tokens_of_the_smallest_graph(num_decodes: int, most: int) -> None:
    background = Background()
    assert background.max_tokens(8192, num_decodes) == 8192
    background.is_short = True
    assert background.max_tokens(8192, num_decodes) == most
    assert background.max_tokens(128, num_decodes) == 128


def test_a_step_with_a_prompt_of_a_request_leaves_the_batch_out() -> None:
    simulation = Simulation(1, 1, has_batch=False)
    scheduler = simulation.engine.scheduler

    def step() -> set[bool]:
        simulation.step()
        check_scheduler(scheduler)
        _, batch, _ = simulation.engine.pending[-1]
        return {chunk.sequence.message.background for chunk in batch.chunks}

    for _ in range(3):
        simulation.add(500, background=True)
    while scheduler.prefills.prefilling or len(scheduler.prefills.waiting):
        assert step() == {True}
    simulation.add(1000, background=False)
    simulation.add(500, background=True)
    kinds = [step()]
    while any(not s.message.background for s in scheduler.prefills.prefilling.values()):
        kinds.append(step())
    assert kinds == [{False}] * len(kinds)
    # Then all decode together, and the batch's last prompt is computed.
    assert step() == {False, True}


def test_steps_are_launched_ahead_again_when_no_request_has_come_for_long() -> None:
    simulation = Simulation(1, 1, has_batch=False)
    engine = simulation.engine
    for _ in range(4):
        simulation.add(50, background=True)
    simulation.step()
    assert not engine.waits  # there was no request yet
    simulation.add(50, background=False)
    assert not engine.waits  # the request waits
    simulation.step()
    assert engine.waits
    simulation.device.now += duration(StepLoad(4, 4)) + duration(StepLoad(0, 50))
    assert not engine.waits  # the device is about to be idle


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
