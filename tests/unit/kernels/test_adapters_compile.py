"""The kernels of adapters compile for each GPU and fit its shared memory, in few variants."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.adapters import grouped, shrink_expand, token_groups
from kernels.adapters.adapter_tuning import FEW_TOKENS
from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.adapters.group_tokens import group_tokens
from kernels.device import KNOWN_DEVICES
from kernels.gemm import gemv
from services.common.nn.adapter_stack import AdapterStack
from services.common.nn.collectives import ALONE
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations import table
from services.decoder.operations.adapted import adapted
from services.decoder.operations.kernel_facts import KernelFacts
from services.decoder.operations.ops import Ops
from tests.gpu_compiler import compiled_launches

CASES = [
    ("h100", 16, (1, 64, 1000)),
    *(
        pytest.param(device, rank, (1, 64, 1000), marks=pytest.mark.nightly)
        for device in ("h100", "l40s", "a100", "rtx-pro-6000")
        for rank in (64, 256)
    ),
]


def rows_of(slots: Tensor, count: int) -> AdapterRows:
    """The adapters of tokens as a step has them: in groups if there are many tokens."""
    is_many = len(slots) > FEW_TOKENS
    groups = token_groups.group_tokens(slots, count) if is_many else None
    return AdapterRows(slots, count, 0, count, groups=groups)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "rank", "counts"), CASES)
def test_shrink_and_expand_compile_and_fit(device: str, rank: int, counts: tuple[int, ...]) -> None:
    gpu, slots = KNOWN_DEVICES[device], 8
    like = torch.empty(0, dtype=torch.bfloat16)
    layers = ((1024, 256, 256), 1024), ((2048, 2048), 1024), ((1024,), 2048)
    qkv, gate_up, down = (SlotFactors.zeros(*of, slots, rank, like) for of in layers)
    with compiled_launches(gpu) as launches:
        for count in counts:
            rows = rows_of(torch.zeros(count, dtype=torch.int64), slots)
            x, pdl = like.new_empty(count, 1024), 2 * gpu.supports_pdl
            given = {"shared_memory_bytes": gpu.shared_memory_bytes, "pdl": pdl}
            out = torch.empty(2, count, 1536) if count <= 64 else like.new_empty(count, 1536)
            norm = RMSNorm(1024, 1e-6).to(torch.bfloat16)
            first = norm if count == 1 else None
            products = shrink_expand.shrink_adapters(x, first, qkv, rows, **given)
            shrink_expand.expand_adapters(out, products, qkv, rows, **given)
            out = like.new_empty(count, 4096)
            products = shrink_expand.shrink_adapters(x, None, gate_up, rows, **given)
            shrink_expand.expand_adapters_swiglu(out, products, gate_up, rows, **given)
            shrink_expand.expand_swiglu_shrink(out, products, gate_up, down, rows, **given)
            if count > FEW_TOKENS:
                group_tokens(rows.slots, slots)
            if count == 1 and gpu.supports_pdl:
                changes = qkv.changes(rows)
                weight = like.new_empty(1536, 1024)
                gemv.norm_linear(x, norm.weight, 1e-6, weight, pdl=pdl, changes=changes)
    names = {launch.name for launch in launches}
    assert {"_shrink_kernel", "_expand_kernel", "_shrink_groups_kernel"} <= names
    assert ("_expand_groups_kernel" in names) == (1000 in counts and rank <= 64)
    for launch in launches:
        assert launch.shared_bytes <= gpu.shared_memory_bytes, launch.name
        if gpu.supports_pdl and launch.name != "_group_kernel":  # a CTA without tokens waits, too
            assert "griddepcontrol.wait" in launch.ptx


def layer_of(rows: dict[str, int], columns: int, slots: int = 2) -> Linear:
    """A layer with memory for adapters of some slots."""
    with torch.device("meta"):
        made = Linear(columns, rows)
    weight = torch.empty(sum(rows.values()), columns, dtype=torch.bfloat16)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    made.adapters = AdapterStack.of(made, slots, 16, weight, ALONE)
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_token_needs_no_more_launches_than_the_base_model() -> None:
    """The first programs of each GEMV compute the change."""
    text = replace(
        TEXT_SHAPES["8b"], hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2,
        head_dim=64,
    )  # fmt: skip
    facts = KernelFacts(KNOWN_DEVICES["h100"], text, torch.bfloat16)
    ops = Ops(table.resolve(facts))
    kernels = adapted(
        ops.for_tokens(1), AdapterRows(torch.zeros(1, dtype=torch.int64), 2, 0, 2, True)
    )
    norm = RMSNorm(256, 1e-6).to(torch.bfloat16)
    qkv = layer_of({"q_proj": 256, "k_proj": 128, "v_proj": 128}, 256)
    gate_up = layer_of({"gate_proj": 512, "up_proj": 512}, 256)
    o_proj, down = layer_of({"": 256}, 256), layer_of({"": 256}, 512)
    residual = torch.empty(1, 256, dtype=torch.bfloat16)
    with compiled_launches(facts.device) as launches:
        kernels.norm_linear(None, residual, norm, qkv)
        assert kernels.linear_residual(residual.clone(), o_proj, residual) is None
        inner, _ = kernels.norm_swiglu(None, residual, norm, gate_up, down)
        assert inner.shape == (1, 512)
        assert kernels.linear_residual(inner, down, residual) is None
    assert [launch.name for launch in launches] == ["_gemv_kernel"] * 4
    heights = [launch.arguments["num_rows"] for launch in launches]
    assert heights == [512, 256, 512, 256]
    assert [launch.arguments["RANK"] for launch in launches] == [16] * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "device", ["h100", pytest.param("rtx-pro-6000", marks=pytest.mark.nightly)]
)
def test_few_tokens_need_no_more_launches_than_the_base_model(device: str) -> None:
    """The CTAs of each GEMM keep their shared memory, so that as many share an SM."""
    facts = KernelFacts(KNOWN_DEVICES[device], TEXT_SHAPES["8b"], torch.bfloat16)
    ops = Ops(table.resolve(facts))
    rows = AdapterRows(torch.zeros(64, dtype=torch.int64), 8, 0, 8, True)
    norm = RMSNorm(4096, 1e-6).to(torch.bfloat16)
    qkv = layer_of({"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}, 4096, 8)
    gate_up = layer_of({"gate_proj": 12288, "up_proj": 12288}, 4096, 8)
    down = layer_of({"": 4096}, 12288, 8)
    residual = torch.empty(64, 4096, dtype=torch.bfloat16)
    bytes_of: list[list[int]] = []
    for kernels in (ops.for_tokens(64), adapted(ops.for_tokens(64), rows)):
        with compiled_launches(facts.device) as launches:
            kernels.norm_linear(None, residual, norm, qkv)
            inner, _ = kernels.norm_swiglu(None, residual, norm, gate_up, down)
            assert inner.shape == (64, 12288)
            found = kernels.linear_residual(inner, down, residual)
            assert found is not None and found.shape[1:] == (64, 4096)
        names = ["_add_norm_kernel", "_skinny_gemm_kernel"] * 2
        assert [launch.name for launch in launches] == [*names, "_skinny_gemm_kernel"]
        gemms = [launch for launch in launches if launch.name == "_skinny_gemm_kernel"]
        bytes_of.append([launch.shared_bytes for launch in gemms])
    assert max(bytes_of[1]) <= facts.device.shared_memory_bytes
    if device == "h100":  # three CTAs of qkv, and of gate and up, share an SM
        assert bytes_of[0] == bytes_of[1]
        assert all(".maxnreg 168" in launch.ptx for launch in gemms[:2])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prompt_has_seven_launches_more_than_the_base_model() -> None:
    """The kernel that applies SwiGLU shrinks the input of the layer that follows."""
    facts = KernelFacts(KNOWN_DEVICES["h100"], TEXT_SHAPES["8b"], torch.bfloat16)
    ops, slots = Ops(table.resolve(facts)), torch.zeros(1088, dtype=torch.int64)
    kernels = adapted(ops.for_tokens(1088), AdapterRows(slots, 2, 0, 2, True))
    norm = RMSNorm(256, 1e-6).to(torch.bfloat16)
    qkv = layer_of({"q_proj": 256, "k_proj": 128, "v_proj": 128}, 256)
    gate_up = layer_of({"gate_proj": 512, "up_proj": 512}, 256)
    o_proj, down = layer_of({"": 256}, 256), layer_of({"": 256}, 512)
    residual = torch.empty(1088, 256, dtype=torch.bfloat16)
    with torch.inference_mode(), compiled_launches(facts.device) as launches:
        kernels.norm_linear(None, residual, norm, qkv)
        assert kernels.linear_residual(residual.clone(), o_proj, residual) is None
        inner, _ = kernels.norm_swiglu(None, residual, norm, gate_up, down)
        assert kernels.linear_residual(inner, down, residual) is None
    names = [launch.name for launch in launches if "_groups_kernel" in launch.name]
    both = ["_shrink_groups_kernel", "_expand_groups_kernel"]
    assert names == [*both * 3, "_expand_groups_kernel"]


@pytest.mark.slow
def test_kernels_wait_to_start_if_tokens_are_grouped_for_them_alone() -> None:
    """They read the groups before their wait, which the kernel directly before has written."""
    like, slots = torch.empty(0, dtype=torch.bfloat16), torch.zeros(70, dtype=torch.int64)
    layer, x = SlotFactors.zeros((64,), 128, 2, 16, like), like.new_empty(70, 128)
    gpu = KNOWN_DEVICES["h100"]
    given = {"shared_memory_bytes": gpu.shared_memory_bytes, "pdl": 2}
    for rows, waits in ((rows_of(slots, 2), True), (AdapterRows(slots, 2, 0, 2), False)):
        with compiled_launches(gpu) as launches:
            products = shrink_expand.shrink_adapters(x, None, layer, rows, **given)
            shrink_expand.expand_adapters(like.new_empty(70, 64), products, layer, rows, **given)
        assert [launch.name for launch in launches] == [
            "_shrink_groups_kernel", "_expand_groups_kernel",
        ]  # fmt: skip
        for launch in launches:
            assert ("griddepcontrol.wait" in launch.ptx) == waits
            assert ("griddepcontrol.launch_dependents" in launch.ptx) == waits


class _Variants:
    """Stands for a kernel, and notes the constants of its launches."""

    def __init__(self, seen: set[Any]) -> None:
        self.seen = seen

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **constants: Any) -> None:
        kinds = [each.dtype if torch.is_tensor(each) else type(each) for each in arguments]
        self.seen.add((id(self), *kinds, *sorted(constants.items())))


def test_a_model_needs_few_variants_and_no_step_another() -> None:
    """A variant takes up to a second to compile. Layers of the 8B, rank 16, eight slots."""
    like, slots, seen = torch.empty(0, dtype=torch.bfloat16, device="meta"), 8, set[Any]()
    sizes = ((4096, 1024, 1024), 4096), ((4096,), 4096), ((12288, 12288), 4096), ((4096,), 12288)
    layers = [SlotFactors.zeros(rows, columns, slots, 16, like) for rows, columns in sizes]
    norm = RMSNorm(4096, 1e-6)
    given = {"shared_memory_bytes": KNOWN_DEVICES["h100"].shared_memory_bytes, "pdl": 2}

    def step(count: int, first: int = 0, last: int = slots) -> None:
        ids = torch.zeros(count, dtype=torch.int64, device="meta")
        rows = replace(rows_of(ids, slots), first=first, last=last)
        for layer in layers:
            first_of_block = norm if count == 1 and layer.a.shape[1] > 1 else None
            x = like.new_empty(count, layer.a.shape[-1])
            products = shrink_expand.shrink_adapters(x, first_of_block, layer, rows, **given)
            out = like.new_empty(count, sum(layer.sizes))
            if 1 < count <= 64:
                out = torch.empty(2, *out.shape, device="meta")
            is_gate_up, expand = len(layer.sizes) == 2, shrink_expand.expand_adapters
            expand = shrink_expand.expand_adapters_swiglu if is_gate_up else expand
            expand(out, products, layer, rows, **given)
            if is_gate_up:
                shrink_expand.expand_swiglu_shrink(out, products, layer, layers[3], rows, **given)

    few: dict[str, Any] = {f"_{name}_kernel": _Variants(seen) for name in ("shrink", "expand")}
    many: dict[str, Any] = {
        f"_{name}_groups_kernel": _Variants(seen) for name in ("shrink", "expand")
    }
    with mock.patch.multiple(shrink_expand, **few), mock.patch.multiple(grouped, **many):
        for count in (1, 2, 64, 512, 1024, 4096):  # sizes of warm-up and of graphs
            step(count)
        assert len(seen) <= 18
        warm = set(seen)
        for count in (1, 3, 17, 33, 65, 500, 1111, 8000):
            for first, last in ((0, 8), (3, 4), (2, 4), (0, 5), (7, 8)):
                step(count, first, last)
    assert seen == warm
