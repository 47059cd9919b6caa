"""The kernels of linear attention, compiled for each known GPU, because the interpreter
(`interpreted_delta_rule.py`) does not check types.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.attention.heads import ProjectedHeads
from kernels.attention.qk_rope_cache import qk_rope_cache
from kernels.device import KNOWN_DEVICES
from kernels.gemm import skinny_gemm
from kernels.linear_attention import (
    delta_rule_decode,
    delta_rule_prefill,
    delta_rule_verify,
    output_gates,
)
from kernels.linear_attention.draft_runs import run_table
from kernels.linear_attention.states import prefill_pieces
from kernels.tuning import DeltaPrefillConfig, delta_decode_config, delta_prefill_config
from tests.cases import first
from tests.gpu_compiler import compiled_launches
from tests.unit.kernels.delta_rule_steps import (
    random_inputs,
    random_layout,
    random_runs,
    spec_of,
)

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", first(1, ["l40s", "h200"]))
def test_kernels_compile_and_fit(gpu: str) -> None:
    """For the heads of the 4B, in bf16. The A100 differs from the L40S in FP8 alone, and has more
    shared memory.
    """
    facts, spec = KNOWN_DEVICES[gpu], spec_of(16, 32, 128, 128)
    pdl = facts.supports_pdl
    inputs = random_inputs(spec, 70, BF16, CPU)
    layout = random_layout(spec, [1, 69], [4, 0], 1, BF16, CPU, saves=(64,))
    out = torch.zeros(70, 32, 128, dtype=BF16)
    runs, kept = random_runs(spec, [(9, 1, 2)], 3, BF16, CPU)
    with compiled_launches(facts) as found:
        for config in map(delta_decode_config, (1, 64)):
            states = layout.cache.layer(0)
            delta_rule_decode.decode(inputs, states, layout, out, pdl=pdl, config=config)
        delta_rule_verify.verify(inputs, runs.cache.layer(0), runs, kept.layer(0), out, pdl=pdl)
        delta_rule_prefill.prefill(
            inputs, layout.cache.layer(0), layout, out, layout.saved(0), device=facts
        )
        wide = DeltaPrefillConfig(columns=64, scan_stages=2)
        delta_rule_prefill.prefill(inputs, layout.cache.layer(0), layout, out, config=wide)
        output_gates.output_gate(out, out.clone(), pdl=pdl)
        output_gates.gated_norm(out, inputs.qkv[:, :4096], out[0, 0], 1e-6, pdl=pdl)
        skinny_gemm.reduce_split_k(torch.zeros(3, 5, 64), BF16, pdl=pdl)
        angles = torch.zeros(70, 32, dtype=BF16)
        heads = ProjectedHeads(
            torch.zeros(70, 40 * 256, dtype=BF16),
            (torch.zeros(256), torch.zeros(256)), 1e-6, (angles, angles),
            torch.zeros(9, 2, 16, 4, 256, dtype=BF16), torch.zeros(2, 70, dtype=torch.int64), True,
        )  # fmt: skip
        qk_rope_cache(heads, None, torch.zeros(70, 16, 256, dtype=BF16), pdl=pdl)
    assert len(found) == 14
    for launch in found:
        assert launch.shared_bytes <= facts.shared_memory_bytes, launch
        assert "ld.global" in launch.ptx


@pytest.mark.parametrize(
    ("heads", "chunks", "tokens", "columns", "stages"),
    [
        (32, 1, 96, 32, 2), (32, 1, 4096, 32, 2), (32, 2, 1792, 64, 2), (32, 2, 4096, 64, 2),
        (48, 1, 960, 64, 2), (48, 2, 4096, 64, 2),
        (32, 17, 1792, 32, 2), (32, 17, 2048, 64, 2), (32, 17, 960, 32, 1),  # captured mixed steps
    ],
)  # fmt: skip
def test_scan_has_small_parts_if_all_run_at_the_same_time(
    heads: int, chunks: int, tokens: int, columns: int, stages: int
) -> None:
    """The choices for one and two prompts are the fastest ones of an H200."""
    config = delta_prefill_config(KNOWN_DEVICES["h200"], heads, chunks, tokens)
    assert (config.columns, config.scan_stages) == (columns, stages)


@pytest.mark.parametrize("gpu", ["a100", "l40s", "rtx-pro-6000"])
def test_scan_has_one_stage_where_it_multiplies_from_registers(gpu: str) -> None:
    for chunks, tokens in ((1, 4096), (8, 8192), (17, 2048)):
        found = delta_prefill_config(KNOWN_DEVICES[gpu], 32, chunks, tokens)
        assert found == DeltaPrefillConfig()


@pytest.mark.parametrize(
    ("lengths", "num_decodes", "padding"),
    [([1], 0, 0), ([64], 0, 0), ([65, 1, 200], 0, 9), ([1, 1, 0, 63, 0, 64], 3, 100)],
)
def test_pieces_cover_each_token_of_a_chunk_once(
    lengths: list[int], num_decodes: int, padding: int
) -> None:
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    pieces = prefill_pieces(starts, num_decodes, int(starts[-1]) + padding)
    seen = np.zeros(starts[-1], np.int64)
    for sequence, start in pieces.tolist():
        if sequence >= 0:
            assert sequence >= num_decodes
            seen[start : min(start + 64, starts[sequence + 1])] += 1
    assert (seen[: starts[num_decodes]] == 0).all() and (seen[starts[num_decodes] :] == 1).all()
    count = len(lengths) - num_decodes
    assert len(pieces) == (int(starts[-1]) + padding) // 64 + count


def test_decodes_are_grouped_into_runs_of_consecutive_tokens() -> None:
    """Row 9 is scratch: each decode there that pads a captured step is a run of its own, and those
    that pad a step with chunks have no token.
    """
    slots = np.array([4, 4, 4, 2, 7, 7, 9, 9, 9, 9], np.int32)
    lens = np.array([8, 9, 10, 3, 21, 22, 1, 1, 0, 0], np.int32)
    found = run_table(slots, lens, {0: 3, 4: 1})
    assert found.tolist() == [
        [0, 3, 4, 6, 7, 0, 0, 0, 0, 0],
        [3, 1, 2, 1, 1, 0, 0, 0, 0, 0],
        [3, 0, 1, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert run_table(slots[:0], lens[:0], {}).shape == (3, 0)
