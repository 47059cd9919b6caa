"""Times steps of a loaded model, to begin with a `StepCost` that is right."""

import time

import numpy as np

from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.step import Runner
from services.decoder.engine.step_cost import StepCost, StepLoad

_PROMPTS = 1, 32, 256, 1024, 4096  # tokens
_ROWS = 64
_NUM_TOKENS = 4  # of each completion
_ROUNDS = 2
_GROWTH = 4  # of the time from one prompt to the next


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


def measured_cost(runner: Runner, budget_s: float) -> StepCost:
    """The cost of the runner's steps.

    Decodes of one row and of many, prompts of several lengths, and one that goes on behind a long
    context, by the engine itself and so by the graphs and kernels that serve. What would take more
    than is left of `budget_s` seconds is not run; the first steps are.
    """
    info = runner.info
    longest = min(info.max_model_len, info.num_blocks * info.block_size) - _NUM_TOKENS
    lengths = {min(n, longest) for n in (*_PROMPTS, info.max_batched_tokens + _PROMPTS[-2])}
    runs = [(1, length) for length in sorted(lengths) if length > 0]
    runs.insert(2, (min(_ROWS, info.max_num_sequences, info.num_blocks), 1))
    timings = _Timings()
    engine = Engine(runner, overlap=False, prefix_caching=False, step_cost=timings)
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
    return cost


def _run(engine: Engine, count: int, length: int, vocab_size: int) -> None:
    """Runs sequences of random tokens from beginning to end."""
    sampling = SamplingParams(max_tokens=_NUM_TOKENS)
    for number in range(count):
        ids = np.random.default_rng(number).integers(0, vocab_size, length, dtype=np.int32)
        engine.add(AddSequence(number, ids.tobytes(), b"", 0, [], sampling))
    while engine.has_work:
        engine.step()
