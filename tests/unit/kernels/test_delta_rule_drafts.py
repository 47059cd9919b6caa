"""Decodes with drafts over recurrent states against decodes one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.linear_attention import delta_rule, delta_rule_drafts
from kernels.linear_attention.draft_runs import KeptInputs, StepRuns, run_table
from kernels.linear_attention.states import DeltaInputs, StateCache, StateLayout
from tests.unit.kernels.delta_rule_steps import difference, random_inputs, spec_of

SPEC = spec_of(2, 4, 8, 12)
CPU, NUM_SLOTS, NUM_DRAFTS = torch.device("cpu"), 6, 6
# Tokens before the first step, by slot; and then, for each step: slot, number of drafts, and how
# many of these are accepted.
CONTEXTS = {4: 7, 1: 0, 3: 30}
STEPS = [
    [(4, 2, 2), (1, 0, 0), (3, 6, 5)],
    [(3, 3, 0), (4, 5, 5), (1, 1, 1)],
    [(1, 0, 0), (4, 0, 0), (3, 2, 1)],
    [(3, 0, 0), (1, 4, 3), (4, 1, 0)],
]


def layout_of(cache: StateCache, slots: list[int], seq_lens: list[int]) -> StateLayout:
    starts = np.arange(len(slots) + 1, dtype=np.int32)
    lens = np.array(seq_lens, np.int32)
    return StateLayout(
        cache, len(slots), starts, lens, torch.tensor(slots), torch.from_numpy(starts),
        torch.from_numpy(lens),
    )  # fmt: skip


def runs_of(layout: StateLayout, folds: dict[int, int]) -> StepRuns:
    slots, lens = layout.slots.numpy().astype(np.int32), layout.seq_lens
    return StepRuns(torch.from_numpy(run_table(slots, lens, folds)), slots, lens, folds)


def part(inputs: DeltaInputs, token: int) -> DeltaInputs:
    one = slice(token, token + 1)
    return replace(inputs, qkv=inputs.qkv[one], beta=inputs.beta[one], decay=inputs.decay[one])


# Loops over tensors of other sizes round the exponential otherwise, in its last bit. bfloat16 then
# rounds a value to its neighbour now and then.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_drafts_are_computed_as_tokens_are_one_by_one(dtype: torch.dtype, most: float) -> None:
    """The outputs of all drafts, and the states after the accepted ones, are equal."""
    cache = StateCache.allocate(SPEC, 1, NUM_SLOTS, dtype, CPU)
    cache.conv.normal_()
    cache.recurrent.normal_()
    alone = StateCache(cache.conv.clone(), cache.recurrent.clone())
    sizes = 1, NUM_SLOTS, NUM_DRAFTS
    kept = KeptInputs.allocate(SPEC.num_channels, SPEC.num_value_heads, sizes, dtype, CPU)
    kept.qkv.fill_(torch.nan)
    computed, unfolded = dict(CONTEXTS), dict.fromkeys(CONTEXTS, 0)
    # Only inputs depend on the number of tokens; a layer's parameters are those of the first step.
    layer = random_inputs(SPEC, 50, dtype, CPU)
    for step in STEPS:
        slots = [slot for slot, drafts, _ in step for _ in range(1 + drafts)]
        lens = [computed[s] + 1 + i for s, drafts, _ in step for i in range(1 + drafts)]
        own = random_inputs(SPEC, len(slots), dtype, CPU)
        inputs = replace(layer, qkv=own.qkv, beta=own.beta, decay=own.decay)
        layout = layout_of(cache, slots, lens)
        firsts = {slot: slots.index(slot) for slot in computed}
        folds = {firsts[slot]: count for slot, count in unfolded.items() if count}
        layout.runs = runs_of(layout, folds)
        found = torch.full((len(slots), SPEC.num_value_heads, SPEC.value_head_dim), torch.nan)
        expected = found.to(dtype).clone()
        found = found.to(dtype)
        delta_rule_drafts.verify(inputs, cache.layer(0), layout, kept.layer(0), found)
        for slot, drafts, accepted in step:
            states = StateCache(alone.conv.clone(), alone.recurrent.clone())
            for place in range(1 + drafts):
                token = firsts[slot] + place
                one = layout_of(states, [slot], [lens[token]])
                out = expected[token : token + 1]
                delta_rule.decode(part(inputs, token), states.layer(0), one, out)
                if place == accepted:
                    alone.conv[:, slot] = states.conv[:, slot]
                    alone.recurrent[:, slot] = states.recurrent[:, slot]
            computed[slot] += 1 + accepted
            unfolded[slot] = accepted
        assert difference(found, expected) < most
    for slot, count in unfolded.items():
        if not count:
            assert difference(cache.recurrent[:, slot], alone.recurrent[:, slot]) < most
            assert torch.equal(cache.conv[:, slot], alone.conv[:, slot])
    assert sum(unfolded.values()) == 3
