"""What the tower's kernel table picks, for devices that need not be here."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.attention.attention_tuning import HOPPER_SHARED_MEMORY
from kernels.attention.segments import BatchSegments
from kernels.device import KNOWN_DEVICES, DeviceFacts
from services.common.families.paddleocr_vl import SiglipTower
from services.common.families.qwen2_5_vl import WindowTower
from services.common.families.qwen2_vl import PlainTower
from services.common.families.qwen3_vl import DeepStackTower
from services.common.model_spec import TowerSpec
from services.common.nn.dispatch import KernelTable, UnknownOverride, parse_overrides
from services.encoder.operations.ops import Ops
from services.encoder.operations.table import IMPLEMENTATIONS, TowerFacts, resolve
from tests.cases import first
from tests.tower import cpu_ops

TWO_B = DeepStackTower(24, 1024, 4096, 16, 3, 16, 2, 2, 2048, 2304, (5, 11, 17))
EIGHT_B = DeepStackTower(27, 1152, 4304, 16, 3, 16, 2, 2, 4096, 2304, (8, 16, 24))
RESERVED_SHARED_MEMORY = 1024  # bytes of each CTA that the driver takes
QWEN2_7B = PlainTower(32, 1280, 5120, 16, 3, 14, 2, 2, 3584)
QWEN2_5_7B = WindowTower(32, 1280, 3420, 16, 3, 14, 2, 2, 3584, 112, (7, 15, 23, 31))
PADDLEOCR = SiglipTower(27, 1152, 4304, 16, 3, 14, 1, 2, 1024, 729)
TOWERS = {
    "2B": TWO_B, "8B": EIGHT_B, "2-7B": QWEN2_7B, "2.5-7B": QWEN2_5_7B, "PaddleOCR": PADDLEOCR,
}  # fmt: skip
OPERATIONS = {
    "pack_patches", "add_layer_norm", "layer_norm", "add_rms_norm", "rms_norm", "silu_and_mul",
    "rotary", "ragged_attention", "linear_gelu", "quick_gelu", "linear_add", "linear",
}  # fmt: skip


def table(
    spec: TowerSpec,
    device: DeviceFacts,
    dtype: torch.dtype = torch.bfloat16,
    kernels: str = "",
) -> KernelTable[TowerFacts]:
    return resolve(TowerFacts.of(spec, device, dtype), parse_overrides(kernels))


def picked(found: KernelTable[TowerFacts], num_tokens: int = 4096) -> dict[str, str]:
    return {operation: found.choose(operation, num_tokens).name for operation in OPERATIONS}


@pytest.mark.parametrize("spec", TOWERS.values(), ids=TOWERS)
@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=KNOWN_DEVICES)
def test_every_tower_is_fast_on_every_gpu(device: DeviceFacts, spec: TowerSpec) -> None:
    hopper = device.capability == (9, 0)
    found = picked(table(spec, device))
    assert found.pop("ragged_attention") == ("hopper" if hopper else "torch_varlen")
    for operation in ("linear", "linear_add"):
        assert found.pop(operation) == ("cublaslt" if hopper else "plain")
    assert found.pop("linear_gelu") == ("cublaslt" if hopper else "cublas")
    # Qwen2-VL's MLPs alone have it. It is plain on every device.
    assert found.pop("quick_gelu") == "plain"
    assert set(found.values()) == {"triton"}


def test_all_is_plain_on_a_cpu_and_by_override() -> None:
    for found in (cpu_ops(TWO_B).table, table(TWO_B, KNOWN_DEVICES["h200"], kernels="plain")):
        assert set(picked(found).values()) == {"plain"}


@pytest.mark.parametrize(
    ("device", "spec", "dtype", "reason"),
    [
        (DeviceFacts("cpu"), TWO_B, torch.bfloat16, "on CUDA, not on cpu"),
        (KNOWN_DEVICES["a100"], TWO_B, torch.bfloat16, "compute capability 9.0"),
        (KNOWN_DEVICES["b200"], TWO_B, torch.bfloat16, "compute capability 9.0"),
        (KNOWN_DEVICES["h200"], TWO_B, torch.float32, "no kernel for torch.float32"),
        (DeviceFacts("cuda", "H200", (9, 0), 132, 227 << 10), TWO_B, torch.bfloat16, "triton"),
        (
            KNOWN_DEVICES["h200"], DeepStackTower(2, 96, 96, 1, 3, 16, 2, 2, 40, 36, (0,)),
            torch.bfloat16, "head_dim 96",
        ),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_run_says_why(
    device: DeviceFacts, spec: TowerSpec, dtype: torch.dtype, reason: str
) -> None:
    found = table(spec, device, dtype)
    assert found.choose("ragged_attention", 4096).name != "hopper"
    assert reason in found.rejected["ragged_attention", "hopper"]
    with pytest.raises(UnknownOverride, match=reason):
        table(spec, device, dtype, "ragged_attention=hopper")


def test_one_operation_is_overridden() -> None:
    found = picked(table(TWO_B, KNOWN_DEVICES["h200"], kernels="ragged_attention=torch_varlen"))
    assert found["ragged_attention"] == "torch_varlen" and found["rotary"] == "triton"
    with pytest.raises(UnknownOverride, match="there is no such implementation"):
        table(TWO_B, KNOWN_DEVICES["h200"], kernels="rotary=magic")


def test_a_kernel_that_fails_at_warm_up_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of resources")

    rows = [
        replace(row, create=lambda _: fail)
        if (row.operation, row.name) == ("rotary", "triton")
        else row
        for row in IMPLEMENTATIONS
    ]
    facts = TowerFacts.of(TWO_B, KNOWN_DEVICES["l40s"], torch.bfloat16)
    found = KernelTable.resolve(rows, facts)
    x, angles = torch.randn(4, 2, 16, 64), torch.rand(4, 32)
    with found.warming_up(), caplog.at_level(logging.WARNING):
        rotated = Ops(found).rotary(x, angles.cos(), angles.sin())
    assert torch.equal(rotated, cpu_ops(TWO_B).rotary(x, angles.cos(), angles.sin()))
    assert "rotary: triton failed" in caplog.text and "out of resources" in caplog.text
    assert picked(found)["rotary"] == "plain"


# The 8B's heads are the wider ones, of which a part is padded.
COMPILED = first(
    2,
    [
        *(("h200", "8B"), ("l40s", "8B"), ("h200", "2B")),
        *((name, "8B") for name in KNOWN_DEVICES if name not in ("h200", "l40s")),
    ],
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("device", "spec"),
    [(KNOWN_DEVICES[name], {"2B": TWO_B, "8B": EIGHT_B}[size]) for name, size in COMPILED],
    ids=[f"{name}-{size}" for name, size in COMPILED],
)
def test_kernels_of_ours_compile_and_fit(device: DeviceFacts, spec: TowerSpec) -> None:
    """What the table picks of Triton and Gluon, for GPUs that are not here."""
    pytest.importorskip("triton")
    from tests.gpu_compiler import compiled_launches

    ops, heads = Ops(table(spec, device)), spec.num_heads
    head_dim, grouped = spec.hidden_size // heads, 4 * spec.hidden_size
    zeros = partial(torch.zeros, dtype=torch.bfloat16)
    cos = torch.zeros(256, head_dim // 2)
    x, wide = zeros(256, spec.hidden_size), zeros(64, grouped)
    with compiled_launches(device) as launched:
        ops.pack_patches(torch.zeros(256 * 768, dtype=torch.uint8), [(1, 16, 16)], 16, 2, x.dtype)
        ops.add_layer_norm(x, x, zeros(x.shape[1]), zeros(x.shape[1]), 1e-6)
        ops.layer_norm(wide, zeros(grouped), zeros(grouped), 1e-6)
        ops.rotary(zeros(256, 3, heads, head_dim)[:, :2], cos, cos)
        if picked(ops.table)["ragged_attention"] == "hopper":
            for rows in (256, 4096):
                query, key, value = zeros(rows, 3, heads, head_dim).unbind(1)
                segments = BatchSegments([rows - 100, 100], torch.device("cpu"))
                ops.ragged_attention(query, key, value, segments)
    assert len(launched) == (6 if device.is_hopper else 4)
    for launch in launched:
        assert launch.shared_bytes + RESERVED_SHARED_MEMORY <= device.shared_memory_bytes
    if device.is_hopper:  # two CTAs of attention share an SM; the table knows what they need
        attention = [launch for launch in launched if "attention" in launch.name]
        needed = max(launch.shared_bytes for launch in attention) + RESERVED_SHARED_MEMORY
        assert needed <= HOPPER_SHARED_MEMORY and 2 * needed <= device.shared_memory_bytes


@pytest.mark.parametrize("name", ["l40s", pytest.param("h200", marks=pytest.mark.nightly)])
def test_kernels_of_windows_compile(name: str) -> None:
    """What other towers do not call, and patches whose side is no power of two."""
    pytest.importorskip("triton")
    from tests.gpu_compiler import compiled_launches

    spec, device = QWEN2_5_7B, KNOWN_DEVICES[name]
    ops, zeros = Ops(table(spec, device)), partial(torch.zeros, dtype=torch.bfloat16)
    x = zeros(256, spec.hidden_size)
    with compiled_launches(device) as launched:
        ops.pack_patches(torch.zeros(256 * 588, dtype=torch.uint8), [(1, 16, 16)], 14, 2, x.dtype)
        ops.rms_norm(x, zeros(x.shape[1]), 1e-6)
        ops.add_rms_norm(x, x.clone(), zeros(x.shape[1]), 1e-6)
        ops.silu_and_mul(zeros(256, 2 * spec.intermediate_size))
    assert len(launched) == 4
    for launch in launched:
        assert launch.shared_bytes + RESERVED_SHARED_MEMORY <= device.shared_memory_bytes
