"""Run by interpreted.py.

float32 inputs: what differs from the twins is the order of sums.
"""

from dataclasses import replace

import torch

from kernels.device import DeviceFacts
from kernels.gemm import (
    int8_kernels,
    int8_weight,
    packed_kernels,
    packed_tiles,
    packed_weight,
    quantizing,
)
from kernels.gemm.int8_weight import Int8Weight
from kernels.gemm.packed_tiles import SkinnyConfig
from kernels.gemm.packed_weight import PackedWeight
from kernels.gemm.skinny_gemm import summed
from kernels.plain import rms_norm, silu_and_mul
from kernels.tuning import MoEGemmConfig, MoETilesConfig
from tests.unit.kernels.interpreted_moe import check_experts
from tests.unit.kernels.interpreted_moe import check_packed as check_packed_experts
from tests.unit.kernels.interpreter import assert_close

INT8 = int8_kernels.GemmConfig(16, 64, 64, 2, 4)
DEVICE = DeviceFacts("cuda", num_sms=8, shared_memory_bytes=1 << 17)  # K is split


def make(rows: int, columns: int, bits: int, group: int, zeros: bool) -> PackedWeight:
    codes = torch.randint(256, (rows, columns * bits // 8), dtype=torch.uint8)
    count = columns // group
    scale = (torch.rand(rows, count) * 3e-2 + 1e-2).half()
    zero = torch.randint(1 << bits, (rows, count), dtype=torch.uint8) if zeros else None
    return PackedWeight(codes, scale, zero, bits, group, columns)


def check(tokens: int, rows: int, columns: int, bits: int, group: int, zeros: bool) -> int:
    weight, x = make(rows, columns, bits, group, zeros), torch.randn(tokens, columns)
    assert packed_weight.has_kernels(weight)
    expected = packed_weight.weight_only_linear(x, weight)
    found = summed(packed_kernels.split_k_partials, x, weight, device=DEVICE)
    assert_close(found, expected, atol=2e-3 * (1 + 15 * (bits == 8)), rtol=1e-5)
    for bias in (None, torch.randn(rows)):
        partials = packed_kernels.split_k_partials(x, weight, bias, device=DEVICE)
        total = partials.view(-1, tokens, rows).sum(0)
        wanted = expected if bias is None else expected + bias
        assert_close(total, wanted, atol=2e-3 * (1 + 15 * (bits == 8)), rtol=1e-5)
    wrong = PackedWeight(
        weight.codes, weight.scale.flip(0), weight.zero, bits, group, columns
    )  # a control: the check sees the scales of other rows
    assert (packed_weight.weight_only_linear(x, wrong) - expected).abs().max() > 1
    return 1 if partials.dim() == 2 else len(partials)


def check_e2m1(tokens: int, rows: int, columns: int, group: int, row_scales: bool) -> None:
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // group) * 3e-2 + 1e-2).half()
    row_scale = torch.rand(rows, 1) + 0.5 if row_scales else None
    weight = PackedWeight(codes, scale, None, 4, group, columns, True, row_scale)
    x, bias = torch.randn(tokens, columns), torch.randn(rows)
    expected = packed_weight.weight_only_linear(x, weight)
    found = summed(packed_kernels.split_k_partials, x, weight, device=DEVICE)
    assert_close(found, expected, atol=2e-3, rtol=1e-5)
    partials = packed_kernels.split_k_partials(x, weight, bias, device=DEVICE)
    assert_close(partials.view(-1, tokens, rows).sum(0), expected + bias, atol=2e-3, rtol=1e-5)


def check_e2m1_codes() -> None:
    """Every code has exactly its value: a row of each byte, times a one at either place of it."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 64).contiguous()
    weight = PackedWeight(codes, torch.ones(256, 1).half(), None, 4, 128, 128, True)
    found = summed(packed_kernels.split_k_partials, torch.eye(2, 128), weight, device=DEVICE)
    assert found.equal(packed_weight.dequantize(weight, torch.float32)[:, :2].t())
    assert found[0, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def check_tiles(tokens: int, rows: int, columns: int, group: int, zeros: bool) -> None:
    weight = packed_weight.tiled(make(rows, columns, 4, group, zeros))
    x, bias = torch.randn(tokens, columns), torch.randn(rows)
    expected = packed_weight.weight_only_linear(x, weight)
    for config in (None, SkinnyConfig(1), SkinnyConfig(columns // 128, pair=True)):
        partials = packed_tiles.split_k_partials(x, weight, bias, device=DEVICE, config=config)
        assert config is None or len(partials.view(-1, tokens, rows)) == config.splits
        total = partials.view(-1, tokens, rows).sum(0)
        assert_close(total, expected + bias, atol=2e-3, rtol=1e-5)
    found = summed(packed_tiles.split_k_partials, x, weight, device=DEVICE)
    assert_close(found, expected, atol=2e-3, rtol=1e-5)
    for config in (None, SkinnyConfig(1, pair=True)):
        found = packed_tiles.linear_swiglu(x, weight, bias, device=DEVICE, config=config)
        assert_close(found, silu_and_mul(expected + bias), atol=4e-3, rtol=1e-4)
    wide = packed_tiles.dequantized(weight, torch.float32, device=DEVICE)
    assert wide.equal(packed_weight.dequantize(weight, torch.float32))
    part = torch.empty(64, columns)
    packed_tiles.dequantize(weight, part, 64, device=DEVICE)
    assert part.equal(wide[64:128])
    wrong = replace(weight, scale=weight.scale.flip(1))  # a control, as above
    assert (packed_weight.weight_only_linear(x, wrong) - expected).abs().max() > 1


def check_int8(tokens: int, rows: int, columns: int) -> None:
    values = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    weight, x = Int8Weight(values, torch.rand(rows, 1) * 3e-3 + 1e-3), torch.randn(tokens, columns)
    x[0] = 0
    found = quantizing.quantize_activations(x, torch.int8, columns, pdl=False)
    wanted = int8_weight.quantize_activations(x)
    assert found.values[:tokens].equal(wanted[0]) and found.scale[:tokens].equal(wanted[1])
    norm, added = torch.randn(columns), torch.randn(3, tokens, columns)
    for term in (None, added[0], added):
        residual = x.clone()
        found = quantizing.norm_quantize(term, residual, norm, 1e-6, torch.int8, columns, pdl=False)
        total = x if term is None else x + term.view(-1, tokens, columns).sum(0)
        assert_close(residual, total, atol=1e-6, rtol=1e-6)
        wanted = int8_weight.quantize_activations(rms_norm(residual, norm, 1e-6))
        assert_close(found.scale[:tokens], wanted[1], atol=1e-7, rtol=1e-6)
        far = (found.values[:tokens].int() - wanted[0].int()).abs()
        assert far.max() <= 1  # at a half
    expected = int8_weight.w8a8_linear(x, weight)
    partials = int8_kernels.split_k_partials(x, weight, device=DEVICE)
    assert_close(partials.view(-1, tokens, rows).sum(0), expected, atol=1e-4, rtol=1e-5)
    assert int8_kernels.gemm(x, weight, device=DEVICE, config=INT8).equal(expected)
    found = int8_kernels.gemm(x, weight, device=DEVICE, config=INT8, is_swiglu=True)
    assert_close(found, silu_and_mul(expected), atol=1e-2, rtol=1e-4)
    x[0, 3] = float("nan")  # integers have none: the scale tells
    for found in (
        int8_weight.w8a8_linear(x, weight),
        int8_kernels.gemm(x, weight, device=DEVICE, config=INT8),
    ):
        assert found.isfinite().all(1).tolist() == [False] + [True] * (tokens - 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    splits = {
        check(1, 64, 512, 4, 128, True), check(16, 48, 256, 4, 32, False),
        check(3, 144, 384, 4, 64, True), check(5, 32, 256, 4, 256, True),
        check(2, 64, 256, 8, 64, False), check(7, 1024, 128, 8, 128, True),
    }  # fmt: skip
    assert splits >= {1, 2, 4}, splits
    check_e2m1(3, 48, 256, 16, True)
    check_e2m1(16, 64, 512, 32, False)
    check_e2m1_codes()
    check_experts(9, (10, 64, 96, 2), "w4a16", MoEGemmConfig(16, 32, 32, 2, 4))
    check_experts(9, (5, 128, 256, 2), "int8", MoEGemmConfig(16, 32, 64, 2, 4, w8a8=True))
    tiles = MoETilesConfig(16, 2)
    check_packed_experts(1, (4, 256, 128, 2), "w4a16", 32, tiles)
    check_packed_experts(20, (3, 128, 128, 2), "w4a16", 64, tiles, zeros=True)
    check_packed_experts(20, (3, 128, 128, 2), "w4a16", 16, tiles, zeros=True)
    check_packed_experts(5, (3, 256, 128, 2), "w8a16", 0, tiles)
    check_packed_experts(20, (3, 256, 128, 2), "nvfp4", 16, tiles)
    check_packed_experts(5, (3, 128, 256, 2), "mxfp4", 32, tiles)
    check_packed_experts(5, (3, 256, 128, 2), "mxfp8", 32, tiles)
    check_tiles(1, 128, 256, 256, True)
    check_tiles(16, 256, 256, 64, True)
    check_tiles(70, 128, 128, 128, False)  # in two blocks
    check_tiles(9, 128, 384, 32, False)
    check_int8(3, 128, 512)
    check_int8(20, 64, 256)
    print("agreed")
