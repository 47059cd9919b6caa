"""The kernels of a mixture of experts compile for each GPU, and fit its shared memory."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.device import KNOWN_DEVICES
from kernels.experts import shared_gate
from kernels.experts.moe_weights import ExpertWeights
from kernels.gemm.packed_weight import PackedWeight
from services.common.model_spec import QuantizationSpec
from services.common.nn.experts import Experts, Router, StackedLinear
from services.common.nn.formats import method_of
from services.common.nn.fp8 import Fp8Linear
from services.common.nn.linear import Linear
from services.common.nn.packed import PackedLinear
from services.common.nn.weights import materialize
from services.decoder.operations import moe, table
from services.decoder.operations.moe import MoEKernels, weights_of
from services.decoder.operations.ops import Ops
from services.decoder.operations.table import KernelFacts
from tests.cases import first
from tests.gpu_compiler import compiled_launches, copies_see_their_barriers

HIDDEN, SIZE, COUNT = 2048, 768, 4  # as the 30B's, with fewer experts in memory
CASES = [
    ("l40s", "plain"),  # the least shared memory
    ("h200", "fp8_block"),
    ("h200", "plain"),
    ("h200", "fp8_channel"),
    ("a100", "fp8_block"),
    ("b200", "fp8_block"),
]
PACKED = [
    ("nvfp4", 16, "l40s"),
    ("int8", 0, "h200"),
    *(("w4a16", 128, device) for device in ("h200", "l40s", "b200")),
    *(("nvfp4", 16, device) for device in ("a100", "h200", "b200")),
    *(("mxfp4", 32, "l40s"), ("mxfp8", 32, "a100"), ("mxfp8", 32, "b200")),
    *(("w8a16", 0, "h200"), ("int8", 0, "a100")),
]
pytestmark = pytest.mark.thorough


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "weight_format"), first(2, CASES))
def test_what_the_table_picks_compiles_and_fits(
    device: str, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = KernelFacts(
        KNOWN_DEVICES[device], TEXT_SHAPES["30b-a3b"], torch.bfloat16, weight_format
    )
    with torch.device("meta"):
        router = Router(HIDDEN, 128, 8, normalize=True)
        experts = Experts(COUNT, HIDDEN, SIZE)
        if weight_format != "plain":
            for stack in experts.stacks.values():
                stack.set_method(Fp8Linear(QuantizationSpec(format=weight_format)))  # type: ignore[arg-type]
    for module in (router, experts):
        materialize(module, "cpu", torch.bfloat16)

    def as_on_a_gpu(stack: StackedLinear, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
        found = weights_of(stack, dtype)
        values = found.values if found.scale is None else found.values.view(torch.uint8)
        return ExpertWeights(values, found.scale, found.block_rows)

    monkeypatch.setattr(moe, "weights_of", as_on_a_gpu)
    ops = Ops(table.resolve(facts, {"fused_decode_attention": "plain"}))
    with compiled_launches(facts.device) as launches:
        # On the others, what the experts of few tokens share with those of many is compiled once.
        for count in (1, 2, 40, 1008) if facts.device.is_hopper else (1, 1008):
            x = half(count, HIDDEN)
            ops.for_tokens(count).moe(x, router, experts, half(count, HIDDEN))
        for out in (half(8, HIDDEN), torch.empty(4, 8, HIDDEN)):
            shared_gate.add(out, half(8, HIDDEN), half(1, HIDDEN), half(8, HIDDEN), pdl=False)
    compiled = {launch.name for launch in launches}
    assert compiled >= {
        "_route_kernel", "_sort_kernel", "_gate_up_kernel", "_down_kernel", "_grouped_gemm_kernel",
        "_combine_kernel", "_shared_gate_kernel",
    }  # fmt: skip
    for launch in launches:
        assert launch.shared_bytes <= facts.device.shared_memory_bytes, launch.name
        if launch.name == "_combine_kernel":
            assert ".v4" in launch.ptx, "loads elements one by one"
        if launch.name.startswith("_grouped") and facts.device.is_hopper:
            assert "wgmma" in launch.ptx
        if launch.name == "_grouped_kernel":  # of Gluon
            assert copies_see_their_barriers(launch.ptx)
            assert "st.local" not in launch.ptx
            room = facts.device.shared_memory_bytes + 1024
            assert 2 * (launch.shared_bytes + 1024) <= room, "an SM has one CTA"
    in_warp_groups = facts.device.is_hopper and weight_format != "plain"
    assert ("_grouped_kernel" in compiled) == in_warp_groups


@pytest.mark.slow
@pytest.mark.parametrize(("weight_format", "group", "device"), first(2, PACKED))
def test_packed_experts_compile_and_fit(
    weight_format: str, group: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = KNOWN_DEVICES[device]
    with torch.device("meta"):
        router, experts = Router(HIDDEN, 128, 8, normalize=True), Experts(COUNT, HIDDEN, SIZE)
        for stack in experts.stacks.values():
            spec = QuantizationSpec(format=weight_format, group_size=group)  # type: ignore[arg-type]
            stack.set_method(method_of(spec))
    for module in (router, experts):
        materialize(module, "cpu", torch.bfloat16)
    for stack in experts.stacks.values():
        stack.method.process_weights_after_loading(stack)
    if weight_format == "mxfp8":  # bytes, as on a GPU
        of_layer = PackedLinear.weight

        def as_on_a_gpu(self: PackedLinear, layer: Linear) -> PackedWeight:
            found = of_layer(self, layer)
            return replace(found, codes=found.codes.view(torch.uint8))

        monkeypatch.setattr(PackedLinear, "weight", as_on_a_gpu)
    kernels = MoEKernels(gpu, TEXT_SHAPES["30b-a3b"].moe, gpu.supports_pdl)  # type: ignore[arg-type]
    with compiled_launches(gpu) as launches:
        for count in (1, 300, 1008):
            run = kernels.int8 if weight_format == "int8" else kernels.packed
            run(half(count, HIDDEN), router, experts, half(count, HIDDEN))
    found = [launch for launch in launches if launch.name.startswith("_grouped_")]
    assert len(found) == 6
    for launch in found:
        assert launch.shared_bytes <= gpu.shared_memory_bytes
        assert "wgmma" in launch.ptx or not gpu.is_hopper
