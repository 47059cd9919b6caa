"""The experts' kernels against their plain twins; a part of interpreted_kernels.py."""

from functools import partial

import torch
from torch import nn

from kernels import plain
from kernels.device import DeviceFacts
from kernels.experts import moe_bytes, moe_gemm, moe_tiles, shared_gate
from kernels.experts.moe_routing import route
from kernels.experts.moe_weights import ExpertWeights
from kernels.gemm.fp8_weight import E4M3
from kernels.tuning import MoEGemmConfig, MoEGemvConfig, MoETilesConfig
from services.common.model_spec import MoESpec, QuantizationSpec
from services.common.nn.experts import Experts, Router
from services.common.nn.experts import moe as plain_moe
from services.common.nn.formats import method_of
from services.common.nn.linear import Linear
from services.common.nn.weights import materialize
from services.decoder.operations.moe import MoEKernels, weights_of
from tests.cases import THOROUGH
from tests.quantized_experts import quantized_activations
from tests.unit.kernels.interpreter import assert_close

GEMV = MoEGemvConfig(up_rows=4, up_columns=64, down_rows=8, down_columns=64)
# Several CTAs share a scale of 128 rows.
FP8_GEMV = MoEGemvConfig(up_rows=16, up_columns=64, down_rows=64, down_columns=64)


def made_experts(
    count: int, hidden: int, size: int, weight_format: str, group: int = 32, zeros: bool = False
) -> Experts:
    with torch.device("meta"):
        experts = Experts(count, hidden, size)
        if weight_format != "plain":
            group = 0 if "fp8" in weight_format else group
            method = method_of(
                QuantizationSpec(format=weight_format, group_size=group, symmetric=not zeros)  # type: ignore[arg-type]
            )
            for stack in experts.stacks.values():
                stack.set_method(method)
    materialize(experts, "cpu", torch.float32)
    for name, parameter in experts.named_parameters():
        if parameter.dtype == E4M3:
            parameter.data.copy_((torch.randn(parameter.shape) * 60).clamp(-448, 448))
        elif parameter.dtype == torch.int32:  # packed
            parameter.data.random_(-(1 << 31), 1 << 31)
        elif parameter.dtype in (torch.uint8, torch.int8):
            least = -127 if parameter.dtype == torch.int8 else 0
            parameter.data.random_(least, 128 if least else 256)
        elif "row_scale" in name:  # files hold its inverse
            parameter.data.copy_((torch.rand(parameter.shape) + 0.5) / 10)
        elif weight_format.startswith("mx") and "scale" in name:  # exponents
            least = 115 if weight_format == "mxfp8" else 120
            parameter.data.copy_(torch.randint(least, least + 4, parameter.shape))
        elif "scale" in name:  # a factor of 3 apart, so that a wrong one shows
            least = 50 if weight_format == "w4a16" else 500
            parameter.data.copy_((torch.rand(parameter.shape) + 0.5) / least)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
    for stack in experts.stacks.values():
        stack.method.process_weights_after_loading(stack)
    return experts


def check_routing(num_tokens: int, num_experts: int, top_k: int, tile: int, *, normalize: bool):
    """Ties, and a row that is not finite."""
    logits = (torch.randn(num_tokens, num_experts) * 2).bfloat16()
    logits[0] = 1.0
    is_finite = torch.ones(num_tokens, dtype=torch.bool)
    if num_tokens > 1:
        logits[1], is_finite[1] = torch.nan, False
    found = route(logits, top_k, normalize=normalize, dtype=torch.bfloat16, tile=tile)
    experts, weights = plain.route(logits, top_k, normalize=normalize)
    assert torch.equal(found.experts[is_finite].long(), experts[is_finite])
    expected = weights[is_finite].float()
    assert_close(found.weights[is_finite], expected, atol=1e-6, rtol=8e-3)
    assert torch.equal(found.weights[is_finite].bfloat16().float(), found.weights[is_finite])
    assert found.weights[~is_finite].isnan().all()
    ids = found.experts.flatten().long()
    assert 0 <= int(ids.min()) <= int(ids.max()) < num_experts
    assert torch.equal(found.order.long(), ids.sort(stable=True).indices)
    assert torch.equal(found.places[found.order.long()].long(), torch.arange(len(ids)))
    counts = ids.bincount(minlength=num_experts)
    wanted = [
        [expert, int(end - size) + first, min(tile, int(size) - first)]
        for expert, (end, size) in enumerate(zip(counts.cumsum(0), counts, strict=True))
        for first in range(0, int(size), tile)
    ]
    listed = found.tiles.t().tolist()
    assert listed[: len(wanted)] == wanted
    assert all(rows == 0 for _, _, rows in listed[len(wanted) :])


def check_experts(
    num_tokens: int, sizes: tuple[int, int, int, int], weight_format: str,
    config: MoEGemvConfig | MoEGemmConfig,
) -> None:  # fmt: skip
    """`sizes`: experts, hidden size, size of an expert, experts per token."""
    count, hidden, size, top_k = sizes
    experts = made_experts(count, hidden, size, weight_format)
    with torch.device("meta"):
        router = Router(hidden, count, top_k, normalize=num_tokens % 2 == 0)
    router.weight = nn.Parameter(torch.randn(count, hidden) / hidden**0.5, requires_grad=False)
    x, residual = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden)
    if isinstance(config, MoEGemvConfig):
        kernels = MoEKernels(
            DeviceFacts("cpu"), MoESpec(num_experts=count, top_k=top_k, intermediate_size=size), 0
        )
        expected = residual + plain_moe(x, router, experts, residual)
        kernels.gemv(x, router, experts, residual, config=config)
    else:
        with quantized_activations(are_quantized=config.w8a8 and weight_format != "int8"):
            expected = residual + plain_moe(x, router, experts, residual)
        assert (expected - residual).std() > 0.1
        routing = route(
            router(x), top_k, normalize=router.normalize, dtype=torch.float32, tile=config.tokens
        )
        stacks = experts.stacks.values()
        if weight_format == "int8":
            up, down = (ExpertWeights.of(stack.method.weight(stack)) for stack in stacks)
        else:
            up, down = (weights_of(stack, torch.float32) for stack in stacks)
        gemm = partial(moe_gemm.launch_gemm, config=config, pdl=False)
        moe_gemm.grouped_experts(x, routing, up, down, residual, gemm, pdl=False)
    assert_close(residual, expected, atol=2e-5, rtol=2e-5)


def check_packed(
    num_tokens: int, sizes: tuple[int, int, int, int], weight_format: str, group: int,
    config: MoETilesConfig, *, zeros: bool = False,
) -> None:  # fmt: skip
    """As `check_experts`, of packed codes, in tiles if they fit."""
    count, hidden, size, top_k = sizes
    experts = made_experts(count, hidden, size, weight_format, group, zeros)
    with torch.device("meta"):
        router = Router(hidden, count, top_k, normalize=True)
    router.weight = nn.Parameter(torch.randn(count, hidden) / hidden**0.5, requires_grad=False)
    x, residual = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden)
    expected = residual + plain_moe(x, router, experts, residual)
    assert (expected - residual).std() > 0.1
    routing = route(router(x), top_k, normalize=True, dtype=torch.float32, tile=config.tokens)
    up, down = (stack.method.weight(stack) for stack in experts.stacks.values())
    assert (up.zero is not None) == zeros
    module = moe_tiles if up.is_tiled else moe_bytes
    assert (weight_format == "w4a16" and group >= 32) == up.is_tiled == down.is_tiled
    assert up.is_tiled or (moe_bytes.fits(up) and moe_bytes.fits(down))
    gemm = partial(module.launch_gemm, config=config, pdl=False)
    moe_gemm.grouped_experts(x, routing, up, down, residual, gemm, pdl=False)
    assert_close(residual, expected, atol=2e-4, rtol=2e-4)


def check_shared_gate(num_tokens: int, hidden: int, num_partials: int) -> None:
    x, residual = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden)
    gate = Linear(hidden, 1)
    gate.weight = nn.Parameter(torch.randn(1, hidden) / hidden**0.5, requires_grad=False)
    out = torch.randn(num_partials, num_tokens, hidden) if num_partials else torch.randn_like(x)
    expected = residual + plain.shared_gate(out, x, gate, residual)
    shared_gate.add(out, x, gate.weight, residual)
    assert_close(residual, expected, atol=2e-5, rtol=2e-5)


def check_all() -> None:
    """All of a mixture's kernels."""
    for case in (
        (1, 8, 2, 16),
        (5, 6, 3, 16),
        (64, 128, 8, 16),
        # The last: more than a CTA holds at once.
        *([(70, 128, 8, 32), (150, 60, 4, 64), (1100, 6, 2, 64)] if THOROUGH else []),
    ):
        for normalize in (False, True) if case[0] <= 5 else (True,):  # of each row alone
            check_routing(*case, normalize=normalize)
    check_experts(1, (4, 64, 32, 2), "plain", GEMV)
    check_experts(2, (6, 96, 48, 3), "plain", GEMV)  # sizes and top_k are padded
    check_experts(9, (4, 64, 32, 2), "plain", MoEGemmConfig(16, 32, 32, 2, 4))
    check_experts(40, (6, 96, 48, 3), "plain", MoEGemmConfig(16, 32, 32, 2, 4))
    for weight_format in ("fp8_block", "fp8_channel"):
        check_experts(2, (3, 256, 128, 2), weight_format, FP8_GEMV)
        check_experts(20, (3, 256, 128, 2), weight_format, MoEGemmConfig(16, 64, 64, 2, 4))
    check_experts(2, (3, 128, 192, 2), "fp8_block", FP8_GEMV)  # scales of gate and up are repeated
