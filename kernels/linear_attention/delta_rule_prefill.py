"""The gated delta rule for chunks of prompts, as three Triton kernels.

A chunk is cut into pieces of up to 64 tokens (`states.prefill_pieces`). The first kernel applies
the convolution to each piece, the second solves the recurrence within it (the inverse of a unit
lower triangular matrix), both in parallel over pieces and heads. The third takes the state through
the pieces of a sequence, one after the other, in parallel over heads and columns of the state, and
gives the output.

Matrices are inverted by forward substitution in blocks of 16, then merged: products of powers would
overflow where keys repeat. GEMMs are TF32 where the model's dtype is 16 bits wide. The plain twin
is `kernels.linear_attention.delta_rule.prefill`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear_attention.delta_rule_decode import NORM_EPS, gates
from kernels.linear_attention.states import PIECE, DeltaInputs, LayerStates, StateLayout
from kernels.tuning import DeltaPrefillConfig

_PIECE = tl.constexpr(PIECE)
_BLOCK = tl.constexpr(16)  # rows of a block that is inverted by substitution


def prefill(
    inputs: DeltaInputs, states: LayerStates, layout: StateLayout, out: Tensor,
    saved: tuple[Tensor, LayerStates] | None = None, *, config: DeltaPrefillConfig | None = None,
) -> None:  # fmt: skip
    """Implements `delta_rule.prefill`."""
    config = config or DeltaPrefillConfig()
    spec, work, count = inputs.spec, layout.work, len(inputs.qkv)
    assert work is not None
    heads, decodes = spec.num_value_heads, layout.num_decodes
    starts, lens = layout.cu_query_lens_device, layout.seq_lens_device
    mixed = inputs.qkv.new_empty(count, spec.num_channels)
    solved, scores = (
        torch.empty(count, heads, PIECE, dtype=torch.float32, device=out.device) for _ in range(2)
    )
    totals = torch.empty(count, heads, dtype=torch.float32, device=out.device)
    rows, columns = (
        max(16, triton.next_power_of_2(size)) for size in (spec.key_head_dim, spec.value_head_dim)
    )
    columns = min(config.columns, columns)
    wide = out.dtype == torch.float32
    saves, kept = saved or (work, states)
    sizes = {
        "GROUP": spec.group_size, "KEY_DIM": spec.key_head_dim, "KEY_SIZE": spec.key_size,
        "CHANNELS": spec.num_channels, "ROWS": rows, "PRECISION": "ieee" if wide else "tf32",
    }  # fmt: skip
    _convolve_kernel[(len(work), triton.cdiv(spec.num_channels, config.channels))](
        inputs.qkv, inputs.conv, states.conv, work, layout.slots, starts, lens, mixed, saves,
        kept.conv, inputs.qkv.stride(0), CHANNELS=spec.num_channels, WIDTH=spec.conv_width,
        TAPS=triton.next_power_of_2(spec.conv_width), BLOCK=config.channels,
        SAVES=saved is not None, num_warps=4,
    )  # fmt: skip
    _solve_kernel[(len(work), heads)](
        mixed, inputs.beta, inputs.decay, inputs.a_log, inputs.dt_bias, work, starts, solved,
        scores, totals, inputs.beta.stride(0), inputs.decay.stride(0), HEADS=heads, **sizes,
        SOLVE="ieee" if wide else "tf32x3", num_warps=config.solve_warps,
    )  # fmt: skip
    grid = len(layout.slots) - decodes, heads, triton.cdiv(spec.value_head_dim, columns)
    _scan_kernel[grid](
        inputs.qkv, mixed, solved, scores, totals, states.conv, states.recurrent, layout.slots,
        starts, lens, out, saves, kept.recurrent, inputs.qkv.stride(0), decodes, HEADS=heads,
        **sizes, VALUE_DIM=spec.value_head_dim, WIDTH=spec.conv_width, COLUMNS=columns,
        SAVES=saved is not None, num_warps=config.scan_warps, num_stages=config.scan_stages,
    )  # fmt: skip


@triton.jit
def _convolve_kernel(
    qkv_ptr, weight_ptr, conv_ptr, work_ptr, slots_ptr, starts_ptr, lens_ptr, mixed_ptr,
    saves_ptr, saved_ptr, qkv_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution, `[T, channels]`. SAVES: a whole piece's last inputs may go to a
    checkpoint.
    """
    piece = tl.program_id(0)
    sequence = tl.load(work_ptr + 2 * piece)
    if sequence >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
        first = tl.load(lens_ptr + sequence) - (end - begin)  # the chunk's first token's index
        token = tl.load(work_ptr + 2 * piece + 1) + tl.arange(0, _PIECE)[:, None]
        index = first + token - begin
        inside = (token < end) & (channel < CHANNELS)
        conv = conv_ptr + tl.load(slots_ptr + sequence) * (WIDTH * CHANNELS) + channel
        total = tl.zeros((_PIECE, BLOCK), tl.float32)
        for back in tl.static_range(WIDTH - 1, -1, -1):
            source = token - back
            own = inside & (source >= begin)
            values = tl.load(
                qkv_ptr + source.to(tl.int64) * qkv_stride + channel, mask=own, other=0.0
            ).to(tl.float32)
            if back > 0:
                earlier = inside & (source < begin) & (index >= back)
                column = (index + WIDTH - back) % WIDTH
                kept = tl.load(conv + column * CHANNELS, mask=earlier, other=0.0)
                values += kept.to(tl.float32)
            at = weight_ptr + channel * WIDTH + WIDTH - 1 - back
            total += values * tl.load(at, mask=channel < CHANNELS, other=0.0).to(tl.float32)
        mixed = (total / (1.0 + tl.exp(-total))).to(mixed_ptr.dtype.element_ty)
        tl.store(mixed_ptr + token.to(tl.int64) * CHANNELS + channel, mixed, mask=inside)
        if SAVES:
            last = tl.minimum(tl.load(work_ptr + 2 * piece + 1) + _PIECE, end) - 1
            to = tl.load(saves_ptr + last).to(tl.int64)
            back = tl.arange(0, TAPS)[:, None]
            kept = (back < WIDTH) & (channel < CHANNELS) & (to >= 0)
            own = qkv_ptr + (last - back).to(tl.int64) * qkv_stride + channel
            column = (first + last - begin + WIDTH - back) % WIDTH
            place = saved_ptr + (to * WIDTH + column) * CHANNELS + channel
            tl.store(place, tl.load(own, mask=kept), mask=kept)


@triton.jit
def _heads_of(mixed, column, inside, DIM: tl.constexpr):
    """A piece's queries or keys, of length 1; `mixed` points to each token's head."""
    values = tl.load(mixed + column, mask=inside & (column < DIM), other=0.0).to(tl.float32)
    return values * tl.rsqrt(tl.sum(values * values, axis=1) + NORM_EPS)[:, None]


@triton.jit
def _solve_kernel(
    mixed_ptr, beta_ptr, decay_ptr, a_log_ptr, dt_bias_ptr, work_ptr, starts_ptr, solved_ptr,
    scores_ptr, totals_ptr, beta_stride, decay_stride, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_SIZE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """Within a piece: what turns errors into corrections, `solved`; decayed products of queries and
    keys, `scores`; and the log of the decay since before the piece, `totals`.
    """
    piece, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(work_ptr + 2 * piece)
    if sequence >= 0:
        row = tl.arange(0, _PIECE)
        token = (tl.load(work_ptr + 2 * piece + 1) + row).to(tl.int64)
        inside = token < tl.load(starts_ptr + sequence + 1)
        dtype: tl.constexpr = mixed_ptr.dtype.element_ty
        beta = tl.load(beta_ptr + token * beta_stride + head, mask=inside, other=0.0)
        decay = tl.load(decay_ptr + token * decay_stride + head, mask=inside, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        log_decay, beta = gates(beta, decay, tl.load(a_log_ptr + head), dt_bias, dtype)
        total = tl.cumsum(tl.where(inside, log_decay, 0.0))
        mixed = mixed_ptr + (token * CHANNELS + head // GROUP * KEY_DIM)[:, None]
        column = tl.arange(0, ROWS)[None, :]
        query = _heads_of(mixed, column, inside[:, None], KEY_DIM) * KEY_DIM**-0.5
        key = _heads_of(mixed + KEY_SIZE, column, inside[:, None], KEY_DIM)
        lower = row[:, None] >= row[None, :]
        between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
        system = tl.dot(key * beta[:, None], tl.trans(key), input_precision=PRECISION) * between
        system = tl.where(row[:, None] > row[None, :], system, 0.0)
        solved = _inverse(system, row, SOLVE) * beta[None, :]
        at = (token * HEADS + head) * _PIECE
        tl.store(solved_ptr + at[:, None] + row[None, :], solved, mask=inside[:, None])
        tl.store(scores_ptr + at[:, None] + row[None, :], scores, mask=inside[:, None])
        tl.store(totals_ptr + token * HEADS + head, total, mask=inside)


@triton.jit
def _inverse(system, row, SOLVE: tl.constexpr):
    """The inverse of 1 + `system`, which is strictly lower triangular, `[64, 64]`."""
    same_block = row[:, None] // _BLOCK == row[None, :] // _BLOCK
    unit = (row[:, None] == row[None, :]).to(tl.float32)
    diagonal = tl.where(same_block, system, 0.0)
    inverse = unit
    for number in range(1, _BLOCK):  # this row of each block; those before it are done
        is_row = (row % _BLOCK == number)[:, None]
        weights = tl.sum(tl.where(is_row, diagonal, 0.0), axis=0)  # by column
        weights = tl.sum(tl.where(unit > 0, weights[None, :], 0.0), axis=1)  # the same, by row
        change = tl.sum(weights[:, None] * inverse, axis=0)[None, :]
        inverse -= tl.where(is_row & same_block, change, 0.0)
    off = tl.dot(inverse, system - diagonal, input_precision=SOLVE)
    squared = tl.dot(off, off, input_precision=SOLVE)  # its square is zero: there are four blocks
    merged = tl.dot(unit - off, unit + squared, input_precision=SOLVE)
    return tl.dot(merged, inverse, input_precision=SOLVE)


@triton.jit
def _scan_kernel(
    qkv_ptr, mixed_ptr, solved_ptr, scores_ptr, totals_ptr, conv_ptr, state_ptr, slots_ptr,
    starts_ptr, lens_ptr, out_ptr, saves_ptr, saved_ptr, qkv_stride, decodes, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, SAVES: tl.constexpr,
):  # fmt: skip
    """Takes some columns of a head's state through a sequence's pieces. SAVES: that after a piece
    may go to a checkpoint.
    """
    sequence, head, block = decodes + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    if end > begin:  # else it is padding of a captured step
        first = tl.load(lens_ptr + sequence) - (end - begin)
        slot = tl.load(slots_ptr + sequence)
        row, dim = tl.arange(0, _PIECE), tl.arange(0, ROWS)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < VALUE_DIM
        kept = (dim < KEY_DIM)[:, None] & is_column
        within = dim[:, None] * VALUE_DIM + column
        place = (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + within
        # The first token starts from zero, whatever the slot holds.
        state = tl.load(state_ptr + place, mask=kept & (first > 0), other=0.0)
        for at in range(begin, end, _PIECE):
            token = (at + row).to(tl.int64)
            inside = (token < end)[:, None]
            mixed = mixed_ptr + (token * CHANNELS + head // GROUP * KEY_DIM)[:, None]
            query = _heads_of(mixed, dim[None, :], inside, KEY_DIM) * KEY_DIM**-0.5
            key = _heads_of(mixed + KEY_SIZE, dim[None, :], inside, KEY_DIM)
            values = mixed_ptr + token[:, None] * CHANNELS + 2 * KEY_SIZE + head * VALUE_DIM
            value = tl.load(values + column, mask=inside & is_column, other=0.0).to(tl.float32)
            of_head = (token * HEADS + head)[:, None]
            squares = of_head * _PIECE + row[None, :]
            solved = tl.load(solved_ptr + squares, mask=inside, other=0.0)
            scores = tl.load(scores_ptr + squares, mask=inside, other=0.0)
            total = tl.load(totals_ptr + of_head, mask=inside, other=0.0)
            last = tl.minimum(at + _PIECE, end) - 1
            whole = tl.load(totals_ptr + last.to(tl.int64) * HEADS + head)
            since = tl.exp(total)
            error = value - since * tl.dot(key, state, input_precision=PRECISION)
            change = tl.dot(solved, error, input_precision=PRECISION)
            found = since * tl.dot(query, state, input_precision=PRECISION)
            found += tl.dot(scores, change, input_precision=PRECISION)
            out = out_ptr + of_head * VALUE_DIM + column
            tl.store(out, found.to(out_ptr.dtype.element_ty), mask=inside & is_column)
            rest = tl.where(inside, tl.exp(whole - total), 0.0)
            added = tl.dot(tl.trans(key * rest), change, input_precision=PRECISION)
            state = state * tl.exp(whole) + added
            if SAVES:
                to = tl.load(saves_ptr + last).to(tl.int64)
                saved = saved_ptr + (to * HEADS + head) * (KEY_DIM * VALUE_DIM) + within
                tl.store(saved, state, mask=kept & (to >= 0))
        tl.store(state_ptr + place, state, mask=kept)
        _keep_inputs(
            qkv_ptr, conv_ptr + slot * (WIDTH * CHANNELS), begin, end, first, qkv_stride,
            head // GROUP * KEY_DIM + dim, (dim < KEY_DIM) & (head % GROUP == 0) & (block == 0),
            2 * KEY_SIZE + head * VALUE_DIM + column, is_column, KEY_SIZE, CHANNELS, WIDTH,
        )  # fmt: skip


@triton.jit
def _keep_inputs(
    qkv_ptr, conv, begin, end, first, qkv_stride, at_query, is_query, at_value, is_value,
    KEY_SIZE: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes the convolution's last inputs to its state; each channel's by one CTA."""
    for back in tl.static_range(WIDTH):
        token = end - 1 - back
        if token >= begin:
            own = qkv_ptr + token.to(tl.int64) * qkv_stride
            to = conv + (first + token - begin) % WIDTH * CHANNELS
            tl.store(to + at_query, tl.load(own + at_query, mask=is_query), mask=is_query)
            at_key = KEY_SIZE + at_query
            tl.store(to + at_key, tl.load(own + at_key, mask=is_query), mask=is_query)
            tl.store(to + at_value, tl.load(own + at_value, mask=is_value), mask=is_value)
