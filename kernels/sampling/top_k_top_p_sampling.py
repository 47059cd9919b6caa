"""Triton kernels that sample a token per row by top-k / top-p threshold search and inverse CDF.

The reference implementation, which sums in float64, is `kernels.sampling.sampling.sample`.

The vocabulary is divided into splits. Tokens whose logit is above a threshold may be sampled, and
of the tokens equal to the threshold the first few by id. The threshold is searched among all values
of the logits' data type, represented by integers in the same order ("keys"). Each launch of the
search sums the number (for top_k) or the probability (for top_p) of the tokens at or above each of
fifteen pivots. The next launch continues between the two pivots that enclose the target. A block
whose largest logit is below all pivots is not read again.

For a row with a token mask, the mask's bit is read beside each logit, and the logit of a forbidden
token is minus infinity.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launches import launch
from kernels.sampling import ALL_MASKED, NOT_FINITE
from kernels.sampling.sampling import SamplingInputs

# Number of splits, which is the same for any number of rows, so that the order of a row's sums does
# not depend on the batch.
_SPLITS = 32
_BLOCK, _WARPS = 512, 4
_MIN_CTAS = 2048  # number of CTAs that keeps a device busy
_PIVOTS = tl.constexpr(16)  # fifteen pivots, and an element for another sum
_LOWEST = tl.constexpr(-(2**31))  # below the key of every logit
_NOT_FINITE, _ALL_MASKED = tl.constexpr(NOT_FINITE), tl.constexpr(ALL_MASKED)
# Number of low bits of a float32 that are zero for every value of a data type.
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOTHING, _BY_COUNT, _BY_MASS = (tl.constexpr(n) for n in range(3))  # kinds of sums of a launch
# The workspace of a row consists of float64 values. For each split, it has the largest logit, the
# id of this logit, and the number of tokens equal to the threshold. Then there are two copies of
# the state of the search, and of the sums of each split at each pivot, of which a launch reads one
# and writes the other. The fields of the state are: lower and upper bound of the threshold; sum
# above the upper bound; target; sum above the lower bound; threshold of top_k; number of tokens
# equal to this threshold that are kept. At the end there is the largest logit of each block. Tokens
# at a bound count as above the bound.
_MAX, _ARGMAX, _EQUAL, _STATE = (tl.constexpr(n) for n in range(4))  # in units of the splits
_LOW, _HIGH, _ABOVE, _TARGET, _REACHED, _RANK, _EQUALS, _FIELDS = (
    tl.constexpr(n) for n in range(8)
)


def sample(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Implements `Ops.sample`."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and inputs.floats.is_contiguous()
    shift = _SHIFTS[logits.dtype]
    rounds = -(-(32 - shift) // 4)
    chunk = -(-vocab_size // _SPLITS // 16) * 16
    blocks = -(-chunk // _BLOCK)
    size = (_STATE.value + 2 * _PIVOTS.value + blocks) * _SPLITS + 2 * _FIELDS.value
    workspace = torch.empty(num_rows, size, dtype=torch.float64, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    # Without masks, any other tensors are passed, which the kernels do not read.
    masks = inputs.top_k if inputs.token_masks is None else inputs.token_masks
    mask_index = inputs.top_k if inputs.mask_index is None else inputs.mask_index
    row = (logits, inputs.floats, inputs.top_k, masks, mask_index, workspace, num_rows)
    sizes = {
        "VOCAB": vocab_size,
        "SPLITS": _SPLITS,
        "CHUNK": chunk,
        "SHIFT": shift,
        "SIZE": size,
        "MASKED": inputs.token_masks is not None,
    }
    per_block = sizes | {"BLOCK": _BLOCK, "num_warps": _WARPS}
    whole_split = sizes | {"BLOCK": triton.next_power_of_2(chunk), "num_warps": 2 * _WARPS}
    # Each CTA has to read the state of its row first, so with many rows a CTA has several splits.
    each = min(_SPLITS, 1 << max(1, num_rows * _SPLITS // _MIN_CTAS).bit_length() - 1)
    first = (*row, int(inputs.bias is not None))
    launch(_row_max_kernel, (num_rows, _SPLITS, 1), first, **per_block)
    steps = [_BY_COUNT.value] * (rounds if inputs.has_top_k else 0)
    steps += [_BY_MASS.value] * (rounds if inputs.has_top_p else 0)
    previous, parity = _NOTHING.value, 0
    for parity, current in enumerate(steps, 1):
        launch(
            _threshold_kernel,
            (num_rows, _SPLITS // each, 1),
            (*row, previous, current, parity & 1, each),
            FIRST=parity == 1,
            **per_block,
        )
        previous = current
    parity = (parity + 1) & 1
    last = (*row, previous, parity)
    launch(_kept_mass_kernel, (num_rows, _SPLITS, 1), last, FIRST=not steps, **per_block)
    last = (*row, inputs.uniforms, out, parity)
    launch(_inverse_cdf_kernel, (num_rows, 1, 1), last, **whole_split)
    return out


@triton.jit
def _key(logit, SHIFT: tl.constexpr):
    """Converts a logit to an integer of the same order. Adding zero makes -0.0 equal to 0.0."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """Returns the largest logit that has a key."""
    low = tl.where(key < 0, 2**SHIFT - 1, 0)
    bits = (key << SHIFT) | low
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _mass_at(key, row_max, scale, min_logit, SHIFT: tl.constexpr):
    """Computes the unnormalized probability of a token with a key. 0 if min_p excludes it."""
    logit = _logit(key.to(tl.int32), SHIFT)
    counts = (key > (_LOWEST >> SHIFT)) & (logit >= min_logit)
    return tl.where(counts, tl.exp2((logit - row_max) * scale), 0.0).to(tl.float64)


@triton.jit
def _parameters(floats_ptr, workspace_ptr, row, num_rows, SPLITS: tl.constexpr):
    """Loads a row's largest logit, its scale (log2(e) / temperature), and the limit of min_p."""
    temperature = tl.load(floats_ptr + row)
    min_p = tl.load(floats_ptr + 2 * num_rows + row)
    maxima = tl.load(workspace_ptr + _MAX * SPLITS + tl.arange(0, SPLITS))
    row_max, divisor = tl.max(maxima).to(tl.float32), tl.where(temperature > 0, temperature, 1.0)
    return row_max, _LOG2_E / divisor, row_max + divisor * tl.log(min_p)


@triton.jit
def _tokens(
    logits_ptr, row, split, start, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Loads ids and logits of a block of a split. Outside of the split, logits are -inf."""
    offset = start + tl.arange(0, BLOCK)
    token = split * CHUNK + offset
    inside = (offset < CHUNK) & (token < VOCAB)
    place = logits_ptr + row.to(tl.int64) * VOCAB + token
    return token, tl.load(place, mask=inside, other=float("-inf")).to(tl.float32), inside


@triton.jit
def _mask_row(mask_index_ptr, row, MASKED: tl.constexpr):
    """Loads the index of a row's token mask. -1 if the row has no mask."""
    found = tl.full([], -1, tl.int64)
    if MASKED:
        found = tl.load(mask_index_ptr + row)
    return found


@triton.jit
def _apply_mask(
    logit, token, inside, masks_ptr, mask_row, VOCAB: tl.constexpr, MASKED: tl.constexpr
):
    """Sets logits to minus infinity for tokens that the mask forbids."""
    if MASKED:
        words: tl.constexpr = (VOCAB + 31) // 32
        place = masks_ptr + mask_row * words + (token >> 5)
        word = tl.load(place, mask=inside & (mask_row >= 0), other=-1)
        logit = tl.where(((word >> (token & 31)) & 1) != 0, logit, float("-inf"))
    return logit


@triton.jit
def _pivots(low, high):
    """Computes fifteen keys that are evenly spaced between the bounds."""
    return low + (high - low) * (tl.arange(0, _PIVOTS) + 1) // _PIVOTS


@triton.jit
def _sums(workspace_ptr, parity, SPLITS: tl.constexpr):
    """Returns the address of a row's sums."""
    return workspace_ptr + _STATE * SPLITS + 2 * _FIELDS + parity * (SPLITS * _PIVOTS)


@triton.jit
def _block_max(
    workspace_ptr, split, start, SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the address of the largest logit of a split's block."""
    blocks: tl.constexpr = (CHUNK + BLOCK - 1) // BLOCK
    return _sums(workspace_ptr, 2, SPLITS) + split * blocks + start // BLOCK


@triton.jit
def _lower_bound(workspace_ptr, top_k, lowest, SPLITS: tl.constexpr, SHIFT: tl.constexpr):
    """Finds a key that at least k tokens reach, from the maxima of splits. Else the lowest key."""
    one = tl.load(workspace_ptr + _MAX * SPLITS + tl.arange(0, SPLITS)[:, None])
    other = tl.load(workspace_ptr + _MAX * SPLITS + tl.arange(0, SPLITS)[None, :])
    enough = tl.sum((other >= one).to(tl.int32), axis=1, keep_dims=True) >= top_k
    return tl.max(tl.where(enough, _key(one.to(tl.float32), SHIFT).to(tl.int64), lowest))


@triton.jit
def _new_bounds(sums_ptr, low, high, above, target, reached, rest, top_p, SPLITS: tl.constexpr):
    """Computes new bounds, the sums above each bound and the target from the last launch's sums.

    `rest` is the probability mass of the kept tokens that are equal to top_k's threshold.
    """
    split, pivot = tl.arange(0, SPLITS)[:, None], tl.arange(0, _PIVOTS)
    sums = tl.sum(tl.load(sums_ptr + split * _PIVOTS + pivot[None, :]), axis=0)
    # top_p is a share of the mass that remains after top_k and min_p.
    total = tl.max(tl.where(pivot == _PIVOTS - 1, sums, 0.0)) + rest
    target = tl.where(target < 0, total * top_p, target)
    places, inner = _pivots(low, high), pivot < _PIVOTS - 1
    short, enough = inner & (sums < target), inner & (sums >= target)
    new_high = tl.minimum(high, tl.min(tl.where(short, places, high)))
    over = tl.max(tl.where(short & (places == new_high), sums, 0.0))
    above = tl.where(new_high < high, over, above)
    reached = tl.minimum(reached, tl.min(tl.where(enough, sums, float("inf"))))
    low = tl.maximum(low, tl.max(tl.where(enough, places, low)))
    return low, new_high, above, target, reached


@triton.jit
def _state(
    workspace_ptr,
    floats_ptr,
    top_k_ptr,
    row,
    num_rows,
    row_max,
    scale,
    min_logit,
    previous,
    current,
    parity,
    FIRST: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Computes a row's search state, and loads top_p.

    `previous` and `current` are the kinds of sums of the previous launch and of this launch, and
    `parity` is the copy of the state that this launch writes. A negative target is not known yet.
    The search ends when no key is between the bounds. If the previous sums show that exactly the
    tokens above the lower bound are kept, the bounds are moved together, which ends the search.
    """
    lowest = tl.full([], _LOWEST >> SHIFT, tl.int64)
    highest = _key(row_max, SHIFT).to(tl.int64) + 1
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(floats_ptr + num_rows + row).to(tl.float64)
    zero = top_p * 0.0
    reached = zero + float("inf")  # unknown
    if FIRST:
        rank, above, equals = lowest, zero, zero
        found = _lower_bound(workspace_ptr, top_k, lowest, SPLITS, SHIFT)
        low = tl.where(current == _BY_COUNT, found, lowest)
        high = tl.where((current == _BY_COUNT) & (top_k >= VOCAB), low + 1, highest)
        target = tl.where(current == _BY_COUNT, top_k.to(tl.float64), -1.0)
    else:
        fields = workspace_ptr + _STATE * SPLITS + (1 - parity) * _FIELDS
        low = tl.load(fields + _LOW).to(tl.int64)
        high = tl.load(fields + _HIGH).to(tl.int64)
        above, target = tl.load(fields + _ABOVE), tl.load(fields + _TARGET)
        rank, equals = tl.load(fields + _RANK).to(tl.int64), tl.load(fields + _EQUALS)
        reached = tl.load(fields + _REACHED)
        if (high - low > 1) | (target < 0):
            rest = equals * _mass_at(rank, row_max, scale, min_logit, SHIFT)
            low, high, above, target, reached = _new_bounds(
                _sums(workspace_ptr, 1 - parity, SPLITS),
                low,
                high,
                above,
                target,
                reached,
                rest,
                top_p,
                SPLITS,
            )
            # The search ends by count if the target is reached exactly, and by mass if there is a
            # single token between the bounds, since each token there has at least the mass of a
            # token at the lower bound.
            single = reached - above < 1.5 * _mass_at(low, row_max, scale, min_logit, SHIFT)
            if tl.where(previous == _BY_COUNT, reached == target, single):
                low, high, above = low - 1, low, reached
        if (previous == _BY_COUNT) & (current != _BY_COUNT):
            # Without top_k, the threshold is the lowest key.
            low = tl.where(top_k < VOCAB, low, lowest)
            rank, equals = low, tl.where(top_k < VOCAB, target - above, 0.0)
            high, above, target, reached = highest, zero, zero - 1.0, zero + float("inf")
    if (current == _BY_MASS) & (previous != _BY_MASS):
        if top_p < 1:
            # All tokens below `least` together have at most half of the mass that top_p excludes,
            # because the mass of the most likely token is 1.
            share = (1.0 - top_p).to(tl.float32)
            least = row_max + tl.log2(share / (2.0 * VOCAB)) / scale
            least = tl.where(share > 1e-4, least, float("-inf"))
            low = tl.maximum(low, tl.minimum(_key(least, SHIFT).to(tl.int64), highest - 1))
        else:
            high, target = low + 1, zero
    return low, high, above, target, reached, rank, equals, top_p


@triton.jit(do_not_specialize=["num_rows", "has_bias"])
def _row_max_kernel(
    logits_ptr,
    floats_ptr,
    top_k_ptr,
    masks_ptr,
    mask_index_ptr,
    workspace_ptr,
    num_rows,
    has_bias,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the largest logit of a split and its first token.

    The result is infinity if a logit is not finite.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    workspace_ptr += row.to(tl.int64) * SIZE
    mask_row = _mask_row(mask_index_ptr, row, MASKED)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], 2147483647, tl.int32)
    not_finite = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        token, logit, inside = _tokens(logits_ptr, row, split, start, VOCAB, CHUNK, BLOCK)
        # A comparison with NaN is false.
        fine = (tl.abs(logit) < float("inf")) | ((has_bias > 0) & (logit == float("-inf")))
        not_finite |= (inside & (fine == 0)).to(tl.int32)
        logit = _apply_mask(logit, token, inside, masks_ptr, mask_row, VOCAB, MASKED)
        ids = tl.where((logit > best) | ((ids == 2147483647) & inside), token, ids)
        best = tl.maximum(best, logit)
        max_ptr = _block_max(workspace_ptr, split, start, SPLITS, CHUNK, BLOCK)
        tl.store(max_ptr, tl.max(logit).to(tl.float64))
    row_max = tl.max(best)
    found = tl.min(tl.where(best == row_max, ids, 2147483647))
    row_max = tl.where(tl.max(not_finite) > 0, float("inf"), row_max)
    tl.store(workspace_ptr + _MAX * SPLITS + split, row_max.to(tl.float64))
    tl.store(workspace_ptr + _ARGMAX * SPLITS + split, found.to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "previous", "current", "parity", "num_splits"])
def _threshold_kernel(
    logits_ptr,
    floats_ptr,
    top_k_ptr,
    masks_ptr,
    mask_index_ptr,
    workspace_ptr,
    num_rows,
    previous,
    current,
    parity,
    num_splits,
    FIRST: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Makes one round of the search: sums the tokens of some splits at or above each pivot."""
    row, first = tl.program_id(0), tl.program_id(1) * num_splits
    workspace_ptr += row.to(tl.int64) * SIZE
    mask_row = _mask_row(mask_index_ptr, row, MASKED)
    row_max, scale, min_logit = _parameters(floats_ptr, workspace_ptr, row, num_rows, SPLITS)
    low, high, above, target, reached, rank, equals, _ = _state(
        workspace_ptr,
        floats_ptr,
        top_k_ptr,
        row,
        num_rows,
        row_max,
        scale,
        min_logit,
        previous,
        current,
        parity,
        FIRST,
        VOCAB,
        SPLITS,
        SHIFT,
    )
    if first == 0:
        fields = workspace_ptr + _STATE * SPLITS + parity * _FIELDS
        tl.store(fields + _LOW, low.to(tl.float64))
        tl.store(fields + _HIGH, high.to(tl.float64))
        tl.store(fields + _ABOVE, above)
        tl.store(fields + _TARGET, target)
        tl.store(fields + _REACHED, reached)
        tl.store(fields + _RANK, rank.to(tl.float64))
        tl.store(fields + _EQUALS, equals)
    if (high - low > 1) | (target < 0):
        pivot = tl.arange(0, _PIVOTS)
        places = tl.where(pivot == _PIVOTS - 1, rank + 1, _pivots(low, high)).to(tl.int32)
        # The mass above `rank` is needed only until the target is known.
        least = tl.where(target < 0, tl.minimum(low, rank + 1), low)
        for split in range(first, first + num_splits):
            sums = tl.zeros([_PIVOTS, BLOCK], tl.float32)  # a thread has all pivots of its tokens
            for start in range(0, CHUNK, BLOCK):
                block_max = tl.load(_block_max(workspace_ptr, split, start, SPLITS, CHUNK, BLOCK))
                if _key(block_max.to(tl.float32), SHIFT) >= least:
                    token, logit, inside = _tokens(
                        logits_ptr, row, split, start, VOCAB, CHUNK, BLOCK
                    )
                    logit = _apply_mask(logit, token, inside, masks_ptr, mask_row, VOCAB, MASKED)
                    mass = tl.where(logit >= min_logit, tl.exp2((logit - row_max) * scale), 0.0)
                    mass = tl.where(current == _BY_MASS, mass, tl.where(inside, 1.0, 0.0))
                    over = _key(logit, SHIFT)[None, :] >= places[:, None]
                    sums += tl.where(over, mass[None, :], 0.0)
            place = _sums(workspace_ptr, parity, SPLITS) + split * _PIVOTS + pivot
            tl.store(place, tl.sum(sums, axis=1).to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "previous", "parity"])
def _kept_mass_kernel(
    logits_ptr,
    floats_ptr,
    top_k_ptr,
    masks_ptr,
    mask_index_ptr,
    workspace_ptr,
    num_rows,
    previous,
    parity,
    FIRST: tl.constexpr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the threshold, and the number of tokens equal to the threshold that are kept.

    For a split, the mass above the threshold and the number of tokens equal to it are computed.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    workspace_ptr += row.to(tl.int64) * SIZE
    mask_row = _mask_row(mask_index_ptr, row, MASKED)
    row_max, scale, min_logit = _parameters(floats_ptr, workspace_ptr, row, num_rows, SPLITS)
    low, _, above, target, _, rank, equals, top_p = _state(
        workspace_ptr,
        floats_ptr,
        top_k_ptr,
        row,
        num_rows,
        row_max,
        scale,
        min_logit,
        previous,
        parity * 0,
        parity,
        FIRST,
        VOCAB,
        SPLITS,
        SHIFT,
    )
    threshold_mass = _mass_at(low, row_max, scale, min_logit, SHIFT)
    divisor = tl.where(threshold_mass > 0, threshold_mass, 1.0)
    wanted = tl.maximum(tl.ceil((target - above) / divisor), 1.0)
    wanted = tl.where(above < target, tl.where(threshold_mass > 0, wanted, 1e9), 0.0)
    wanted = tl.where(low == rank, tl.minimum(wanted, equals), wanted)
    by_mass = (previous == _BY_MASS) & (top_p < 1)
    threshold, most = tl.where(by_mass, low, rank), tl.where(by_mass, wanted, equals)
    if split == 0:
        fields = workspace_ptr + _STATE * SPLITS + parity * _FIELDS
        tl.store(fields + _LOW, threshold.to(tl.float64))
        tl.store(fields + _EQUALS, most)
    mass, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    least = threshold.to(tl.int32)
    for start in range(0, CHUNK, BLOCK):
        block_max = tl.load(_block_max(workspace_ptr, split, start, SPLITS, CHUNK, BLOCK))
        if _key(block_max.to(tl.float32), SHIFT) >= least:
            token, logit, inside = _tokens(logits_ptr, row, split, start, VOCAB, CHUNK, BLOCK)
            logit = _apply_mask(logit, token, inside, masks_ptr, mask_row, VOCAB, MASKED)
            key = _key(logit, SHIFT)
            kept = logit >= min_logit
            mass += tl.where(kept & (key > least), tl.exp2((logit - row_max) * scale), 0.0)
            count += tl.where(kept & inside & (key == least), 1, 0)
    tl.store(_sums(workspace_ptr, parity, SPLITS) + split, tl.sum(mass).to(tl.float64))
    tl.store(workspace_ptr + _EQUAL * SPLITS + split, tl.sum(count).to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "parity"])
def _inverse_cdf_kernel(
    logits_ptr,
    floats_ptr,
    top_k_ptr,
    masks_ptr,
    mask_index_ptr,
    workspace_ptr,
    num_rows,
    uniforms_ptr,
    out_ptr,
    parity,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Samples a token: finds the split, and in it the token, where the mass passes the number.

    The number is the row's uniform random number, and the mass is cumulated in the order of ids.
    """
    row = tl.program_id(0)
    workspace_ptr += row.to(tl.int64) * SIZE
    mask_row = _mask_row(mask_index_ptr, row, MASKED)
    row_max, scale, min_logit = _parameters(floats_ptr, workspace_ptr, row, num_rows, SPLITS)
    each = tl.arange(0, SPLITS)
    if row_max == float("inf"):
        tl.store(out_ptr + row, _NOT_FINITE)
    elif row_max == float("-inf"):
        tl.store(out_ptr + row, _ALL_MASKED)
    elif tl.load(floats_ptr + row) > 0:
        fields = workspace_ptr + _STATE * SPLITS + parity * _FIELDS
        threshold, most = tl.load(fields + _LOW).to(tl.int64), tl.load(fields + _EQUALS)
        threshold_mass = _mass_at(threshold, row_max, scale, min_logit, SHIFT)
        count = tl.load(workspace_ptr + _EQUAL * SPLITS + each)
        room = tl.minimum(tl.maximum(most - (tl.cumsum(count) - count), 0.0), count)
        mass = tl.load(_sums(workspace_ptr, parity, SPLITS) + each) + room * threshold_mass
        ends = tl.cumsum(mass)
        wanted = tl.load(uniforms_ptr + row) * tl.max(ends)
        # The last split with any mass is used if rounded sums stay below the uniform number.
        last = tl.max(tl.where(mass > 0, each, 0))
        split = tl.minimum(tl.sum((ends <= wanted).to(tl.int32)), last)
        rest = wanted - tl.sum(tl.where(each == split, ends - mass, 0.0))
        left = tl.sum(tl.where(each == split, room, 0.0))
        token, logit, inside = _tokens(logits_ptr, row, split, 0, VOCAB, CHUNK, BLOCK)
        logit = _apply_mask(logit, token, inside, masks_ptr, mask_row, VOCAB, MASKED)
        key, least = _key(logit, SHIFT), threshold.to(tl.int32)
        equal = inside & (key == least)
        nth = tl.cumsum(equal.to(tl.int32))
        kept = inside & (logit >= min_logit) & ((key > least) | (equal & (nth <= left)))
        masses = tl.where(kept, tl.exp2((logit - row_max) * scale), 0.0)
        kept &= masses > 0
        found = tl.min(tl.where(kept & (tl.cumsum(masses) > rest), token, 2147483647))
        final = tl.max(tl.where(kept, token, 0))
        tl.store(out_ptr + row, tl.where(found < VOCAB, found, final))
    else:
        block_max = tl.load(workspace_ptr + _MAX * SPLITS + each)
        ids = tl.load(workspace_ptr + _ARGMAX * SPLITS + each)
        best = tl.min(tl.where(block_max == tl.max(block_max), ids, 2147483647.0))
        tl.store(out_ptr + row, tl.minimum(best, VOCAB - 1.0).to(tl.int32))
