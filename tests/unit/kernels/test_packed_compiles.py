"""What the dispatch table picks for packed integers compiles for known GPUs, and fits them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.device import KNOWN_DEVICES
from kernels.gemm import packed_kernels
from kernels.gemm.packed_weight import PackedWeight
from services.common.nn.packed import SKINNY_TOKENS
from services.decoder.operations import table
from services.decoder.operations.table import KernelFacts
from tests.gpu_compiler import compiled_launches

DEVICES = [name for name in KNOWN_DEVICES if name != "h100"]  # which compiles as the H200 does


def weight_of(rows: int, columns: int, bits: int, group: int, zeros: bool) -> PackedWeight:
    scale = torch.empty(rows, columns // group, dtype=torch.float16)
    zero = torch.empty(scale.shape, dtype=torch.uint8) if zeros else None
    codes = torch.empty(rows, columns * bits // 8, dtype=torch.uint8)
    return PackedWeight(codes, scale, zero, bits, group, columns)


@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 128, True), (4, 32, False), (8, 64, False)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_what_the_table_picks_compiles_and_fits(
    device: str, bits: int, group: int, zeros: bool
) -> None:
    facts = KernelFacts(
        KNOWN_DEVICES[device], TEXT_SHAPES["8b"], torch.bfloat16, weight_format=f"w{bits}a16"
    )
    kernels, weight = table.resolve(facts), weight_of(4096, 12288, bits, group, zeros)
    operation = f"w{bits}a16_linear"
    assert kernels.choose("project", SKINNY_TOKENS).name == "packed_skinny_gemm"
    assert kernels.choose(operation, SKINNY_TOKENS + 1).name == "plain"
    with compiled_launches(facts.device) as found:
        for num_tokens in (1, SKINNY_TOKENS):
            x = torch.empty(num_tokens, 12288, dtype=torch.bfloat16)
            kernels.call(operation, x, weight)
    launches = [launch for launch in found if launch.name == "_skinny_kernel"]
    assert len(launches) == 2
    for launch in launches:
        assert launch.shared_bytes <= facts.device.shared_memory_bytes
        assert "mma" in launch.ptx


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_e2m1_compiles(device: str) -> None:
    facts, weight = KNOWN_DEVICES[device], weight_of(4096, 12288, 4, 16, False)
    weight = replace(weight, is_float=True, row_scale=torch.empty(4096, 1))
    with compiled_launches(facts) as found:
        packed_kernels.split_k_partials(torch.empty(1, 12288).bfloat16(), weight, device=facts)
    assert found[0].shared_bytes <= facts.shared_memory_bytes


def test_float32_is_left_to_torch() -> None:
    facts = KernelFacts(
        KNOWN_DEVICES["h200"], TEXT_SHAPES["8b"], torch.float32, weight_format="w4a16"
    )
    assert table.resolve(facts).choose("w4a16_linear", 1).name == "plain"
