"""What the dispatch table picks for a layer's GEMMs and their neighbours compiles for each GPU and
fits its shared memory.
"""

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.text_shapes import TEXT_SHAPES
from kernels.attention.heads import ProjectedHeads
from kernels.device import KNOWN_DEVICES
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Linear
from services.decoder.operations import table
from services.decoder.operations.ops import Ops
from services.decoder.operations.table import KernelFacts
from tests.gpu_compiler import compiled_launches

CASES = [
    *(
        pytest.param("h100", shape, marks=() if shape == "8b" else pytest.mark.nightly)
        for shape in TEXT_SHAPES
        if shape != "4b"  # between the 2B and the 8B
    ),
    ("l40s", "8b"),
    pytest.param("a100", "8b", marks=pytest.mark.nightly),
    pytest.param("b200", "8b", marks=pytest.mark.nightly),
    pytest.param("rtx-pro-6000", "32b", marks=pytest.mark.nightly),
]


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def linear(rows: int, columns: int) -> Linear:
    with torch.device("meta"):
        made = Linear(columns, rows)
    made.weight = torch.nn.Parameter(half(rows, columns), requires_grad=False)
    return made


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "shape"), CASES)
def test_a_layers_kernels_compile_and_fit(device: str, shape: str) -> None:
    facts = KernelFacts(KNOWN_DEVICES[device], TEXT_SHAPES[shape], torch.bfloat16)
    text, gpu = facts.text, facts.device
    hidden, dim = text.hidden_size, text.head_dim
    norm = RMSNorm(hidden, 1e-6)
    norm.weight.data = half(hidden)
    qkv, gate_up = linear(facts.qkv_size, hidden), linear(*facts.gate_up_shape)
    o_proj, down = (linear(*sizes) for sizes in facts.residual_shapes)
    pool = half(2, 2, 16, text.num_kv_heads, dim)
    # Attention allocates memory on the device; test_attention_compiles.py compiles it.
    ops = Ops(table.resolve(facts, {"fused_decode_attention": "plain"}))
    with compiled_launches(gpu) as launches, ops.table.for_graph():
        for count in (1, 40):
            kernels, angles = ops.for_tokens(count), half(count, dim // 2)
            residual, rows = half(count, hidden), torch.zeros(2, count, dtype=torch.int64)
            projected, _ = kernels.norm_linear(None, residual, norm, qkv)
            norms = half(dim), half(dim)
            heads = ProjectedHeads(projected, norms, 1e-6, (angles, angles), pool, rows)
            kernels.qk_rope_cache(heads, None)
            added = kernels.linear_residual(half(count, facts.query_size), o_proj, residual)
            inner, _ = kernels.norm_swiglu(added, residual, norm, gate_up, down)
            kernels.linear_residual(inner, down, residual)
        if gpu.is_hopper:
            many = half(128 * gpu.num_sms, hidden)
            assert ops.table.choose("linear_swiglu", len(many)).name == "swiglu_gemm"
            ops.for_tokens(len(many)).linear_swiglu(many, gate_up)
    for launch in launches:
        assert launch.shared_bytes <= gpu.shared_memory_bytes, launch.name
    compiled = {launch.name for launch in launches}
    assert {"_add_norm_kernel", "_qk_rope_cache_kernel"} <= compiled
    assert gpu.supports_pdl == ({"_gemv_kernel", "_skinny_gemm_kernel"} <= compiled)
    assert gpu.is_hopper == ("_swiglu_gemm_kernel" in compiled)
    for launch in launches:
        if gpu.supports_pdl and launch.name in {"_add_norm_kernel", "_gemv_kernel"}:
            start, wait = map(launch.ptx.index, ("griddepcontrol.launch", "griddepcontrol.wait"))
            assert start < wait, "the model is not quantized"
        if launch.name == "_skinny_gemm_kernel" and gpu.is_hopper:
            assert "wgmma" in launch.ptx
