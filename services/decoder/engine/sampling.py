"""The host's half of sampling: each row's parameters, and a step's plan. Numpy only on the way."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.decoder.engine.messages import SamplingParams
from services.decoder.engine.staging import Staged, Staging

GREEDY_TEMPERATURE = 1e-5  # below it, sampling is greedy, as in vLLM
_TOP_K_STEPS = (32, 128, 1024)  # candidates are taken in these sizes; above, all are sorted

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class SamplingPlan:
    """What the sampler needs for one step of B sampled rows of logits; what is staged, on the
    device.
    """

    rows: Staged  # [B] int64: rows of the runner's tables
    floats: Staged  # [6, B] float32, as FLOATS
    top_k: Staged  # [B] int64, vocab_size where off
    uniforms: Staged  # [B] float64 in (0, 1)
    host_floats: FloatArray  # as `floats`
    host_top_k: IntArray
    has_top_k: bool  # some row has
    has_top_p: bool
    has_penalties: bool
    logprobs: Staged | None = None  # [g] int64, counting within the B rows
    logprob_indices: list[int] = field(default_factory=list[int])  # the same, on the host
    logprob_counts: list[int] = field(default_factory=list[int])  # top n of each
    edits: tuple[IntArray, IntArray, FloatArray] | None = None  # index, id, addend


FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class SamplingTable:
    """Sampling parameters of all rows."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._floats = np.zeros((len(FLOATS), num_rows), np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._seed = np.zeros(num_rows, np.uint64)
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._top_logprobs = np.full(num_rows, -1, np.int64)  # -1: none asked for
        self._plain = np.ones(num_rows, np.bool_)  # greedy and nothing else
        self._penalized = np.zeros(num_rows, np.bool_)
        self._bias: dict[int, tuple[IntArray, FloatArray]] = {}
        self._stops: dict[int, IntArray] = {}

    def set(self, row: int, params: SamplingParams) -> None:
        """A new sequence has the row."""
        self._floats[:, row] = [getattr(params, name) for name in FLOATS]
        greedy = params.temperature < GREEDY_TEMPERATURE
        if greedy:
            self._floats[0, row] = 0.0
        self._top_k[row] = min(params.top_k, self._vocab_size) or self._vocab_size
        self._seed[row] = params.seed & 0xFFFFFFFFFFFFFFFF
        self._min_tokens[row] = params.min_tokens
        self._top_logprobs[row] = -1 if params.top_logprobs is None else params.top_logprobs
        self._penalized[row] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._bias.pop(row, None)
        self._stops.pop(row, None)
        ids = np.array([i for i in params.logit_bias if 0 <= i < self._vocab_size], np.int64)
        if len(ids):
            values = np.array([params.logit_bias[int(i)] for i in ids], np.float32)
            self._bias[row] = ids, values
        if params.min_tokens > 0:
            stops = np.array(params.stop_token_ids, np.int64)
            self._stops[row] = stops[(stops >= 0) & (stops < self._vocab_size)]
        self._plain[row] = (
            greedy
            and not self._penalized[row]
            and self._top_logprobs[row] < 0
            and row not in self._bias
            and row not in self._stops
        )

    def is_penalized(self, row: int) -> bool:
        """Whether the row's token counts matter."""
        return bool(self._penalized[row])

    def plan(self, rows: IntArray, generated: IntArray, staging: Staging) -> SamplingPlan | None:
        """The plan of a step, its arrays in `staging`; None: each row is plainly greedy."""
        if self._plain[rows].all():
            return None
        floats, top_k = self._floats[:, rows], self._top_k[rows]
        drawn = floats[0] > 0.0
        plan = SamplingPlan(
            rows=staging.add(rows),
            floats=staging.add(floats),
            top_k=staging.add(top_k),
            uniforms=staging.add(uniforms(self._seed[rows], generated)),
            host_floats=floats,
            host_top_k=top_k,
            has_top_k=bool((drawn & (top_k < self._vocab_size)).any()),
            has_top_p=bool((drawn & (floats[1] < 1.0)).any()),
            has_penalties=bool(self._penalized[rows].any()),
        )
        counts = self._top_logprobs[rows]
        asking = np.flatnonzero(counts >= 0)
        if len(asking):
            plan.logprobs = staging.add(asking)
            plan.logprob_indices, plan.logprob_counts = asking.tolist(), counts[asking].tolist()
        plan.edits = self._edits(rows, generated)
        return plan

    def _edits(
        self, rows: IntArray, generated: IntArray
    ) -> tuple[IntArray, IntArray, FloatArray] | None:
        """What is added to single logits: biases, and -inf to stop ids before min_tokens."""
        if not self._bias and not self._stops:
            return None
        indices: list[IntArray] = []
        ids: list[IntArray] = []
        values: list[FloatArray] = []
        early = generated < self._min_tokens[rows]
        for index, row in enumerate(rows.tolist()):
            if row in self._bias:
                tokens, addends = self._bias[row]
                indices.append(np.full(len(tokens), index))
                ids.append(tokens)
                values.append(addends)
            if early[index] and row in self._stops:
                tokens = self._stops[row]
                indices.append(np.full(len(tokens), index))
                ids.append(tokens)
                values.append(np.full(len(tokens), -np.inf, np.float32))
        if not indices:
            return None
        return np.concatenate(indices), np.concatenate(ids), np.concatenate(values)


class RowGroups(NamedTuple):
    """Rows that torch draws from together; each row is in exactly one of the four."""

    greedy: IntArray
    free: IntArray  # no truncation by rank
    few: IntArray  # top_k <= num_candidates
    num_candidates: int
    many: IntArray  # all the vocabulary is ranked


def row_groups(floats: FloatArray, top_k: IntArray, vocab_size: int) -> RowGroups:
    """See `SamplingPlan`, whose `host_floats` and `host_top_k` these are."""
    greedy, limited = floats[0] == 0.0, top_k < vocab_size
    free = ~greedy & ~limited & (floats[1] >= 1.0)
    few = ~greedy & limited & (top_k <= _TOP_K_STEPS[-1])
    most = top_k[few].max(initial=1)
    num_candidates = min(next(step for step in _TOP_K_STEPS if step >= most), vocab_size)
    return RowGroups(
        np.flatnonzero(greedy), np.flatnonzero(free), np.flatnonzero(few), num_candidates,
        np.flatnonzero(~greedy & ~free & ~few),
    )  # fmt: skip


def uniforms(seeds: npt.NDArray[np.uint64], counters: IntArray) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each (seed, counter): splitmix64 of both, its upper 40 bits.

    Depends on nothing else, so a sequence draws the same numbers in whatever batch it runs. Forty
    bits leave the doubles of a cumulated distribution room: number * total < total.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15) * (counters.astype(np.uint64)))
    return ((state >> np.uint64(24)).astype(np.float64) + 0.5) * 2.0**-40


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
