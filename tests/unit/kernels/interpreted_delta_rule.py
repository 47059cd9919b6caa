"""Kernels of linear attention and output gates in Triton's interpreter against their twins; prints
"agreed". Run by interpreted.py.
"""

from dataclasses import replace

import torch
from torch import Tensor

import tests.unit.kernels.interpreter  # noqa: F401
from kernels import plain
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.attention.qk_rope_cache import qk_rope_cache
from kernels.gemm import skinny_gemm
from kernels.linear_attention import (
    delta_rule,
    delta_rule_decode,
    delta_rule_drafts,
    delta_rule_prefill,
    delta_rule_verify,
    output_gates,
)
from kernels.linear_attention.draft_runs import KeptInputs
from kernels.linear_attention.states import StateCache, StateLayout
from kernels.tuning import DeltaDecodeConfig
from services.common.model_spec import LinearAttentionSpec
from tests.cases import cases
from tests.unit.kernels.delta_rule_steps import (
    difference,
    random_inputs,
    random_layout,
    random_runs,
    spec_of,
    twin_of,
)

CPU = torch.device("cpu")
TOLERANCE = 3e-6


def check_step(
    spec: LinearAttentionSpec,
    lengths: list[int],
    contexts: list[int],
    num_decodes: int,
    *,
    padding: int = 0,
    repeated: bool = False,
    saves: tuple[int, ...] = (),
    config: DeltaDecodeConfig | None = None,
) -> None:
    """Outputs and states of a step, those kept within chunks among them; sequences without a token
    are a captured step's padding.
    """
    used = sum(lengths)
    inputs = random_inputs(spec, used + padding, torch.float32, CPU, repeated=repeated)
    layout = random_layout(
        spec, lengths, contexts, num_decodes, torch.float32, CPU, used + padding, saves
    )
    twin, before = twin_of(layout), layout.cache.recurrent.clone()
    shape = used + padding, spec.num_value_heads, spec.value_head_dim
    found, expected = torch.zeros(shape), torch.zeros(shape)
    if num_decodes:
        delta_rule_decode.decode(inputs, layout.cache.layer(0), layout, found, config=config)
        delta_rule.decode(inputs, twin.cache.layer(0), twin, expected)
    if num_decodes < len(lengths):
        delta_rule_prefill.prefill(inputs, layout.cache.layer(0), layout, found, layout.saved(0))
        delta_rule.prefill(inputs, twin.cache.layer(0), twin, expected, twin.saved(0))
    assert difference(found, expected) < TOLERANCE
    slots = twin.slots
    for states, others in (
        (layout.cache.recurrent, twin.cache.recurrent),
        (layout.cache.conv, twin.cache.conv),
    ):
        assert difference(states[:, slots], others[:, slots]) < TOLERANCE
    if layout.checkpoints is not None and twin.checkpoints is not None:
        assert difference(layout.checkpoints.recurrent, twin.checkpoints.recurrent) < TOLERANCE
        assert difference(layout.checkpoints.conv, twin.checkpoints.conv) == 0
        assert int(twin.checkpoints.conv.isfinite().all(-1).all(-1).sum()) == len(saves)
    idle = [slot for slot in range(before.shape[1]) if slot not in slots.tolist()]
    assert difference(layout.cache.recurrent[:, idle], before[:, idle]) == 0


def check_runs(
    spec: LinearAttentionSpec,
    runs: list[tuple[int, int, int]],
    num_drafts: int,
    *,
    padding: int = 0,
) -> None:
    """Outputs, states and kept inputs of runs of (context, folds, drafts)."""
    layout, kept = random_runs(spec, runs, num_drafts, torch.float32, CPU, padding)
    count, used = layout.num_decodes, layout.num_decodes - padding
    inputs = random_inputs(spec, count, torch.float32, CPU)
    twin = replace(layout, cache=StateCache(*map(Tensor.clone, states_of(layout))))
    others = KeptInputs(kept.qkv.clone(), kept.gates.clone())
    shape = count, spec.num_value_heads, spec.value_head_dim
    found, expected = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    delta_rule_verify.verify(inputs, layout.cache.layer(0), layout, kept.layer(0), found)
    delta_rule_drafts.verify(inputs, twin.cache.layer(0), twin, others.layer(0), expected)
    assert difference(found[:used], expected[:used]) < TOLERANCE
    assert found.isfinite().all(), "a decode that pads a captured step has no output"
    scratch = int(layout.slots[-1]) if padding else len(layout.cache.conv[0])
    for states, expecteds in zip(states_of(layout), states_of(twin), strict=True):
        states[:, scratch : scratch + 1] = expecteds[:, scratch : scratch + 1] = 0.0
        assert difference(states, expecteds) < TOLERANCE
    assert difference(kept.qkv, others.qkv) == difference(kept.gates, others.gates) == 0


def states_of(layout: StateLayout) -> tuple[Tensor, Tensor]:
    return layout.cache.conv, layout.cache.recurrent


def check_heads(num_tokens: int, sizes: tuple[int, int, int, int], *, gated: bool) -> None:
    """Queries, gates, keys and values of heads that rotate in part, with zero-centred norms."""
    heads, kv_heads, dim, rotary = sizes
    qkv = torch.randn(num_tokens, (heads * (1 + gated) + 2 * kv_heads) * dim)
    qkv[:, ::7] = -0.0
    angles = torch.randn(2, num_tokens, rotary // 2)
    projected = ProjectedHeads(
        qkv, (torch.rand(dim) + 1, torch.rand(dim) + 1), 1e-6, (angles[0], angles[1]),
        torch.zeros(9, 2, 16, kv_heads, dim), kv_rows(torch.randperm(144)[:num_tokens], 16), gated,
    )  # fmt: skip
    twin = replace(projected, kv_cache=projected.kv_cache.clone())
    gates, twins_gates = (torch.zeros(num_tokens, heads, dim) for _ in range(2))
    own, twins_own = (torch.zeros(num_tokens, 2 * kv_heads, dim) for _ in range(2))
    query = qk_rope_cache(projected, own, gates if gated else None)
    expected = plain.qk_rope_cache(twin, twins_own, twins_gates if gated else None)
    pairs = (query, expected), (gates, twins_gates), (own, twins_own)
    for found, other in (*pairs, (projected.kv_cache, twin.kv_cache)):
        assert difference(found, other) < 1e-5
    values = qkv.unflatten(1, (-1, dim))[:, -kv_heads:]
    assert torch.equal(own[:, kv_heads:].view(torch.int32), values.view(torch.int32))


def check_gates(num_tokens: int, heads: int, dim: int) -> None:
    x, wide = torch.randn(num_tokens, heads, dim), torch.randn(num_tokens, heads * dim + 8)
    weight, gate = torch.rand(dim), wide[:, 8:]
    found = output_gates.gated_norm(x, gate, weight, 1e-6)
    assert difference(found, delta_rule.gated_norm(x, gate, weight, 1e-6)) < TOLERANCE
    gates = gate.contiguous().view_as(x)
    expected = plain.output_gate(x.clone(), gates)
    assert difference(output_gates.output_gate(x, gates), expected) < TOLERANCE
    partials = torch.randn(3, num_tokens, dim)
    found = skinny_gemm.reduce_split_k(partials, torch.float32)
    assert difference(found, plain.reduce_split_k(partials, torch.float32)) < TOLERANCE


if __name__ == "__main__":
    twice, thrice = spec_of(2, 4, 16, 16), spec_of(1, 3, 24, 8, 3)
    check_step(twice, [1, 1, 1], [5, 0, 2], 3)
    check_step(thrice, [1, 1], [1, 7], 2)
    check_step(thrice, [1, 0, 0], [5, 0, 0], 3)
    check_step(twice, [1, 1, 0], [5, 0, 0], 3, config=DeltaDecodeConfig(4, 4))
    check_step(spec_of(1, 2, 16, 16), [70, 2, 130], [0, 3, 9], 0, saves=(63, 135, 199))
    check_step(thrice, [1, 0, 65, 0, 1], [4, 0, 1, 0, 0], 2, padding=30, saves=(64,))
    check_step(spec_of(1, 1, 16, 16), [150], [0], 0, repeated=True)
    check_runs(twice, [(5, 0, 0), (0, 0, 2), (9, 1, 2), (30, 3, 0), (7, 2, 3)], 3, padding=2)
    check_runs(thrice, [(1, 0, 8), (1, 1, 0), (20, 8, 8), (12, 4, 1)], 8)
    check_heads(5, (3, 1, 64, 16), gated=True)
    check_heads(cases(20, 130), (4, 2, 24, 8), gated=True)
    check_heads(3, (2, 2, 48, 24), gated=False)
    check_gates(3, 5, 24)
    print("agreed")
