"""The kernels of adapters compile for each GPU and fit its shared memory."""

import pytest
import torch

pytest.importorskip("triton")
from kernels.adapters import shrink_expand
from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.device import KNOWN_DEVICES
from services.common.nn.layers import RMSNorm
from tests.gpu_compiler import compiled_launches

CASES = [
    ("h100", 16, (1, 64)),
    *(
        pytest.param(device, rank, (1, 64, 1000), marks=pytest.mark.nightly)
        for device in ("h100", "l40s", "a100", "rtx-pro-6000")
        for rank in (64, 256)
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("device", "rank", "counts"), CASES)
def test_shrink_and_expand_compile_and_fit(device: str, rank: int, counts: tuple[int, ...]) -> None:
    gpu, slots = KNOWN_DEVICES[device], 8
    like = torch.empty(0, dtype=torch.bfloat16)
    sizes = (1024, 256, 256), (2048, 2048)
    qkv, gate_up = (SlotFactors.zeros(of, 1024, slots, rank, like) for of in sizes)
    with compiled_launches(gpu) as launches:
        for count in counts:
            rows = AdapterRows(torch.zeros(count, dtype=torch.int64), slots, 0, slots)
            x, pdl = like.new_empty(count, 1024), 2 * gpu.supports_pdl
            out = torch.empty(2, count, 1536) if count <= 64 else like.new_empty(count, 1536)
            norm = RMSNorm(1024, 1e-6).to(torch.bfloat16) if count == 1 else None
            products = shrink_expand.shrink_adapters(x, norm, qkv, rows, pdl=pdl)
            shrink_expand.expand_adapters(out, products, qkv, rows, pdl=pdl)
            out = like.new_empty(count, 4096)
            products = shrink_expand.shrink_adapters(x, None, gate_up, rows, pdl=pdl)
            shrink_expand.expand_adapters_swiglu(out, products, gate_up, rows, pdl=pdl)
    assert {launch.name for launch in launches} == {"_shrink_kernel", "_expand_kernel"}
    for launch in launches:
        assert launch.shared_bytes <= gpu.shared_memory_bytes, launch.name
        if gpu.supports_pdl:  # a CTA without tokens waits, too
            assert "griddepcontrol.wait" in launch.ptx
