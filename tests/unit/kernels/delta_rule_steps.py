"""Random steps of the gated delta rule, for tests of kernels against their twins."""

import numpy as np
import torch
from torch import Tensor

from kernels.linear_attention.draft_runs import KeptInputs, StepRuns, run_table
from kernels.linear_attention.states import DeltaInputs, StateCache, StateLayout, prefill_pieces
from services.common.model_spec import LinearAttentionSpec


def spec_of(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int = 4
) -> LinearAttentionSpec:
    return LinearAttentionSpec(
        num_key_heads=key_heads, num_value_heads=value_heads, key_head_dim=key_dim,
        value_head_dim=value_dim, conv_width=width,
    )  # fmt: skip


def random_inputs(
    spec: LinearAttentionSpec,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    repeated: bool = False,
) -> DeltaInputs:
    """Strided as the projection leaves them. `repeated`: equal keys, no decay, betas of nearly 1,
    for which powers of the system overflow.
    """
    heads = spec.num_value_heads
    width = spec.num_channels + spec.value_size + 2 * heads
    generator = torch.Generator(device).manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    projected = normal(num_tokens, width)
    a_log = normal(heads) - 1
    if repeated:
        projected[:] = projected[0]
        projected[:, -2 * heads : -heads] = 8.0
        a_log = a_log - 20
    projected = projected.to(dtype)
    gates = projected[:, -2 * heads :]
    return DeltaInputs(
        spec, projected[:, : spec.num_channels], gates[:, :heads], gates[:, heads:],
        (normal(spec.num_channels, spec.conv_width) / 2).to(dtype), a_log,
        normal(heads).to(dtype),
    )  # fmt: skip


def random_layout(
    spec: LinearAttentionSpec,
    lengths: list[int],
    contexts: list[int],
    num_decodes: int,
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int | None = None,
    saves: tuple[int, ...] = (),
) -> StateLayout:
    """Sequences of `lengths` tokens after `contexts`; slots of those without any hold NaN. States
    after the tokens `saves` are kept.
    """
    count = len(lengths)
    cache = StateCache.allocate(spec, 1, count + 2, dtype, device)
    generator = torch.Generator(device).manual_seed(count)
    for states in (cache.conv, cache.recurrent):
        states.normal_(generator=generator)
    slots = torch.arange(count, 0, -1, device=device)
    for slot, context in zip(slots.tolist(), contexts, strict=True):
        if context == 0:
            cache.conv[:, slot], cache.recurrent[:, slot] = torch.nan, torch.nan
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    seq_lens = np.array(contexts, np.int32) + np.array(lengths, np.int32)
    work = None
    if num_decodes < count:
        total = int(starts[-1]) if num_tokens is None else num_tokens
        work = torch.from_numpy(prefill_pieces(starts, num_decodes, total)).to(device)
    layout = StateLayout(
        cache, num_decodes, starts, seq_lens, slots, torch.from_numpy(starts).to(device),
        torch.from_numpy(seq_lens).to(device), work,
    )  # fmt: skip
    if saves:
        layout.checkpoints = StateCache.allocate(spec, 1, len(saves) + 1, dtype, device)
        layout.checkpoints.conv.fill_(torch.nan)
        layout.checkpoints.recurrent.fill_(torch.nan)
        slot_of = torch.full((num_tokens or int(starts[-1]),), -1, dtype=torch.int32)
        slot_of[list(saves)] = torch.arange(len(saves), 0, -1, dtype=torch.int32)
        layout.saves = slot_of.to(device)
    return layout


def random_runs(
    spec: LinearAttentionSpec,
    runs: list[tuple[int, int, int]],
    num_drafts: int,
    dtype: torch.dtype,
    device: torch.device,
    num_padding: int = 0,
) -> tuple[StateLayout, KeptInputs]:
    """Runs of (tokens before the step, kept inputs to fold, drafts), each in a slot of its own, and
    `num_padding` runs of one token in a last slot, as a captured step has them.
    """
    lengths = [1 + drafts for _, _, drafts in runs]
    layout = random_layout(
        spec, [*lengths, *[1] * min(num_padding, 1)],
        [context for context, _, _ in runs] + [0] * min(num_padding, 1), 0, dtype, device,
    )  # fmt: skip
    of_token = np.repeat(layout.slots.cpu().numpy(), [*lengths, *[num_padding] * (num_padding > 0)])
    lens = [context + 1 + i for context, _, drafts in runs for i in range(1 + drafts)]
    count = len(lens) + num_padding
    firsts = np.cumsum([0, *lengths[:-1]]).tolist()
    folds = {first: n for first, (_, n, _) in zip(firsts, runs, strict=True) if n}
    seq_lens = np.array([*lens, *[1] * num_padding], np.int32)
    starts, slots = np.arange(count + 1, dtype=np.int32), of_token.astype(np.int32)
    table = torch.from_numpy(run_table(slots, seq_lens, folds)).to(device)
    # The reference implementation has no padding.
    step_runs = StepRuns(table, slots[: len(lens)], seq_lens[: len(lens)], folds)
    kept = KeptInputs.allocate(
        spec.num_channels,
        spec.num_value_heads,
        (1, len(layout.slots) + 2, num_drafts),
        dtype,
        device,
    )
    generator = torch.Generator(device).manual_seed(count)
    for inputs in (kept.qkv, kept.gates):
        inputs.normal_(generator=generator)
    layout = StateLayout(
        layout.cache, count, starts, seq_lens, torch.from_numpy(of_token).to(device),
        torch.from_numpy(starts).to(device), torch.from_numpy(seq_lens).to(device), runs=step_runs,
    )  # fmt: skip
    return layout, kept


def twin_of(layout: StateLayout) -> StateLayout:
    """The layout without sequences that have no token, over a copy of the states."""
    cache, kept, lengths = layout.cache, layout.checkpoints, np.diff(layout.cu_query_lens)
    live = np.flatnonzero(lengths)
    index = torch.from_numpy(live).to(layout.slots.device)
    starts = np.cumsum([0, *lengths[live]], dtype=np.int32)
    return StateLayout(
        StateCache(cache.conv.clone(), cache.recurrent.clone()),
        int((live < layout.num_decodes).sum()), starts, layout.seq_lens[live],
        layout.slots[index], torch.from_numpy(starts).to(index.device),
        layout.seq_lens_device[index],
        checkpoints=None if kept is None else StateCache(kept.conv.clone(), kept.recurrent.clone()),
        saves=layout.saves,
    )  # fmt: skip


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest; NaN equals NaN."""
    both = actual.isnan() & expected.isnan()
    return float((actual.float() - expected.float()).masked_fill(both, 0.0).abs().max())
