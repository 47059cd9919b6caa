"""Qwen3.5 on a GPU: the kernels of linear attention against their twins, and a model of the 4B's
widths with eight layers against Hugging Face and against itself without graphs.

Metric and tolerance of the model as in test_decoder_gpu.py. Kernels: float32 within 1e-4 of values
of the order of 1; bf16 by the relative L2 of the worst row, where TF32 GEMMs and a rounding of
inputs that falls the other way leave 1e-2.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from kernels import plain
from kernels.device import DeviceFacts
from kernels.linear_attention import delta_rule
from kernels.sampling.sampling import greedy
from services.common.model_spec import LinearAttentionSpec
from services.decoder.engine.run.graphs import DecodeGraphs, MixedGraphs, PromptGraphs
from tests.decoder_harness import Harness
from tests.gpu.decoder_2b import GPU, options, prompts, relative
from tests.unit.kernels.delta_rule_steps import (
    difference,
    random_inputs,
    random_layout,
    spec_of,
    twin_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
pytest.importorskip("triton")
from kernels.gemm import skinny_gemm  # noqa: E402
from kernels.linear_attention import delta_rule_decode, delta_rule_prefill, output_gates  # noqa: E402

SPECS = {
    "4b": spec_of(16, 32, 128, 128),
    "27b": spec_of(16, 48, 128, 128),
    "odd": spec_of(3, 9, 64, 96, 3),
}
STEPS = {
    "one decode": ([1], [700], 1),
    "decodes": ([1] * 65, [index % 40 for index in range(65)], 65),
    "prompt": ([1008], [0], 0),
    "chunks": ([130, 1, 64, 63, 500], [0, 5, 64, 1, 2000], 0),
    "mixed": ([1] * 30 + [77, 300], [9] * 29 + [0, 12, 0], 30),
    "captured": ([1] * 5 + [0] * 20 + [90, 0, 0], [9] * 5 + [0] * 20 + [3, 0, 0], 25),
}

# Tokens of a step at the end of whole pieces of its chunks, after which states are kept.
SAVES = {
    "prompt": (959,), "chunks": (63, 194, 321), "mixed": (93, 170, 298), "captured": (68,),
}  # fmt: skip


def run_both(
    spec: LinearAttentionSpec, name: str, dtype: torch.dtype, *, repeated: bool = False
) -> tuple[float, float, float]:
    """Differences of outputs, of recurrent and of convolution states."""
    lengths, contexts, decodes = STEPS[name]
    used, padding = sum(lengths), 17
    inputs = random_inputs(spec, used + padding, dtype, GPU, repeated=repeated)
    layout = random_layout(
        spec, lengths, contexts, decodes, dtype, GPU, used + padding, SAVES.get(name, ())
    )
    twin, other = twin_of(layout), layout.cache.recurrent.clone()
    shape = used + padding, spec.num_value_heads, spec.value_head_dim
    found, expected = (torch.zeros(shape, dtype=dtype, device=GPU) for _ in range(2))
    states, twins = layout.cache.layer(0), twin.cache.layer(0)
    if decodes:
        delta_rule_decode.decode(inputs, states, layout, found, pdl=True)
        delta_rule.decode(inputs, twins, twin, expected)
    if decodes < len(lengths):
        device = DeviceFacts.of(GPU)
        delta_rule_prefill.prefill(inputs, states, layout, found, layout.saved(0), device=device)
        delta_rule.prefill(inputs, twins, twin, expected, twin.saved(0))
    assert not found[used:].any(), "padding was written"
    idle = [slot for slot in range(len(other[0])) if slot not in twin.slots.tolist()]
    assert difference(layout.cache.recurrent[:, idle], other[:, idle]) == 0
    slots = twin.slots
    conv = difference(layout.cache.conv[:, slots], twin.cache.conv[:, slots])
    ours, theirs = layout.cache.recurrent[0, slots], twin.cache.recurrent[0, slots]
    if layout.checkpoints is not None and twin.checkpoints is not None:
        conv += difference(layout.checkpoints.conv, twin.checkpoints.conv)
        kept = slice(1, None)
        ours = torch.cat((ours, layout.checkpoints.recurrent[0, kept]))
        theirs = torch.cat((theirs, twin.checkpoints.recurrent[0, kept]))
    if dtype == torch.float32:
        return difference(found, expected), difference(ours, theirs), conv
    rows = (found[:used].flatten(1), expected[:used].flatten(1))
    return relative(*rows), relative(ours.flatten(1), theirs.flatten(1)), conv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", SPECS)
def test_kernels_agree_with_their_twins(size: str, name: str, dtype: torch.dtype) -> None:
    output, recurrent, conv = run_both(SPECS[size], name, dtype)
    print(f"\n{size} {name} {dtype}: output {output:.2e}, state {recurrent:.2e}")
    assert conv == 0
    assert max(output, recurrent) < (1e-4 if dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_repeated_keys_do_not_overflow(dtype: torch.dtype) -> None:
    output, recurrent, _ = run_both(SPECS["4b"], "prompt", dtype, repeated=True)
    print(f"\noutput {output:.2e}, state {recurrent:.2e}")
    assert max(output, recurrent) < (1e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("tokens", [1, 64, 1008])
def test_gates_and_reduction_agree_with_their_twins(tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 48, 128, device=GPU).bfloat16()
    wide = torch.randn(tokens, 48 * 128 + 96, device=GPU).bfloat16()
    weight = torch.rand(128, device=GPU).bfloat16()
    gate = wide[:, 96:]
    found = output_gates.gated_norm(x, gate, weight, 1e-6, pdl=True)
    assert relative(found, delta_rule.gated_norm(x, gate, weight, 1e-6)) < 5e-3
    gates = gate.contiguous().view_as(x)
    expected = plain.output_gate(x.clone(), gates)
    assert relative(output_gates.output_gate(x, gates, pdl=True), expected) < 5e-3
    partials = torch.randn(3, tokens, 1000, device=GPU)
    found = skinny_gemm.reduce_split_k(partials, torch.bfloat16, pdl=True)
    assert relative(found, plain.reduce_split_k(partials, torch.bfloat16)) < 5e-3


# A model.


@dataclass
class Pair:
    """One checkpoint: our harness, and logits of HF in float32 and bf16 for the same prompts."""

    ours: Harness
    prompts: list[list[int]]
    exact: list[Tensor]  # [T, V] of each prompt
    rounded: list[Tensor]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=150016, hidden_size=2560, intermediate_size=9216, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
        },
    )  # fmt: skip
    with torch.device(GPU):
        theirs = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.uniform_(-2.0, 1.0)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 1:
                parameter.uniform_(-0.5, 0.5)
            parameter.copy_(parameter.bfloat16())
    ids = [*prompts(7, seed=3), prompts(1, seed=4)[0] * 3]
    rope = theirs.model.rotary_emb
    frequencies = rope.inv_freq.clone()
    exact = [logits(theirs, one) for one in ids]
    theirs.bfloat16()
    rope.register_buffer(
        "inv_freq", frequencies, persistent=False
    )  # `.bfloat16()` casts buffers, too
    rounded = [logits(theirs, one) for one in ids]
    theirs.save_pretrained(directory)
    del theirs
    torch.cuda.empty_cache()
    with closing(Harness(directory, **options(kv_cache_bytes=2 << 30))) as ours:
        yield Pair(ours, ids, exact, rounded)
    torch.cuda.empty_cache()


@torch.no_grad()
def logits(model: Qwen3_5ForCausalLM, token_ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([token_ids], device=GPU)).logits[0].float()


def test_the_table_uses_kernels(pair: Pair) -> None:
    table = pair.ours.model.ops.table
    print(f"\n{table}")
    operations = ("delta_decode", "delta_prefill", "gated_norm", "qk_rope_cache", "output_gate")
    assert [table.usable(name)[0].name for name in operations] == ["triton"] * 5
    assert len(pair.ours.runner.computer.graphs) == 3, "a kind of step is not captured"


@pytest.mark.parametrize("chunk", [None, 100])
def test_prompts_are_as_close_to_float32_as_hugging_faces(pair: Pair, chunk: int | None) -> None:
    found = [pair.ours.prompt_logits(pair.ours.start(ids, 3), chunk) for ids in pair.prompts]
    exact = torch.cat(pair.exact)
    noise = relative(torch.cat(pair.rounded), exact)
    error = relative(torch.cat(found).float(), exact)
    print(f"\nfrom float32: HF {noise:.4f}, ours {error:.4f}")
    assert error < 1.3 * noise


@pytest.mark.parametrize("count", [1, 2, 8])
def test_decodes_are_as_close_to_float32_as_hugging_faces(pair: Pair, count: int) -> None:
    sequences = [pair.ours.start(ids, row) for row, ids in enumerate(pair.prompts[:count])]
    for sequence in sequences:
        pair.ours.step(pair.ours.chunk(sequence, len(sequence.token_ids) - 1))
    actual = pair.ours.logits(*(pair.ours.chunk(sequence) for sequence in sequences))
    for sequence in sequences:
        pair.ours.finish(sequence)
    noise = relative(torch.cat(pair.rounded), torch.cat(pair.exact))
    exact = torch.stack([rows[-1] for rows in pair.exact[:count]])
    assert relative(actual.float(), exact) < 1.3 * noise


def states_of(harness: Harness, rows: list[int]) -> tuple[Tensor, Tensor]:
    states = harness.state.states
    assert states is not None
    return states.conv[:, rows].clone(), states.recurrent[:, rows].clone()


@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [(1, []), (2, []), (5, []), (51, []), (0, [333]), (3, [300, 2, 33]), (50, [300, 290, 1])],
    ids=["1", "2", "5", "51", "prompt", "few", "many"],
)
def test_a_graph_agrees_with_the_eager_step(pair: Pair, decodes: int, chunks: list[int]) -> None:
    """Logits, and the states that the step leaves. A chunk has some context before it."""
    ours, rng = pair.ours, np.random.default_rng(decodes)
    running = [ours.start(ids, row) for row, ids in enumerate(prompts(decodes))]
    for sequence in running:
        ours.step(ours.chunk(sequence))
    step = [ours.chunk(sequence) for sequence in running]
    for index, length in enumerate(chunks):
        sequence = ours.start(rng.integers(0, 150000, 40 + length).tolist(), decodes + index)
        ours.step(ours.chunk(sequence, 40))
        running.append(sequence)
        step.append(ours.chunk(sequence, length))
    step.sort(key=lambda chunk: (not chunk.from_device, chunk.length != 1))  # as `launch` does
    rows = [sequence.row for sequence in running]
    states = ours.state.states
    assert states is not None
    before = states.conv.clone(), states.recurrent.clone()
    ends = np.cumsum([chunk.length for chunk in step]) - 1
    eager = ours.logits(*step)[ends.tolist()]
    eager_states = states_of(ours, rows)
    states.conv.copy_(before[0])
    states.recurrent.copy_(before[1])
    tokens = ours.launch(*step).result().token_ids[:, 0].tolist()
    kind = DecodeGraphs if not chunks else PromptGraphs if len(step) == 1 else MixedGraphs
    (graphs,) = [each for each in ours.runner.computer.graphs if type(each) is kind]
    assert graphs.logits is not None
    captured = graphs.logits[: len(step)]
    assert relative(captured, eager) < 5e-2  # GEMMs of another size
    assert tokens == greedy(captured).tolist()
    for found, expected in zip(states_of(ours, rows), eager_states, strict=True):
        assert relative(found.transpose(0, 1), expected.transpose(0, 1)) < 5e-2
    for sequence in running:
        ours.finish(sequence)
