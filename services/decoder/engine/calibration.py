"""Calibration: times steps of a loaded model, so that its `StepCost` is right from the start."""

import logging
import math
import os
import statistics
import sys
import time

import numpy as np

from services.common.clock import Clock
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.runner import Runner
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad

# Numbers of tokens of the prompts that are timed alone.
_PROMPTS = 1, 32, 256, 1024, 4096
# The most decodes of a timed step.
_ROWS = 64
_COMPLETION_TOKENS = 4
_ROUNDS = 2
# A prompt is assumed to take at most this many times longer than the next shorter prompt.
_GROWTH = 4
# Numbers of tokens of the steps with prompts that are compared. CUDA graphs are captured for them.
# Decodes count among the tokens, so smaller steps would leave little for prompts.
_SIZES = 896, 960, 1024, 1152, 1280, *range(1408, 2048, 128), 2048, 3072, 4096, 6144, 8192
# The longest prompt of these steps, and the context of each decode beside the prompts.
_PROMPT = _CONTEXT = 1024
# Number of rounds in which all sizes are timed, the most steps of a size in all rounds together,
# and the least in each round. The steps of a round run one right behind the other. Where the least
# number of steps would take too long, the largest sizes are left out.
_SIZE_ROUNDS, _STEPS, _LEAST_STEPS = 3, 8, 2
# A model for search is at full load for as long as documents are embedded. Milliseconds of load
# before its first size, and the least milliseconds of each size.
_HEAT_MS, _SIZE_MS = 500, 250
# The time for sizes is this many times the time for the other steps, and for a model for search.
_SIZES_SHARE, _SEARCH_SIZES_SHARE = 2, 4
# A time per token up to this many times the least is as good as the least, and a size up to this
# many times another one delays tokens as little.
_NEARLY, _ALIKE = 1.03, 1.125

log = logging.getLogger("services.decoder.engine")


class _Timings(StepCost):
    """Keeps measured steps instead of learning from them; of equal steps the fastest."""

    decode_period = 1

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[tuple[int, int, float, int], tuple[StepLoad, float]] = {}

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        key = load.rows, load.tokens, load.pairs, load.keys
        if key not in self.steps or ms < self.steps[key][1]:
            self.steps[key] = load, ms


class _SizeTimings(StepCost):
    """Keeps the times of steps with `efficient_tokens` tokens instead of learning from them.

    Attributes:
        ms: milliseconds of these steps, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ms: list[float] = []

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        if load.tokens == self.efficient_tokens:
            self.ms.append(ms)


def measured_cost(
    runner: Runner, budget_s: float, step_ms: float | None, clock: Clock = time.monotonic
) -> StepCost:
    """Returns the cost of the runner's steps, from steps that are run and timed.

    The steps are decodes of one row and of many rows, prompts of several lengths, and a prompt that
    continues behind a long context. The engine runs them, and so the graphs and kernels that serve.
    Then steps of several sizes are compared, in twice as much time, or in four times as much for a
    model for search.

    Args:
        runner: the runner of a loaded model.
        budget_s: seconds that the steps may take. Steps that would take more than is left are not
            run, except for the first.
        step_ms: milliseconds that a step with prompts may last when the model serves. Defaults to
            `StepCost.default_step_ms`.
        clock: the clock that times steps.
    """
    info = runner.info
    longest = min(info.max_model_len, info.num_blocks * info.block_size) - _COMPLETION_TOKENS
    lengths = {min(n, longest) for n in (*_PROMPTS, info.max_batched_tokens + _PROMPTS[-2])}
    runs = [(1, length) for length in sorted(lengths) if length > 0]
    runs.insert(2, (min(_ROWS, info.max_num_sequences, info.num_blocks), 1))
    timings = _Timings()
    engine = _engine(runner, timings, clock)
    began, round_s = clock(), 0.0
    for _ in range(_ROUNDS):
        last_s = 0.0
        for count, length in runs:
            left_s = budget_s - (clock() - began)
            if timings.steps and max(round_s, _GROWTH * last_s) > left_s:
                break
            started = clock()
            _run(engine, count, length, _COMPLETION_TOKENS)
            if count == 1:
                last_s = clock() - started
        round_s = clock() - began
    cost = StepCost(info.num_weight_tokens, info.expert_share, info.wave_tokens)
    cost.fit(list(timings.steps.values()))
    bound_ms = cost.default_step_ms if step_ms is None else step_ms
    cost.may_stretch = step_ms is None  # a bound that an operator has set holds
    sizes_s = budget_s * (_SIZES_SHARE if info.task == "generate" else _SEARCH_SIZES_SHARE)
    cost.efficient_tokens = _efficient_tokens(runner, cost, sizes_s, bound_ms, clock)
    return cost


def _efficient_tokens(
    runner: Runner, cost: StepCost, budget_s: float, step_ms: float, clock: Clock
) -> int:
    """Returns the size of a step that takes nearly the least time per token, see `_best_size`.

    A GPU's GEMM tiles fill all SMs only at some sizes: a step of 1,056 tokens of an 8B model takes
    a sixth longer than a step of 1,024 tokens. Several steps of a size are timed one right behind
    the other, because a GPU is slower under load than in a single step.

    The median of three rounds counts (`_merged`). Neither a clock that falls meanwhile nor another
    process on the GPU during one round changes the choice much. For a model for search there is one
    round: the load before the first size and that of each size last long enough for the GPU's power
    limit to hold.
    """
    timings, info = _SizeTimings(), runner.info
    is_search = info.task != "generate"
    sizes = _predicted_sizes(runner, cost, step_ms)
    num_rounds = 1 if is_search else _SIZE_ROUNDS
    while not is_search and _LEAST_STEPS * num_rounds * sum(sizes.values()) > 1e3 * budget_s:
        sizes.popitem()
    engine = _engine(runner, timings, clock)
    end, rounds = clock() + budget_s, list[dict[int, float]]()
    for number in range(num_rounds):
        # If steps are slower than predicted, the later rounds have fewer of them.
        share_ms = 1e3 * (end - clock()) / (num_rounds - number)
        fitting = int(share_ms / max(1e-3, sum(sizes.values())))
        num_steps = max(_LEAST_STEPS, min(fitting, (_STEPS + number) // num_rounds))
        ms_per_token = dict[int, float]()
        for size, ms in sizes.items():
            if is_search:
                heat_ms = 0 if ms_per_token else _HEAT_MS
                num_steps = max(_STEPS, math.ceil((_SIZE_MS + heat_ms) / max(ms, 1.0)))
            if num_steps * ms > 1e3 * (end - clock()):
                break
            ms_per_token[size] = _timed_size(engine, timings, size, num_steps) / size
        # The first round counts even if there was not enough time for all of its sizes.
        if not number or len(ms_per_token) == len(sizes):
            rounds.append(ms_per_token)
        if len(ms_per_token) < len(sizes):
            fields = {"whole_rounds": number, "sizes": len(rounds[0])}
            log.info("not all sizes of steps were timed", extra={"fields": fields})
            break
        sizes |= {size: size * ms for size, ms in ms_per_token.items() if ms < math.inf}
    return _best_size(_merged(rounds), alike=1.0 if is_search else _ALIKE)


def _predicted_sizes(runner: Runner, cost: StepCost, step_ms: float) -> dict[int, float]:
    """Returns the sizes to compare, and the predicted milliseconds of prompts of so many tokens.

    With decodes beside the prompts, unless the model is one for search, they last at most
    `step_ms`.
    """
    info, sizes = runner.info, dict[int, float]()
    rows = 0 if info.task != "generate" else _ROWS
    most = min(info.max_batched_tokens, info.num_blocks * info.block_size)
    for size in [size for size in _SIZES if size <= most]:
        count = -(-size // _PROMPT)
        load, served = StepLoad(), StepLoad(rows, keys=rows * _CONTEXT)
        for _ in range(count):
            load.add_chunk(0, size // count)
            served.add_chunk(0, size // count)
        fits = count <= info.max_num_sequences and size // count < info.max_model_len
        if not fits or cost.predict(served) > step_ms:
            break
        sizes[size] = cost.predict(load)
    return sizes


def _timed_size(engine: Engine, timings: _SizeTimings, size: int, steps: int) -> float:
    """Returns the median milliseconds of the later half of some steps of one size.

    Infinite if there were none: with too few blocks, the prompts were computed in two steps,
    neither of which has this size.
    """
    count = -(-size // _PROMPT)
    timings.ms, timings.efficient_tokens = [], size
    _run(engine, steps * count, size // count, num_tokens=1)
    return statistics.median(timings.ms[len(timings.ms) // 2 :] or [math.inf])


def _merged(rounds: list[dict[int, float]]) -> dict[int, float]:
    """Returns the time of each size: the median over rounds, without what slowed a whole round.

    If the clock falls in the second of three rounds, the sizes before have two fast rounds, and the
    sizes after it two slow ones. Divided by how slow their rounds are, two of three rounds agree.
    Of two rounds, the shorter time counts.
    """
    low = statistics.median_low
    medians = {size: low([ms[size] for ms in rounds]) for size in rounds[0]}
    finite = [size for size, ms in medians.items() if ms < math.inf]
    slow = [low([ms[size] / medians[size] for size in finite] or [1.0]) for ms in rounds]
    return {
        size: low([ms[size] / by for ms, by in zip(rounds, slow, strict=True)]) for size in medians
    }


def _best_size(ms_per_token: dict[int, float], alike: float) -> int:
    """Returns the size to which steps are bounded, or `sys.maxsize` for no bound.

    Sizes within 3 % of the least time per token are equally good, because measured times do not
    tell them apart. The smallest of them is taken, whose steps delay tokens the least, or the
    largest of them that is at most `alike` times as large. There is no bound if the largest size
    is the only good one.

    Args:
        ms_per_token: milliseconds per token of each size, from the smallest size to the largest.
        alike: factor up to which a larger size delays tokens as little.
    """
    nearly = _NEARLY * min(ms_per_token.values(), default=0.0)
    good = [size for size, ms in ms_per_token.items() if ms <= nearly]
    if not good or good[0] == max(ms_per_token):
        return sys.maxsize
    return max(size for size in good if size <= alike * good[0])


def _engine(runner: Runner, timings: StepCost, clock: Clock) -> Engine:
    """Returns an engine that copies nothing to the host. Together, the prompts have more tokens
    than a small KV cache, so steps would otherwise be timed with copies of the prompts before them.
    """
    engine = Engine(runner, overlap=False, step_cost=timings, clock=clock)
    engine.scheduler.blocks.host.close()
    engine.scheduler.blocks.states.host.close()
    return engine


def _run(engine: Engine, count: int, length: int, num_tokens: int) -> None:
    """Runs sequences of random tokens from beginning to end.

    Args:
        engine: the engine that runs them.
        count: number of sequences.
        length: number of prompt tokens of each sequence.
        num_tokens: number of completion tokens of each sequence.
    """
    # With a salt of their own, the sequences find nothing in the prefix cache.
    sampling, salt = SamplingParams(max_tokens=num_tokens), os.urandom(8)
    vocab_size = engine.info.vocab_size
    for number in range(count):
        ids = np.random.default_rng(number).integers(0, vocab_size, length, dtype=np.int32)
        engine.add(AddSequence(number, ids.tobytes(), b"", 0, [], sampling, cache_salt=salt))
    while engine.has_work:
        engine.step()
