"""Triton kernel for decodes of the gated delta rule, with one token per sequence.

The kernel computes the convolution with its state, the gates, the norms of query and key, and the
recurrence. A decode reads and writes the whole state, so that memory bandwidth is the limit, or the
latency of a launch in small batches. A CTA has some columns of a head's state in registers.

The columns, the state of the convolution and the step's arrays are loaded before the wait for the
projection. The state of a row was last written by an earlier step (by this kernel, by
`delta_rule_verify` or by `delta_rule_prefill`), or by the copy of a checkpoint before this step.
Launches without PDL lie between: `enter_step` and the lookup of embeddings, see
`kernels.dependent_launch`. No other kernel of a step writes the states of its decodes: a row has
either decodes or a chunk, and if there are drafts, `delta_rule_verify` computes all decodes.
Padding reads the scratch slot, whose contents do not matter.

The reference implementation is `kernels.linear_attention.delta_rule.decode`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import wait_for_earlier
from kernels.linear_attention.states import DeltaInputs, LayerStates, StateLayout
from kernels.tuning import DeltaDecodeConfig, delta_decode_config

NORM_EPS = tl.constexpr(1e-6)


def decode(
    inputs: DeltaInputs,
    states: LayerStates,
    layout: StateLayout,
    out: Tensor,
    *,
    pdl: int = 0,
    config: DeltaDecodeConfig | None = None,
) -> None:
    """Implements `delta_rule.decode`."""
    spec, count = inputs.spec, layout.num_decodes
    config = config or delta_decode_config(count)
    columns = min(config.columns, triton.next_power_of_2(spec.value_head_dim))
    # CTAs read states in the order of their addresses.
    grid = triton.cdiv(spec.value_head_dim, columns), spec.num_value_heads, count
    _decode_kernel[grid](
        inputs.qkv,
        inputs.beta,
        inputs.decay,
        inputs.conv,
        inputs.a_log,
        inputs.dt_bias,
        states.conv,
        states.recurrent,
        layout.slots,
        layout.cu_query_lens_device,
        layout.seq_lens_device,
        out,
        inputs.qkv.stride(0),
        inputs.beta.stride(0),
        inputs.decay.stride(0),
        HEADS=spec.num_value_heads,
        GROUP=spec.group_size,
        KEY_DIM=spec.key_head_dim,
        VALUE_DIM=spec.value_head_dim,
        KEY_SIZE=spec.key_size,
        CHANNELS=spec.num_channels,
        WIDTH=spec.conv_width,
        ROWS=triton.next_power_of_2(spec.key_head_dim),
        COLUMNS=columns,
        PDL=pdl,
        num_warps=config.warps,
        maxnreg=config.max_registers,
        launch_pdl=pdl > 0,
    )


@triton.jit
def gates(  # noqa: ANN201 - Triton blocks have no type
    beta, decay, a_log, dt_bias, dtype: tl.constexpr
):
    """Computes the logarithm of the decay, and beta, which is rounded to `dtype`."""
    wide = decay.to(tl.float32) + dt_bias
    soft = tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(wide)))
    learned = (1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))).to(dtype).to(tl.float32)
    return -tl.exp(a_log) * soft, learned


@triton.jit
def _inside(index, SIZE: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Mask of indices below SIZE, a constant if all are."""
    if IS_WHOLE:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < SIZE


@triton.jit
def _load_taps(
    conv, weight_ptr, channel, inside, index, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):
    """Loads inputs of earlier tokens with their weights, and the weight of the token's own input,
    at some channels. `conv` is the slot's state.
    """
    taps = ()
    for back in tl.static_range(WIDTH - 1, 0, -1):
        column = (index + WIDTH - back) % WIDTH
        before = tl.load(conv + column * CHANNELS + channel, mask=inside & (index >= back), other=0)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - back, mask=inside, other=0)
        taps += ((before, weight),)
    return taps, tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=inside, other=0)


@triton.jit
def _mixed(own, taps, weight, WIDTH: tl.constexpr):
    """Computes SiLU of the convolution at some channels of a token."""
    total = tl.zeros_like(own.to(tl.float32))
    for tap in tl.static_range(WIDTH - 1):
        before, its_weight = taps[tap]
        total += before.to(tl.float32) * its_weight.to(tl.float32)
    total += own.to(tl.float32) * weight.to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(own.dtype).to(tl.float32)


@triton.jit
def _decode_kernel(
    qkv_ptr,
    beta_ptr,
    decay_ptr,
    weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    conv_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    lens_ptr,
    out_ptr,
    qkv_stride,
    beta_stride,
    decay_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tl.load(lens_ptr + sequence) - 1
    slot = tl.load(slots_ptr + sequence)
    token = tl.load(starts_ptr + sequence).to(tl.int64)
    row, column = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    is_row = _inside(row, KEY_DIM, ROWS == KEY_DIM)
    is_column = _inside(column, VALUE_DIM, VALUE_DIM % COLUMNS == 0)
    place = (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + row[:, None] * VALUE_DIM + column
    inside = is_row[:, None] & is_column
    # The state before the first token is zero, and the contents of the slot are ignored.
    state = tl.load(state_ptr + place, mask=inside & (index > 0), other=0.0)
    conv = conv_ptr + slot * (WIDTH * CHANNELS)
    # Channels of the query and of the key are computed together, as rows of a pair.
    pair = tl.arange(0, 2 * ROWS)
    is_pair = _inside(pair % ROWS, KEY_DIM, ROWS == KEY_DIM)
    at_pair = pair // ROWS * KEY_SIZE + head // GROUP * KEY_DIM + pair % ROWS
    at_value = 2 * KEY_SIZE + head * VALUE_DIM + column
    taps, weight = _load_taps(conv, weight_ptr, at_pair, is_pair, index, CHANNELS, WIDTH)
    value_taps, value_weight = _load_taps(
        conv, weight_ptr, at_value, is_column, index, CHANNELS, WIDTH
    )
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    wait_for_earlier(PDL)
    if index >= 0:  # a negative index is padding of a captured step
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        own = qkv_ptr + token * qkv_stride
        own_value = tl.load(own + at_value, mask=is_column, other=0.0)
        beta = tl.load(beta_ptr + token * beta_stride + head)
        decay = tl.load(decay_ptr + token * decay_stride + head)
        own_pair = tl.load(own + at_pair, mask=is_pair, other=0.0)
        log_decay, beta = gates(beta, decay, a_log, dt_bias, dtype)
        both = _mixed(own_pair, taps, weight, WIDTH)
        value = _mixed(own_value, value_taps, value_weight, WIDTH)
        # No CTA of this step reads the column of this token.
        kept = conv + index % WIDTH * CHANNELS
        is_first = (head % GROUP == 0) & (block == 0)
        tl.store(kept + at_pair, own_pair, mask=is_pair & is_first)
        tl.store(kept + at_value, own_value, mask=is_column)

        both = tl.reshape(both, (2, ROWS))
        both *= tl.rsqrt(tl.sum(both * both, axis=1) + NORM_EPS)[:, None]
        query, key = tl.split(tl.trans(both))
        query *= KEY_DIM**-0.5
        state = state * tl.exp(log_decay)
        delta = (value - tl.sum(state * key[:, None], axis=0)) * beta
        state += key[:, None] * delta[None, :]
        tl.store(state_ptr + place, state, mask=inside)
        found = tl.sum(state * query[:, None], axis=0)
        out = out_ptr + (token * HEADS + head) * VALUE_DIM + column
        tl.store(out, found.to(dtype), mask=is_column)
