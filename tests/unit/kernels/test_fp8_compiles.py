"""What the dispatch table picks for FP8 layers compiles for known GPUs, and fits them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from kernels.device import KNOWN_DEVICES, DeviceFacts
from kernels.gemm import fp8_kernels, fp8_w8a8, quantizing
from kernels.gemm.fp8_weight import E4M3, Fp8Weight
from services.common.nn import fp8
from services.common.nn.dispatch import KernelTable
from tests.cases import first
from tests.gpu_compiler import compiled_launches

DEVICES = [name for name in KNOWN_DEVICES if name != "h100"]  # which compiles as the H200 does


def weight_of(rows: int, columns: int, block: bool) -> Fp8Weight:
    values = torch.empty(rows, columns, dtype=E4M3)
    if block:
        return Fp8Weight(values, torch.empty(rows // 128, columns // 128), 128, 128)
    return Fp8Weight(values, torch.empty(rows, 1), 1, columns)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceFacts:
    facts = KNOWN_DEVICES[request.param]
    monkeypatch.setattr(fp8_kernels, "_packed", lambda w: (True, w.values.view(torch.uint8)))
    return facts


def table_of(facts: DeviceFacts) -> KernelTable[SimpleNamespace]:
    rows = [*fp8.linear_rows("fp8_block_linear"), *fp8.linear_rows("fp8_channel_linear")]
    return KernelTable.resolve(rows, SimpleNamespace(device=facts))


# A scale for each row differs from one for each block in how a kernel finds it, on all devices
# alike but for those that convert FP8 themselves.
CASES = first(
    2,
    [
        *(("h200", True), ("a100", False), ("h200", False)),
        *((name, True) for name in DEVICES if name != "h200"),
    ],
)


@pytest.mark.thorough
@pytest.mark.parametrize(("device", "block"), CASES, indirect=["device"])
def test_what_the_table_picks_compiles_and_fits(device: DeviceFacts, block: bool) -> None:
    """For the widest projection of an 8B, whose CTAs hold the most."""
    table, weight, columns = table_of(device), weight_of(4096, 12288, block), 12288
    operation = "fp8_block_linear" if block else "fp8_channel_linear"
    launches = []
    with compiled_launches(device) as found:
        for num_tokens in (1, 2, fp8.SKINNY_TOKENS):
            x = torch.empty(num_tokens, columns, dtype=torch.bfloat16)
            table.call(operation, x, weight)
            fp8_kernels.split_k_partials(
                x, weight, device=device
            )  # by an override, where not by that
        x = torch.empty(1008, columns, dtype=torch.bfloat16)
        match table.choose(operation, 1008).name:
            case "scaled_mm":  # torch's own, after this
                wide = 128 if block else columns
                quantizing.quantize_activations(x, E4M3, wide, pdl=device.supports_pdl)
            case "triton_gemm":
                fp8_w8a8.triton_gemm(x, weight, device=device)
            case name:
                assert name == "plain" and device.capability == (8, 0)
        launches += found
    assert {launch.name for launch in launches} >= {"_gemv_kernel", "_skinny_kernel"}
    for launch in launches:
        assert launch.shared_bytes <= device.shared_memory_bytes


@pytest.mark.parametrize("device", ["h200"], indirect=True)
def test_fused_gemvs_compile(device: DeviceFacts) -> None:
    x, norm = torch.empty(1, 4096).bfloat16(), torch.empty(4096).bfloat16()
    for block in (True, False):
        weight = weight_of(24576, 4096, block)
        with compiled_launches(device) as found:
            fp8_kernels.norm_gemv(x, norm, 1e-6, weight, None, device=device)
            fp8_kernels.norm_swiglu_gemv(x, norm, 1e-6, weight, None, device=device)
            fp8_kernels.gemv_add(x, weight, None, torch.empty(1, 24576).bfloat16(), device=device)
        assert len(found) == 3


# `make test` has few tokens and many, and both kinds of scales.
QUANTIZED = first(2, [(True, 2), (False, 64), (True, 33), (True, 64), (False, 2), (False, 33)])


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["h200"], indirect=True)
@pytest.mark.parametrize(("block", "num_tokens"), QUANTIZED)
def test_gemms_of_quantized_activations_compile(
    device: DeviceFacts, block: bool, num_tokens: int
) -> None:
    """On FP8 tensor cores, without a conversion of the weight."""
    residual, norm = torch.empty(num_tokens, 4096).bfloat16(), torch.empty(4096).bfloat16()
    weight = weight_of(24576, 4096, block)
    with compiled_launches(device) as found:
        x = quantizing.norm_quantize(
            residual, residual, norm, 1e-6, E4M3, weight.block_columns, pdl=True
        )
        fp8_w8a8.split_k_partials(x, weight_of(6144, 4096, block), device=device)
        fp8_w8a8.linear_swiglu(x, weight, device=device)
    assert [launch.name for launch in found] == ["_quantize_kernel", *["_skinny_kernel"] * 2]
    for launch in found[1:]:
        assert "wgmma.mma_async" in launch.ptx and ".e4m3.e4m3" in launch.ptx
        assert "cvt.rn.f16x2.e4m3x2" not in launch.ptx
        assert 3 * launch.shared_bytes <= device.shared_memory_bytes


@pytest.mark.parametrize(
    ("assembly", "dtype"),
    [(fp8_kernels._TO_BF16, torch.bfloat16), (fp8_kernels._TO_F16, torch.float16)],
)
def test_the_assembly_unpacks_every_value_exactly(assembly, dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    values[values & 0x7F == 0x7F] = 0  # NaN, which a checkpoint has not
    words = values.view(torch.int32).tolist()
    found = [half for word in words for half in run_assembly(assembly.value, word, dtype)]
    assert torch.tensor(found).equal(values.view(E4M3).float())


def run_assembly(text: str, word: int, dtype: torch.dtype) -> list[float]:
    """Runs the instructions on one register of four bytes; four results."""
    registers: dict[str, int] = {"$2": word & 0xFFFFFFFF}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def halves(bits: int) -> torch.Tensor:
        pair = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32)
        return pair.to(torch.uint16).view(dtype).double()

    for line in text.strip("{} \n").split(";"):
        code, _, operands = line.strip().partition(" ")
        if not operands or code == ".reg":
            continue
        target, *names = [name.strip() for name in operands.split(",")]
        given = [value(name) for name in names]
        match code:
            case "mov.b32":
                registers[target] = given[0]
            case "prmt.b32":
                source = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
                chosen = [source[given[2] >> 4 * index & 7] for index in range(4)]
                registers[target] = int.from_bytes(bytes(chosen), "little")
            case "and.b32":
                registers[target] = given[0] & given[1]
            case "shr.b32":
                registers[target] = given[0] >> given[1]
            case "lop3.b32":
                assert given[3] == (0xF0 & 0xCC) | 0xAA, "(a & b) | c"
                registers[target] = given[0] & given[1] | given[2]
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                exact = halves(given[0]) * halves(given[1]) + halves(given[2])
                assert exact.to(dtype).double().equal(exact)
                bits = exact.to(dtype).view(torch.uint16).to(torch.int32)
                registers[target] = int(bits[0]) | int(bits[1]) << 16
            case _:
                raise ValueError(line)
    return [float(half) for index in range(2) for half in halves(registers[f"${index}"])]


@pytest.mark.parametrize(
    ("name", "block", "channel"),
    [
        ("h200", ["gemv", "skinny_w8a8", "scaled_mm"], ["gemv", "skinny_w8a8", "scaled_mm"]),
        ("l40s", ["gemv", "skinny_gemm", "triton_gemm"], ["gemv", "skinny_gemm", "scaled_mm"]),
        ("b200", ["gemv", "skinny_gemm", "triton_gemm"], ["gemv", "skinny_gemm", "scaled_mm"]),
        ("a100", ["gemv", "skinny_gemm", "plain"], ["gemv", "skinny_gemm", "plain"]),
    ],
)
def test_the_table_picks_by_device_and_tokens(
    name: str, block: list[str], channel: list[str]
) -> None:
    table = table_of(KNOWN_DEVICES[name])
    for operation, expected in (("fp8_block_linear", block), ("fp8_channel_linear", channel)):
        assert [
            table.choose(operation, tokens).name for tokens in (1, fp8.SKINNY_TOKENS, 1008)
        ] == expected
    on_cpu = table_of(DeviceFacts("cpu"))
    assert on_cpu.choose("fp8_block_linear", 1).name == "plain"
