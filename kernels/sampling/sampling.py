"""Logits to tokens in plain torch: the specification of the sampling kernels, and their arguments.

For each row: temperature, min_p, top_k, top_p, then one sample by inverse CDF: the distribution of
the kept tokens, cumulated over ids, at one uniform number. So a row's token depends on its own
logits, parameters and number alone. Tokens are ranked by logit, equal logits by id; top_k keeps
exactly k. Without top_k and top_p nothing is ranked.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sampling import ALL_MASKED, NOT_FINITE

_TOP_K_STEPS = (32, 128, 1024)  # candidates are ranked in these sizes; above, all tokens are
_ROWS_AT_ONCE = 64  # where all tokens are ranked: a few float64 copies of 64 rows of logits

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

# Rows of `SamplingInputs.floats`.
FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class SamplingInputs(NamedTuple):
    """How B rows of logits are sampled; tensors are on the device.

    Attributes:
        rows: `[B]` int64, the rows of the runner's tables; those with penalties are distinct.
        floats: `[6, B]` float32, as `FLOATS`; temperature 0: the most likely token.
        top_k: `[B]` int64, vocab_size where off.
        uniforms: `[B]` float64 in (0, 1).
        host_floats, host_top_k: the same on the host; torch groups rows by them.
        has_top_k, has_top_p: whether any row that is sampled uses it.
        mask_index: `[B]` int64, the row of `token_masks`, -1 for none; None: no row has a mask.
        token_masks: `[M, ceil(vocab_size / 32)]` int32; bit i of word w allows token 32 * w + i.
        seen: `[rows of the tables, vocab_size]` int32: 2 * times in the completion + (is in the
            prompt); None: no row has penalties.
        bias: added to logits: index into B `[n]` int64, token ids `[n]` int64, addends `[n]`
            float32, on the host; None: nothing. Minus infinity forbids a token.
        logprob_index: `[g]` int64, rows whose log-probabilities are requested; None: none.
        logprob_rows: the same on the host.
        logprob_counts: `[g]`, the number of most likely tokens to report of each.
        logprob_ids: `[g, m]` int64, further tokens to report; None: none.
        logprob_named: `[g]`, how many of them count for each row.
    """

    rows: Tensor
    floats: Tensor
    top_k: Tensor
    uniforms: Tensor
    host_floats: FloatArray
    host_top_k: IntArray
    has_top_k: bool
    has_top_p: bool
    mask_index: Tensor | None = None
    token_masks: Tensor | None = None
    seen: Tensor | None = None
    bias: tuple[IntArray, IntArray, FloatArray] | None = None
    logprob_index: Tensor | None = None
    logprob_rows: tuple[int, ...] = ()
    logprob_counts: tuple[int, ...] = ()
    logprob_ids: Tensor | None = None
    logprob_named: tuple[int, ...] = ()


class MaskedRows(NamedTuple):
    """Rows of a greedy step that have token masks; tensors are on the device.

    Attributes:
        samples: `[M]` int64, indices of the rows of logits.
        rows: `[M]` int64, of the runner's tables.
        token_masks: `[M, ceil(vocab_size / 32)]` int32, as in `SamplingInputs`.
    """

    samples: Tensor
    rows: Tensor
    token_masks: Tensor


def are_finite(logits: Tensor) -> Tensor:
    """Whether all logits of a row are finite: `[B, V]` → `[B]`."""
    return torch.isfinite(logits.sum(-1, dtype=torch.float32))


def greedy(logits: Tensor) -> Tensor:
    """Implements `Ops.greedy`."""
    return logits.argmax(-1).masked_fill(~are_finite(logits), NOT_FINITE).to(torch.int32)


def greedy_masked(
    logits: Tensor, masked: MaskedRows, token_ids: Tensor, last_tokens: Tensor
) -> None:
    """Implements `Ops.greedy_masked`."""
    chosen = logits[masked.samples].float()
    finite, bits = are_finite(chosen), _bits(masked.token_masks, logits.shape[-1])
    chosen = torch.where(bits, chosen, -torch.inf)
    found = chosen.argmax(-1).masked_fill(~bits.any(-1), ALL_MASKED)
    found = found.masked_fill(~finite, NOT_FINITE).to(torch.int32)
    token_ids.index_copy_(0, masked.samples, found)
    last_tokens.index_copy_(0, masked.rows, found.clamp(min=0))


def penalize(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Implements `Ops.penalize`."""
    assert inputs.seen is not None
    logits, seen = logits.float(), inputs.seen[inputs.rows]
    repetition, presence, frequency = inputs.floats[3:, :, None]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits, count = torch.where(seen > 0, scaled, logits), seen >> 1
    return logits - frequency * count - presence * (count > 0)


def count_tokens(token_ids: Tensor, inputs: SamplingInputs) -> None:
    """Implements `Ops.count_tokens`."""
    assert inputs.seen is not None
    repetition, presence, frequency = inputs.floats[3:]
    has_any = (repetition != 1) | (presence != 0) | (frequency != 0)
    places = inputs.rows, token_ids.clamp(min=0).long()
    counts = 2 * (has_any & (token_ids >= 0)).int()
    inputs.seen.index_put_(places, counts, accumulate=True)


def mask_tokens(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Logits `[B, V]` with minus infinity where a row's token mask forbids the token."""
    if inputs.mask_index is None or inputs.token_masks is None:
        return logits
    bits = _bits(inputs.token_masks, logits.shape[-1])
    allowed = bits[inputs.mask_index.clamp(min=0)] | (inputs.mask_index < 0)[:, None]
    return torch.where(allowed, logits, -torch.inf)


def _bits(token_masks: Tensor, vocab_size: int) -> Tensor:
    """`[M, words]` int32 → `[M, vocab_size]` bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=token_masks.device)
    return (token_masks[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] > 0


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Implements `Ops.sample`; sums in float64."""
    num_rows, vocab_size = logits.shape
    finite = are_finite(logits)
    if inputs.bias is not None:
        finite = ~(torch.isnan(logits) | (logits == torch.inf)).any(-1)
    logits = mask_tokens(logits.float(), inputs)
    token_ids = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    for group, num_candidates in _row_groups(inputs, vocab_size):
        split = num_candidates and split_width(vocab_size, num_candidates)
        at_once = num_rows if split or num_candidates < 2 else _ROWS_AT_ONCE
        for index in torch.from_numpy(group).to(logits.device).split(at_once):
            part, uniform = logits[index], inputs.uniforms[index, None]
            temperature, top_p, min_p = inputs.floats[:3, index, None]
            if num_candidates == 1:
                found = part.argmax(-1)
            elif num_candidates == 0:
                found = _sample_by_id(part, temperature, min_p, uniform)
            else:
                top_k = inputs.top_k[index, None]
                found = _sample_by_rank(
                    part, num_candidates, temperature, min_p, top_k, top_p, uniform
                )
            token_ids[index] = found.int()
    token_ids = token_ids.masked_fill(logits.amax(-1) == -torch.inf, ALL_MASKED)
    return token_ids.masked_fill(~finite, NOT_FINITE)


def _row_groups(inputs: SamplingInputs, vocab_size: int) -> list[tuple[IntArray, int]]:
    """Rows that are sampled together, with the number of candidates to rank: 0: no row of the
    group needs ranks; 1: the group is greedy.
    """
    floats, top_k = inputs.host_floats, inputs.host_top_k
    greedy_rows, limited = floats[0] == 0.0, top_k < vocab_size
    free = ~greedy_rows & ~limited & (floats[1] >= 1.0)
    few = ~greedy_rows & limited & (top_k <= _TOP_K_STEPS[-1])
    most = top_k[few].max(initial=2)
    few_candidates = min(next(step for step in _TOP_K_STEPS if step >= most), vocab_size)
    many = ~greedy_rows & ~free & ~few
    groups = ((greedy_rows, 1), (free, 0), (few, few_candidates), (many, vocab_size))
    return [(np.flatnonzero(rows), count) for rows, count in groups if rows.any()]


def by_rank(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` first tokens by logit, then id: values `[g, count]` and ids `[g, count]` int64.

    A small `count` is found in two steps: all of these tokens lie in the `count` splits of the
    vocabulary with the greatest maxima, because a token in another split has at least `count`
    tokens before it. So the vocabulary is read once, and a hundredth of it is ranked.
    """
    vocab_size = logits.shape[-1]
    width = split_width(vocab_size, count)
    if width == 0:
        return _ranked(logits, count)
    splits = logits.unflatten(-1, (-1, width))
    _, chosen = _ranked(splits.amax(-1), count)
    chosen = chosen.sort(-1).values  # so that candidates are in the order of their ids
    candidates = splits.gather(1, chosen[:, :, None].expand(-1, -1, width))
    values, places = _ranked(candidates.flatten(1), count)
    split = chosen.gather(-1, places // width)
    return values, split * width + places % width


def split_width(vocab_size: int, count: int) -> int:
    """Tokens of a split in `by_rank`, near the square root that leaves least to rank; 0: none."""
    width = 1 << max(0, (vocab_size // count).bit_length() // 2)
    worthwhile = vocab_size // width + count * width <= vocab_size // 4
    return width if worthwhile and vocab_size % width == 0 else 0


def _ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`by_rank` over all tokens. Each key is unique (the bits of the logit above the id), so equal
    logits have one order whichever algorithm ranks them. Adding zero makes the bits of -0.0 those
    of 0.0.
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


def _sample_by_id(logits: Tensor, temperature: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse CDF over ids: `[g, V]` → `[g]`."""
    scaled = logits.double() / temperature
    least = scaled.amax(-1, keepdim=True) + min_p.double().log()
    probabilities = torch.where(scaled >= least, scaled, -torch.inf).softmax(-1)
    cumulated = probabilities.cumsum(-1)
    found = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True)
    return found.squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _sample_by_rank(
    logits: Tensor,
    count: int,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Inverse CDF over the ids of the tokens kept among the `count` first by rank: → `[g]`."""
    values, ids = by_rank(logits, count)
    scaled = values.double() / temperature
    rank = torch.arange(count, device=logits.device)
    keep = (rank < top_k) & (scaled >= scaled[:, :1] + min_p.double().log())
    probabilities = torch.where(keep, scaled, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ids, order = ids.sort(-1)
    cumulated = torch.where(before < top_p, probabilities, 0.0).gather(-1, order).cumsum(-1)
    found = (cumulated <= uniform * cumulated[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(-1, found.clamp(max=count - 1)).squeeze(-1)
