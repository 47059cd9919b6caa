"""Step cost: a linear model that predicts how long a step lasts, corrected by measured steps.

    ms = step + row · rows + token · min(tokens, 256) + more · max(tokens - 256, 0)
         + pair · pairs + key · keys + experts · read + draft · drafts

- `step` is the time of any step: the weights are read and kernels are launched.
- `row` is the time of a decode, and `rows` the number of decodes.
- `token` is the time of each of the first 256 tokens, and `more` that of each further token. Up to
  a few hundred tokens, a GPU mostly waits for the weights, so these tokens take less time.
- `pair` is the time of a pair of a prompt's query and a key that the query attends to.
- `key` is the time of a key in the cache that a decode attends to.
- `experts` is the time to read all experts, and `read` the share of a layer's experts that the step
  reads: 1 - (1 - share that one token uses) ^ tokens, if tokens choose their experts
  independently. 64 tokens read nearly all of 128 experts.
- `draft` is the time of a draft, with its attention and experts. It is first taken to be that of a
  token.

Each measured step corrects each coefficient, in proportion to its share of the step's time (a
normalized least mean squares filter). If the device becomes slower, the predictions follow within
some ten steps. Coefficients of terms that are 0 in a step do not change. A step with drafts
corrects the time of a draft, which is learned even if the first guess is far too low. If the
prediction is too long even without the drafts, it corrects the other coefficients, too. Pure
Python.
"""

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

_FEW_TOKENS = 256
# A measured step reduces the error of the prediction by this share.
_RATE = 0.1
# The same, for the time of a draft, in a step of many drafts.
_DRAFT_RATE = 0.3
# A measured time that is more than this many times longer or shorter than the prediction is an
# outlier. It counts as if it were exactly this many times longer or shorter.
_OUTLIER = 2.0
# The same for steps with drafts, whose time is not known beforehand.
_DRAFT_OUTLIER = 4.0
# First guesses of coefficients, relative to the time of a step of one token. The first measured
# step sets the scale. `_PAIR` says that attention of some tokens to a context with as many bytes as
# the weights takes four times as long as their GEMMs.
_TOKEN, _PAIR = 1 / 256, 4
# Bounds of `min_chunk`.
_LEAST_MIN_CHUNK, _GREATEST_MIN_CHUNK = 32, 256
# CUDA graphs of steps with prompts and decodes are captured for multiples of this number of tokens,
# from `_LEAST_GRAPH` on. A step is padded to the next one: 260 tokens take as long as 320.
_GRAPH_TOKENS, _LEAST_GRAPH = 64, 256
# Graphs of steps with more than 64 sampled tokens begin at 320 tokens. A step with up to 60 decodes
# has at most 64, as long as it ends at most four prompts.
_FEW_DECODES, _LEAST_CROWDED = 60, 320
# Default of the longest time of a step, in ms. If reading the weights takes more than a quarter of
# it, a step may last five times as long as reading them, up to the longest gap that a reader of an
# answer should see.
_STEP_MS, _LONG_READ, _READS, _GAP_MS = 40.0, 0.25, 5, 80.0
# A step of at most `efficient_tokens` tokens may last this many times its bound.
_STRETCH = 1.5
# Prompts are a crowd if they take longer than `_CROWD_MS` and wait beside more decodes than the
# `_CROWDED_DECODES` with which `calibration` compares sizes of steps. A step may then last for
# `_CROWDED_STEP_MS`, see `StepCost.extended_ms`.
_CROWD_MS, _CROWDED_DECODES, _CROWDED_STEP_MS = 1000.0, 64, 50.0
# Share of the difference by which a launch that the device waits for corrects `launch_ms`, and
# share of `launch_ms` that another launch leaves.
_LATE_RATE, _KEPT = 0.3, 0.97


@dataclass(slots=True)
class StepLoad:
    """The work of a step.

    Attributes:
        rows: number of decodes.
        tokens: number of tokens, of decodes and prompts together.
        pairs: number of pairs of a prompt's query and a key that the query attends to.
        keys: number of keys that decodes attend to, without those of drafts.
        drafts: number of drafts, which are not among `tokens`.
    """

    rows: int = 0
    tokens: int = 0
    pairs: float = 0.0
    keys: int = 0
    drafts: int = 0

    def add_chunk(self, start: int, length: int) -> None:
        """Adds tokens [start, start + length) of a prompt."""
        self.tokens += length
        self.pairs += length * (start + length / 2)


class Limit(NamedTuple):
    """The limit of a step.

    Attributes:
        ms: milliseconds that the step may last.
        tokens: the most tokens that the step may have.
        least: number of tokens that the step may have even if they take longer than `ms`.
        is_half: True if another prompt takes the rest of the step.
        extended_ms: milliseconds in which the step may have up to `extended_tokens` tokens, even if
            these are more than `tokens`, see `StepCost.extended_ms`.
        extended_tokens: see `extended_ms`.
    """

    ms: float
    tokens: int
    least: int
    is_half: bool = False
    extended_ms: float = 0.0
    extended_tokens: int = 0


class StepCost:
    """The coefficients of one device and model.

    Args:
        num_weight_tokens: number of tokens whose keys and values have as many bytes as the weights.
            The first guess of the time of attention depends on it.
        expert_share: share of a layer's experts that one token uses; 0 if the model has no experts.
        wave_tokens: number of prompt tokens whose attention fills all SMs once, see
            `EngineInfo.wave_tokens`.

    Attributes:
        decode_period: number of steps without prompts of which one is observed.
        efficient_tokens: number of tokens above which each token of a step takes longer than below
            it, see `calibration`.
        may_stretch: True if a step with fewer tokens than `efficient_tokens` may last longer than
            its bound, see `sized_bound`.
        launch_ms: milliseconds in which the host lately launched steps with prompts for which the
            device had to wait. Fades if the device does not wait.
    """

    decode_period = 16

    def __init__(
        self, num_weight_tokens: int = 0, expert_share: float = 0.0, wave_tokens: int = 0
    ) -> None:
        context = max(1, num_weight_tokens)
        self._expert_share, self._wave_tokens = expert_share, wave_tokens
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
        self._draft_ms, self._num_observed_drafts = 0.0, 0
        self.efficient_tokens, self.may_stretch = sys.maxsize, False
        self.launch_ms = 0.0

    def predict(self, load: StepLoad) -> float:
        """Returns the milliseconds that a step lasts; 0 before any step was measured."""
        if not self._is_measured:
            return 0.0
        return sum(self._parts(load)) + self._draft_ms * load.drafts

    @property
    def min_chunk(self) -> int:
        """Number of prompt tokens that every step may compute.

        They take about as long as reading all weights. With fewer tokens, the step would spend most
        of its time on reading weights.
        """
        _, _, few, more, *_ = self._coefficients
        tokens = int(self._weights_ms / max(few, more)) // _LEAST_MIN_CHUNK * _LEAST_MIN_CHUNK
        return min(_GREATEST_MIN_CHUNK, max(_LEAST_MIN_CHUNK, tokens))

    @property
    def default_step_ms(self) -> float:
        """Milliseconds that a step may last if no setting says so. While 16 of 40 ms read weights,
        prompts of a 32B model cannot keep up with 64 clients, who would wait for seconds.
        """
        if not self._is_measured or self._weights_ms <= _LONG_READ * _STEP_MS:
            return _STEP_MS
        return min(_READS * self._weights_ms, _GAP_MS)

    def bound(self, step_ms: float) -> float:
        """Returns the milliseconds that a step may last: `step_ms`, or twice the time of reading
        the weights if that is more, so that at least half of the time is left for prompts.
        """
        return max(step_ms, 2 * self._weights_ms if self._is_measured else 0.0)

    @staticmethod
    def short_tokens(num_decodes: int) -> int:
        """Returns the tokens of the smallest CUDA graph that has room for a few tokens of a prompt
        beside the decodes. A step with fewer tokens takes as long.
        """
        if num_decodes <= _FEW_DECODES:
            return _LEAST_GRAPH
        least = max(_LEAST_CROWDED, num_decodes + _LEAST_MIN_CHUNK)
        return -(-least // _GRAPH_TOKENS) * _GRAPH_TOKENS

    def sized_bound(self, bound_ms: float) -> float:
        """Returns the milliseconds that a step of at most `efficient_tokens` tokens may last.

        Behind long contexts, attention takes so long that a step within its bound would have fewer
        tokens than is efficient.
        """
        stretches = self.may_stretch and self.efficient_tokens < sys.maxsize
        return _STRETCH * bound_ms if stretches else bound_ms

    def launched(self, ms: float, *, is_late: bool) -> None:
        """Notes in how many milliseconds the host has launched a step with prompts.

        Args:
            ms: milliseconds of the launch, and of planning the step.
            is_late: True if the device had computed the step before when the launch ended.
        """
        if is_late:
            self.launch_ms += _LATE_RATE * (ms - self.launch_ms)
        else:
            self.launch_ms *= _KEPT

    def crowd_tokens(self, num_decodes: int) -> int | None:
        """Returns the number of prompt tokens that take a second. If more of them are left to
        compute, their prompts are a crowd. None if the step has too few decodes for a crowd to
        change it, or if an operator has set its bound.

        Args:
            num_decodes: number of decodes of the step.
        """
        if not self.may_stretch or num_decodes <= _CROWDED_DECODES:
            return None
        return int(_CROWD_MS / max(self._coefficients[3], 1e-6))

    def extended_ms(self, bound_ms: float, *, is_crowded: bool) -> float:
        """Returns the milliseconds for which a step may last with more than `efficient_tokens`
        tokens; 0 if it may not have more. The bound that an operator has set holds.

        A host whose CPU cores are busy may launch a step kernel by kernel for longer than the
        device computes the step, and more tokens then cost no time.

        Beside a crowd, a step of `efficient_tokens` tokens reads the keys of many decodes for few
        tokens of prompts, and first tokens come late. A step of 50 ms has more of them, and later
        tokens still come within 50 ms, as in answers that docs/tuning.md counts as good.

        Args:
            bound_ms: milliseconds that a step of `efficient_tokens` tokens may last.
            is_crowded: True if more than `crowd_tokens` tokens of prompts wait.
        """
        if not self.may_stretch:
            return 0.0
        launch_ms = min(self.launch_ms, max(bound_ms, _GAP_MS))
        return max(launch_ms, _CROWDED_STEP_MS) if is_crowded else launch_ms

    def fitting_tokens(
        self, load: StepLoad, start: int, limit: Limit, left: int = sys.maxsize
    ) -> int:
        """Returns the most tokens of a prompt that fit into a step.

        Args:
            load: the work of the step so far.
            start: index of the first of these tokens in the prompt.
            limit: the limit of the whole step.
            left: number of tokens that are left of the prompt.
        """
        most = limit.tokens - load.tokens
        fitting = min(most, self._max_chunk(load, start, limit.ms))
        if limit.extended_ms:
            room = limit.extended_tokens - load.tokens
            if (longer := min(room, self._max_chunk(load, start, limit.extended_ms))) > fitting:
                fitting, most = longer, room
        if (total := load.tokens + fitting) > _LEAST_GRAPH:
            if fitting < most:
                fitting -= total % _GRAPH_TOKENS
            # Tiles of several prompts, which attend to more and fewer keys, share the SMs better.
            if fitting < left and not load.pairs and not limit.is_half:
                fitting -= self._surplus(load, start, fitting)
        return max(fitting, limit.least - load.tokens, 0)

    def half_limit(self, load: StepLoad, limit: Limit) -> Limit:
        """Returns a limit that leaves half as much beside `load` as `limit` does."""
        return Limit(
            (self.predict(load) + limit.ms) / 2,
            (load.tokens + limit.tokens) // 2,
            (load.tokens + limit.least) // 2,
            is_half=True,
            extended_ms=limit.extended_ms and (self.predict(load) + limit.extended_ms) / 2,
            extended_tokens=(load.tokens + limit.extended_tokens) // 2,
        )

    def _surplus(self, load: StepLoad, start: int, length: int) -> int:
        """Returns by how many tokens a chunk should be shorter, so that attention is faster.

        The tiles of all heads are computed in waves, one tile on each SM, and a wave with few tiles
        takes as long as one with many. With 32 heads and 132 SMs, 512 tokens are one wave, and 640
        tokens take as long as 1,024. The chunk is cut to fewer waves, so that the step has the size
        of a graph, if the step then computes more tokens in the same time. That is so if attention
        takes a large part of it.

        Args:
            load: the work of the step without the chunk. It has no other chunk.
            start: index of the chunk's first token in the prompt.
            length: number of tokens of the chunk.
        """
        wave = self._wave_tokens
        if not wave or length <= wave:
            return 0
        attended = -(-length // wave) * wave
        fewer = attended - wave
        shorter = fewer - (load.tokens + fewer) % _GRAPH_TOKENS
        pair_ms = self._coefficients[4]

        def rate(tokens: int, attended: int) -> float:
            step = StepLoad(load.rows, load.tokens + tokens, keys=load.keys)
            return tokens / (self.predict(step) + pair_ms * start * attended)

        return length - shorter if rate(shorter, fewer) > rate(length, attended) else 0

    def _max_chunk(self, load: StepLoad, start: int, bound_ms: float) -> int:
        """Returns the most tokens of a prompt with which the step lasts at most `bound_ms`."""
        if not self._is_measured or bound_ms == math.inf:
            return sys.maxsize
        _, _, few, more, pair, _, experts = self._coefficients
        # The chunk is assumed to have enough tokens to read all experts.
        left_ms = bound_ms - self.predict(load) - experts * (1 - self._share_read(load.tokens))
        cheap = max(0, _FEW_TOKENS - load.tokens)
        cheap_ms = few * cheap + pair * cheap * (start + cheap / 2)
        if cheap_ms > left_ms:
            cheap, cheap_ms, more = 0, 0.0, few
        return cheap + _tokens_within(left_ms - cheap_ms, more + pair * (start + cheap), pair)

    def observe(self, load: StepLoad, ms: float, rate: float = _RATE) -> None:
        """Corrects the coefficients by a step that took `ms` milliseconds."""
        parts = self._parts(load)
        predicted = sum(parts)
        if load.drafts and self._is_measured:
            self._observe_drafts(load, ms, predicted)
            if ms >= predicted:
                return
            # The step without its drafts was predicted to take longer than the step with them.
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

    def _observe_drafts(self, load: StepLoad, ms: float, without_ms: float) -> None:
        """Corrects the time of a draft by a step that is predicted to take `without_ms` without its
        drafts.
        """
        self._num_observed_drafts += 1
        predicted = without_ms + self._draft_ms * load.drafts
        found = max(0.0, min(predicted * _DRAFT_OUTLIER, ms) - without_ms) / load.drafts
        # With few drafts among many decodes, an error of `without_ms` counts for more than the
        # drafts.
        rate = _DRAFT_RATE * load.drafts / (load.drafts + load.rows)
        # The first step with drafts may load kernels, so the second one replaces its time.
        if self._num_observed_drafts <= 2:
            rate = 1.0
        self._draft_ms += rate * (found - self._draft_ms)

    def fit(self, steps: list[tuple[StepLoad, float]]) -> None:
        """Fits the coefficients to measured steps, the first of which sets the scale."""
        for _ in range(200):
            for load, ms in steps:
                self.observe(load, ms, rate=0.5)
        _, _, self._draft_ms, *_ = self._coefficients

    def _parts(self, load: StepLoad) -> list[float]:
        """Returns the milliseconds of each term of the model."""
        step, row, few, more, pair, key, experts = self._coefficients
        tokens = min(load.tokens, _FEW_TOKENS)
        rest = load.tokens - tokens
        return [
            step,
            row * load.rows,
            few * tokens,
            more * rest,
            pair * load.pairs,
            key * load.keys,
            experts * self._share_read(load.tokens),
        ]

    @property
    def _weights_ms(self) -> float:
        """Milliseconds of a step that only reads all weights."""
        return self._coefficients[0] + self._coefficients[-1]

    def _share_read(self, tokens: int) -> float:
        """Returns the share of experts that `tokens` tokens use; 1 if the model has no experts."""
        return 1 - (1 - self._expert_share) ** tokens if self._expert_share else 1.0


def _tokens_within(ms: float, token: float, pair: float) -> int:
    """Returns the largest number n of tokens with token · n + pair · n² / 2 <= ms."""
    if ms <= 0:
        return 0
    return int(2 * ms / (token + math.sqrt(token * token + 2 * pair * ms)))
