"""Reference implementation of the gated delta rule in plain torch, also used on CPUs.

See Yang et al., "Gated Delta Networks", 2024. First a causal convolution is applied to the channels
of queries, keys and values, and then SiLU. Keys and queries are normalized to length 1. For each
token, a head's state S `[key_dim, value_dim]` and the output o are

    S = exp(g) * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q / sqrt(key_dim)

The rounding is that of transformers: q, k and v after SiLU, beta after its sigmoid, and o are
rounded to the model's dtype. All other values, and S, are float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear_attention.states import DeltaInputs, LayerStates, StateLayout

CHUNK = 64  # tokens whose recurrence is solved at the same time
_NORM_EPS = 1e-6


def decode(inputs: DeltaInputs, states: LayerStates, layout: StateLayout, out: Tensor) -> None:
    """Computes the decodes of a step, which have one token per sequence, and updates the states.

    Args:
        inputs: inputs of all tokens of the step.
        states: states of the layer, which are updated.
        layout: sequences and slots of the step.
        out: `[T, value_heads, value_dim]`, of which the rows of decodes are written.
    """
    refuse_capture()
    count, width = layout.num_decodes, inputs.spec.conv_width
    slots, index = layout.slots[:count], layout.seq_lens_device[:count].long() - 1
    tokens = inputs.qkv[:count]
    taps = [column(states, slots, index - back, width) for back in range(width - 1, 0, -1)]
    states.conv[slots, index % width] = tokens
    query, key, value = heads(convolved([*taps, tokens], inputs), inputs)
    decay, beta = gates(inputs, slice(0, count))
    state = states.recurrent[slots].where((index > 0)[:, None, None, None], 0.0)
    state = state * decay.exp()[..., None, None]
    delta = (value - (state * key[..., None]).sum(-2)) * beta[..., None]
    state = state + key[..., None] * delta[..., None, :]
    out[:count] = (state * query[..., None]).sum(-2).to(out.dtype)
    states.recurrent[slots] = state


def prefill(
    inputs: DeltaInputs,
    states: LayerStates,
    layout: StateLayout,
    out: Tensor,
    saved: tuple[Tensor, LayerStates] | None = None,
) -> None:
    """Computes the chunks of a step, one sequence after the other, and updates the states.

    Args:
        inputs, states, layout, out: see `decode`. The rows of chunks are written to `out`.
        saved: states to save within chunks, from `StateLayout.saved`. None if no state is saved.
    """
    refuse_capture()
    starts, lens = layout.cu_query_lens.tolist(), layout.seq_lens.tolist()
    saves = {} if saved is None else {t: s for t, s in enumerate(saved[0].tolist()) if s >= 0}
    for index in range(layout.num_decodes, len(lens)):
        begin, end = starts[index], starts[index + 1]
        slot, ahead = layout.slots[index : index + 1], lens[index] - end
        ends = [token + 1 for token in saves if begin <= token < end]
        for stop in dict.fromkeys([*ends, end]) if begin < end else ():
            _prefill_chunk(inputs, states, slot, ahead + begin, slice(begin, stop), out)
            if saved is not None and (to := saves.get(stop - 1)) is not None:
                saved[1].conv[to] = states.conv[slot[0]]
                saved[1].recurrent[to] = states.recurrent[slot[0]]
            begin = stop


def _prefill_chunk(
    inputs: DeltaInputs, states: LayerStates, slot: Tensor, start: int, tokens: slice, out: Tensor
) -> None:
    """Computes consecutive tokens of the sequence in `slot`.

    Args:
        inputs, states, out: see `decode`.
        slot: `[1]`, slot of the sequence.
        start: index in the sequence of the first token.
        tokens: the tokens within the step.
    """
    width, own = inputs.spec.conv_width, inputs.qkv[tokens]
    length = len(own)
    ahead = torch.arange(start - width + 1, start, device=own.device)
    before = column(states, slot.expand(width - 1), ahead, width)
    window = torch.cat((before, own))
    taps = [window[tap : tap + length] for tap in range(width)]
    last = torch.arange(max(start, start + length - width), start + length, device=own.device)
    states.conv[slot, last % width] = own[len(own) - len(last) :]
    query, key, value = (part.transpose(0, 1) for part in heads(convolved(taps, inputs), inputs))
    decay, beta = (part.T for part in gates(inputs, tokens))
    initial = states.recurrent[slot[0]] if start else None
    found, state = chunked(query, key, value, decay, beta, initial)
    out[tokens] = found.transpose(0, 1).to(out.dtype)
    states.recurrent[slot[0]] = state


def chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Applies the rule to many tokens of H heads, `CHUNK` tokens at a time, in float32.

    Within a chunk, the corrections of the tokens solve a unit lower triangular system, because
    token i sees the state that earlier tokens have changed. Three GEMMs then compute the chunk.

    Args:
        query: `[H, T, key_dim]`, of length 1 / sqrt(key_dim).
        key: `[H, T, key_dim]`, of length 1.
        value: `[H, T, value_dim]`.
        decay: logarithm of the decay, g, `[H, T]`.
        beta: `[H, T]`.
        state: initial state `[H, key_dim, value_dim]`. None if it is zero.

    Returns:
        Outputs `[H, T, value_dim]`, and the state after the last token.
    """
    now = value.new_zeros(len(value), key.shape[-1], value.shape[-1]) if state is None else state
    parts: list[Tensor] = []
    for begin in range(0, query.shape[1], CHUNK):
        q, k, v, g, b = (x[:, begin : begin + CHUNK] for x in (query, key, value, decay, beta))
        total = g.cumsum(-1)  # logarithm of the decay since the beginning of the chunk
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        from_start, to_end = total.exp()[..., None], (total[:, -1:] - total).exp()[..., None]
        system = ((k * b[..., None]) @ k.mT * between).tril(-1)
        wanted = (v - (k * from_start) @ now) * b[..., None]
        found = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        parts.append((q * from_start) @ now + (q @ k.mT * between) @ found)
        now = now * total[:, -1].exp()[:, None, None] + (k * to_end).mT @ found
    return torch.cat(parts, dim=1), now


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the RMSNorm of each head and multiplies it by SiLU of the gate.

    Args:
        x: `[T, heads, value_dim]`.
        gate: `[T, heads * value_dim]`. Rows may be strided.
        weight: weight of the norm, `[value_dim]`.
        eps: constant of the norm.

    Returns:
        Gated norm `[T, heads * value_dim]`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (weight * normed.to(x.dtype)).flatten(1)
    return (normed * F.silu(gate.float())).to(x.dtype)


def refuse_capture() -> None:
    """Refuses to run during the capture of a CUDA graph.

    The lengths differ between replays of a graph, but these functions read them on the host.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the plain gated delta rule cannot be part of a CUDA graph")


def column(states: LayerStates, slots: Tensor, index: Tensor, width: int) -> Tensor:
    """Reads the convolution's input at a token of each slot: `[n, channels]`.

    Inputs before the first token of a sequence are zero.
    """
    return states.conv[slots, index % width].where((index >= 0)[:, None], 0.0)


def convolved(taps: Sequence[Tensor], inputs: DeltaInputs) -> Tensor:
    """Computes SiLU of the weighted sum of the convolution's taps, `[n, channels]` each."""
    weights = inputs.conv.float().unbind(1)
    mixed = sum(tap.float() * weight for tap, weight in zip(taps, weights, strict=True))
    assert isinstance(mixed, Tensor)
    return F.silu(mixed).to(inputs.qkv.dtype)


def heads(mixed: Tensor, inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Divides `[n, channels]` into queries, keys and values of value heads, `[n, H, dim]` float32.

    Queries and keys are normalized, and repeated for the value heads of their group.
    """
    spec = inputs.spec
    query, key, value = mixed.float().split((spec.key_size, spec.key_size, spec.value_size), dim=1)
    query = _normed(query.unflatten(1, (spec.num_key_heads, -1))) * spec.key_head_dim**-0.5
    key = _normed(key.unflatten(1, (spec.num_key_heads, -1)))
    group = spec.group_size
    return (
        query.repeat_interleave(group, dim=1),
        key.repeat_interleave(group, dim=1),
        value.unflatten(1, (spec.num_value_heads, -1)),
    )


def _normed(x: Tensor) -> Tensor:
    """Normalizes heads to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def gates(inputs: DeltaInputs, tokens: slice) -> tuple[Tensor, Tensor]:
    """Computes the logarithm of the decay, and beta, `[n, H]` float32 each."""
    wide = inputs.decay[tokens].float() + inputs.dt_bias.float()
    beta = inputs.beta[tokens].sigmoid().float()
    return -inputs.a_log.exp() * F.softplus(wide), beta
