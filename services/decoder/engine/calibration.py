"""Times steps of a loaded model, to begin with a `StepCost` that is right."""

import math
import os
import sys
import time

import numpy as np

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from services.decoder.engine.step import Runner

_PROMPTS = 1, 32, 256, 1024, 4096  # tokens
_ROWS = 64
_NUM_TOKENS = 4  # of each completion
_ROUNDS = 2
_GROWTH = 4  # of the time from one prompt to the next
# Tokens of steps with prompts, as graphs are captured. Decodes count among them: of fewer, little
# would be left for prompts.
_SIZES = *range(896, 1408, 64), *range(1408, 2048, 128), 2048, 3072, 4096, 6144, 8192
_PROMPT = _CONTEXT = 1024  # the longest prompt of these; of each of `_ROWS` decodes beside them
_NEARLY = 1.03  # times the least time a token: as good


class _Timings(StepCost):
    """Keeps steps instead of learning from them; of equal ones the fastest."""

    decode_period = 1

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[tuple[int, int, float, int], tuple[StepLoad, float]] = {}

    def observe(self, load: StepLoad, ms: float, rate: float = 0.0) -> None:
        key = load.rows, load.tokens, load.pairs, load.keys
        if key not in self.steps or ms < self.steps[key][1]:
            self.steps[key] = load, ms


def measured_cost(runner: Runner, budget_s: float, step_ms: float) -> StepCost:
    """The cost of the runner's steps, of which those with prompts may last `step_ms`.

    Decodes of one row and of many, prompts of several lengths, and one that goes on behind a long
    context, by the engine itself and so by the graphs and kernels that serve. What would take more
    than is left of `budget_s` seconds is not run; the first steps are. Then sizes of steps, in as
    much time again.
    """
    info = runner.info
    longest = min(info.max_model_len, info.num_blocks * info.block_size) - _NUM_TOKENS
    lengths = {min(n, longest) for n in (*_PROMPTS, info.max_batched_tokens + _PROMPTS[-2])}
    runs = [(1, length) for length in sorted(lengths) if length > 0]
    runs.insert(2, (min(_ROWS, info.max_num_sequences, info.num_blocks), 1))
    timings = _Timings()
    engine = Engine(runner, overlap=False, step_cost=timings)
    began, round_s = time.monotonic(), 0.0
    for _ in range(_ROUNDS):
        taken = 0.0
        for count, length in runs:
            left = budget_s - (time.monotonic() - began)
            if timings.steps and max(round_s, _GROWTH * taken) > left:
                break
            started = time.monotonic()
            _run(engine, count, length, info.vocab_size)
            if count == 1:
                taken = time.monotonic() - started
        round_s = time.monotonic() - began
    cost = StepCost(info.num_weight_tokens, info.expert_share)
    cost.fit(list(timings.steps.values()))
    cost.efficient_tokens = _efficient_tokens(runner, cost, budget_s, step_ms)
    return cost


def _efficient_tokens(runner: Runner, cost: StepCost, budget_s: float, step_ms: float) -> int:
    """The smallest size of a step with nearly the least time for a token, of those that last at
    most `step_ms` with decodes beside them; no bound if that is the largest of them.

    Tiles of a GEMM fill all SMs of a GPU at some sizes alone: a step of 1,056 tokens of an 8B takes
    a sixth longer than one of 1,024.
    """
    timings, info = _Timings(), runner.info
    engine = Engine(runner, overlap=False, step_cost=timings)
    began, taken = time.monotonic(), dict[int, float]()
    most = min(info.max_batched_tokens, info.num_blocks * info.block_size)
    for size in [size for size in _SIZES if size <= most]:
        count = -(-size // _PROMPT)
        served = StepLoad(_ROWS, keys=_ROWS * _CONTEXT)
        for _ in range(count):
            served.add_chunk(0, size // count)
        ms, left_ms = cost.predict(served), 1e3 * (budget_s + began - time.monotonic())
        fits = count <= info.max_num_sequences and size // count < info.max_model_len
        if not fits or ms > step_ms or _ROUNDS * ms > left_ms:
            break
        for _ in range(_ROUNDS):
            _run(engine, count, size // count, info.vocab_size, 1)
        of_size = [ms for timed, ms in timings.steps.values() if timed.tokens == size]
        taken[size] = min(of_size, default=math.inf) / size  # where blocks lack, it is two steps
    nearly = _NEARLY * min(taken.values(), default=0.0)
    found = next((size for size, ms in taken.items() if ms <= nearly), sys.maxsize)
    return found if found < max(taken, default=0) else sys.maxsize


def _run(
    engine: Engine, count: int, length: int, vocab_size: int, num_tokens: int = _NUM_TOKENS
) -> None:
    """Runs sequences of random tokens, which find nothing of others, from beginning to end."""
    sampling, salt = SamplingParams(max_tokens=num_tokens), os.urandom(8)
    for number in range(count):
        ids = np.random.default_rng(number).integers(0, vocab_size, length, dtype=np.int32)
        engine.add(AddSequence(number, ids.tobytes(), b"", 0, [], sampling, cache_salt=salt))
    while engine.has_work:
        engine.step()
