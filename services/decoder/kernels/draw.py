"""One draw for each row of logits, in some small kernels. The plain twin, which sums in float64, is
`services.decoder.engine.sampler`.

A row's tokens lie in parts. What may be drawn is all above a threshold, and so many, by id, of
those that are equal to it. It is looked for among all numbers of the logits' type, as integers in
the same order ("keys"): each launch sums what lies above fifteen of those that are left, and the
next one finds between which of them it is. First by count, for top_k, then by probability, for
top_p. A block of a part whose largest logit is below them all is not read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.decoder.kernels.draw_params import DrawParams
from services.decoder.kernels.launching import launch

_PARTS = 32  # so many for any number of rows, so that a row's sums have one order
_BLOCK, _WARPS = 512, 4
_PROGRAMS = 2048  # that keep a device busy
_PIVOTS = tl.constexpr(16)  # the last one is another sum's
_LOWEST = tl.constexpr(-(2**31))  # below each logit's key
_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # bits that are always equal
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOTHING, _BY_COUNT, _BY_MASS = (tl.constexpr(n) for n in range(3))  # what a launch sums
# Numbers of a row that launches leave each other, all float64. Of each part: its largest logit,
# whose that is, and how many equal the threshold. Then twice, for what is read and what is written:
# bounds of the threshold, what lies above the upper one, what shall and what lies above the lower
# one, what top_k has found (a threshold, and how many of those equal to it); and the sums. Last,
# each block's largest logit. What is at a bound counts as above it.
_PEAK, _PEAK_ID, _EQUAL, _STATE = (tl.constexpr(n) for n in range(4))  # times the parts
_LOW, _HIGH, _ABOVE, _TARGET, _REACHED, _RANK, _EQUALS, _FIELDS = (
    tl.constexpr(n) for n in range(8)
)


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """See `ops.Ops.draw`."""
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and params.floats.is_contiguous()
    shift = _SHIFTS[logits.dtype]
    rounds = -(-(32 - shift) // 4)
    chunk = -(-vocab_size // _PARTS // 16) * 16
    blocks = -(-chunk // _BLOCK)
    size = (_STATE.value + 2 * _PIVOTS.value + blocks) * _PARTS + 2 * _FIELDS.value
    work = torch.empty(num_rows, size, dtype=torch.float64, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    row = (logits, params.floats, params.top_k, work, num_rows)
    sizes = {"VOCAB": vocab_size, "PARTS": _PARTS, "CHUNK": chunk, "SHIFT": shift, "SIZE": size}
    each_block = sizes | {"BLOCK": _BLOCK, "num_warps": _WARPS}
    a_part = sizes | {"BLOCK": triton.next_power_of_2(chunk), "num_warps": 2 * _WARPS}
    # A row's state, which a program needs first, is to be worth it where there are many.
    each = min(_PARTS, 1 << max(1, num_rows * _PARTS // _PROGRAMS).bit_length() - 1)
    launch(_peak_kernel, (num_rows, _PARTS, 1), (*row, int(params.forbids)), **each_block)
    steps = [_BY_COUNT.value] * (rounds if params.has_top_k else 0)
    steps += [_BY_MASS.value] * (rounds if params.has_top_p else 0)
    before, turn = _NOTHING.value, 0
    for turn, now in enumerate(steps, 1):
        launch(
            _narrow_kernel, (num_rows, _PARTS // each, 1),
            (*row, before, now, turn & 1, each), FIRST=turn == 1, **each_block,
        )  # fmt: skip
        before = now
    turn = (turn + 1) & 1
    last = (*row, before, turn)
    launch(_weigh_kernel, (num_rows, _PARTS, 1), last, FIRST=not steps, **each_block)
    launch(_choose_kernel, (num_rows, 1, 1), (*row, params.uniforms, out, turn), **a_part)
    return out


@triton.jit
def _key(logit, SHIFT: tl.constexpr):
    """Adding zero makes both zeros one."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """Of a key."""
    low = tl.where(key < 0, 2**SHIFT - 1, 0)
    bits = (key << SHIFT) | low
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _weight_at(key, top, factor, floor, SHIFT: tl.constexpr):
    """Of a token with this key, if there is one and min_p keeps it."""
    logit = _logit(key.to(tl.int32), SHIFT)
    counts = (key > (_LOWEST >> SHIFT)) & (logit >= floor)
    return tl.where(counts, tl.exp2((logit - top) * factor), 0.0).to(tl.float64)


@triton.jit
def _parameters(floats_ptr, work_ptr, row, num_rows, PARTS: tl.constexpr):
    """The largest logit, what logits are multiplied by, and the least one that min_p keeps."""
    temperature = tl.load(floats_ptr + row)
    min_p = tl.load(floats_ptr + 2 * num_rows + row)
    peaks = tl.load(work_ptr + _PEAK * PARTS + tl.arange(0, PARTS))
    top, divisor = tl.max(peaks).to(tl.float32), tl.where(temperature > 0, temperature, 1.0)
    return top, _LOG2_E / divisor, top + divisor * tl.log(min_p)


@triton.jit
def _tokens(
    logits_ptr, row, part, start, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Ids and logits of a block of a part; behind its end, none that weighs anything."""
    offset = start + tl.arange(0, BLOCK)
    token = part * CHUNK + offset
    inside = (offset < CHUNK) & (token < VOCAB)
    place = logits_ptr + row.to(tl.int64) * VOCAB + token
    return token, tl.load(place, mask=inside, other=float("-inf")).to(tl.float32), inside


@triton.jit
def _pivots(low, high):
    """What is between the bounds, evenly."""
    return low + (high - low) * (tl.arange(0, _PIVOTS) + 1) // _PIVOTS


@triton.jit
def _sums(work_ptr, turn, PARTS: tl.constexpr):
    """Where the sums of a row are."""
    return work_ptr + _STATE * PARTS + 2 * _FIELDS + turn * (PARTS * _PIVOTS)


@triton.jit
def _block_peak(
    work_ptr, part, start, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Where the largest logit of a part's block is."""
    blocks: tl.constexpr = (CHUNK + BLOCK - 1) // BLOCK
    return _sums(work_ptr, 2, PARTS) + part * blocks + start // BLOCK


@triton.jit
def _lower_bound(work_ptr, top_k, lowest, PARTS: tl.constexpr, SHIFT: tl.constexpr):
    """A key that k tokens reach, if so many parts have one; else the lowest."""
    one = tl.load(work_ptr + _PEAK * PARTS + tl.arange(0, PARTS)[:, None])
    other = tl.load(work_ptr + _PEAK * PARTS + tl.arange(0, PARTS)[None, :])
    enough = tl.sum((other >= one).to(tl.int32), axis=1, keep_dims=True) >= top_k
    return tl.max(tl.where(enough, _key(one.to(tl.float32), SHIFT).to(tl.int64), lowest))


@triton.jit
def _narrowed(sums_ptr, low, high, above, target, reached, rest, top_p, PARTS: tl.constexpr):
    """Bounds, what lies above each of them, and what shall, by what the launch before has summed;
    `rest`: mass of those equal to what top_k has found.
    """
    part, pivot = tl.arange(0, PARTS)[:, None], tl.arange(0, _PIVOTS)
    sums = tl.sum(tl.load(sums_ptr + part * _PIVOTS + pivot[None, :]), axis=0)
    # Top_p of all that top_k and min_p keep.
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
    work_ptr, floats_ptr, top_k_ptr, row, num_rows, top, factor, floor, before, now,
    turn, FIRST: tl.constexpr, VOCAB: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A row's state, and top_p. `before`: what the launch before has summed; `now`: and this one;
    `turn`: where this one writes.

    A target below zero is not known yet. Bounds that are one apart have nothing between them; all
    above the lower one is kept as soon as that is known to be right.
    """
    lowest = tl.full([], _LOWEST >> SHIFT, tl.int64)
    highest = _key(top, SHIFT).to(tl.int64) + 1
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(floats_ptr + num_rows + row).to(tl.float64)
    zero = top_p * 0.0
    reached = zero + float("inf")  # not known
    if FIRST:
        rank, above, equals = lowest, zero, zero
        found = _lower_bound(work_ptr, top_k, lowest, PARTS, SHIFT)
        low = tl.where(now == _BY_COUNT, found, lowest)
        high = tl.where((now == _BY_COUNT) & (top_k >= VOCAB), low + 1, highest)
        target = tl.where(now == _BY_COUNT, top_k.to(tl.float64), -1.0)
    else:
        fields = work_ptr + _STATE * PARTS + (1 - turn) * _FIELDS
        low = tl.load(fields + _LOW).to(tl.int64)
        high = tl.load(fields + _HIGH).to(tl.int64)
        above, target = tl.load(fields + _ABOVE), tl.load(fields + _TARGET)
        rank, equals = tl.load(fields + _RANK).to(tl.int64), tl.load(fields + _EQUALS)
        reached = tl.load(fields + _REACHED)
        if (high - low > 1) | (target < 0):
            rest = equals * _weight_at(rank, top, factor, floor, SHIFT)
            low, high, above, target, reached = _narrowed(
                _sums(work_ptr, 1 - turn, PARTS), low, high, above, target, reached, rest, top_p,
                PARTS,
            )  # fmt: skip
            # By count, as many as shall be lie above the lower bound. By mass, a single token is
            # between, since each one there weighs as much as one at the lower bound.
            single = reached - above < 1.5 * _weight_at(low, top, factor, floor, SHIFT)
            if tl.where(before == _BY_COUNT, reached == target, single):
                low, high, above = low - 1, low, reached
        if (before == _BY_COUNT) & (now != _BY_COUNT):
            # What is off finds its lowest bound.
            low = tl.where(top_k < VOCAB, low, lowest)
            rank, equals = low, tl.where(top_k < VOCAB, target - above, 0.0)
            high, above, target, reached = highest, zero, zero - 1.0, zero + float("inf")
    if (now == _BY_MASS) & (before != _BY_MASS):
        if top_p < 1:
            # All tokens below weigh no more than half of what top_p leaves out: the largest one's
            # weight is 1.
            share = (1.0 - top_p).to(tl.float32)
            least = top + tl.log2(share / (2.0 * VOCAB)) / factor
            least = tl.where(share > 1e-4, least, float("-inf"))
            low = tl.maximum(low, tl.minimum(_key(least, SHIFT).to(tl.int64), highest - 1))
        else:
            high, target = low + 1, zero
    return low, high, above, target, reached, rank, equals, top_p


@triton.jit(do_not_specialize=["num_rows", "forbids"])
def _peak_kernel(
    logits_ptr, floats_ptr, top_k_ptr, work_ptr, num_rows, forbids,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each part's largest logit, and the first token that has it; infinity: it is not finite."""
    row, part = tl.program_id(0), tl.program_id(1)
    work_ptr += row.to(tl.int64) * SIZE
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], 2147483647, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        token, logit, inside = _tokens(logits_ptr, row, part, start, VOCAB, CHUNK, BLOCK)
        # Nothing else compares below infinity.
        fine = (tl.abs(logit) < float("inf")) | ((forbids > 0) & (logit == float("-inf")))
        broken |= (inside & (fine == 0)).to(tl.int32)
        ids = tl.where((logit > best) | ((ids == 2147483647) & inside), token, ids)
        best = tl.maximum(best, logit)
        peak_ptr = _block_peak(work_ptr, part, start, PARTS, CHUNK, BLOCK)
        tl.store(peak_ptr, tl.max(logit).to(tl.float64))
    top = tl.max(best)
    found = tl.min(tl.where(best == top, ids, 2147483647))
    top = tl.where(tl.max(broken) > 0, float("inf"), top)
    tl.store(work_ptr + _PEAK * PARTS + part, top.to(tl.float64))
    tl.store(work_ptr + _PEAK_ID * PARTS + part, found.to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "before", "now", "turn", "num_parts"])
def _narrow_kernel(
    logits_ptr, floats_ptr, top_k_ptr, work_ptr, num_rows, before, now, turn, num_parts,
    FIRST: tl.constexpr, VOCAB: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    SHIFT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of some parts' tokens above each pivot, or how many there are."""
    row, first = tl.program_id(0), tl.program_id(1) * num_parts
    work_ptr += row.to(tl.int64) * SIZE
    top, factor, floor = _parameters(floats_ptr, work_ptr, row, num_rows, PARTS)
    low, high, above, target, reached, rank, equals, _ = _state(
        work_ptr, floats_ptr, top_k_ptr, row, num_rows, top, factor, floor, before, now,
        turn, FIRST, VOCAB, PARTS, SHIFT,
    )  # fmt: skip
    if first == 0:
        fields = work_ptr + _STATE * PARTS + turn * _FIELDS
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
        # What is above `rank` is only asked for as long as there is no target.
        least = tl.where(target < 0, tl.minimum(low, rank + 1), low)
        for part in range(first, first + num_parts):
            sums = tl.zeros([_PIVOTS, BLOCK], tl.float32)  # a thread has all pivots
            for start in range(0, CHUNK, BLOCK):
                peak = tl.load(_block_peak(work_ptr, part, start, PARTS, CHUNK, BLOCK))
                if _key(peak.to(tl.float32), SHIFT) >= least:
                    _token, logit, inside = _tokens(
                        logits_ptr, row, part, start, VOCAB, CHUNK, BLOCK
                    )
                    weight = tl.where(logit >= floor, tl.exp2((logit - top) * factor), 0.0)
                    weight = tl.where(now == _BY_MASS, weight, tl.where(inside, 1.0, 0.0))
                    over = _key(logit, SHIFT)[None, :] >= places[:, None]
                    sums += tl.where(over, weight[None, :], 0.0)
            place = _sums(work_ptr, turn, PARTS) + part * _PIVOTS + pivot
            tl.store(place, tl.sum(sums, axis=1).to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "before", "turn"])
def _weigh_kernel(
    logits_ptr, floats_ptr, top_k_ptr, work_ptr, num_rows, before, turn,
    FIRST: tl.constexpr, VOCAB: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    SHIFT: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The threshold and how many of those equal to it are kept; of a part what is above, and how
    many are equal.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    work_ptr += row.to(tl.int64) * SIZE
    top, factor, floor = _parameters(floats_ptr, work_ptr, row, num_rows, PARTS)
    low, _, above, target, _, rank, equals, top_p = _state(
        work_ptr, floats_ptr, top_k_ptr, row, num_rows, top, factor, floor, before,
        turn * 0, turn, FIRST, VOCAB, PARTS, SHIFT,
    )  # fmt: skip
    weight = _weight_at(low, top, factor, floor, SHIFT)
    wanted = tl.maximum(tl.ceil((target - above) / tl.where(weight > 0, weight, 1.0)), 1.0)
    wanted = tl.where(above < target, tl.where(weight > 0, wanted, 1e9), 0.0)
    wanted = tl.where(low == rank, tl.minimum(wanted, equals), wanted)
    by_mass = (before == _BY_MASS) & (top_p < 1)
    threshold, most = tl.where(by_mass, low, rank), tl.where(by_mass, wanted, equals)
    if part == 0:
        fields = work_ptr + _STATE * PARTS + turn * _FIELDS
        tl.store(fields + _LOW, threshold.to(tl.float64))
        tl.store(fields + _EQUALS, most)
    mass, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    least = threshold.to(tl.int32)
    for start in range(0, CHUNK, BLOCK):
        peak = tl.load(_block_peak(work_ptr, part, start, PARTS, CHUNK, BLOCK))
        if _key(peak.to(tl.float32), SHIFT) >= least:
            _token, logit, inside = _tokens(logits_ptr, row, part, start, VOCAB, CHUNK, BLOCK)
            key = _key(logit, SHIFT)
            kept = logit >= floor
            mass += tl.where(kept & (key > least), tl.exp2((logit - top) * factor), 0.0)
            count += tl.where(kept & inside & (key == least), 1, 0)
    tl.store(_sums(work_ptr, turn, PARTS) + part, tl.sum(mass).to(tl.float64))
    tl.store(work_ptr + _EQUAL * PARTS + part, tl.sum(count).to(tl.float64))


@triton.jit(do_not_specialize=["num_rows", "turn"])
def _choose_kernel(
    logits_ptr, floats_ptr, top_k_ptr, work_ptr, num_rows, uniforms_ptr, out_ptr, turn,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The part that the draw falls into, and its token there; -1: the row is not finite."""
    row = tl.program_id(0)
    work_ptr += row.to(tl.int64) * SIZE
    top, factor, floor = _parameters(floats_ptr, work_ptr, row, num_rows, PARTS)
    each = tl.arange(0, PARTS)
    if top == float("inf"):
        tl.store(out_ptr + row, -1)
    elif tl.load(floats_ptr + row) > 0:
        fields = work_ptr + _STATE * PARTS + turn * _FIELDS
        threshold, most = tl.load(fields + _LOW).to(tl.int64), tl.load(fields + _EQUALS)
        weight = _weight_at(threshold, top, factor, floor, SHIFT)
        count = tl.load(work_ptr + _EQUAL * PARTS + each)
        room = tl.minimum(tl.maximum(most - (tl.cumsum(count) - count), 0.0), count)
        mass = tl.load(_sums(work_ptr, turn, PARTS) + each) + room * weight
        ends = tl.cumsum(mass)
        wanted = tl.load(uniforms_ptr + row) * tl.max(ends)
        # The last one that weighs anything, if sums are rounded to the draw's disadvantage.
        last = tl.max(tl.where(mass > 0, each, 0))
        part = tl.minimum(tl.sum((ends <= wanted).to(tl.int32)), last)
        rest = wanted - tl.sum(tl.where(each == part, ends - mass, 0.0))
        left = tl.sum(tl.where(each == part, room, 0.0))
        token, logit, inside = _tokens(logits_ptr, row, part, 0, VOCAB, CHUNK, BLOCK)
        key, least = _key(logit, SHIFT), threshold.to(tl.int32)
        equal = inside & (key == least)
        nth = tl.cumsum(equal.to(tl.int32))
        kept = inside & (logit >= floor) & ((key > least) | (equal & (nth <= left)))
        weights = tl.where(kept, tl.exp2((logit - top) * factor), 0.0)
        kept &= weights > 0
        found = tl.min(tl.where(kept & (tl.cumsum(weights) > rest), token, 2147483647))
        final = tl.max(tl.where(kept, token, 0))
        tl.store(out_ptr + row, tl.where(found < VOCAB, found, final))
    else:
        peak = tl.load(work_ptr + _PEAK * PARTS + each)
        ids = tl.load(work_ptr + _PEAK_ID * PARTS + each)
        best = tl.min(tl.where(peak == tl.max(peak), ids, 2147483647.0))
        tl.store(out_ptr + row, tl.minimum(best, VOCAB - 1.0).to(tl.int32))
