"""Run by test_packed_kernels.py with TRITON_INTERPRET=1, which Triton reads when it is imported.

float32 inputs: what differs from the twins is the order of sums.
"""

import torch

from kernels.device import DeviceFacts
from kernels.gemm import packed_kernels, packed_weight
from kernels.gemm.packed_kernels import packed_config
from kernels.gemm.packed_weight import PackedWeight
from kernels.tuning import MoEGemmConfig
from tests.unit.kernels.interpreted_moe import check_experts
from tests.unit.kernels.interpreter import assert_close

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
    found = packed_kernels.skinny_gemm(x, weight, device=DEVICE)
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
    return packed_config(rows, columns, DEVICE).splits


def check_e2m1(tokens: int, rows: int, columns: int, group: int, row_scales: bool) -> None:
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    scale = (torch.rand(rows, columns // group) * 3e-2 + 1e-2).half()
    row_scale = torch.rand(rows, 1) + 0.5 if row_scales else None
    weight = PackedWeight(codes, scale, None, 4, group, columns, True, row_scale)
    x, bias = torch.randn(tokens, columns), torch.randn(rows)
    expected = packed_weight.weight_only_linear(x, weight)
    found = packed_kernels.skinny_gemm(x, weight, device=DEVICE)
    assert_close(found, expected, atol=2e-3, rtol=1e-5)
    partials = packed_kernels.split_k_partials(x, weight, bias, device=DEVICE)
    assert_close(partials.view(-1, tokens, rows).sum(0), expected + bias, atol=2e-3, rtol=1e-5)


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
    check_experts(9, (10, 64, 96, 2), "w4a16", MoEGemmConfig(16, 32, 32, 2, 4))
    print("agreed")
