"""Sampling on the device for a whole step, by the sampling parameters and token counts of its rows.

`ModelRunner` owns the sampler. Logits and token ids stay on the device. The host knows all that is
decided before the step is launched.

The order of operations is vLLM's:

1. Log-probabilities are taken from the raw logits.
2. Logit bias is added, and stop tokens are excluded before `min_tokens`.
3. The repetition penalty counts prompt and completion, frequency and presence penalty count the
   completion.
4. The token mask excludes tokens.
5. Unless the row is greedy: temperature, min_p, top_k, top_p, one sample (`kernels.sampling`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sampling import NOT_FINITE
from kernels.sampling.sampling import (
    FLOATS,
    FloatArray,
    MaskedRows,
    SamplingInputs,
    are_finite,
    by_rank,
)
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.step import Int64Array, RowSampling, SampleStep
from services.decoder.operations.ops import Ops

_NO_IDS = np.empty(0, np.int64)
# Below this temperature, sampling is greedy, as in vLLM.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the g rows that request them.

    Attributes:
        chosen: `[g]` float32, log-probability of the sampled token.
        top_ids: `[g, n + m]` int32, the n most likely tokens, then m tokens that the row names.
        top: `[g, n + m]` float32, log-probabilities of these tokens.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step, on the device.

    Attributes:
        token_ids: `[B]` int32, below 0 where a row failed.
        logprobs: log-probabilities. None if no row wants any.
    """

    token_ids: Tensor
    logprobs: SampledLogprobs | None


class Sampler:
    """Owner of the sampling parameters and token counts of all rows.

    Args:
        num_rows: number of rows.
        vocab_size: number of tokens of the vocabulary.
        device: the device that samples.
        ops: the operations of the model.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, ops: Ops) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops
        self._floats = np.zeros((len(FLOATS), num_rows), np.float32)
        self._num_prompt = np.zeros(num_rows, np.int64)
        self._top_k = np.zeros(num_rows, np.int64)
        self._seed = np.zeros(num_rows, np.uint64)
        self._min_tokens = np.zeros(num_rows, np.int64)
        self._top_logprobs = np.full(num_rows, -1, np.int64)  # -1 if none are requested
        self._plain = np.ones(num_rows, np.bool_)  # greedy, without any other option
        self._penalized = np.zeros(num_rows, np.bool_)
        self._named: dict[int, Int64Array] = {}  # by row, ids whose logprobs are wanted
        self._bias: dict[int, tuple[Int64Array, FloatArray]] = {}
        self._stops: dict[int, Int64Array] = {}
        # See `SamplingInputs.seen`. On a CPU, pages are allocated when they are first written.
        self._seen = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)

    def start_row(self, start: RowSampling) -> None:
        """Gives a row to another sequence."""
        row, params = start.row, start.params
        self._num_prompt[row] = start.num_prompt_tokens
        self._floats[:, row] = [getattr(params, name) for name in FLOATS]
        greedy = params.temperature < GREEDY_TEMPERATURE
        if greedy:
            self._floats[0, row] = 0.0
        self._top_k[row] = min(params.top_k, self._vocab_size) or self._vocab_size
        self._seed[row] = params.seed & 0xFFFFFFFFFFFFFFFF
        self._min_tokens[row] = params.min_tokens
        self._top_logprobs[row] = -1 if params.top_logprobs is None else params.top_logprobs
        self._penalized[row] = params.has_penalties
        self._named.pop(row, None)
        if params.logprob_token_ids and params.top_logprobs is not None:
            self._named[row] = np.array(params.logprob_token_ids, np.int64)
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
            and not params.has_penalties
            and params.top_logprobs is None
            and row not in self._bias
            and row not in self._stops
        )
        if params.has_penalties:
            self._count_all(start)

    def prepare(
        self,
        rows: Int64Array,
        ends: Int64Array,
        staging: Staging,
        step: SampleStep,
        late_masks: Tensor | None = None,
    ) -> SamplingInputs | MaskedRows | None:
        """Adds a step's sampling inputs to the staging buffer, and returns them.

        Args:
            rows: `[B]`, rows that are sampled.
            ends: `[B]`, number of tokens of each row's sequence, without the sampled token.
            staging: the staging buffer, which is uploaded afterwards.
            step: the samples that have masks.
            late_masks: `[M + L, words]` on the device, filled later with the masks of
                `step.masked`, then those of `step.late`. None if no mask is late.

        Returns:
            None if every row is greedy, without penalties, biases, masks and log-probabilities.
            `MaskedRows` if some rows have masks and all are as above otherwise.
        """

        def put(array: npt.NDArray[np.generic]) -> Tensor:
            return staging.device(staging.add(array))

        samples, masks = step.masked, late_masks
        if len(step.late):
            samples = np.concatenate((samples, step.late))
        plain = self._plain[rows].all()
        if plain and not len(samples):
            return None
        if len(samples) and masks is None:
            masks = put(step.token_masks)
        if plain and masks is not None:
            return MaskedRows(put(samples), put(rows[samples]), masks)
        generated = ends - self._num_prompt[rows]
        floats, top_k = self._floats[:, rows], self._top_k[rows]
        sampled = floats[0] > 0.0
        mask_index = logprob_index = None
        if len(samples):
            index = np.full(len(rows), -1)
            index[samples] = np.arange(len(samples))
            mask_index = put(index)
        assumed = drafted = None
        if (drafts := step.draft_counts) is not None:
            self._count(drafts.accepted)
            if len(drafts.samples):
                assumed = self._pairs(drafts.assumed)
                drafted = self.upload(torch.from_numpy(drafts.samples))
        counts = self._top_logprobs[rows]
        asking = np.flatnonzero(counts >= 0)
        if len(asking):
            logprob_index = put(asking)
        named, num_named = self._named_ids(rows[asking])
        return SamplingInputs(
            rows=put(rows),
            floats=put(floats),
            top_k=put(top_k),
            uniforms=put(uniforms(self._seed[rows], generated)),
            host_floats=floats,
            host_top_k=top_k,
            has_top_k=bool((sampled & (top_k < self._vocab_size)).any()),
            has_top_p=bool((sampled & (floats[1] < 1.0)).any()),
            mask_index=mask_index,
            token_masks=masks,
            seen=self._seen if self._penalized[rows].any() else None,
            bias=self._biases(rows, generated),
            logprob_index=logprob_index,
            logprob_rows=tuple(asking.tolist()),
            logprob_counts=tuple(counts[asking].tolist()),
            logprob_ids=None if named is None else put(named),
            logprob_named=num_named,
            assumed=assumed,
            drafted=drafted,
        )

    def _named_ids(self, rows: Int64Array) -> tuple[Int64Array | None, tuple[int, ...]]:
        """Returns `SamplingInputs.logprob_ids` and `logprob_named`."""
        if not self._named or len(rows) == 0:
            return None, ()
        found = [self._named.get(row, _NO_IDS) for row in rows.tolist()]
        counts = tuple(map(len, found))
        if not any(counts):
            return None, ()
        ids = np.zeros((len(found), max(counts)), np.int64)
        for place, named in enumerate(found):
            ids[place, : len(named)] = named
        return ids, counts

    def sample(self, raw: Tensor, inputs: SamplingInputs) -> Sampled:
        """Samples one token per row.

        Args:
            raw: `[B, vocab_size]`, logits, which are left unchanged.
            inputs: the uploaded result of `prepare`.
        """
        logits, finite = raw, None
        if inputs.bias is not None:
            logits, finite = raw.to(torch.float32, copy=True), are_finite(raw)
            index, ids, values = (self.upload(torch.from_numpy(part)) for part in inputs.bias)
            logits.index_put_((index, ids), values, accumulate=True)
        if inputs.seen is not None:
            logits = self._ops.penalize(logits, _with_drafts(inputs))
        token_ids = self._ops.sample(logits, inputs)
        if finite is not None:
            token_ids = token_ids.masked_fill(~finite, NOT_FINITE)
        if inputs.seen is not None:
            counted = token_ids
            if inputs.drafted is not None:
                counted = token_ids.index_fill(0, inputs.drafted, NOT_FINITE)  # counts nothing
            self._ops.count_tokens(counted, inputs)
        logprobs = None
        if inputs.logprob_index is not None:
            most = min(max(inputs.logprob_counts), raw.shape[-1])
            chosen = token_ids[inputs.logprob_index].long().clamp(min=0)
            wanted = raw[inputs.logprob_index].float()
            logprobs = logprobs_of(wanted, chosen, most, inputs.logprob_ids)
        return Sampled(token_ids, logprobs)

    def _count_all(self, start: RowSampling) -> None:
        """Counts the tokens of a sequence that gets a row."""
        seen = self._seen[start.row]
        seen.zero_()
        prompt, completion = (
            self.upload(torch.from_numpy(np.frombuffer(ids, np.int32).astype(np.int64)))
            for ids in (start.prompt_token_ids, start.completion_token_ids)
        )
        seen.index_fill_(0, prompt, 1)
        seen.index_add_(0, completion, torch.full_like(completion, 2, dtype=torch.int32))

    def _count(self, accepted: Int64Array) -> None:
        """Counts accepted drafts, which are pairs of a row and a token id."""
        if len(accepted):
            rows, ids = self._pairs(accepted)
            twos = torch.full_like(ids, 2, dtype=torch.int32)
            self._seen.index_put_((rows, ids), twos, accumulate=True)

    def _pairs(self, values: Int64Array) -> tuple[Tensor, Tensor]:
        """Uploads both columns of `[n, 2]`."""
        first, second = self.upload(torch.from_numpy(np.ascontiguousarray(values.T)))
        return first, second

    def _biases(
        self, rows: Int64Array, generated: Int64Array
    ) -> tuple[Int64Array, Int64Array, FloatArray] | None:
        """Returns `SamplingInputs.bias`: biases, and -inf for stop ids before `min_tokens`."""
        if not self._bias and not self._stops:
            return None
        found: list[tuple[Int64Array, Int64Array, FloatArray]] = []
        early = generated < self._min_tokens[rows]
        for index, row in enumerate(rows.tolist()):
            if row in self._bias:
                tokens, addends = self._bias[row]
                found.append((np.full(len(tokens), index), tokens, addends))
            if early[index] and row in self._stops:
                tokens = self._stops[row]
                forbidden = np.full(len(tokens), -np.inf, np.float32)
                found.append((np.full(len(tokens), index), tokens, forbidden))
        if not found:
            return None
        indices, ids, values = zip(*found, strict=True)
        return np.concatenate(indices), np.concatenate(ids), np.concatenate(values)

    def upload(self, values: Tensor) -> Tensor:
        """Copies a tensor from the host to the device, without waiting."""
        if self._device.type != "cuda":
            return values
        # The pinned copy returns to torch's allocator, which waits for the stream.
        return values.pin_memory().to(self._device, non_blocking=True)


def _with_drafts(inputs: SamplingInputs) -> SamplingInputs:
    """Returns inputs whose `seen` has a row for each sample, which counts the drafts before it."""
    if inputs.assumed is None or inputs.seen is None:
        return inputs
    seen, (samples, ids) = inputs.seen[inputs.rows], inputs.assumed
    twos = torch.full_like(ids, 2, dtype=torch.int32)
    seen.index_put_((samples, ids), twos, accumulate=True)
    return inputs._replace(seen=seen, rows=torch.arange(len(seen), device=seen.device))


def uniforms(seeds: npt.NDArray[np.uint64], counters: Int64Array) -> npt.NDArray[np.float64]:
    """Returns a number in (0, 1) for each pair of a seed and a counter.

    The number is the upper 40 bits of splitmix64 of both. It depends on nothing else, so a sequence
    has the same numbers in every batch. With 40 bits, number * total < total holds in float64.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15) * (counters.astype(np.uint64)))
    return ((state >> np.uint64(24)).astype(np.float64) + 0.5) * 2.0**-40


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def logprobs_of(
    raw: Tensor, token_ids: Tensor, count: int, named: Tensor | None = None
) -> SampledLogprobs:
    """Returns log-probabilities from raw logits.

    Args:
        raw: `[g, vocab_size]` float32, logits.
        token_ids: `[g]` int64, a token of each row.
        count: number n of the most likely tokens.
        named: `[g, m]` int64, further tokens of each row. None if there are no further tokens.
    """
    total = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(-1, token_ids[:, None]) - total
    values, ids = by_rank(raw, count) if count else (raw[:, :0], token_ids[:, None][:, :0])
    if named is not None:
        values = torch.cat((values, raw.gather(-1, named)), -1)
        ids = torch.cat((ids, named), -1)
    return SampledLogprobs(chosen.squeeze(-1), ids.to(torch.int32), values - total)
