"""Reference implementation of sampling in plain torch, and the inputs of the sampling kernels.

For each row, temperature, min_p, top_k and top_p are applied, and then a token is sampled by
inverse CDF: the probabilities of the remaining tokens are cumulated in the order of token ids and
compared with a uniform random number. A row's token thus depends only on its own logits, parameters
and random number. Tokens are ranked by logit, and equal logits by id, so that top_k keeps exactly k
tokens. Without top_k and top_p, tokens are not ranked.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.sampling import ALL_MASKED, NOT_FINITE

# Parts of the vocabulary whose best tokens `greedy_rescored` compares, and number of successive ids
# that are in the same part. Frequent tokens, which have the first ids, are thus in all parts.
RESCORED, RUN = 128, 16
_TOP_K_STEPS = (32, 128, 1024)  # numbers of candidates to rank; for larger top_k, all are ranked
# Rows that are sampled at the same time if all tokens are ranked, to bound the memory of a few
# float64 copies of the logits.
_ROWS_AT_ONCE = 64

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

# Parameters in the rows of `SamplingInputs.floats`.
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SamplingInputs(NamedTuple):
    """Parameters for sampling B rows of logits. Tensors are on the device.

    Attributes:
        rows: `[B]` int64, rows of the runner's tables. Rows with penalties are distinct, except for
            those in `drafted`.
        floats: `[6, B]` float32, parameters in the order of `FLOATS`. Temperature 0 selects the
            most likely token.
        top_k: `[B]` int64. vocab_size if top_k is off.
        uniforms: `[B]` float64, random numbers in (0, 1).
        host_floats, host_top_k: copies of `floats` and `top_k` on the host, by which the reference
            implementation groups rows.
        has_top_k, has_top_p: True if a row that is sampled uses top_k, or top_p.
        mask_index: `[B]` int64, index of each row's mask in `token_masks`, or -1 if the row has no
            mask. None if no row has a mask.
        token_masks: `[M, ceil(vocab_size / 32)]` int32. Bit i of word w allows token 32 * w + i.
        seen: `[rows of the tables, vocab_size]` int32, twice the number of occurrences of a token
            in the completion, plus 1 if it is in the prompt. None if no row has penalties.
        bias: logit biases, as row indices `[n]` int64, token ids `[n]` int64 and addends `[n]`
            float32 on the host. An addend of minus infinity forbids a token. None if there are no
            biases.
        logprob_index: `[g]` int64, rows whose log-probabilities are requested. None if no row's
            are.
        logprob_rows: copy of `logprob_index` on the host.
        logprob_counts: `[g]`, number of most likely tokens to report for each of these rows.
        logprob_ids: `[g, m]` int64, further tokens to report. None if there are no such tokens.
        logprob_named: `[g]`, number of tokens in `logprob_ids` for each of these rows.
        assumed: drafts that penalties count beside `seen`, as row indices `[m]` int64 and token ids
            `[m]` int64. None if no row with penalties verifies drafts.
        drafted: `[d]` int64, row indices whose sampled tokens are not counted, because drafts
            before them may be rejected. None if `assumed` is.
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
    assumed: tuple[Tensor, Tensor] | None = None
    drafted: Tensor | None = None


class MaskedRows(NamedTuple):
    """Rows of a greedy step that have token masks. Tensors are on the device.

    Attributes:
        samples: `[M]` int64, indices of the rows of logits.
        rows: `[M]` int64, rows of the runner's tables.
        token_masks: `[M, ceil(vocab_size / 32)]` int32, as in `SamplingInputs`.
    """

    samples: Tensor
    rows: Tensor
    token_masks: Tensor


def are_finite(logits: Tensor) -> Tensor:
    """Returns for each row whether all logits are finite: `[B, V]` → `[B]`."""
    return torch.isfinite(logits.sum(-1, dtype=torch.float32))


def greedy(logits: Tensor) -> Tensor:
    """Implements `Ops.greedy`."""
    return logits.argmax(-1).masked_fill(~are_finite(logits), NOT_FINITE).to(torch.int32)


def greedy_rescored(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Implements `Ops.greedy_rescored`."""
    num_rows, vocab_size = logits.shape
    padded = F.pad(logits, (0, -vocab_size % (RESCORED * RUN)), value=-torch.inf)
    ids = torch.arange(padded.shape[1], device=logits.device).view(-1, RESCORED, RUN)
    ids = ids.transpose(0, 1).flatten(1)  # by part
    ids = ids[ids[:, 0] < vocab_size]  # without parts that have no token
    places = padded[:, ids].argmax(-1, keepdim=True)
    ids = ids.expand(num_rows, -1, -1).gather(2, places).squeeze(2)
    exact = (weight[ids].float() @ hidden.float().unsqueeze(-1)).squeeze(-1).to(logits.dtype)
    is_best = exact == exact.amax(1, keepdim=True)
    found = torch.where(is_best, ids, vocab_size).amin(1)
    finite = are_finite(logits) & are_finite(exact)
    return found.masked_fill(~finite, NOT_FINITE).to(torch.int32)


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
    """Sets logits `[B, V]` to minus infinity for tokens that a row's mask forbids."""
    if inputs.mask_index is None or inputs.token_masks is None:
        return logits
    bits = _bits(inputs.token_masks, logits.shape[-1])
    allowed = bits[inputs.mask_index.clamp(min=0)] | (inputs.mask_index < 0)[:, None]
    return torch.where(allowed, logits, -torch.inf)


def _bits(token_masks: Tensor, vocab_size: int) -> Tensor:
    """Unpacks token masks `[M, words]` int32 to `[M, vocab_size]` bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=token_masks.device)
    return (token_masks[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size] > 0


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Implements `Ops.sample` with sums in float64."""
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
    """Groups rows that are sampled together by the number of candidates to rank.

    The number is 1 for greedy rows, and 0 for rows whose tokens need no ranks.
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
    """Finds the first `count` tokens, ranked by logit and then by id.

    For a small `count`, the tokens are found in two steps. They are all in the `count` splits of
    the vocabulary with the largest maxima, because at least `count` tokens rank before a token of
    another split. The vocabulary is thus read once, and a hundredth of it is ranked.

    Returns:
        Logits `[g, count]`, and ids `[g, count]` int64.
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
    """Tokens of a split in `by_rank`. 0 if `by_rank` should rank all tokens in one step.

    The width is near the square root of vocab_size / count, which minimizes the work of ranking.
    """
    width = 1 << max(0, (vocab_size // count).bit_length() // 2)
    worthwhile = vocab_size // width + count * width <= vocab_size // 4
    return width if worthwhile and vocab_size % width == 0 else 0


def _ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Implements `by_rank` in one step.

    The sort keys have the bits of the logit above the id. Each key is unique, so that the order of
    equal logits does not depend on the algorithm. Adding zero makes the bits of -0.0 those of 0.0.
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
    """Samples by inverse CDF over all ids: `[g, V]` → `[g]`."""
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
    """Samples by inverse CDF over the ids that remain of the first `count` by rank: → `[g]`."""
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
