"""The Gluon kernel of FP8 experts against its twin, emulated on a CPU; `tests/gpu` has the rest."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from kernels import plain
from kernels.device import KNOWN_DEVICES
from kernels.experts import moe_warpgroups
from kernels.experts.moe_routing import Routing
from kernels.experts.moe_weights import ExpertWeights
from kernels.gemm.fp8_weight import BLOCK, E4M3, Fp8Weight, quantize_activations, w8a8_linear
from kernels.gemm.quantizing import Quantized
from tests.unit.kernels.gluon_emulator import Cta, Pointer, Tiles, emulated

HIDDEN, SIZE = 256, 128


class Launcher:
    """Stands in for the kernel, and runs its CTAs on the CPU."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*arguments: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            given = [as_argument(argument) for argument in arguments]
            constants["DTYPE"] = torch.bfloat16
            for tile in range(grid[1]):
                for part in range(grid[0]):
                    cta = Cta((part, tile), num_warps)
                    emulated(KERNEL, cta, REPLACED)(*given, **constants)
                    assert not any((cta.group, cta.groups, cta.products)), "ends before its copies"

        return launch


KERNEL = moe_warpgroups._grouped_kernel
REPLACED = {
    "swiglu": lambda gate, up: plain.silu_and_mul(torch.cat((gate, up), 1)),
    "amax_of": lambda x: x.abs().amax(1),
    "larger": torch.maximum,
    "scale_of": lambda amax, most: torch.where(amax == 0, 1.0, amax / torch.tensor(most)),
    "quotient": lambda x, scale: x / scale,
}


def tiles_of(matrix: Tensor, size: list[int], _: object) -> Tiles:
    return Tiles(matrix, size)


def as_argument(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    is_scale = argument.dim() == 2 and argument.stride(0) == 1  # contiguous columns
    return Pointer((argument.t() if is_scale else argument).reshape(-1))


def routing_of(experts: list[int], tile: int) -> Routing:
    """Routing of tokens with one expert each."""
    ids = torch.tensor(experts, dtype=torch.int32)
    order = ids.sort(stable=True).indices.int()
    listed, first = [], 0
    for expert in range(max(experts) + 1):
        count = experts.count(expert)
        listed += [(expert, first + at, min(tile, count - at)) for at in range(0, count, tile)]
        first += count
    tiles = torch.tensor([*listed, (0, 0, 0)], dtype=torch.int32).t().contiguous()
    places = torch.empty_like(order)
    places[order.long()] = torch.arange(len(order), dtype=torch.int32)
    return Routing(ids[:, None], torch.ones(len(ids), 1), order, places, tiles)


def made_weight(count: int, rows: int, columns: int, is_block: bool) -> list[Fp8Weight]:
    per = (BLOCK, BLOCK) if is_block else (1, columns)
    return [
        Fp8Weight(
            (torch.randn(rows, columns) * 60).clamp(-448, 448).to(E4M3),
            (torch.rand(rows // per[0], columns // per[1]) + 0.5) / 500,
            *per,
        )
        for _ in range(count)
    ]


def stacked(weights: list[Fp8Weight]) -> ExpertWeights:
    values = torch.stack([weight.values.view(torch.uint8) for weight in weights])
    scale = torch.stack([weight.scale for weight in weights])
    return ExpertWeights(values, scale, weights[0].block_rows)


def quantized(x: Tensor, columns: int) -> Quantized:
    values, scale = quantize_activations(x, columns)
    return Quantized(values, scale.t().contiguous().t(), len(x), x.dtype)


@pytest.mark.parametrize("is_block", [True, False])
def test_both_gemms_agree_with_their_twins(is_block: bool) -> None:
    torch.manual_seed(0)
    routing = routing_of([0] * 3 + [2] * 70 + [0] * 2, moe_warpgroups.TOKENS)
    chosen = routing.experts[routing.order.long(), 0].tolist()
    up = made_weight(3, 2 * SIZE, HIDDEN, is_block)
    down = made_weight(3, HIDDEN, SIZE, is_block)
    weights = stacked(up), stacked(down)
    assert moe_warpgroups.fits(KNOWN_DEVICES["h200"], *weights)
    assert not moe_warpgroups.fits(KNOWN_DEVICES["l40s"], *weights)
    x = torch.randn(75, HIDDEN).bfloat16()
    rows = x[routing.order.long()]
    sums = torch.cat([w8a8_linear(row[None], up[e]) for row, e in zip(rows, chosen, strict=True)])
    expected = plain.silu_and_mul(sums)
    with (
        patch.object(moe_warpgroups, "_grouped_kernel", Launcher()),
        patch.object(moe_warpgroups.TensorDescriptor, "from_tensor", tiles_of),
    ):  # fmt: skip
        given = quantized(x, BLOCK if is_block else HIDDEN)
        if is_block:
            values = torch.empty(75, SIZE, dtype=E4M3)
            scale = torch.full((1, 75), torch.nan).t()
            moe_warpgroups.launch_gemm(given, routing, weights[0], values, scale, is_up=True, pdl=0)
            inner = Quantized(values, scale, 75, x.dtype)
            found = values.float() * scale
            # One bf16 unit beside the edge of a code is a step of that code, a sixteenth.
            assert ((found - expected.float()).abs() <= expected.float().abs() / 8 + 1e-4).all()
            codes, scales = quantize_activations(expected, BLOCK)
            assert ((values.float() == codes.float()).float().mean()) > 0.98
            assert torch.allclose(scale, scales, rtol=1e-2)
        else:
            wide = torch.full((75, SIZE), torch.nan).bfloat16()
            moe_warpgroups.launch_gemm(given, routing, weights[0], wide, None, is_up=True, pdl=0)
            assert torch.allclose(wide, expected, rtol=2e-2, atol=1e-3)
            inner = quantized(wide, SIZE)
        out = torch.full((75, HIDDEN), torch.nan).bfloat16()
        moe_warpgroups.launch_gemm(inner, routing, weights[1], out, None, is_up=False, pdl=0)
    exact = (inner.values.float() * inner.scale).double()
    for place, expert in enumerate(chosen):
        matrix = down[expert]
        scales = matrix.scale.repeat_interleave(matrix.block_rows, 0).double()
        wide = matrix.values.double() * scales
        assert torch.allclose(out[place].double(), wide @ exact[place], rtol=1e-2, atol=1e-3)
