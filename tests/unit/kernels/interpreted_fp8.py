"""Run by interpreted.py.

float32 inputs: what differs from the twins is the order of sums.
"""

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from kernels.device import DeviceFacts
from kernels.gemm import fp8_kernels, fp8_w8a8, fp8_weight, quantizing
from kernels.gemm.fp8_weight import E4M3, Fp8Weight
from kernels.gemm.skinny_gemm import summed
from kernels.plain import rms_norm, silu_and_mul
from kernels.tuning import MoEGemmConfig
from services.common.nn import fp8
from services.common.nn.fp8 import SKINNY_W8A8_TOKENS
from tests.fp8_checkpoints import quantize
from tests.unit.kernels.interpreted_moe import check_experts
from tests.unit.kernels.interpreter import assert_close

EPS = 1e-6
DEVICE = DeviceFacts("cuda", num_sms=8, shared_memory_bytes=1 << 17)  # K is split
_convert = interpreter._convert_float


def convert(values: np.ndarray, kind: tl.dtype, wanted: tl.dtype, mode: object) -> np.ndarray:
    """The interpreter's own conversion to e4m3 loses the carry from mantissa to exponent."""
    if wanted == tl.float8e4nv and kind == tl.float32:
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _convert(values, kind, wanted, mode)


def make(rows: int, columns: int, block: bool) -> Fp8Weight:
    values, scale = quantize(torch.randn(rows, columns), (128, 128) if block else (1, None))
    return Fp8Weight(values, scale, *((128, 128) if block else (1, columns)))


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, atol=1e-3, rtol=1e-5)


def check_weight_only(num_tokens: int, rows: int, columns: int, block: bool) -> None:
    weight, x = make(rows, columns, block), torch.randn(num_tokens, columns)
    expected = fp8.weight_only_linear(x, weight)
    close(summed(fp8_kernels.split_k_partials, x, weight, device=DEVICE), expected)
    for bias in (None, torch.randn(rows)):
        added = torch.zeros(rows) if bias is None else bias
        partials = fp8_kernels.split_k_partials(x, weight, bias, device=DEVICE)
        close(partials.view(-1, num_tokens, rows).sum(0), expected + added)
    if num_tokens > 1:
        return
    close(fp8_kernels.gemv(x, weight, device=DEVICE), expected)
    norm, residual = torch.randn(columns), torch.randn(1, rows)
    normed = fp8.weight_only_linear(rms_norm(x, norm, EPS), weight)
    for bias in (None, torch.randn(rows)):
        added = torch.zeros(rows) if bias is None else bias
        close(fp8_kernels.norm_gemv(x, norm, EPS, weight, bias, device=DEVICE), normed + added)
        found = fp8_kernels.norm_swiglu_gemv(x, norm, EPS, weight, bias, device=DEVICE)
        assert_close(found, silu_and_mul(normed + added), atol=1e-2, rtol=1e-4)
        total = residual.clone()
        fp8_kernels.gemv_add(x, weight, bias, total, device=DEVICE)
        close(total, residual + expected + added)


def check_quantization(num_tokens: int, columns: int, block_columns: int) -> None:
    x = torch.randn(num_tokens, columns) * torch.logspace(-20, 20, num_tokens)[:, None]
    x[0, :block_columns] = 0
    values, scale = fp8_weight.quantize_activations(x, block_columns)
    found = quantizing.quantize_activations(x, E4M3, block_columns, pdl=False)
    assert found.num_tokens == num_tokens and len(found.values) % 4 == 0
    assert found.scale[:num_tokens].equal(scale)
    assert found.values[:num_tokens].float().equal(values.float())
    assert not found.values[num_tokens:].float().any()
    assert (found.scale[num_tokens:] == 1).all()


def check_swiglu_quantization(num_tokens: int, columns: int, block_columns: int) -> None:
    """A scale may differ by a rounding of the activation, a value by a step of e4m3."""
    gate_up = torch.randn(num_tokens, 2 * columns)
    gate_up[0, :block_columns] = 0
    expected, scale = fp8_weight.quantize_activations(silu_and_mul(gate_up), block_columns)
    found = quantizing.swiglu_quantize(gate_up, E4M3, block_columns, pdl=False)
    assert found.num_tokens == num_tokens and found.dtype == gate_up.dtype
    assert_close(found.scale[:num_tokens], scale, atol=0, rtol=1e-5)
    values, expected = found.values[:num_tokens].float(), expected.float()
    assert (values != expected).float().mean() < 0.01
    assert_close(values, expected, atol=1e-2, rtol=0.13)
    assert not found.values[num_tokens:].float().any()
    twin = expected * scale.repeat_interleave(columns // scale.shape[1], 1)
    assert_close(found.dequantized(), twin, atol=1e-2, rtol=0.13)


def check_what_is_no_number() -> None:
    """It is not hidden, and does not reach other tokens."""
    weight, x = make(256, 256, block=True), torch.randn(3, 256)
    x[0, 3], x[2, 130] = float("nan"), float("inf")
    for found in (
        fp8_weight.w8a8_linear(x, weight),
        summed(fp8_w8a8.split_k_partials, x, weight, device=DEVICE),
    ):
        assert found.isfinite().all(1).tolist() == [False, True, False]


def check_norm(num_tokens: int, columns: int, block_columns: int) -> None:
    """Scales differ by the order of the norm's sum, values by a step of e4m3 where it decides."""
    residual, norm = torch.randn(num_tokens, columns), torch.randn(columns)
    partials = torch.randn(2, num_tokens, columns)
    for x in (None, partials[0], partials):
        total = residual if x is None else residual + x.view(-1, num_tokens, columns).sum(0)
        expected, scale = fp8_weight.quantize_activations(rms_norm(total, norm, EPS), block_columns)
        memory = residual.clone()
        found = quantizing.norm_quantize(x, memory, norm, EPS, E4M3, block_columns, pdl=False)
        close(memory, total)
        assert_close(found.scale[:num_tokens], scale, atol=0, rtol=1e-5)
        values, expected = found.values[:num_tokens].float(), expected.float()
        assert (values != expected).float().mean() < 0.01
        assert_close(values, expected, atol=1e-2, rtol=0.13)
        assert not found.values[num_tokens:].float().any()


def check_w8a8(num_tokens: int, rows: int, columns: int, block: bool) -> None:
    weight, x = make(rows, columns, block), torch.randn(num_tokens, columns)
    expected = fp8_weight.w8a8_linear(x, weight)
    if block:
        close(fp8_w8a8.triton_gemm(x, weight, device=DEVICE), expected)
    if num_tokens > SKINNY_W8A8_TOKENS:
        return
    close(summed(fp8_w8a8.split_k_partials, x, weight, device=DEVICE), expected)
    bias = torch.randn(rows)
    for config in (None, fp8_w8a8.SkinnyConfig(1, 3), fp8_w8a8.SkinnyConfig(columns // 128, 2)):
        partials = fp8_w8a8.split_k_partials(x, weight, bias, device=DEVICE, config=config)
        close(partials.view(-1, num_tokens, rows).sum(0), expected + bias)
    found = fp8_w8a8.linear_swiglu(x, weight, bias, device=DEVICE)
    assert_close(found, silu_and_mul(expected + bias), atol=1e-2, rtol=1e-4)


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreter._convert_float = convert
    for block in (True, False):
        check_weight_only(1, 256 if block else 48, 256, block)  # gate and up: whole blocks
        check_weight_only(1, 256 if block else 32, 1280, block)  # three tiles, one half full
        check_weight_only(3, 144 if block else 72, 384, block)
        check_weight_only(17, 320, 512, block)
    check_quantization(3, 512, 128)
    check_quantization(5, 1152, 128)
    check_quantization(2, 640, 640)
    check_swiglu_quantization(3, 512, 128)
    check_swiglu_quantization(5, 1152, 128)
    check_swiglu_quantization(2, 640, 640)
    check_what_is_no_number()
    check_norm(3, 512, 128)
    check_norm(2, 640, 640)
    check_w8a8(3, 256, 384, block=True)
    check_w8a8(2, 144, 256, block=False)
    check_w8a8(35, 512, 128, block=True)  # gate and up of two blocks each
    check_w8a8(70, 192, 256, block=True)
    for weight_format in ("fp8_block", "fp8_channel"):
        gemm = MoEGemmConfig(16, 64, 64, 2, 4, w8a8=True)
        check_experts(20, (3, 256, 128, 2), weight_format, gemm)
    print("agreed")
