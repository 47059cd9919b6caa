"""Lines of a batch beside requests: the first tokens of requests come as soon as without the batch.

A simulated day of an engine, in the time of a simulated device: each step takes as long as about
that of the 8B in bf16 on one H200, and the engine learns it from the steps. Requests of 210 or
1,000 tokens arrive at random and get 8 or 100 tokens; the batch always has as many lines of 500
tokens as `LineTurns` allows.
"""

import bisect
import math
import random
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import EngineInfo, ImageSpan
from services.decoder.engine.schedule.background import _MOST_HELD_STEPS, Background
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import Int32Array, Step, StepOutput
from services.gateway.batches.line_turns import LineTurns
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message, runner_info
from tests.integrity import check_scheduler

STEP_MS = 40.0  # the setting's default
MOST_LINES = 128
TICK_MS = 500.0
# Long enough that requests wait that the batch would delay, in each of the simulations.
SECONDS = 30
# Requests a second, tokens of a prompt and of an answer: the engine is often without a request.
SHORT = (20, 210, 8)
# Milliseconds in which the host plans and launches a step, in addition for each of its sequences,
# and between two looks at messages.
HOST_MS, SEQUENCE_MS, POLL_MS = 0.5, 0.01, 0.02


def duration(load: StepLoad) -> float:
    """Milliseconds of a step: weights or tokens, keys that decodes read, pairs of prompts. A step
    with prompts is padded to the size of a CUDA graph. One with decodes, too, takes 1 ms longer,
    which is fitted to measured times of requests beside a batch.
    """
    tokens, mixed = load.tokens, 0.0
    if tokens > load.rows:
        tokens = -(-tokens // 64) * 64
        if load.rows:
            tokens, mixed = max(256, tokens), 1.0
    gemms = max(4.0 + 0.009 * tokens, 0.0205 * tokens)
    return gemms + mixed + 4.3e-5 * load.keys + 1e-6 * load.pairs


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
        compute = step.compute
        self.now += HOST_MS + SEQUENCE_MS * len(compute.lengths)
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
        num_output: number of tokens of a request's answer.
    """

    def __init__(
        self,
        rate: float,
        seconds: float,
        *,
        has_batch: bool,
        num_prompt: int = 1000,
        num_output: int = 100,
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
        self._num_prompt, self._num_output = num_prompt, num_output
        self._num_waiting = self._num_running = 0  # as the last step has said
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
                self._wait(min(end, *self._arrivals[:1], self._ticked_at + TICK_MS))
            elif engine.has_work:
                self.step()
            else:
                device.now = self._arrivals[0] if self._arrivals else end
        check_scheduler(engine.scheduler)
        self.day.first_ms.sort()
        self.day.busy = device.busy_ms / device.now
        return self.day

    def _wait(self, until: float) -> None:
        """Looks at messages until the engine waits no longer, or until a time. Bisects the looks:
        while nothing arrives, only time ends the wait, and a wait that has ended does not begin
        again.
        """
        device, start = self.device, self.device.now

        def has_ended(num_looks: int) -> bool:
            device.now = start + POLL_MS * num_looks
            return not self.engine.waits

        most = max(1, math.floor((until - start) / POLL_MS) + 1)
        num_looks = 1 + bisect.bisect_left(range(1, most), True, key=has_ended)
        device.now = start + POLL_MS * num_looks

    def step(self) -> None:
        """Runs a step, and notes the first tokens of requests and the ends of lines."""
        done = self.engine.step()
        if done is not None:
            self._num_waiting, self._num_running = done.stats.num_waiting, done.stats.num_running
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
        tokens = self._rng.choices(range(97), k=length)
        tenant = "x/batch" if background else "x"
        if background:
            self._lines.add(self._number)
        most = 100 if background else self._num_output
        self.engine.add(
            add_message(self._number, tokens, tenant=tenant, max_tokens=most, background=background)
        )
        return self._number

    def _add_lines(self) -> None:
        if self.device.now - self._ticked_at > TICK_MS:
            self._ticked_at = self.device.now
            self._turns.adapt(self._num_waiting, self._num_running)
        while self._turns.num_running < self._turns.limit:
            self._turns.num_running += 1
            self.add(500, background=True)


@cache
def alone(rate: float, num_prompt: int, num_output: int) -> Day:
    return Simulation(
        rate, SECONDS, has_batch=False, num_prompt=num_prompt, num_output=num_output
    ).run()


def beside(rate: float, num_prompt: int, num_output: int) -> Day:
    return Simulation(
        rate, SECONDS, has_batch=True, num_prompt=num_prompt, num_output=num_output
    ).run()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "load",
    [
        SHORT,
        pytest.param((40, 210, 8), marks=pytest.mark.nightly),
        pytest.param((2, 1000, 100), marks=pytest.mark.nightly),
        pytest.param((15, 1000, 100), marks=pytest.mark.nightly),
    ],
)
def test_a_batch_delays_first_tokens_by_a_twentieth_at_most(load: tuple[int, int, int]) -> None:
    rate, _, _ = load
    without, day = alone(*load), beside(*load)
    print(f"{without.p99:.1f} and {day.p99:.1f} ms, {day.num_lines / SECONDS:.1f} lines/s")
    assert len(day.first_ms) >= 0.9 * rate * SECONDS
    assert day.p99 <= 1.05 * without.p99
    assert day.num_lines / SECONDS > 5
    assert day.busy > 0.97  # The device waits for no launch.


def never(_: object) -> bool:
    return False


def ignored(_: object, __: object) -> None:
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["held back", "short steps", "late launches"])
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the rules, the batch delays first tokens by more than a tenth."""
    module = "services.decoder.engine.schedule.background"
    match rule:
        case "held back":
            monkeypatch.setattr(f"{module}._MOST_HELD_STEPS", -1)
        case "short steps":
            monkeypatch.setattr(
                f"{module}.Background.is_short", property(never, ignored), raising=False
            )
        case _:
            monkeypatch.setattr("services.decoder.engine.launch_gate._MARGIN_S", 1.0)
    assert beside(*SHORT).p99 > 1.1 * alone(*SHORT).p99


@pytest.mark.thorough
@pytest.mark.parametrize("learns", [True, False])
def test_steps_that_take_long_to_launch_are_launched_earlier(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the device would be idle while the host launches each step."""
    monkeypatch.setattr(f"{__name__}.HOST_MS", 2.0)
    if not learns:
        monkeypatch.setattr("services.decoder.engine.launch_gate.LaunchGate.launched", ignored)
    busy = Simulation(10, 15, has_batch=True, num_prompt=210).run().busy
    assert busy > 0.97 if learns else busy < 0.9


@pytest.mark.parametrize(("num_decodes", "most"), [(1, 256), (60, 256), (61, 320), (300, 384)])
def test_a_short_step_has_the_tokens_of_the_smallest_graph(num_decodes: int, most: int) -> None:
    background = Background()
    assert background.max_tokens(8192, num_decodes) == 8192
    background.is_short = True
    assert background.max_tokens(8192, num_decodes) == most
    assert background.max_tokens(128, num_decodes) == 128


def step(simulation: Simulation) -> set[tuple[bool, bool]]:
    """Runs a step. Returns for each of its chunks whether it is a line's, and a prompt's."""
    simulation.step()
    if not simulation.engine.pending:
        return set()
    _, batch, _ = simulation.engine.pending[-1]
    return {(c.sequence.message.background, not c.from_device) for c in batch.chunks}


LINE = {(True, True), (True, False)}
REQUEST = {(False, True), (False, False)}


def test_steps_leave_the_batch_out_while_a_request_is_there() -> None:
    simulation = Simulation(1, 1, has_batch=False, num_output=20)
    for _ in range(3):
        simulation.add(500, background=True)
    for _ in range(8):
        assert step(simulation) <= LINE
    simulation.add(1000, background=False)
    simulation.add(500, background=True)
    num_steps = 0
    while (kinds := step(simulation)) <= REQUEST:
        num_steps += 1
    # The answer has 20 tokens, of which the first one comes with the prompt.
    assert num_steps >= 20
    assert kinds <= LINE
    check_scheduler(simulation.engine.scheduler)


def test_the_batch_runs_again_beside_a_request_without_an_end() -> None:
    """Then steps with prompts of requests leave it out, until no request is there."""
    simulation = Simulation(1, 1, has_batch=False, num_output=200)
    for _ in range(3):
        simulation.add(500, background=True)
    for _ in range(12):
        step(simulation)
    simulation.add(1000, background=False)
    for _ in range(_MOST_HELD_STEPS):
        assert step(simulation) <= REQUEST
    for _ in range(40):
        assert step(simulation) == {(True, False), (False, False)}
    simulation.add(1000, background=False)
    while any(not s.message.background for s in simulation.engine.sequences.values()):
        kinds = step(simulation)
        assert kinds <= REQUEST or (False, True) not in kinds
    for _ in range(2):
        simulation.add(500, background=True)
        assert step(simulation) <= LINE
    simulation.add(1000, background=False)
    for _ in range(_MOST_HELD_STEPS):
        assert step(simulation) <= REQUEST
    check_scheduler(simulation.engine.scheduler)


def test_steps_of_the_batch_have_one_prompt_or_decodes_while_requests_come() -> None:
    simulation = Simulation(1, 1, has_batch=False, num_output=1)
    simulation.add(100, background=False)
    simulation.add(50, background=True)
    assert step(simulation) == {(False, True)}
    assert step(simulation) == {(True, True)}
    for _ in range(4):
        simulation.add(100, background=True)
    simulation.add(1000, background=True)
    simulation.add(100, background=True)
    sizes = list[int]()
    while len(simulation.engine.scheduler.decodes) < 7:
        assert step(simulation) in ({(True, True)}, {(True, False)}, set())
        _, batch, _ = simulation.engine.pending[-1]
        chunks = [c for c in batch.chunks if not c.from_device]
        assert len(chunks) <= 1
        sizes += [c.length for c in chunks]
    # The long prompt is computed in its turn, by steps as short as others.
    assert sizes == [100, 100, 100, 100, 192, 192, 192, 192, 192, 40, 100]
    assert step(simulation) == {(True, False)}


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
