"""What the dispatch table picks for packed integers compiles for known GPUs, and fits them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.device import KNOWN_DEVICES
from kernels.gemm import int8_kernels, packed_kernels, packed_tiles, packed_weight
from kernels.gemm.int8_weight import Int8Weight
from kernels.gemm.packed_weight import PackedWeight
from services.common.nn import int8, packed
from services.common.nn.packed import BYTES_TOKENS
from services.decoder.operations import table
from services.decoder.operations.table import KernelFacts
from tests.cases import first
from tests.gpu_compiler import compiled_launches

# The first two have the least shared memory, and GEMMs of their own. An H100 compiles as an H200.
_FIRST = ("l40s", "h200")
DEVICES = first(2, [*_FIRST, *(name for name in KNOWN_DEVICES if name not in (*_FIRST, "h100"))])
pytestmark = pytest.mark.thorough


def weight_of(rows: int, columns: int, bits: int, group: int, zeros: bool) -> PackedWeight:
    scale = torch.empty(rows, columns // group, dtype=torch.float16)
    zero = torch.empty(scale.shape, dtype=torch.uint8) if zeros else None
    codes = torch.empty(rows, columns * bits // 8, dtype=torch.uint8)
    return PackedWeight(codes, scale, zero, bits, group, columns)


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_of_bytes_compile_and_fit(device: str) -> None:
    facts, weight = KNOWN_DEVICES[device], weight_of(4096, 12288, 8, 64, False)
    kernels = table.resolve(
        KernelFacts(facts, TEXT_SHAPES["8b"], torch.bfloat16, weight_format="w8a16")
    )
    assert kernels.choose("project", BYTES_TOKENS).name == "packed_skinny_gemm"
    assert kernels.choose("w8a16_linear", BYTES_TOKENS + 1).name == "plain"
    with compiled_launches(facts) as found:
        for num_tokens in (1, BYTES_TOKENS):
            x = torch.empty(num_tokens, 12288, dtype=torch.bfloat16)
            kernels.call("w8a16_linear", x, weight)
    launches = [launch for launch in found if launch.name == "_skinny_kernel"]
    assert len(launches) == 2
    for launch in launches:
        assert launch.shared_bytes <= facts.shared_memory_bytes
        assert "mma" in launch.ptx


def test_the_kernel_of_bytes_takes_no_more_tokens_than_it_has_room_for() -> None:
    """An override is used for any number of them."""
    facts = KernelFacts(
        KNOWN_DEVICES["h200"], TEXT_SHAPES["8b"], torch.bfloat16, weight_format="w8a16"
    )
    kernels = table.resolve(facts, {"w8a16_linear": "skinny_gemm"})
    weight = weight_of(64, 512, 8, 64, False)
    with compiled_launches(facts.device) as found:
        for num_tokens in (BYTES_TOKENS, BYTES_TOKENS + 1):
            x = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
            assert kernels.call("w8a16_linear", x, weight).shape == (num_tokens, 64)
    assert sum(launch.name == "_skinny_kernel" for launch in found) == 1


# `make test` has both GEMMs and both kinds of groups.
TILES = [("h200", 128, False), ("l40s", 32, True), ("h200", 32, True), ("l40s", 128, False)]
TILES += [(name, *kind) for name in DEVICES[2:] for kind in ((128, False), (32, True))]


@pytest.mark.parametrize(("device", "group", "zeros"), first(2, TILES))
def test_kernels_of_tiles_compile_and_fit(device: str, group: int, zeros: bool) -> None:
    facts = KernelFacts(
        KNOWN_DEVICES[device], TEXT_SHAPES["8b"], torch.bfloat16, weight_format="w4a16"
    )
    kernels = table.resolve(facts)
    for operation in ("project", "linear_swiglu", "w4a16_linear"):
        assert kernels.choose(operation, packed.SKINNY_TOKENS).name == "tiles"
    assert kernels.choose("project", packed.SKINNY_TOKENS + 1).name == "linear"
    weight = packed_weight.tiled(weight_of(4096, 512, 4, group, zeros))
    with compiled_launches(facts.device) as found:
        for num_tokens in (1, 16, packed.SKINNY_TOKENS, 1008):
            x = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
            kernels.call("w4a16_linear", x, weight)
        for num_tokens in (1, packed.SKINNY_TOKENS):
            x = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
            packed_tiles.linear_swiglu(x, weight, device=facts.device)
    names = [launch.name for launch in found if launch.name != "_reduce_kernel"]
    few = "_skinny_kernel"
    assert names == [few, few, few, "_dequantize_kernel", few, few]
    for launch in found:
        assert launch.shared_bytes <= facts.device.shared_memory_bytes, launch
        if launch.name == few:
            assert "mma" in launch.ptx
            assert "lop3" in launch.ptx


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_of_int8_compile_and_fit(device: str) -> None:
    facts = KernelFacts(
        KNOWN_DEVICES[device], TEXT_SHAPES["8b"], torch.bfloat16, weight_format="int8"
    )
    kernels = table.resolve(facts)
    assert kernels.choose("project", int8.SKINNY_TOKENS).name == "int8_skinny_gemm"
    many = kernels.choose("int8_linear", int8.SKINNY_TOKENS + 1).name
    assert many == ("gemm" if facts.device.is_hopper else "int_mm")
    weight = Int8Weight(torch.empty(4096, 512, dtype=torch.int8), torch.empty(4096, 1))
    with compiled_launches(facts.device) as found:
        for num_tokens in (1, int8.SKINNY_TOKENS):
            x = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
            kernels.call("int8_linear", x, weight)
        if facts.device.is_hopper:
            for num_tokens in (64, 128, 1008):
                x = torch.empty(num_tokens, 512, dtype=torch.bfloat16)
                int8_kernels.gemm(x, weight, device=facts.device)
                int8_kernels.gemm(x, weight, device=facts.device, is_swiglu=True)
    assert len([launch for launch in found if launch.name == "_skinny_kernel"]) == 2
    for launch in found:
        assert launch.shared_bytes <= facts.device.shared_memory_bytes, launch


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
