"""Reference implementation of decodes with drafts over recurrent states, in plain torch.

See `draft_runs` for what happens to the states, and `delta_rule` for the operations. Each token is
computed as `delta_rule.decode` computes it, with the same rounding.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.linear_attention import delta_rule
from kernels.linear_attention.draft_runs import LayerInputs, Spans
from kernels.linear_attention.states import DeltaInputs, LayerStates, StateLayout


def verify(
    inputs: DeltaInputs, states: LayerStates, layout: StateLayout, kept: LayerInputs, out: Tensor
) -> None:
    """Computes the decodes of a step in `layout.runs`, and updates the states.

    Args:
        inputs: inputs of all tokens of the step.
        states: states of the layer, which are updated up to the first token of each run.
        layout: sequences and slots of the step.
        kept: inputs of the last drafts of each slot. Those of this step's drafts replace them.
        out: `[T, value_heads, value_dim]`, of which the rows of decodes are written.
    """
    delta_rule.refuse_capture()
    spec, heads = inputs.spec, inputs.spec.num_value_heads
    assert layout.runs is not None
    runs = layout.runs.tokens(kept.qkv.shape[1], spec.conv_width)
    own = runs.own
    state = states.recurrent[own.slots].where((own.starts > 0)[:, None, None, None], 0.0)
    if runs.folds is not None:
        assert runs.folded is not None and runs.ring_tokens is not None
        qkv, gates = kept.qkv.flatten(0, 1), kept.gates.flatten(0, 1)
        folded = state[runs.folded]
        earlier = replace(inputs, qkv=qkv, beta=gates[:, :heads], decay=gates[:, heads:])
        tokens = _tokens(earlier, states, runs.folds)
        for place in range(len(tokens.query)):
            _advance(folded, tokens, place, runs.folds.num_longer(place))
        state[runs.folded] = folded
        columns = runs.ring_tokens % spec.conv_width
        states.conv[runs.ring_slots, columns] = qkv[runs.ring_places]
    tokens = _tokens(inputs, states, own)
    found = out.new_empty(*own.tokens.shape, *out.shape[1:])
    for place in range(len(tokens.query)):
        count = own.num_longer(place)
        found[:count, place] = _advance(state, tokens, place, count).to(out.dtype)
        if place == 0:
            states.recurrent[own.slots] = state
    states.conv[own.slots, own.starts % spec.conv_width] = inputs.qkv[own.tokens[:, 0]]
    out[: len(runs.span_of)] = found[runs.span_of, runs.place_of]
    if len(runs.kept_tokens):
        drafts = runs.kept_tokens
        kept.qkv[runs.kept_slots, runs.kept_places] = inputs.qkv[drafts]
        gates = torch.cat((inputs.beta[drafts], inputs.decay[drafts]), dim=1)
        kept.gates[runs.kept_slots, runs.kept_places] = gates


class _Tokens(NamedTuple):
    """The inputs of the recurrence of R spans of up to L tokens, float32.

    Attributes:
        query, key: `[L, R, H, key_dim]`.
        value: `[L, R, H, value_dim]`.
        decay, beta: `[L, R, H]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def _tokens(inputs: DeltaInputs, states: LayerStates, spans: Spans) -> _Tokens:
    """Computes what the recurrence needs of all tokens of the spans together.

    Args:
        inputs: inputs of which `spans.tokens` has the places.
        states: states of the layer, with the inputs of the convolution before each span.
        spans: the tokens.
    """
    width, (count, longest) = inputs.spec.conv_width, spans.tokens.shape
    places = spans.tokens.T.flatten()  # token after token, so that the first are contiguous
    ahead = spans.starts + torch.arange(1 - width, 0, device=places.device)[:, None]
    before = delta_rule.column(states, spans.slots.repeat(width - 1), ahead.flatten(), width)
    window = torch.cat((before, inputs.qkv[places])).unflatten(0, (-1, count))
    taps = [window[tap : tap + longest].flatten(0, 1) for tap in range(width)]
    chosen = replace(inputs, qkv=taps[-1], beta=inputs.beta[places], decay=inputs.decay[places])
    mixed = delta_rule.heads(delta_rule.convolved(taps, chosen), chosen)
    gates = delta_rule.gates(chosen, slice(None))
    return _Tokens(*[part.unflatten(0, (longest, count)) for part in (*mixed, *gates)])


def _advance(state: Tensor, tokens: _Tokens, place: int, count: int) -> Tensor:
    """Applies the rule to one token of each of the first `count` spans, and updates their states.

    Returns the outputs `[count, H, value_dim]`.
    """
    query, key, value, decay, beta = (part[place, :count] for part in tokens)
    now = state[:count] * decay.exp()[..., None, None]
    delta = (value - (now * key[..., None]).sum(-2)) * beta[..., None]
    now = now + key[..., None] * delta[..., None, :]
    state[:count] = now
    return (now * query[..., None]).sum(-2)
