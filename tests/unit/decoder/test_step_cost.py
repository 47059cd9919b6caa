"""The cost model of a step: what it learns, and how many tokens it says fit."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.schedule.step_budget import StepBudget
from services.decoder.engine.schedule.step_cost import Limit, StepCost, StepLoad
from services.decoder.engine.step import Step
from tests.fake_runner import FakeRunner, add_message, runner_info

ms = float
# Tokens whose keys and values are as large as the weights.
CONTEXT = {"gpu": 103_000, "cpu": 2_000, "experts": 400_000}


def gpu(load: StepLoad) -> ms:
    """A step of an 8B model: weights or GEMMs, whichever take longer, then attention."""
    gemms = max(5.4, 0.0215 * load.tokens)
    return 0.3 + gemms + 1.4e-6 * load.pairs + 5.4 / CONTEXT["gpu"] * load.keys


def cpu(load: StepLoad) -> ms:
    """A step of the demonstration model on a core."""
    tokens = 0.12 * (load.tokens - load.rows) + 0.25 * load.rows
    return 5 + tokens + 1.4e-4 * load.pairs + 5 / CONTEXT["cpu"] * load.keys


def experts(load: StepLoad) -> ms:
    """A step of a mixture of 128 experts, 8 a token, whose weights take longer than a bound."""
    read = 45 * (1 - (1 - 8 / 128) ** load.tokens)
    return 10 + read + 0.05 * load.tokens + 3e-6 * load.pairs + 10 / 400_000 * load.keys


DEVICES = {"gpu": gpu, "cpu": cpu, "experts": experts}


def load_of(rows: int = 0, context: int = 0, *chunks: tuple[int, int]) -> StepLoad:
    load = StepLoad(rows, rows, 0.0, rows * context)
    for start, length in chunks:
        load.add_chunk(start, length)
    return load


def fitted(device: str, scale: float = 1.0, wave_tokens: int = 0) -> StepCost:
    """As `measured_cost` fits it: a few steps, within three percent."""
    most = 1024 if device == "cpu" else 8192
    share = 8 / 128 if device == "experts" else 0.0
    noise, cost = random.Random(0), StepCost(CONTEXT[device], share, wave_tokens)
    loads = [load_of(0, 0, (0, 1)), load_of(1, 2), load_of(64, 3)]
    loads += [load_of(0, 0, (0, n)) for n in (32, 256, 1024, 4096, most) if n <= most]
    loads += [load_of(0, 0, (most, 1024)), load_of(1, most + 1024)]
    cost.fit([(load, scale * DEVICES[device](load) * noise.uniform(0.97, 1.03)) for load in loads])
    return cost


SERVED = [  # what steps under load compute
    load_of(100, 1000, (0, 900)),
    load_of(170, 1060, (0, 700), (500, 300)),
    load_of(20, 500, (12_000, 900)),
    load_of(8, 200, (0, 200)),
]


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_fit_says_how_long_prompts_take(device: str) -> None:
    cost = fitted(device)
    for load in (load_of(0, 0, (0, 1008)), load_of(1, 500), load_of(0, 0, (0, 256))):
        assert cost.predict(load) == pytest.approx(DEVICES[device](load), rel=0.08)


@pytest.mark.parametrize("device", DEVICES)
def test_measured_steps_keep_it_true_despite_noise_and_outliers(device: str) -> None:
    """Within twelve percent, although one step in a hundred takes five times as long."""
    cost, noise = fitted(device), random.Random(1)
    for _ in range(2000):
        chunk = noise.choice([0, 0, 1000, 5000]), noise.randint(16, 1500)
        load = load_of(noise.randint(1, 200), noise.randint(100, 3000), chunk)
        outlier = 5 if noise.random() < 0.01 else 1
        cost.observe(load, DEVICES[device](load) * noise.uniform(0.9, 1.1) * outlier)
    for load in SERVED:
        assert cost.predict(load) == pytest.approx(DEVICES[device](load), rel=0.12)


def test_a_device_that_is_shared_is_noticed_within_thirty_steps() -> None:
    cost = fitted("gpu")
    for _ in range(30):
        cost.observe(SERVED[0], 1.6 * gpu(SERVED[0]))
    assert cost.predict(SERVED[0]) == pytest.approx(1.6 * gpu(SERVED[0]), rel=0.05)


def test_one_slow_step_changes_little() -> None:
    cost = fitted("gpu")
    before = cost.predict(SERVED[0])
    cost.observe(SERVED[0], 10_000.0)
    assert before < cost.predict(SERVED[0]) <= 1.11 * before


def test_a_least_chunk_is_worth_reading_the_weights_for() -> None:
    assert fitted("gpu").min_chunk in (192, 224, 256)
    assert fitted("cpu").min_chunk == 32


@pytest.mark.parametrize(
    ("read_ms", "expected"),
    [(0.1, 40.0), (4.1, 40.0), (9.0, 40.0), (13.6, 68.0), (15.0, 75.0), (40.0, 80.0)],
)
def test_models_whose_weights_take_long_to_read_get_longer_steps(read_ms: ms, expected: ms) -> None:
    """8B: 4.1 ms on an H200; 32B on two: 9; 27B on one: 13.6."""
    cost = StepCost(10**9)
    assert cost.default_step_ms == 40.0  # nothing is known
    cost.fit([(load_of(0, 0, (0, n)), read_ms + 0.0068 * read_ms * n) for n in (1, 256, 1024)])
    assert cost.default_step_ms == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("bound", [10.0, 40.0, 500.0])
def test_experts_are_read_once_for_many_tokens(bound: ms) -> None:
    """A step of 64 tokens takes eight times as long as of one, of 1,000 twice as long as of 64: a
    bound that reading the weights fills would else leave prompts crumbs.
    """
    cost, load, room = fitted("experts"), StepLoad(), 0
    for _ in range(200):  # what it learns of its own steps keeps it there
        load = load_of(6, 500)
        room = cost.fitting_tokens(
            load, 0, Limit(cost.bound(bound), 8192, cost.min_chunk + load.tokens)
        )
        load.add_chunk(0, room)
        cost.observe(load, experts(load))
    assert experts(load) == pytest.approx(max(bound, 2 * 55), rel=0.15)
    best = 1 / 0.05  # tokens of prompts a millisecond, in endless steps
    assert room / experts(load) >= 0.45 * best


def test_nothing_is_known_before_something_is_measured() -> None:
    cost = StepCost(1000)
    assert cost.predict(SERVED[0]) == 0.0
    assert cost.fitting_tokens(StepLoad(4, 4), 0, Limit(1.0, 100, 50)) == 96
    cost.observe(SERVED[0], 30.0)
    assert cost.predict(SERVED[0]) == pytest.approx(30.0)


@settings(max_examples=300, deadline=None)
@given(
    device=st.sampled_from(sorted(DEVICES)),
    scale=st.floats(0.05, 20.0),
    rows=st.integers(0, 256),
    context=st.integers(0, 8000),
    tokens=st.integers(0, 2000),
    start=st.integers(0, 100_000),
    limit=st.builds(
        Limit,
        st.floats(1, 500),
        st.integers(2300, 8192),
        st.integers(0, 500),
        extended_ms=st.just(0.0),
    ),
)
def test_a_chunk_fits_and_no_much_longer_one_does(
    device, scale, rows, context, tokens, start, limit
):
    cost = fitted(device, scale)
    load = load_of(rows, context, (0, tokens))
    room = cost.fitting_tokens(load, start, limit)
    least = max(0, limit.least - load.tokens)
    assert least <= room <= limit.tokens - load.tokens

    def lasts(length: int) -> ms:
        return cost.predict(load_of(rows, context, (0, tokens), (start, length)))

    if room > least:
        assert lasts(room) <= limit.ms * 1.0001
    if room < limit.tokens - load.tokens:
        assert lasts(room + 64) >= limit.ms * 0.9999  # a graph's size


@pytest.mark.parametrize(
    ("start", "bound", "waves"),
    [(0, 40.0, 0), (90_000, 70.0, 0), (90_000, 100.0, 1), (60_000, 160.0, 2)],
    ids=["short", "less than a wave", "a wave", "two waves"],
)
def test_a_lone_chunk_behind_many_keys_fills_whole_waves(start: int, bound: ms, waves: int) -> None:
    """640 tokens behind 90,000 keys would take as long as 1,024, and 512 take half as long."""
    limit, load = Limit(bound, 8192, 0), StepLoad()
    cost, other = fitted("gpu", wave_tokens=512), fitted("gpu")
    room = other.fitting_tokens(load, start, limit)
    assert cost.fitting_tokens(load, start, limit) == (512 * waves or room)
    assert room % 512
    # Beside another chunk, the chunk's own tiles need not fill the wave.
    half, beside = limit._replace(is_half=True), load_of(0, 0, (0, 64))
    assert cost.fitting_tokens(load, start, half) == room
    shared = other.fitting_tokens(beside, start, limit)
    assert cost.fitting_tokens(beside, start, limit) == shared


def test_a_step_may_last_as_long_as_its_launch() -> None:
    """Tokens that the device computes while the host launches the step cost no time."""
    cost, load, start = fitted("gpu"), StepLoad(), 8000
    cost.may_stretch, cost.efficient_tokens = True, 512

    def tokens(step_ms: ms = 40.0) -> int:
        budget = StepBudget(cost, StepLoad(), step_ms=step_ms, max_tokens=8192, alone=False)
        return budget.fitting_tokens(start, 2 * cost.efficient_tokens)

    usual, short = tokens(), tokens(0.0)
    for _ in range(20):
        cost.launched(60.0, is_late=True)
    assert 50 <= cost.extended_ms(40.0, is_crowded=False) <= 60
    longer = tokens()
    assert longer > usual
    load.add_chunk(start, longer)
    assert 40 < cost.predict(load) <= 60
    assert tokens(0.0) == short
    for _ in range(20):
        cost.launched(1000.0, is_late=True)
    # 80 ms are the longest gap that a reader should see.
    assert cost.extended_ms(40.0, is_crowded=False) == 80.0
    assert cost.extended_ms(120.0, is_crowded=False) == 120.0
    cost.may_stretch = False  # the bound that an operator sets holds
    assert tokens() == usual
    cost.may_stretch = True
    for _ in range(400):
        cost.launched(20.0, is_late=False)
    assert tokens() == usual


def test_a_step_of_an_efficient_size_fills_whole_waves_behind_many_keys() -> None:
    """What is left of a prompt is not divided for that if it fits."""
    cost, load = fitted("gpu", wave_tokens=512), load_of(3, 30_000)
    limit = Limit(500.0, 1152, 0)
    for start, total in ((0, 1152), (30_000, 1024)):
        assert load.tokens + cost.fitting_tokens(load, start, limit) == total
        assert load.tokens + cost.fitting_tokens(load, start, limit, left=1100) >= 1100


@pytest.mark.parametrize("decodes", [0, 7, 64, 130, 200, 250])
def test_a_chunk_is_cut_to_fewer_waves_alone(decodes: int) -> None:
    """Tiles begin with the chunk, behind decodes, and the step keeps the size of a graph."""
    wave, limit = 512, Limit(500.0, 1152, 0)
    cost, load = fitted("gpu", wave_tokens=wave), load_of(decodes, 1000)
    for start in (5_000, 20_000, 60_000):
        length = cost.fitting_tokens(load, start, limit)
        if length != 1152 - decodes:
            assert -(-length // wave) < -(-(1152 - decodes) // wave)
            assert not (decodes + length) % 64


@pytest.mark.parametrize(("is_default", "size"), [(True, 960), (True, sys.maxsize), (False, 960)])
def test_a_step_of_an_efficient_size_may_last_longer(is_default: bool, size: int) -> None:
    """Behind 30,000 keys, 40 ms are too few for it. The bound that an operator sets holds."""
    cost, context = fitted("gpu"), 30_000
    cost.may_stretch, cost.efficient_tokens = is_default, size

    def lasts(step_ms: ms, *, alone: bool = False) -> ms:
        load = StepLoad() if alone else load_of(3, context)
        budget = StepBudget(cost, load, step_ms=step_ms, max_tokens=8192, alone=alone)
        load.add_chunk(context, budget.fitting_tokens(context, 1900))
        assert alone or load.tokens <= size
        return cost.predict(load)

    if is_default and size == 960:
        assert 50 < lasts(40.0) <= 60.0
    else:
        assert 35 < lasts(40.0) <= 40.0
    assert lasts(40.0, alone=True) <= 160.0
    shortest = lasts(0.0)
    cost.may_stretch = False
    assert lasts(0.0) == shortest


def test_the_first_steps_are_timed_by_an_engine_that_leaves_nothing_behind() -> None:
    runner = FakeRunner(runner_info(num_blocks=600, max_model_len=2000, max_batched_tokens=1024))
    cost = measured_cost(runner, budget_s=60.0, step_ms=40.0)
    assert cost.predict(SERVED[0]) > 0
    shapes = {(len(batch), batch[0][1], batch[0][2]) for batch in runner.batches}
    assert {(1, 0, 1024), (1, 1024, 972), (8, 1, 1)} <= shapes
    engine = Engine(runner, overlap=True)
    engine.add(add_message(7, [1, 2, 3], max_tokens=4))
    while engine.has_work:
        engine.step()


def test_no_step_is_timed_with_copies_to_the_host() -> None:
    """There are more tokens in the prompts than in the cache."""
    runner = FakeRunner(
        runner_info(
            num_blocks=600, max_model_len=2000, max_batched_tokens=1024, num_host_blocks=2000
        )
    )
    copied: list[bool] = []

    def note(step: Step) -> None:
        copied.append(step.compute.block_saves is not None)
        copied.append(step.compute.idle_block_saves is not None)

    runner.on_execute = note
    measured_cost(runner, budget_s=60.0, step_ms=40.0)
    assert len(copied) > 20 and not any(copied)


class _Observed(StepCost):
    """Counts the steps that it learns from."""

    decode_period, count = 1, 0

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        self.count += 1


def test_nothing_is_learnt_from_a_step_that_loads_blocks() -> None:
    runner, cost = FakeRunner(runner_info(num_blocks=30, num_host_blocks=64)), _Observed()
    loads: list[bool] = []
    runner.on_execute = lambda step: loads.append(step.compute.block_loads is not None)
    engine = Engine(runner, overlap=False, step_cost=cost)
    for number in range(4):
        prompt = list(range(100 * (number % 3), 100 * (number % 3) + 48))
        engine.add(add_message(number, prompt, max_tokens=2))
        while engine.has_work:
            engine.step()
    assert loads.count(True) == 1 and cost.count == len(loads) - 1


def waves(tokens: int, tile: int, fixed: ms) -> ms:
    """A step whose GEMMs have tiles of so many tokens, of which the last one may be all but empty;
    those of few tokens wait for the weights.
    """
    return fixed + max(4, 0.018 * tile * -(-tokens // tile))


@pytest.mark.parametrize(
    ("tile", "fixed", "step_ms", "blocks", "efficient"),
    [
        (1024, 1, 30, 3000, 1024),
        (768, 1, 40, 3000, 1536),
        (1, 20, 60, 3000, 2048),
        (1, 20, 60, 448, 1664),  # 1,792 tokens have blocks, but for the watermark
        (1024, 1, 10, 3000, sys.maxsize),  # none fits
    ],
)
def test_a_step_has_the_size_at_which_a_token_takes_the_least_time(
    tile: int,
    fixed: ms,
    step_ms: ms,
    blocks: int,
    efficient: int,
) -> None:
    now = 0.0  # passes while steps are computed
    info = runner_info(
        num_blocks=blocks, max_model_len=2000, max_batched_tokens=8192, num_weight_tokens=10**9
    )
    runner = FakeRunner(info)

    def compute(step: Step) -> None:
        nonlocal now
        now += waves(sum(step.compute.lengths), tile, fixed) / 1e3

    runner.on_execute = compute
    assert measured_cost(runner, 60.0, step_ms, lambda: now).efficient_tokens == efficient


def test_sizes_are_compared_by_the_times_of_steps_under_load() -> None:
    """A device whose first step of a size is faster than the others, if its tiles are full."""
    now, last, repeats = 0.0, 0, 0

    def compute(step: Step) -> None:
        nonlocal now, last, repeats
        tokens = sum(step.compute.lengths)
        repeats = repeats + 1 if tokens == last else 0
        last = tokens
        per_token = 0.018 if tokens == 1024 and not repeats else 0.02
        now += (3 + max(4, per_token * tokens)) / 1e3

    runner = FakeRunner(
        runner_info(
            num_blocks=3000, max_model_len=2000, max_batched_tokens=8192, num_weight_tokens=10**9
        )
    )
    runner.on_execute = compute
    assert measured_cost(runner, 60.0, 60.0, lambda: now).efficient_tokens == 1664


@pytest.mark.parametrize(("task", "efficient"), [("generate", 1664), ("embed", 1536)])
def test_sizes_are_compared_when_the_power_limit_holds(task: str, efficient: int) -> None:
    """A device whose steps take 4 ms longer once it was busy for 0.4 s."""
    now, busy_ms = 0.0, 0.0

    def compute(step: Step) -> None:
        nonlocal now, busy_ms
        tokens = sum(step.compute.lengths)
        ms = max(4.0, 0.02 * tokens)
        if busy_ms > 400:
            ms += 4.0
        busy_ms += ms if tokens >= 800 else -busy_ms  # few tokens let it cool
        now += ms / 1e3

    runner = FakeRunner(
        runner_info(
            num_blocks=3000,
            max_model_len=2000,
            max_batched_tokens=8192,
            num_weight_tokens=10**9,
            task=task,
        )
    )
    runner.on_execute = compute
    assert measured_cost(runner, 4.0, 40.0, lambda: now).efficient_tokens == efficient


def test_what_takes_too_long_is_not_timed() -> None:
    runner = FakeRunner(runner_info(num_blocks=600, max_model_len=2000, max_batched_tokens=1024))
    assert measured_cost(runner, budget_s=0.0, step_ms=40.0).predict(SERVED[0]) > 0
    assert all(length == 1 for batch in runner.batches for _, _, length in batch)
