"""Decode attention with q/k norm, rotation and cache write in one kernel, for up to two sequences.

In small batches the latency of launches dominates: q/k norm with rotation, split-KV attention and
the merge of the splits would be three launches of a few microseconds each. In this kernel, each CTA
normalizes and rotates its own heads and attends to one split of the context. The last CTA of a head
to finish merges the splits, always in the same order. Keys and values of earlier steps are loaded
before the result of the projection is there, if the device has programmatic dependent launch.

A CTA has the query heads of a key head, so that a K/V tile is loaded once. Small groups are
computed by FMAs, and larger groups on tensor cores, padded to the 16 rows of an MMA.

The reference implementation is `kernels.plain.fused_decode_attention`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.attention_tuning import (
    FUSED_MAX_SEQUENCES,
    AttentionFacts,
    FusedDecodeConfig,
    fused_decode_config,
)
from kernels.attention.fp8_codec import decode_e4m3, encode_e4m3, round_to_e4m3
from kernels.attention.fp8_pages import as_bytes
from kernels.attention.heads import ProjectedHeads
from kernels.attention.qk_rope_cache import normed, turned
from kernels.dependent_launch import wait_for_earlier
from kernels.gemm.skinny_gemm import load_reduced

_MERGED_ELEMENTS = 8192  # elements of splits that a CTA has in registers at the same time
_LOG2_E = 1.4426950408889634


class FusedDecodeAttention:
    """The kernel and its split-KV scratch memory, for one step of a device at a time.

    Args:
        facts: facts about the model and the device.
        device: device of the scratch memory.
        configure: function that returns the configuration for a number of sequences. Defaults to
            the tuned constants.
    """

    def __init__(
        self,
        facts: AttentionFacts,
        device: torch.device,
        configure: Callable[[AttentionFacts, int], FusedDecodeConfig] = fused_decode_config,
    ) -> None:
        self._facts = facts
        self._configs = {n: configure(facts, n) for n in range(1, FUSED_MAX_SEQUENCES + 1)}
        rows = facts.num_heads * max(n * one.num_splits for n, one in self._configs.items())
        self._acc = torch.empty((rows, facts.head_dim), dtype=torch.float32, device=device)
        self._m_l = torch.empty((2, rows), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(
            FUSED_MAX_SEQUENCES * facts.num_heads, dtype=torch.int32, device=device
        )

    def __call__(
        self, heads: ProjectedHeads, block_ids: Tensor, first_blocks: Tensor, seq_lens: Tensor
    ) -> Tensor:
        """Applies q/k norm and rotation, writes to the KV cache, and attends to the context.

        Args:
            heads: output of the projection, with one token per sequence. All tensors are
                contiguous.
            block_ids: int32 KV blocks of all sequences.
            first_blocks: `[T]` int32, index in `block_ids` of each sequence's first block.
            seq_lens: `[T]` int32, length of each sequence with the new token.

        Returns:
            Attention output `[T, num_heads * head_dim]`.
        """
        num_tokens, facts = heads.num_tokens, self._facts
        assert heads.is_contiguous and num_tokens <= FUSED_MAX_SEQUENCES
        block_size, num_kv_heads, head_dim = heads.kv_cache.shape[-3:]
        config, pdl = self._configs[num_tokens], facts.device.supports_pdl
        num_heads, rows = heads.num_heads, config.heads
        if config.tensor_cores:
            rows = max(16, triton.next_power_of_2(rows))
        out = heads.rope[0].new_empty(num_tokens, num_heads * head_dim)
        # Splits are merged one at a time if there are enough rows for all threads, else several.
        at_once = _MERGED_ELEMENTS // (rows * triton.next_power_of_2(head_dim))
        at_once = 1 if rows > 4 else min(max(at_once, 1), config.num_splits)
        _fused_decode_kernel[(num_heads // config.heads, config.num_splits, num_tokens)](
            heads.qkv,
            *(heads.norms or (out, out)),
            *heads.rope,
            heads.rows,
            as_bytes(heads.kv_cache),
            out if heads.kv_scales is None else heads.kv_scales,
            block_ids,
            first_blocks,
            seq_lens,
            self._acc,
            self._m_l,
            self._arrived,
            out,
            num_tokens,
            num_heads,
            num_kv_heads,
            heads.eps,
            head_dim**-0.5 * _LOG2_E,
            heads.qkv[0].numel(),
            HEADS=config.heads,
            ROWS=rows,
            GROUP=num_heads // num_kv_heads,
            HALF=head_dim // 2,
            COLUMNS=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=block_size,
            TILE=config.tile,
            SPLITS=config.num_splits,
            MERGED=at_once,
            SCRATCH=len(self._acc),
            NORM=heads.norms is not None,
            PARTIALS=heads.num_splits,
            TENSOR_CORES=config.tensor_cores,
            FP8=heads.kv_scales is not None,
            PDL=pdl,
            num_warps=config.num_warps,
            launch_pdl=pdl,
        )
        return out


@triton.jit
def _fused_decode_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    cache_ptr,
    scales_ptr,
    block_ids_ptr,
    first_blocks_ptr,
    seq_lens_ptr,
    acc_ptr,
    m_l_ptr,
    arrived_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    num_kv_heads,
    eps,
    scale,
    stride,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    SCRATCH: tl.constexpr,
    NORM: tl.constexpr,
    PARTIALS: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes HEADS query heads of one key head, padded to ROWS, for a split of a sequence.

    A half of a head has HALF elements, padded to COLUMNS. The projection is given by PARTIALS
    split-K partials, which are `stride` elements apart, or reduced if PARTIALS is 0.
    """
    DIM: tl.constexpr = 2 * HALF
    first_head = tl.program_id(0) * HEADS
    kv_head = first_head // GROUP
    split, token = tl.program_id(1), tl.program_id(2)
    half = tl.arange(0, COLUMNS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty

    # The context without the new token is divided into equal splits. No kernel of this step writes
    # to it.
    table_ptr = block_ids_ptr + tl.load(first_blocks_ptr + token)
    context = tl.load(seq_lens_ptr + token) - 1
    split_tokens = tl.cdiv(context, SPLITS)
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, context)
    keys_ptr = cache_ptr + kv_head * DIM
    k_first, k_second, value, inside = _load_tile(
        keys_ptr,
        table_ptr,
        begin,
        end,
        num_kv_heads,
        HALF,
        COLUMNS,
        BLOCK_SIZE,
        TILE,
        TENSOR_CORES,
        dtype,
    )
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        k_scale = tl.load(scales_ptr + kv_head)
        v_scale = tl.load(scales_ptr + num_kv_heads + kv_head)
        scale *= k_scale
    q_norm = _load_norm(q_norm_ptr, HALF, COLUMNS, NORM)
    k_norm = _load_norm(k_norm_ptr, HALF, COLUMNS, NORM)
    wait_for_earlier(PDL)

    token_ptr = qkv_ptr + token * (num_heads + 2 * num_kv_heads) * DIM
    cos = tl.load(cos_ptr + token * HALF + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + half, mask=half < HALF, other=0.0)[None, :]
    row = tl.arange(0, ROWS)
    q_first, q_second = _load_rotated(
        token_ptr,
        first_head + row,
        row < HEADS,
        q_norm,
        cos,
        sin,
        eps,
        stride,
        dtype,
        HALF,
        COLUMNS,
        NORM,
        PARTIALS,
    )
    # For FMAs the query is scaled instead of the scores, in float32.
    wide_first, wide_second = q_first.to(tl.float32) * scale, q_second.to(tl.float32) * scale

    m_i = tl.full((ROWS,), -1e30, tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
    if TENSOR_CORES:
        m_i, l_i, acc = _attend_mma(
            m_i, l_i, acc, q_first, q_second, scale, k_first, k_second, value, inside
        )
    else:
        m_i, l_i, acc = _attend_fma(
            m_i, l_i, acc, wide_first, wide_second, k_first, k_second, value, inside
        )
    for start in range(begin + TILE, end, TILE):
        k_first, k_second, value, inside = _load_tile(
            keys_ptr,
            table_ptr,
            start,
            end,
            num_kv_heads,
            HALF,
            COLUMNS,
            BLOCK_SIZE,
            TILE,
            TENSOR_CORES,
            dtype,
        )
        if TENSOR_CORES:
            m_i, l_i, acc = _attend_mma(
                m_i, l_i, acc, q_first, q_second, scale, k_first, k_second, value, inside
            )
        else:
            m_i, l_i, acc = _attend_fma(
                m_i, l_i, acc, wide_first, wide_second, k_first, k_second, value, inside
            )

    if split == SPLITS - 1:
        new_first, new_second, new_value = _write_new(
            token_ptr,
            k_norm,
            cos,
            sin,
            eps,
            rows_ptr,
            keys_ptr,
            token,
            num_tokens,
            num_heads,
            num_kv_heads,
            kv_head,
            first_head % GROUP == 0,
            stride,
            k_scale,
            v_scale,
            dtype,
            HALF,
            COLUMNS,
            NORM,
            PARTIALS,
            FP8,
        )
        alone = tl.full((1,), 1, tl.int1)
        m_i, l_i, acc = _attend_fma(
            m_i, l_i, acc, wide_first, wide_second, new_first, new_second, new_value, alone
        )
    if FP8:
        acc *= v_scale
    _merge_when_last(
        acc_ptr,
        m_l_ptr,
        arrived_ptr,
        out_ptr,
        token * num_heads + first_head,
        split,
        m_i,
        l_i,
        acc,
        HEADS,
        ROWS,
        DIM,
        2 * COLUMNS,
        SPLITS,
        MERGED,
        SCRATCH,
    )


@triton.jit
def _load_norm(norm_ptr, HALF: tl.constexpr, COLUMNS: tl.constexpr, NORM: tl.constexpr):
    """Loads the halves `[1, COLUMNS]` of a norm's weight. Ones if the model has no norm."""
    half = tl.arange(0, COLUMNS)[None, :]
    if NORM:
        first = tl.load(norm_ptr + half, mask=half < HALF, other=0.0)
        second = tl.load(norm_ptr + HALF + half, mask=half < HALF, other=0.0)
    else:
        first = tl.full((1, COLUMNS), 1.0, norm_ptr.dtype.element_ty)
        second = first
    return first, second


@triton.jit
def _load_rotated(
    token_ptr,
    heads,
    inside,
    norm,
    cos,
    sin,
    eps,
    stride,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Loads, normalizes (if NORM) and rotates heads. Returns their halves `[heads, COLUMNS]`."""
    half = tl.arange(0, COLUMNS)[None, :]
    offset = heads[:, None] * (2 * HALF) + half
    mask = inside[:, None] & (half < HALF)
    first = load_reduced(token_ptr, offset, mask, stride, PARTIALS, dtype)
    second = load_reduced(token_ptr, offset + HALF, mask, stride, PARTIALS, dtype)
    if NORM:
        first, second = normed(first, second, norm[0], norm[1], eps, HALF)
    return turned(first, second, cos, sin)


@triton.jit
def _write_new(
    token_ptr,
    norm,
    cos,
    sin,
    eps,
    rows_ptr,
    keys_ptr,
    token,
    num_tokens,
    num_heads,
    num_kv_heads,
    kv_head,
    writes,
    stride,
    k_scale,
    v_scale,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    PARTIALS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Returns the new token's key and value as a tile of one token, rounded as in the cache.

    The CTA of a key head for which `writes` is True also writes the key and the value to the cache.
    """
    DIM: tl.constexpr = 2 * HALF
    half, column = tl.arange(0, COLUMNS)[None, :], tl.arange(0, 2 * COLUMNS)[None, :]
    head = num_heads + kv_head + tl.zeros((1,), tl.int32)
    is_head = tl.full((1,), 1, tl.int1)
    first, second = _load_rotated(
        token_ptr,
        head,
        is_head,
        norm,
        cos,
        sin,
        eps,
        stride,
        dtype,
        HALF,
        COLUMNS,
        NORM,
        PARTIALS,
    )
    offset = (num_heads + num_kv_heads + kv_head) * DIM + column
    value = load_reduced(token_ptr, offset, column < DIM, stride, PARTIALS, dtype)
    key_row, value_row = tl.load(rows_ptr + token), tl.load(rows_ptr + num_tokens + token)
    writes = writes & (key_row >= 0)  # padding has negative rows and is not written
    key_ptr = keys_ptr + key_row * num_kv_heads * DIM + half
    value_ptr = keys_ptr + value_row * num_kv_heads * DIM + column
    if FP8:
        first = round_to_e4m3(first.to(tl.float32), k_scale)
        second = round_to_e4m3(second.to(tl.float32), k_scale)
        value = round_to_e4m3(value.to(tl.float32), v_scale)
        tl.store(key_ptr, encode_e4m3(first), mask=writes & (half < HALF))
        tl.store(key_ptr + HALF, encode_e4m3(second), mask=writes & (half < HALF))
        tl.store(value_ptr, encode_e4m3(value), mask=writes & (column < DIM))
    else:
        tl.store(key_ptr, first, mask=writes & (half < HALF))
        tl.store(key_ptr + HALF, second, mask=writes & (half < HALF))
        tl.store(value_ptr, value, mask=writes & (column < DIM))
    return first[:, None, :], second[:, None, :], value[:, None, :]


@triton.jit
def _merge_when_last(
    acc_ptr,
    m_l_ptr,
    arrived_ptr,
    out_ptr,
    first_row,
    split,
    m_i,
    l_i,
    acc,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    """Stores a split. The last CTA of the same heads to arrive merges all splits."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    index = (first_row + row) * SPLITS + split
    inside = row < HEADS
    mask = inside[:, None] & (column < DIM)[None, :]
    # `.cg` bypasses L1, which is not coherent between SMs.
    tl.store(acc_ptr + index[:, None] * DIM + column[None, :], acc, mask=mask, cache_modifier=".cg")
    tl.store(m_l_ptr + index, m_i, mask=inside, cache_modifier=".cg")
    tl.store(m_l_ptr + SCRATCH + index, l_i, mask=inside, cache_modifier=".cg")
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + first_row, 1, sem="acq_rel") == SPLITS - 1:
        tl.debug_barrier()
        _merge(
            acc_ptr, m_l_ptr, out_ptr, first_row, HEADS, ROWS, DIM, WIDTH, SPLITS, MERGED, SCRATCH
        )
        tl.store(arrived_ptr + first_row, 0)


@triton.jit
def _merge(
    acc_ptr,
    m_l_ptr,
    out_ptr,
    first_row,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    SCRATCH: tl.constexpr,
):
    """Merges the splits of HEADS heads in a fixed order, MERGED splits at a time."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    head = (first_row + row) * SPLITS
    all_splits = head[:, None] + tl.arange(0, SPLITS)[None, :]
    inside = row < HEADS
    m_i = tl.load(m_l_ptr + all_splits, mask=inside[:, None], other=0.0, cache_modifier=".cg")
    l_i = tl.load(
        m_l_ptr + SCRATCH + all_splits, mask=inside[:, None], other=1.0, cache_modifier=".cg"
    )
    top = tl.max(m_i, axis=1)
    l_total = tl.sum(l_i * tl.exp2(m_i - top[:, None]), axis=1)
    out_mask = inside[:, None] & (column < DIM)[None, :]
    merged = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in tl.static_range(0, SPLITS, MERGED):
        if MERGED == 1:
            part_m = tl.load(m_l_ptr + head + first, mask=inside, other=0.0, cache_modifier=".cg")
            ptr = acc_ptr + (head + first)[:, None] * DIM + column[None, :]
            part = tl.load(ptr, mask=out_mask, other=0.0, cache_modifier=".cg")
            merged += part * tl.exp2(part_m - top)[:, None]
        else:
            index = head[:, None] + (first + tl.arange(0, MERGED))[None, :]
            part_m = tl.load(m_l_ptr + index, mask=inside[:, None], other=0.0, cache_modifier=".cg")
            ptr = acc_ptr + index[:, :, None] * DIM + column[None, None, :]
            part = tl.load(ptr, mask=out_mask[:, None, :], other=0.0, cache_modifier=".cg")
            merged += tl.sum(part * tl.exp2(part_m - top[:, None])[:, :, None], axis=1)
    merged = merged / l_total[:, None]
    out_ptrs = out_ptr + (first_row + row)[:, None] * DIM + column[None, :]
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _load_tile(
    keys_ptr,
    table_ptr,
    start,
    end,
    num_kv_heads,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Loads a tile of keys and values.

    For FMAs, keys and values have a first axis of size 1, for the heads.

    Returns:
        Halves of the keys `[TILE, COLUMNS]`, values `[TILE, 2 * COLUMNS]`, and which tokens are
        before `end`.
    """
    index = start + tl.arange(0, TILE)
    inside = index < end
    block = tl.load(table_ptr + index // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    row = (block * (2 * BLOCK_SIZE) + index % BLOCK_SIZE) * num_kv_heads * (2 * HALF)
    half, column = tl.arange(0, COLUMNS), tl.arange(0, 2 * COLUMNS)
    if TENSOR_CORES:
        ptr, is_token = (keys_ptr + row)[:, None], inside[:, None]
        half, column = half[None, :], column[None, :]
    else:
        ptr, is_token = (keys_ptr + row)[None, :, None], inside[None, :, None]
        half, column = half[None, None, :], column[None, None, :]
    key_mask, value_mask = is_token, is_token
    if COLUMNS > HALF:
        key_mask, value_mask = is_token & (half < HALF), is_token & (column < 2 * HALF)
    first = tl.load(ptr + half, mask=key_mask, other=0.0)
    second = tl.load(ptr + HALF + half, mask=key_mask, other=0.0)
    values_ptr = ptr + BLOCK_SIZE * num_kv_heads * (2 * HALF)
    value = tl.load(values_ptr + column, mask=value_mask, other=0.0)
    if keys_ptr.dtype.element_ty == tl.uint8:
        first, second = decode_e4m3(first, dtype), decode_e4m3(second, dtype)
        value = decode_e4m3(value, dtype)
    return first, second, value, inside


@triton.jit
def _attend_fma(m_i, l_i, acc, q_first, q_second, k_first, k_second, value, inside):
    """Continues an online softmax in base 2 with a tile, by FMAs. Queries are scaled float32."""
    products = q_first[:, None, :] * k_first.to(tl.float32) + q_second[:, None, :] * k_second.to(
        tl.float32
    )
    score = tl.where(inside[None, :], tl.sum(products, axis=2), float("-inf"))
    new_m = tl.maximum(m_i, tl.max(score, axis=1))
    p = tl.exp2(score - new_m[:, None])
    alpha = tl.exp2(m_i - new_m)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * value.to(tl.float32), axis=1)
    return new_m, l_i, acc


@triton.jit
def _attend_mma(m_i, l_i, acc, q_first, q_second, scale, k_first, k_second, value, inside):
    """Continues an online softmax with a tile, on tensor cores. `p` gets the values' dtype."""
    score = tl.dot(q_first, tl.trans(k_first))
    score = tl.dot(q_second, tl.trans(k_second), score) * scale
    score = tl.where(inside[None, :], score, float("-inf"))
    new_m = tl.maximum(m_i, tl.max(score, axis=1))
    p = tl.exp2(score - new_m[:, None])
    alpha = tl.exp2(m_i - new_m)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None])
    return new_m, l_i, acc
