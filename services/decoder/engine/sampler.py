"""Logits to tokens, on the device, for a whole batch.

Order of operations (vLLM's): log-probabilities are taken from the raw logits; then logit bias and
min_tokens; repetition penalty over prompt and completion, frequency and presence penalty over the
completion; then, if not greedy: temperature, min_p, top_k, top_p, one draw.

A draw is the inverse of the distribution, cumulated over ids, at one uniform number per row, so a
row's token depends on its own logits, parameters and number alone. Kept is what comes first by
logit, of equal logits by id; top_k keeps exactly k. Without top_k and top_p nothing is ranked here,
and by a GPU nothing at all: `kernels.draw`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.decoder.engine.sampling import SamplingPlan, row_groups
from services.decoder.engine.staging import Staging
from services.decoder.engine.step import Int32Array
from services.decoder.kernels.draw_params import DrawParams, Penalties
from services.decoder.kernels.ops import Ops

_ROWS_AT_ONCE = 64  # where all tokens are ranked: a few float64 copies of 64 rows of logits


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Of the g rows that asked."""

    chosen: Tensor  # [g] float32
    top_ids: Tensor  # [g, n] int32
    top: Tensor  # [g, n] float32


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn."""

    token_ids: Tensor  # [B] int32; -1: the row's logits were not finite
    logprobs: SampledLogprobs | None


class Sampler:
    """Samples, and keeps what penalties need: how often each row has seen each token."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, ops: Ops) -> None:
        self._device = device
        self._ops = ops
        # See Penalties. Host memory is taken when first written.
        self._seen = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)

    def start_row(self, row: int, prompt_ids: Int32Array, completion_ids: Int32Array) -> None:
        """A sequence with penalties has the row."""
        seen = self._seen[row]
        seen.zero_()
        seen.index_fill_(0, self._upload(torch.from_numpy(prompt_ids.astype(np.int64))), 1)
        if len(completion_ids):
            ids = self._upload(torch.from_numpy(completion_ids.astype(np.int64)))
            seen.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))

    def sample(self, raw: Tensor, plan: SamplingPlan, staging: Staging) -> Sampled:
        """Draws one token per row.

        Args:
            raw: `[B, vocab_size]`, left as it is.
            plan: from `SamplingTable.plan`, its arrays uploaded.
            staging: where they are.
        """
        floats = staging.device(plan.floats)
        logits, finite, penalties = raw, None, None
        if plan.edits is not None:
            logits, finite = raw.to(torch.float32, copy=True), _are_finite(raw)
            index, ids, values = (self._upload(torch.from_numpy(part)) for part in plan.edits)
            logits.index_put_((index, ids), values, accumulate=True)
        if plan.has_penalties:
            penalties = Penalties(self._seen, staging.device(plan.rows), floats)
            logits = self._ops.penalize(logits, penalties)
        params = DrawParams(
            floats, staging.device(plan.top_k), staging.device(plan.uniforms), plan.has_top_k,
            plan.has_top_p, forbids=plan.edits is not None,
        )  # fmt: skip
        token_ids = self._ops.draw(logits, params)
        if token_ids is None:
            finite = _are_finite(raw) if finite is None else finite
            token_ids = self._draw(logits.float(), params, plan)
        if finite is not None:
            token_ids = token_ids.masked_fill(~finite, -1)
        if penalties is not None:
            self._ops.count_tokens(token_ids, penalties)
        logprobs = None
        if plan.logprobs is not None:
            index = staging.device(plan.logprobs)
            most = min(max(plan.logprob_counts), raw.shape[-1])
            chosen = token_ids[index].long().clamp(min=0)
            logprobs = _logprobs(raw[index].float(), chosen, most)
        return Sampled(token_ids, logprobs)

    def _draw(self, logits: Tensor, params: DrawParams, plan: SamplingPlan) -> Tensor:
        """`[B]` int32."""
        num_rows, vocab_size = logits.shape
        token_ids = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
        groups = row_groups(plan.host_floats, plan.host_top_k, vocab_size)
        if len(groups.greedy):
            index = self._upload(torch.from_numpy(groups.greedy))
            token_ids[index] = logits[index].argmax(-1).int()
        for group, num_candidates in (
            (groups.free, 0),
            (groups.few, groups.num_candidates),
            (groups.many, vocab_size),
        ):
            if not len(group):
                continue
            few = num_candidates and part_width(vocab_size, num_candidates)
            at_once = num_rows if few else _ROWS_AT_ONCE
            for index in self._upload(torch.from_numpy(group)).split(at_once):
                part, uniform = logits[index], params.uniforms[index, None]
                temperature, top_p, min_p = params.floats[:3, index, None]
                if num_candidates == 0:
                    drawn = _draw_by_id(part, temperature, min_p, uniform)
                else:
                    top_k = params.top_k[index, None]
                    drawn = _draw_by_rank(
                        part, num_candidates, temperature, min_p, top_k, top_p, uniform
                    )
                token_ids[index] = drawn.int()
        return token_ids

    def _upload(self, values: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return values
        # The pinned copy goes back to torch's allocator, which waits for the stream.
        return values.pin_memory().to(self._device, non_blocking=True)


def _are_finite(logits: Tensor) -> Tensor:
    """`[B, V]` → `[B]`."""
    return torch.isfinite(logits.sum(-1, dtype=torch.float32))


def by_rank(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` first tokens by logit, then id: values `[g, count]` and ids `[g, count]` int64.

    Few of many are looked for in two steps: they all lie in the `count` parts of the vocabulary
    whose greatest logits come first. (Were one in another part, `count` others would come before
    it.) So the vocabulary is read once, and ranked is a hundredth of it.
    """
    vocab_size = logits.shape[-1]
    width = part_width(vocab_size, count)
    if width == 0:
        return _ranked(logits, count)
    parts = logits.unflatten(-1, (-1, width))
    _, chosen = _ranked(parts.amax(-1), count)
    chosen = chosen.sort(-1).values  # so that the order of places is that of ids
    candidates = parts.gather(1, chosen[:, :, None].expand(-1, -1, width))
    values, places = _ranked(candidates.flatten(1), count)
    part = chosen.gather(-1, places // width)
    return values, part * width + places % width


def part_width(vocab_size: int, count: int) -> int:
    """Tokens of a part in `by_rank`, near the square root that makes least to rank; 0: no parts."""
    width = 1 << max(0, (vocab_size // count).bit_length() // 2)
    worthwhile = vocab_size // width + count * width <= vocab_size // 4
    return width if worthwhile and vocab_size % width == 0 else 0


def _ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `by_rank`. Each key is unique (the bits of the logit above the id), so that equal logits
    have one order whichever algorithm ranks them. Adding zero makes -0.0 equal to 0.0 in bits, too.
    """
    last = logits.shape[-1] - 1
    bits = (logits + 0.0).contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    reverse_ids = torch.arange(last, -1, -1, device=logits.device)
    keys = (ordered << 32) | reverse_ids
    if count <= last:
        keys = keys.topk(count, dim=-1).values
    else:
        keys = keys.sort(dim=-1, descending=True).values
    ids = last - (keys & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids


def _draw_by_id(logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the distribution cumulated over ids: `[g, V]` → `[g]`."""
    scaled = logits.double() / temperature
    floor = scaled.amax(-1, keepdim=True) + min_p.double().log()
    probabilities = torch.where(scaled >= floor, scaled, -torch.inf).softmax(-1)
    cumulated = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
    return drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _draw_by_rank(
    logits: Tensor,
    count: int,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """As `_draw_by_id`, of what is kept of the `count` first by rank: `[g]`."""
    values, ids = by_rank(logits, count)
    scaled = values.double() / temperature
    rank = torch.arange(count, device=logits.device)
    keep = (rank < top_k) & (scaled >= scaled[:, :1] + min_p.double().log())
    probabilities = torch.where(keep, scaled, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ids, order = ids.sort(-1)
    cumulated = torch.where(before < top_p, probabilities, 0.0).gather(-1, order).cumsum(-1)
    drawn = (cumulated <= uniform * cumulated[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(-1, drawn.clamp(max=count - 1)).squeeze(-1)


def _logprobs(raw: Tensor, token_ids: Tensor, count: int) -> SampledLogprobs:
    """Of the chosen and the `count` most likely tokens, before anything was done to the logits."""
    total = raw.logsumexp(-1, keepdim=True)
    chosen = raw.gather(-1, token_ids[:, None]) - total
    values, ids = by_rank(raw, count) if count else (raw[:, :0], token_ids[:, None][:, :0])
    return SampledLogprobs(chosen.squeeze(-1), ids.to(torch.int32), values - total)
