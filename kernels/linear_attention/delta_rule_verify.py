"""Two Triton kernels that verify drafts over recurrent states, for all runs of a step.

See `draft_runs` for what happens to the states. The first kernel computes what the recurrence needs
of all tokens of a run together: convolution, SiLU, norms and gates of the folded tokens, of the
known token and of the drafts. It also stores the inputs that later steps need. The second kernel
reads a part of a head's state once, applies the rule to the tokens one after the other, and writes
the state once, after the known token. The state is loaded before the wait for the first kernel,
which does not write states. `delta_rule_decode` says which kernels do.

Numbers of tokens are read on the device, and the grids depend on the number of decodes alone, so a
CUDA graph can contain the kernels. CTAs of padding end at once.
The reference implementation is `kernels.linear_attention.delta_rule_drafts.verify`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.linear_attention.delta_rule_decode import NORM_EPS, gates
from kernels.linear_attention.draft_runs import LayerInputs
from kernels.linear_attention.states import DeltaInputs, LayerStates, StateLayout
from kernels.tuning import DeltaDecodeConfig, delta_verify_config

_MIX_ELEMENTS = 1024  # elements of a part's tile per warp of the first kernel


def verify(
    inputs: DeltaInputs,
    states: LayerStates,
    layout: StateLayout,
    kept: LayerInputs,
    out: Tensor,
    *,
    pdl: int = 0,
    config: DeltaDecodeConfig | None = None,
) -> None:
    """Implements `delta_rule_drafts.verify`."""
    spec, count, num_drafts = inputs.spec, layout.num_decodes, kept.qkv.shape[1]
    assert layout.runs is not None
    config = config or delta_verify_config(count)
    # Rows of the step's decodes, and then rows for the folded tokens of each run.
    num_rows = count * (1 + num_drafts)
    mixed = torch.empty(num_rows, spec.num_channels, dtype=torch.float32, device=out.device)
    scales = torch.empty(num_rows, 2, spec.num_value_heads, dtype=torch.float32, device=out.device)
    tokens = triton.next_power_of_2(2 * num_drafts + 1)
    block = triton.next_power_of_2(max(spec.key_head_dim, spec.value_head_dim))
    head_block = triton.next_power_of_2(spec.num_value_heads)
    largest = tokens * max(block, head_block)
    _mix_kernel[(2 * spec.num_key_heads + spec.num_value_heads + 1, count)](
        inputs.qkv,
        inputs.beta,
        inputs.decay,
        inputs.conv,
        inputs.a_log,
        inputs.dt_bias,
        states.conv,
        kept.qkv,
        kept.gates,
        layout.slots,
        layout.seq_lens_device,
        layout.runs.table,
        mixed,
        scales,
        inputs.qkv.stride(0),
        inputs.beta.stride(0),
        inputs.decay.stride(0),
        count,
        HEADS=spec.num_value_heads,
        KEY_HEADS=spec.num_key_heads,
        KEY_DIM=spec.key_head_dim,
        VALUE_DIM=spec.value_head_dim,
        CHANNELS=spec.num_channels,
        WIDTH=spec.conv_width,
        DRAFTS=num_drafts,
        TOKENS=tokens,
        BLOCK=block,
        HEAD_BLOCK=head_block,
        PDL=pdl,
        num_warps=max(1, min(4, largest // _MIX_ELEMENTS)),
        launch_pdl=pdl > 0,
    )
    columns = min(config.columns, triton.next_power_of_2(spec.value_head_dim))
    blocks = triton.cdiv(spec.value_head_dim, columns)
    _recurrence_kernel[(spec.num_value_heads * blocks, count)](
        mixed,
        scales,
        states.recurrent,
        layout.slots,
        layout.seq_lens_device,
        layout.runs.table,
        out,
        count,
        HEADS=spec.num_value_heads,
        GROUP=spec.group_size,
        KEY_DIM=spec.key_head_dim,
        VALUE_DIM=spec.value_head_dim,
        KEY_SIZE=spec.key_size,
        CHANNELS=spec.num_channels,
        DRAFTS=num_drafts,
        ROWS=triton.next_power_of_2(spec.key_head_dim),
        COLUMNS=columns,
        BLOCKS=blocks,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl > 0,
    )


@triton.jit
def _row(token, first, folds, num_decodes, run, DRAFTS: tl.constexpr):
    """Returns the row of the first kernel's results for a token of a run, folded tokens first."""
    return tl.where(token < folds, num_decodes + run * DRAFTS + token, first + token - folds)


@triton.jit
def _mix_heads(
    qkv_ptr,
    weight_ptr,
    conv_ptr,
    kept_ptr,
    mixed_ptr,
    qkv_stride,
    part,
    first,
    count,
    folds,
    begin,
    token,
    row,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes a head of queries, keys or values of a run's tokens after the convolution.

    `conv_ptr` and `kept_ptr` are those of the run's slot. Folded tokens come first.
    """
    column = tl.arange(0, BLOCK)[None, :]
    is_value = part >= 2 * KEY_HEADS
    size = tl.where(is_value, VALUE_DIM, KEY_DIM)
    offset = 2 * KEY_HEADS * KEY_DIM + (part - 2 * KEY_HEADS) * VALUE_DIM
    channel = tl.where(is_value, offset, part * KEY_DIM) + column
    inside = (token < folds + count) & (column < size)
    own_row = (first + token - folds).to(tl.int64)
    total = tl.zeros_like((token + channel).to(tl.float32))
    own = total.to(qkv_ptr.dtype.element_ty)
    for back in tl.static_range(WIDTH - 1, -1, -1):
        at = token - back
        earlier = conv_ptr + (begin + at + WIDTH) % WIDTH * CHANNELS + channel
        given = qkv_ptr + (own_row - back) * qkv_stride + channel
        source = tl.where(at < folds, kept_ptr + at * CHANNELS + channel, given)
        source = tl.where(at < 0, earlier, source)
        own = tl.load(source, mask=inside & (begin + at >= 0), other=0.0)
        tap = weight_ptr + channel * WIDTH + WIDTH - 1 - back
        weight = tl.load(tap, mask=column < size, other=0.0)
        total += own.to(tl.float32) * weight.to(tl.float32)
    x = (total / (1.0 + tl.exp(-total))).to(own.dtype).to(tl.float32)
    if part < 2 * KEY_HEADS:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) + NORM_EPS)
        x *= tl.where(part < KEY_HEADS, scale * KEY_DIM**-0.5, scale)[:, None]
    tl.store(mixed_ptr + row * CHANNELS + channel, x, mask=inside)
    tl.debug_barrier()  # all kept inputs have been read
    place = kept_ptr + (token - folds - 1) * CHANNELS + channel
    tl.store(place, own, mask=inside & (token > folds))
    place = conv_ptr + (begin + token) % WIDTH * CHANNELS + channel
    tl.store(place, own, mask=inside & (token <= folds) & (token > folds - WIDTH))


@triton.jit
def _mix_gates(
    beta_ptr,
    decay_ptr,
    a_log_ptr,
    dt_bias_ptr,
    kept_ptr,
    scales_ptr,
    beta_stride,
    decay_stride,
    first,
    count,
    folds,
    token,
    row,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the decay and beta of all heads for a run's tokens; see `_mix_heads`."""
    head = tl.arange(0, BLOCK)[None, :]
    inside = (token < folds + count) & (head < HEADS)
    a_log = tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
    own_row, kept = (first + token - folds).to(tl.int64), kept_ptr + token * (2 * HEADS) + head
    beta_at = tl.where(token < folds, kept, beta_ptr + own_row * beta_stride + head)
    decay_at = tl.where(token < folds, kept + HEADS, decay_ptr + own_row * decay_stride + head)
    beta = tl.load(beta_at, mask=inside, other=0.0)
    decay = tl.load(decay_at, mask=inside, other=0.0)
    log_decay, learned = gates(beta, decay, a_log, dt_bias, beta.dtype)
    scales = scales_ptr + row * (2 * HEADS) + head
    tl.store(scales, tl.exp(log_decay), mask=inside)
    tl.store(scales + HEADS, learned, mask=inside)
    tl.debug_barrier()  # all kept gates have been read
    kept = kept_ptr + (token - folds - 1) * (2 * HEADS) + head
    tl.store(kept, beta, mask=inside & (token > folds))
    tl.store(kept + HEADS, decay, mask=inside & (token > folds))


@triton.jit(do_not_specialize=["num_decodes"])
def _mix_kernel(
    qkv_ptr,
    beta_ptr,
    decay_ptr,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    conv_ptr,
    kept_ptr,
    kept_gates_ptr,
    slots_ptr,
    lens_ptr,
    runs_ptr,
    mixed_ptr,
    scales_ptr,
    qkv_stride,
    beta_stride,
    decay_stride,
    num_decodes,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a head of queries, keys or values of a run, or its gates.

    The kept inputs of a channel are read and written by a single CTA, which reads all of them
    before it writes the first.
    """
    part, run = tl.program_id(0), tl.program_id(1)
    first = tl.load(runs_ptr + run)
    count = tl.load(runs_ptr + num_decodes + run)
    folds = tl.load(runs_ptr + 2 * num_decodes + run)
    slot = tl.load(slots_ptr + first)
    begin = tl.load(lens_ptr + first) - 1 - folds  # index in the sequence of the first token
    wait_for_earlier(PDL)
    if count > 0:
        token = tl.arange(0, TOKENS)[:, None]
        row = _row(token, first, folds, num_decodes, run, DRAFTS).to(tl.int64)
        if part < 2 * KEY_HEADS + HEADS:
            _mix_heads(
                qkv_ptr,
                weight_ptr,
                conv_ptr + slot * (WIDTH * CHANNELS),
                kept_ptr + slot * (DRAFTS * CHANNELS),
                mixed_ptr,
                qkv_stride,
                part,
                first,
                count,
                folds,
                begin,
                token,
                row,
                KEY_HEADS,
                KEY_DIM,
                VALUE_DIM,
                CHANNELS,
                WIDTH,
                BLOCK,
            )
        else:
            _mix_gates(
                beta_ptr,
                decay_ptr,
                a_log_ptr,
                dt_bias_ptr,
                kept_gates_ptr + slot * (DRAFTS * 2 * HEADS),
                scales_ptr,
                beta_stride,
                decay_stride,
                first,
                count,
                folds,
                token,
                row,
                HEADS,
                HEAD_BLOCK,
            )


@triton.jit(do_not_specialize=["num_decodes"])
def _recurrence_kernel(
    mixed_ptr,
    scales_ptr,
    state_ptr,
    slots_ptr,
    lens_ptr,
    runs_ptr,
    out_ptr,
    num_decodes,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Applies the rule to the tokens of a run, for some columns of a head's state.

    Both sums over the rows read the state before a token, so that they are computed concurrently:
    S_t = a S + k d^T with d = beta (v - a S^T k), and S_t^T q = a S^T q + (k . q) d.
    """
    head, block, run = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    first = tl.load(runs_ptr + run)
    count = tl.load(runs_ptr + num_decodes + run)
    folds = tl.load(runs_ptr + 2 * num_decodes + run)
    slot = tl.load(slots_ptr + first)
    start = tl.load(lens_ptr + first) - 1
    line, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    is_line, is_column = line < KEY_DIM, column < VALUE_DIM
    place = (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + line[:, None] * VALUE_DIM + column
    inside = is_line[:, None] & is_column
    # The state before the first token is zero, and the contents of the slot are ignored.
    state = tl.load(state_ptr + place, mask=inside & (count > 0) & (start > 0), other=0.0)
    wait_for_earlier(PDL)
    if count > 0:
        at_query = head // GROUP * KEY_DIM + line
        at_key, at_value = KEY_SIZE + at_query, 2 * KEY_SIZE + head * VALUE_DIM + column
        row = _row(0, first, folds, num_decodes, run, DRAFTS).to(tl.int64)
        mixed, scales = mixed_ptr + row * CHANNELS, scales_ptr + row * (2 * HEADS) + head
        query = tl.load(mixed + at_query, mask=is_line, other=0.0)
        key = tl.load(mixed + at_key, mask=is_line, other=0.0)
        value = tl.load(mixed + at_value, mask=is_column, other=0.0)
        decay, beta = tl.load(scales), tl.load(scales + HEADS)
        out = out_ptr + (first - folds).to(tl.int64) * (HEADS * VALUE_DIM) + head * VALUE_DIM
        for token in range(folds + count):
            # The next token is loaded while this one is computed; the last is loaded twice.
            following = tl.minimum(token + 1, folds + count - 1)
            row = _row(following, first, folds, num_decodes, run, DRAFTS).to(tl.int64)
            mixed, scales = mixed_ptr + row * CHANNELS, scales_ptr + row * (2 * HEADS) + head
            next_query = tl.load(mixed + at_query, mask=is_line, other=0.0)
            next_key = tl.load(mixed + at_key, mask=is_line, other=0.0)
            next_value = tl.load(mixed + at_value, mask=is_column, other=0.0)
            next_decay, next_beta = tl.load(scales), tl.load(scales + HEADS)

            by_key = tl.sum(state * key[:, None], axis=0)
            by_query = tl.sum(state * query[:, None], axis=0)
            delta = (value - decay * by_key) * beta
            found = decay * by_query + tl.sum(key * query) * delta
            state = state * decay + key[:, None] * delta[None, :]
            at_out = out + token * (HEADS * VALUE_DIM) + column
            tl.store(at_out, found.to(out_ptr.dtype.element_ty), mask=is_column & (token >= folds))
            if token == folds:  # the known token, which no later step can reject
                tl.store(state_ptr + place, state, mask=inside)
            query, key, value = next_query, next_key, next_value
            decay, beta = next_decay, next_beta
