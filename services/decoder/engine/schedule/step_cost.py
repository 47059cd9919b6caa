"""How long a step lasts: a linear model of its work, kept true by measured steps. Pure Python.

    ms = step + row · rows + token · min(tokens, 256) + more · max(tokens - 256, 0)
         + pair · pairs + key · keys + experts · read

`step` is what every step costs: the weights are read, the kernels are launched. Below some hundred
tokens a GPU still waits for the weights, so that a token costs less there than above. `pairs` are
queries of prompts times the keys that each attends to; `keys` are what decodes read of the cache.
`read` is the share of a layer's experts that is read if tokens choose theirs independently, 1 - (1
- share of one token) ^ tokens: 64 tokens read nearly all of 128, and more tokens cost little.

Each measured step corrects the coefficients in proportion to their part of it (a normalized least
mean squares filter), so that a slow device, or a service beside it on the same device, is noticed
within some ten steps, and what a step has none of stays as it was.
"""

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

_FEW_TOKENS = 256
_RATE = 0.1  # of a step's error that it corrects
_OUTLIER = 2.0  # a step counts as at most so many times faster or slower than predicted
# Before anything is measured, in steps of one token: only the proportions matter. Attention to a
# context with as many bytes as the weights takes the time of some GEMMs of its tokens.
_TOKEN, _PAIR = 1 / 256, 4
_MIN_CHUNKS = 32, 256  # least and greatest
_GRAPH_TOKENS = 64  # CUDA graphs of steps with prompts are captured for multiples of it


@dataclass(slots=True)
class StepLoad:
    """The work of a step.

    Attributes:
        rows: decodes.
        tokens: of decodes and prompts together.
        pairs: queries of prompts times the keys that each attends to.
        keys: that decodes attend to.
    """

    rows: int = 0
    tokens: int = 0
    pairs: float = 0.0
    keys: int = 0

    def add_chunk(self, start: int, length: int) -> None:
        """Adds tokens [start, start + length) of a prompt."""
        self.tokens += length
        self.pairs += length * (start + length / 2)


class Limit(NamedTuple):
    """Of a step.

    Attributes:
        ms: how long it may last.
        tokens: the most that it may have.
        least: tokens that it may have even if it lasts longer then.
    """

    ms: float
    tokens: int
    least: int


class StepCost:
    """The coefficients of one device and model.

    Args:
        num_weight_tokens: tokens whose keys and values have as many bytes as the weights; the first
            guess of what attention costs.
        expert_share: of a layer's experts, what one token uses; 0: it has none.

    Attributes:
        decode_period: of so many steps of decodes alone, one has to be observed.
        efficient_tokens: a step of more takes longer for each, see `calibration`.
    """

    decode_period = 16

    def __init__(self, num_weight_tokens: int = 0, expert_share: float = 0.0) -> None:
        context = max(1, num_weight_tokens)
        self._expert_share = expert_share
        self._coefficients = [
            1.0,
            _TOKEN / 4,
            _TOKEN,
            _TOKEN,
            _PAIR * _TOKEN / context,
            1 / context,
            1.0 if expert_share else 0.0,
        ]
        self._is_measured = False
        self.efficient_tokens = sys.maxsize

    def predict(self, load: StepLoad) -> float:
        """Milliseconds; 0 before anything was measured."""
        return sum(self._parts(load)) if self._is_measured else 0.0

    @property
    def min_chunk(self) -> int:
        """Tokens of a prompt that every step may compute: about as many as double the time of a
        step that reads all weights, so that these are not read for fewer.
        """
        _, _, few, more, _, _, _ = self._coefficients
        least, greatest = _MIN_CHUNKS
        return min(greatest, max(least, int(self._weights_ms / max(few, more)) // least * least))

    def bound(self, step_ms: float) -> float:
        """A step's bound, of which at least half is left for prompts after weights are read."""
        return max(step_ms, 2 * self._weights_ms if self._is_measured else 0.0)

    def room(self, load: StepLoad, start: int, limit: Limit) -> int:
        """The most tokens of a prompt that a step has room for.

        Args:
            load: what the step computes already.
            start: tokens of the prompt before them.
            limit: of the whole step.
        """
        most = limit.tokens - load.tokens
        room = min(most, self._max_chunk(load, start, limit.ms))
        if room < most and room >= 2 * _GRAPH_TOKENS:
            room -= (load.tokens + room) % _GRAPH_TOKENS
        return max(room, limit.least - load.tokens, 0)

    def half(self, load: StepLoad, limit: Limit) -> Limit:
        """The limit that leaves half of a step's room."""
        return Limit(
            (self.predict(load) + limit.ms) / 2,
            (load.tokens + limit.tokens) // 2,
            (load.tokens + limit.least) // 2,
        )

    def _max_chunk(self, load: StepLoad, start: int, bound_ms: float) -> int:
        if not self._is_measured or bound_ms == math.inf:
            return sys.maxsize
        _, _, few, more, pair, _, experts = self._coefficients
        # As if the chunk had tokens enough for all experts.
        left = bound_ms - self.predict(load) - experts * (1 - self._read(load.tokens))
        found = max(0, _FEW_TOKENS - load.tokens)
        taken = few * found + pair * found * (start + found / 2)
        if taken > left:
            found, taken, more = 0, 0.0, few
        return found + _tokens_within(left - taken, more + pair * (start + found), pair)

    def observe(self, load: StepLoad, ms: float, rate: float = _RATE) -> None:
        """Corrects the coefficients by a measured step."""
        parts = self._parts(load)
        predicted = sum(parts)
        if not self._is_measured:
            self._is_measured = True
            scale = ms / predicted
            self._coefficients = [scale * c for c in self._coefficients]
            return
        ms = min(predicted * _OUTLIER, max(predicted / _OUTLIER, ms))
        gain = rate * (ms - predicted) / sum([part * part for part in parts])
        self._coefficients = [
            c * (1 + gain * part) for c, part in zip(self._coefficients, parts, strict=True)
        ]

    def fit(self, steps: list[tuple[StepLoad, float]]) -> None:
        """Fits the coefficients to measured steps, the first of which sets the scale."""
        for _ in range(200):
            for load, ms in steps:
                self.observe(load, ms, rate=0.5)

    def _parts(self, load: StepLoad) -> list[float]:
        """Milliseconds of each term."""
        step, row, few, more, pair, key, experts = self._coefficients
        tokens = min(load.tokens, _FEW_TOKENS)
        rest = load.tokens - tokens
        return [
            step, row * load.rows, few * tokens, more * rest, pair * load.pairs, key * load.keys,
            experts * self._read(load.tokens),
        ]  # fmt: skip

    @property
    def _weights_ms(self) -> float:
        return self._coefficients[0] + self._coefficients[-1]

    def _read(self, tokens: int) -> float:
        """The share of experts that so many tokens use; 1 if there are none."""
        return 1 - (1 - self._expert_share) ** tokens if self._expert_share else 1.0


def _tokens_within(ms: float, token: float, pair: float) -> int:
    """The most tokens n with token · n + pair · n² / 2 <= ms."""
    if ms <= 0:
        return 0
    return int(2 * ms / (token + math.sqrt(token * token + 2 * pair * ms)))
