"""Three Triton kernels for chunks of prompts of the gated delta rule.

A chunk is divided into pieces of up to 64 tokens (`states.prefill_pieces`). The first kernel
applies the convolution to each piece, in parallel over pieces and channels. The second solves the
recurrence within each piece, by inverting a unit lower triangular matrix, in parallel over pieces
and heads. The third updates the state piece by piece and computes the output, in parallel over
sequences, heads and columns of the state.

Blocks of 4 rows are inverted first and then merged two by two, because the powers of the whole
matrix would overflow if keys repeat. Blocks are exchanged through memory, so that all blocks of a
size are merged by one batched GEMM. The GEMMs of the inversion are in float32. Other GEMMs are in
TF32 or 16 bits if the model's dtype has 16 bits. The reference implementation is
`kernels.linear_attention.delta_rule.prefill`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import DeviceFacts
from kernels.linear_attention.delta_rule_decode import NORM_EPS, gates
from kernels.linear_attention.states import PIECE, DeltaInputs, LayerStates, StateLayout
from kernels.tuning import DeltaPrefillConfig, delta_prefill_config

_PIECE = tl.constexpr(PIECE)
_FACTORS = tl.constexpr(5)  # factors of a token and a head, see `_solve_kernel`


def prefill(
    inputs: DeltaInputs,
    states: LayerStates,
    layout: StateLayout,
    out: Tensor,
    saved: tuple[Tensor, LayerStates] | None = None,
    *,
    device: DeviceFacts | None = None,
    config: DeltaPrefillConfig | None = None,
) -> None:
    """Implements `delta_rule.prefill`.

    `config` overrides the choice for `device`. By default, the configuration does not depend on the
    step.
    """
    spec, work, count = inputs.spec, layout.work, len(inputs.qkv)
    assert work is not None
    heads, decodes = spec.num_value_heads, layout.num_decodes
    wide = out.dtype == torch.float32
    if config is None and device is not None and not wide:
        config = delta_prefill_config(device, heads, len(layout.slots) - decodes, count)
    config = config or DeltaPrefillConfig()
    starts, lens = layout.cu_query_lens_device, layout.seq_lens_device
    mixed = inputs.qkv.new_empty(count, spec.num_channels)
    solved, scores = (
        torch.empty(count, heads, PIECE, dtype=torch.float32, device=out.device) for _ in range(2)
    )
    factors = torch.empty(count, heads, _FACTORS.value, dtype=torch.float32, device=out.device)
    rows, columns = (
        max(16, triton.next_power_of_2(size)) for size in (spec.key_head_dim, spec.value_head_dim)
    )
    columns = min(config.columns, columns)
    saves, kept = saved or (work, states)
    sizes = {
        "GROUP": spec.group_size,
        "KEY_DIM": spec.key_head_dim,
        "KEY_SIZE": spec.key_size,
        "CHANNELS": spec.num_channels,
        "ROWS": rows,
        "PRECISION": "ieee" if wide else "tf32",
    }
    _convolve_kernel[(len(work), triton.cdiv(spec.num_channels, config.channels))](
        inputs.qkv,
        inputs.conv,
        states.conv,
        work,
        layout.slots,
        starts,
        lens,
        mixed,
        saves,
        kept.conv,
        inputs.qkv.stride(0),
        CHANNELS=spec.num_channels,
        WIDTH=spec.conv_width,
        TAPS=triton.next_power_of_2(spec.conv_width),
        BLOCK=config.channels,
        SAVES=saved is not None,
        num_warps=4,
    )
    _solve_kernel[(len(work), heads)](
        mixed,
        inputs.beta,
        inputs.decay,
        inputs.a_log,
        inputs.dt_bias,
        work,
        starts,
        solved,
        scores,
        factors,
        inputs.beta.stride(0),
        inputs.decay.stride(0),
        HEADS=heads,
        **sizes,
        num_warps=config.solve_warps,
    )
    # CTAs of chunks come before those of padding, which is at the end.
    grid = heads, triton.cdiv(spec.value_head_dim, columns), len(layout.slots) - decodes
    _scan_kernel[grid](
        inputs.qkv,
        mixed,
        solved,
        scores,
        factors,
        states.conv,
        states.recurrent,
        layout.slots,
        starts,
        lens,
        out,
        saves,
        kept.recurrent,
        inputs.qkv.stride(0),
        decodes,
        HEADS=heads,
        **sizes,
        VALUE_DIM=spec.value_head_dim,
        WIDTH=spec.conv_width,
        COLUMNS=columns,
        SAVES=saved is not None,
        num_warps=config.scan_warps,
        num_stages=config.scan_stages,
    )


@triton.jit
def _convolve_kernel(
    qkv_ptr,
    weight_ptr,
    conv_ptr,
    work_ptr,
    slots_ptr,
    starts_ptr,
    lens_ptr,
    mixed_ptr,
    saves_ptr,
    saved_ptr,
    qkv_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    SAVES: tl.constexpr,
):
    """Computes SiLU of the convolution, `[T, channels]`.

    If SAVES, the last inputs of a whole piece may also be copied to a checkpoint.
    """
    piece = tl.program_id(0)
    sequence = tl.load(work_ptr + 2 * piece)
    if sequence >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
        first = tl.load(lens_ptr + sequence) - (end - begin)  # index of the chunk's first token
        token = tl.load(work_ptr + 2 * piece + 1) + tl.arange(0, _PIECE)[:, None]
        index = first + token - begin
        inside = (token < end) & (channel < CHANNELS)
        # The weights of a channel are contiguous, and are read as such.
        tap = tl.arange(0, TAPS)[None, :]
        row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        valid = (row < CHANNELS) & (tap < WIDTH)
        weights = tl.load(weight_ptr + row * WIDTH + tap, mask=valid, other=0.0).to(tl.float32)
        total = tl.zeros((_PIECE, BLOCK), tl.float32)
        if tl.load(work_ptr + 2 * piece + 1) - begin >= WIDTH - 1:  # all inputs are of this chunk
            for back in tl.static_range(WIDTH - 1, -1, -1):
                own = qkv_ptr + (token - back).to(tl.int64) * qkv_stride + channel
                values = tl.load(own, mask=inside, other=0.0).to(tl.float32)
                total += values * _weight(weights, tap, WIDTH - 1 - back)
        else:
            conv = conv_ptr + tl.load(slots_ptr + sequence) * (WIDTH * CHANNELS) + channel
            for back in tl.static_range(WIDTH - 1, -1, -1):
                source = token - back
                own = qkv_ptr + source.to(tl.int64) * qkv_stride + channel
                values = tl.load(own, mask=inside & (source >= begin), other=0.0).to(tl.float32)
                if back > 0:
                    earlier = inside & (source < begin) & (index >= back)
                    column = (index + WIDTH - back) % WIDTH
                    kept = tl.load(conv + column * CHANNELS, mask=earlier, other=0.0)
                    values += kept.to(tl.float32)
                total += values * _weight(weights, tap, WIDTH - 1 - back)
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
def _weight(weights, tap, at):
    """Returns the weights of one tap `[1, channels]` of weights `[channels, taps]`."""
    return tl.sum(tl.where(tap == at, weights, 0.0), axis=1)[None, :]


@triton.jit
def _solve_kernel(
    mixed_ptr,
    beta_ptr,
    decay_ptr,
    a_log_ptr,
    dt_bias_ptr,
    work_ptr,
    starts_ptr,
    solved_ptr,
    scores_ptr,
    factors_ptr,
    beta_stride,
    decay_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the matrices and factors of a piece that do not depend on the state.

    These are `solved`, the matrix that turns errors into corrections; `scores`, the decayed
    products of queries and keys; and five `factors` of each token: factors of query and key for the
    state before the piece, factor of the key for the state after the piece, decay of the piece, and
    beta.
    """
    piece, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(work_ptr + 2 * piece)
    if sequence >= 0:
        row = tl.arange(0, _PIECE)
        begin = tl.load(work_ptr + 2 * piece + 1)
        count = tl.load(starts_ptr + sequence + 1) - begin
        token, inside = (begin + row).to(tl.int64), row < count
        dtype: tl.constexpr = mixed_ptr.dtype.element_ty
        beta = tl.load(beta_ptr + token * beta_stride + head, mask=inside, other=0.0)
        decay = tl.load(decay_ptr + token * decay_stride + head, mask=inside, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        log_decay, beta = gates(beta, decay, tl.load(a_log_ptr + head), dt_bias, dtype)
        total = tl.cumsum(tl.where(inside, log_decay, 0.0))
        whole = tl.sum(tl.where(row == tl.minimum(count, _PIECE) - 1, total, 0.0))
        column = tl.arange(0, ROWS)[None, :]
        mixed = mixed_ptr + (token * CHANNELS + head // GROUP * KEY_DIM)[:, None] + column
        valid = inside[:, None] & (column < KEY_DIM)
        query = tl.load(mixed, mask=valid, other=0.0)
        key = tl.load(mixed + KEY_SIZE, mask=valid, other=0.0)
        of_query, of_key = _over_length(query) * KEY_DIM**-0.5, _over_length(key)
        lower = row[:, None] >= row[None, :]
        between = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0)
        between *= of_key[None, :]
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        system = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        scores *= of_query[:, None] * between
        system *= of_key[:, None] * tl.where(row[:, None] > row[None, :], between, 0.0)
        first = begin.to(tl.int64) * HEADS + head
        at = ((first + row * HEADS) * _PIECE)[:, None] + row[None, :]
        tl.store(solved_ptr + at, system, mask=inside[:, None])
        tl.store(scores_ptr + at, scores, mask=inside[:, None])
        factors = factors_ptr + (first + row * HEADS) * _FACTORS
        tl.store(factors, tl.exp(total) * of_query, mask=inside)
        tl.store(factors + 1, tl.exp(total) * of_key, mask=inside)
        tl.store(factors + 2, tl.exp(whole - total) * of_key, mask=inside)
        tl.store(factors + 3, tl.exp(whole) + tl.zeros_like(total), mask=inside)
        tl.store(factors + 4, beta, mask=inside)
        tl.debug_barrier()
        betas = factors_ptr + first * _FACTORS + 4
        _solve(solved_ptr + first * _PIECE, betas, count, HEADS)


@triton.jit
def _over_length(values):
    """Computes 1 / length of each row with the rounding of the reference implementation."""
    wide = values.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + NORM_EPS)


@triton.jit
def _solve(matrix, betas, count, HEADS: tl.constexpr):
    """Replaces a strictly lower triangular matrix M `[64, 64]` by (1 + beta M)^-1 beta.

    Only `count` rows of M exist. Blocks of the diagonal are inverted first. If A and B are the
    inverses of two neighbouring blocks and C is the block of M below the first, the block of the
    inverse below the first is -B C A.
    """
    STRIDE: tl.constexpr = HEADS * _PIECE
    block = tl.arange(0, 4)[:, None, None] * 16
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    place = matrix + (block + row) * STRIDE + block + column
    valid = (block + row < count) & (column >= 0)
    of_row = tl.load(betas + (block + row) * HEADS * _FACTORS, mask=block + row < count, other=0.0)
    at_column = betas + (block + column) * HEADS * _FACTORS
    of_column = tl.load(at_column, mask=block + column < count, other=0.0)
    system = of_row * tl.load(place, mask=valid, other=0.0)
    near = tl.where(row // 4 == column // 4, system, 0.0)  # the fourth power of `near` is zero
    inverse = tl.where(row == column, 1.0, 0.0) - near
    squared = tl.dot(near, near, input_precision="ieee")
    inverse += tl.dot(inverse, squared, input_precision="ieee")
    for size in tl.static_range(4, 9, 4):
        below = (row // size != column // size) & (row // (2 * size) == column // (2 * size))
        product = tl.dot(inverse, tl.where(below, system, 0.0), input_precision="ieee")
        inverse -= tl.dot(product, inverse, input_precision="ieee")
    tl.store(place, inverse * of_column, mask=valid)
    tl.debug_barrier()
    block = tl.arange(0, 2)[:, None, None] * 32
    _merge(matrix + block * (STRIDE + 1), row, column, count - block, 16, STRIDE)
    tl.debug_barrier()
    _merge(matrix, tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :], count, 32, STRIDE)


@triton.jit
def _merge(matrix, row, column, count, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Computes the block below the first of two inverted blocks of SIZE rows, see `_solve`."""
    upper = matrix + row * STRIDE + column
    lower = upper + SIZE * STRIDE
    first = tl.load(upper, mask=(row < count) & (column >= 0), other=0.0)
    valid = (row + SIZE < count) & (column >= 0)
    below = tl.load(lower, mask=valid, other=0.0)
    second = tl.load(lower + SIZE, mask=valid, other=0.0)
    product = tl.dot(second, below, input_precision="ieee")
    tl.store(lower, -tl.dot(product, first, input_precision="ieee"), mask=valid)


@triton.jit
def _scan_kernel(
    qkv_ptr,
    mixed_ptr,
    solved_ptr,
    scores_ptr,
    factors_ptr,
    conv_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    saves_ptr,
    saved_ptr,
    qkv_stride,
    decodes,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SAVES: tl.constexpr,
):
    """Updates some columns of a head's state piece by piece, and computes the output.

    If SAVES, the state after a piece may also be copied to a checkpoint.
    """
    head, block, sequence = tl.program_id(0), tl.program_id(1), decodes + tl.program_id(2)
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    if end > begin:  # an empty chunk is padding of a captured step
        first = tl.load(lens_ptr + sequence) - (end - begin)
        slot = tl.load(slots_ptr + sequence)
        row, dim = tl.arange(0, _PIECE), tl.arange(0, ROWS)
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < VALUE_DIM
        kept = (dim < KEY_DIM)[:, None] & is_column
        within = dim[:, None] * VALUE_DIM + column
        place = (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + within
        # The state before the first token is zero, and the contents of the slot are ignored.
        state = tl.load(state_ptr + place, mask=kept & (first > 0), other=0.0)
        for at in range(begin, end, _PIECE):
            token = (at + row).to(tl.int64)
            inside = (token < end)[:, None]
            mixed = mixed_ptr + (token * CHANNELS + head // GROUP * KEY_DIM)[:, None] + dim[None, :]
            valid = inside & (dim < KEY_DIM)[None, :]
            query = tl.load(mixed, mask=valid, other=0.0).to(tl.float32)
            key = tl.load(mixed + KEY_SIZE, mask=valid, other=0.0).to(tl.float32)
            values = mixed_ptr + token[:, None] * CHANNELS + 2 * KEY_SIZE + head * VALUE_DIM
            value = tl.load(values + column, mask=inside & is_column, other=0.0).to(tl.float32)
            of_head = (token * HEADS + head)[:, None]
            squares = of_head * _PIECE + row[None, :]
            solved = tl.load(solved_ptr + squares, mask=inside, other=0.0)
            scores = tl.load(scores_ptr + squares, mask=inside, other=0.0)
            factors = factors_ptr + of_head * _FACTORS
            of_query = tl.load(factors, mask=inside, other=0.0)
            of_key = tl.load(factors + 1, mask=inside, other=0.0)
            rest = tl.load(factors + 2, mask=inside, other=0.0)
            last = tl.minimum(at + _PIECE, end) - 1
            decay = tl.load(factors_ptr + (last.to(tl.int64) * HEADS + head) * _FACTORS + 3)
            error = value - of_key * tl.dot(key, state, input_precision=PRECISION)
            change = tl.dot(solved, error, input_precision=PRECISION)
            found = of_query * tl.dot(query, state, input_precision=PRECISION)
            found += tl.dot(scores, change, input_precision=PRECISION)
            out = out_ptr + of_head * VALUE_DIM + column
            tl.store(out, found.to(out_ptr.dtype.element_ty), mask=inside & is_column)
            added = tl.dot(tl.trans(key), change * rest, input_precision=PRECISION)
            state = state * decay + added
            if SAVES:
                to = tl.load(saves_ptr + last).to(tl.int64)
                saved = saved_ptr + (to * HEADS + head) * (KEY_DIM * VALUE_DIM) + within
                tl.store(saved, state, mask=kept & (to >= 0))
        tl.store(state_ptr + place, state, mask=kept)
        _keep_inputs(
            qkv_ptr,
            conv_ptr + slot * (WIDTH * CHANNELS),
            begin,
            end,
            first,
            qkv_stride,
            head // GROUP * KEY_DIM + dim,
            (dim < KEY_DIM) & (head % GROUP == 0) & (block == 0),
            2 * KEY_SIZE + head * VALUE_DIM + column,
            is_column,
            KEY_SIZE,
            CHANNELS,
            WIDTH,
        )


@triton.jit
def _keep_inputs(
    qkv_ptr,
    conv,
    begin,
    end,
    first,
    qkv_stride,
    at_query,
    is_query,
    at_value,
    is_value,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the last inputs of the convolution to its state. One CTA writes each channel."""
    for back in tl.static_range(WIDTH):
        token = end - 1 - back
        if token >= begin:
            own = qkv_ptr + token.to(tl.int64) * qkv_stride
            to = conv + (first + token - begin) % WIDTH * CHANNELS
            tl.store(to + at_query, tl.load(own + at_query, mask=is_query), mask=is_query)
            at_key = KEY_SIZE + at_query
            tl.store(to + at_key, tl.load(own + at_key, mask=is_query), mask=is_query)
            tl.store(to + at_value, tl.load(own + at_value, mask=is_value), mask=is_value)
