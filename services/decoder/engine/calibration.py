"""Calibration: times steps of a loaded model, so that its `StepCost` is right from the start."""

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
# Number of steps of each size, one right behind the other, and of those that do not count. A GPU at
# its power limit lowers its clock after some steps, and lowers it more if tiles fill all SMs.
_STEPS, _SETTLING = 8, 3
# A model for search is at full load for as long as documents are embedded. Milliseconds of load
# before its first size, and the least milliseconds of each size.
_HEAT_MS, _SIZE_MS = 500, 250
# The time for sizes is this many times the time for the other steps, and for a model for search.
_SIZES_SHARE, _SEARCH_SIZES_SHARE = 2, 4
# A time per token up to this many times the least is as good as the least.
_NEARLY = 1.03


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
    """Returns the smallest size of a step that takes nearly the least time per token.

    Sizes are compared that last at most `step_ms`, with decodes beside the prompts unless the model
    is one for search. If the largest of them is the best, there is no bound, and the result is
    `sys.maxsize`.

    A GPU's GEMM tiles fill all SMs only at some sizes: a step of 1,056 tokens of an 8B model takes
    a sixth longer than a step of 1,024 tokens. Several steps of a size are timed one right behind
    the other, because a GPU is slower under load than in a single step. For a model for search, the
    load before the first size and that of each size last long enough for its power limit to hold.
    """
    timings, info = _SizeTimings(), runner.info
    is_search = info.task != "generate"
    rows, size_ms = (0, _SIZE_MS) if is_search else (_ROWS, 0)
    engine = _engine(runner, timings, clock)
    began, ms_per_token = clock(), dict[int, float]()
    most = min(info.max_batched_tokens, info.num_blocks * info.block_size)
    for size in [size for size in _SIZES if size <= most]:
        count = -(-size // _PROMPT)
        served = StepLoad(rows, keys=rows * _CONTEXT)
        for _ in range(count):
            served.add_chunk(0, size // count)
        ms, left_ms = cost.predict(served), 1e3 * (budget_s + began - clock())
        fits = count <= info.max_num_sequences and size // count < info.max_model_len
        heat_ms = _HEAT_MS if is_search and not ms_per_token else 0
        steps = max(_STEPS, math.ceil((size_ms + heat_ms) / max(ms, 1.0)))
        if not fits or ms > step_ms or steps * ms > left_ms:
            break
        timings.ms, timings.efficient_tokens = [], size
        _run(engine, steps * count, size // count, num_tokens=1)
        # With too few blocks, the prompts were computed in two steps, neither of which is this
        # size.
        settling = max(_SETTLING, len(timings.ms) // 2 if is_search else 0)
        ms_per_token[size] = statistics.median(timings.ms[settling:] or [math.inf]) / size
    nearly = _NEARLY * min(ms_per_token.values(), default=0.0)
    best = next((size for size, ms in ms_per_token.items() if ms <= nearly), sys.maxsize)
    return best if best < max(ms_per_token, default=0) else sys.maxsize


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
