"""What is between the projections of a layer, for a few decodes, as one Triton kernel.

At small batches attention waits more than it reads: q/k norm and rotation, attention by splits and
the merge of the splits are three launches of a few microseconds each. Here each program rotates its
heads by itself and attends to one part of the context, and whoever comes last of a head merges the
parts, in one order. The context's keys and values, which were written by earlier steps, are on
their way before the projection's result is there (see `overlap`).

The plain twin is `services.decoder.kernels.plain.attend_few`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from services.decoder.kernels.heads import ProjectedHeads
from services.decoder.kernels.overlap import overlaps
from services.decoder.kernels.qk_rope_cache import rotated

# Longer contexts are faster through flashinfer, which keeps more reads under way; by number of
# sequences, measured on an H200. So may be more query heads per key head, which was not measured.
_MAX_CONTEXTS = {1: 4096, 2: 2048}
_MAX_GROUP = 2
# (splits, tokens of a tile, warps) by number of sequences, measured for 16 query and 8 key heads
# of 128.
_SHAPES = {1: (32, 64, 4), 2: (16, 64, 4)}
_HEADS = 2  # of the query, per program
_LOG2_E = 1.4426950408889634


class FewAttention:
    """The kernel, and the memory where its programs meet: for one device, one step at a time.

    Args:
        device: of the model.
        num_heads: of the query.
        num_kv_heads: of keys and values.
        head_dim: twice a power of two.
    """

    def __init__(
        self, device: torch.device, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self._group = num_heads // num_kv_heads
        most_tokens = max(_SHAPES)
        parts = num_heads * max(tokens * splits for tokens, (splits, _, _) in _SHAPES.items())
        self._sums = torch.empty((parts, head_dim), dtype=torch.float32, device=device)
        self._scales = torch.empty((2, parts), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(most_tokens * num_heads, dtype=torch.int32, device=device)

    def max_context(self, num_tokens: int) -> int:
        """The longest context, the new token included, where so many sequences gain; 0: none."""
        return _MAX_CONTEXTS.get(num_tokens, 0) if self._group <= _MAX_GROUP else 0

    def __call__(self, heads: ProjectedHeads, block_ids: Tensor, seq_lens: Tensor) -> Tensor:
        """See `ops.attend_few`. All tensors are contiguous."""
        assert heads.is_contiguous
        num_tokens, num_heads = len(heads.qkv), heads.num_heads
        block_size, num_kv_heads, head_dim = heads.kv_cache.shape[-3:]
        at_once = _HEADS if self._group % _HEADS == 0 else 1
        splits, tile, warps = _SHAPES[num_tokens]
        out = heads.qkv.new_empty(num_tokens, num_heads * head_dim)
        _few_attention_kernel[(num_heads // at_once, splits, num_tokens)](
            heads.qkv, *heads.norms, *heads.rope, heads.rows, heads.kv_cache, block_ids, seq_lens,
            self._sums, self._scales, self._arrived, out,
            num_tokens, num_heads, num_kv_heads, heads.eps, head_dim**-0.5 * _LOG2_E,
            HEADS=at_once, GROUP=self._group, HALF=head_dim // 2, BLOCK_SIZE=block_size, TILE=tile,
            SPLITS=splits, TOKENS=triton.next_power_of_2(num_tokens), PARTS=len(self._sums),
            OVERLAP=overlaps(), num_warps=warps, launch_pdl=overlaps(),
        )  # fmt: skip
        return out


@triton.jit
def _few_attention_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, rows_ptr, cache_ptr, block_ids_ptr,
    seq_lens_ptr, sums_ptr, scales_ptr, arrived_ptr, out_ptr,
    num_tokens, num_heads, num_kv_heads, eps, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = 2 * HALF
    first_head = tl.program_id(0) * HEADS
    kv_head = first_head // GROUP
    split, token = tl.program_id(1), tl.program_id(2)
    half = tl.arange(0, HALF)

    # The context but for the new token, in equal parts. Nobody writes to it in this step.
    before = tl.arange(0, TOKENS)
    lengths = tl.load(seq_lens_ptr + before, mask=before < token, other=0)
    table_ptr = block_ids_ptr + tl.sum((lengths + BLOCK_SIZE - 1) // BLOCK_SIZE)
    context = tl.load(seq_lens_ptr + token) - 1
    part = tl.cdiv(context, SPLITS)
    begin = split * part
    end = tl.minimum(begin + part, context)
    keys_ptr = cache_ptr + kv_head * DIM
    k_one, k_two, value, inside = _load_tile(
        keys_ptr, table_ptr, begin, end, num_kv_heads, HALF, BLOCK_SIZE, TILE
    )
    q_weights = tl.load(q_weight_ptr + half), tl.load(q_weight_ptr + HALF + half)
    k_weights = tl.load(k_weight_ptr + half), tl.load(k_weight_ptr + HALF + half)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    token_ptr = qkv_ptr + token * (num_heads + 2 * num_kv_heads) * DIM
    cos = tl.load(cos_ptr + token * HALF + half)[None, :]
    sin = tl.load(sin_ptr + token * HALF + half)[None, :]
    heads = first_head + tl.arange(0, HEADS)
    q_one, q_two = _load_rotated(token_ptr, heads, q_weights, cos, sin, eps, HALF)
    q_one, q_two = q_one.to(tl.float32) * scale, q_two.to(tl.float32) * scale

    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, DIM), tl.float32)
    top, total, sums = _attend(top, total, sums, q_one, q_two, k_one, k_two, value, inside)
    for start in range(begin + TILE, end, TILE):
        k_one, k_two, value, inside = _load_tile(
            keys_ptr, table_ptr, start, end, num_kv_heads, HALF, BLOCK_SIZE, TILE
        )
        top, total, sums = _attend(top, total, sums, q_one, q_two, k_one, k_two, value, inside)

    if split == SPLITS - 1:
        one, two, new_value = _write_new(
            token_ptr, k_weights, cos, sin, eps, rows_ptr, keys_ptr, token, num_tokens, num_heads,
            num_kv_heads, kv_head, first_head % GROUP == 0, HALF,
        )  # fmt: skip
        alone = tl.full((1,), 1, tl.int1)
        top, total, sums = _attend(top, total, sums, q_one, q_two, one, two, new_value, alone)
    _join(
        sums_ptr, scales_ptr, arrived_ptr, out_ptr, token * num_heads + first_head, split,
        top, total, sums, HEADS, DIM, SPLITS, PARTS,
    )  # fmt: skip


@triton.jit
def _load_rotated(token_ptr, heads, weights, cos, sin, eps, HALF: tl.constexpr):
    """Heads of the projection, normalised and rotated, by halves."""
    place = token_ptr + heads[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    return rotated(
        tl.load(place), tl.load(place + HALF), weights[0][None, :], weights[1][None, :],
        cos, sin, eps, HALF,
    )  # fmt: skip


@triton.jit
def _write_new(
    token_ptr, weights, cos, sin, eps, rows_ptr, keys_ptr, token, num_tokens, num_heads,
    num_kv_heads, kv_head, writes, HALF: tl.constexpr,
):  # fmt: skip
    """The new token's key and value: one program of a key head writes them to the cache, all of its
    last part get them as a tile.
    """
    DIM: tl.constexpr = 2 * HALF
    half, column = tl.arange(0, HALF)[None, :], tl.arange(0, DIM)[None, :]
    head = num_heads + kv_head + tl.zeros((1,), tl.int32)
    one, two = _load_rotated(token_ptr, head, weights, cos, sin, eps, HALF)
    value = tl.load(token_ptr + (num_heads + num_kv_heads + kv_head) * DIM + column)
    key_row, value_row = tl.load(rows_ptr + token), tl.load(rows_ptr + num_tokens + token)
    writes = writes & (key_row >= 0)  # padding has negative rows and goes nowhere
    key_ptr = keys_ptr + key_row * num_kv_heads * DIM + half
    tl.store(key_ptr, one, mask=writes)
    tl.store(key_ptr + HALF, two, mask=writes)
    tl.store(keys_ptr + value_row * num_kv_heads * DIM + column, value, mask=writes)
    return one[:, None, :], two[:, None, :], value[:, None, :]


@triton.jit
def _join(
    sums_ptr, scales_ptr, arrived_ptr, out_ptr, number, split, top, total, sums,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Leaves a part for whoever comes last, who merges them all."""
    index = (number + tl.arange(0, HEADS)) * SPLITS + split
    place = sums_ptr + index[:, None] * DIM + tl.arange(0, DIM)[None, :]
    # Past the first cache, which other processors do not see.
    tl.store(place, sums, cache_modifier=".cg")
    tl.store(scales_ptr + index, top, cache_modifier=".cg")
    tl.store(scales_ptr + PARTS + index, total, cache_modifier=".cg")
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + number, 1, sem="acq_rel") == SPLITS - 1:
        tl.debug_barrier()
        for one in tl.static_range(HEADS):
            _merge(sums_ptr, scales_ptr, out_ptr, number + one, DIM, SPLITS, PARTS)
        tl.store(arrived_ptr + number, 0)


@triton.jit
def _merge(
    sums_ptr, scales_ptr, out_ptr, number,
    DIM: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The parts of one head, in one order whoever comes last."""
    index = number * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    tops = tl.load(scales_ptr + index, cache_modifier=".cg")
    totals = tl.load(scales_ptr + PARTS + index, cache_modifier=".cg")
    place = sums_ptr + index[:, None] * DIM + column[None, :]
    parts = tl.load(place, cache_modifier=".cg")
    weights = tl.exp2(tops - tl.max(tops))
    merged = tl.sum(parts * weights[:, None], axis=0) / tl.sum(totals * weights)
    tl.store(out_ptr + number * DIM + column, merged.to(out_ptr.dtype.element_ty))


@triton.jit
def _load_tile(
    keys_ptr, table_ptr, start, end, num_kv_heads,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Both halves of the keys `[1, TILE, HALF]`, the values `[1, TILE, DIM]`, which are inside."""
    index = start + tl.arange(0, TILE)
    inside = index < end
    block = tl.load(table_ptr + index // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    row = (block * (2 * BLOCK_SIZE) + index % BLOCK_SIZE) * num_kv_heads * (2 * HALF)
    place, mask = (keys_ptr + row)[None, :, None], inside[None, :, None]
    half = tl.arange(0, HALF)[None, None, :]
    one = tl.load(place + half, mask=mask, other=0.0)
    two = tl.load(place + HALF + half, mask=mask, other=0.0)
    column = tl.arange(0, 2 * HALF)[None, None, :]
    value_place = place + BLOCK_SIZE * num_kv_heads * (2 * HALF)
    return one, two, tl.load(value_place + column, mask=mask, other=0.0), inside


@triton.jit
def _attend(top, total, sums, q_one, q_two, k_one, k_two, value, inside):
    """One tile more of a running softmax, in base 2."""
    products = q_one[:, None, :] * k_one.to(tl.float32) + q_two[:, None, :] * k_two.to(tl.float32)
    score = tl.where(inside[None, :], tl.sum(products, axis=2), float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    old_scale = tl.exp2(top - new_top)
    total = total * old_scale + tl.sum(weight, axis=1)
    sums = sums * old_scale[:, None] + tl.sum(weight[:, :, None] * value.to(tl.float32), axis=1)
    return new_top, total, sums
