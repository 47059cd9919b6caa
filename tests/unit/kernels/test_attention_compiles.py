"""What the table picks for each GPU compiles for it and fits its shared memory."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from kernels.attention import (
    dense_keys,
    fused_decode_attention,
    paged_decode_attention,
    prefill_attention,
)
from kernels.attention.attention_tuning import (
    AttentionFacts,
    fused_decode_obstacle,
    paged_decode_obstacle,
    prefill_obstacle,
)
from kernels.attention.fp8_pages import E4M3
from kernels.attention.heads import ProjectedHeads
from kernels.device import KNOWN_DEVICES, DeviceFacts
from tests.cases import first
from tests.gpu_compiler import CompiledLaunch, compiled_launches, copies_see_their_barriers

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
BLOCK_SIZE = 16
DEVICES = ("a100", "l40s", "h100", "b200", "rtx-pro-6000")
QWEN = [(16, 8, 128), (32, 8, 128), (64, 8, 128)]  # heads of the 2B, of the 4B and 8B, of the 32B
# A group that is no power of two, one of 16, wide heads, and a head_dim that is padded.
OTHERS = [(14, 2, 64), (128, 8, 64), (8, 4, 256), (32, 32, 80)]
# Every shape on the device with the least shared memory; on the others those of which the paged
# kernel's CTAs hold the most, one and two to an SM. `make test` has one of each kind.
CASES = first(
    2,
    [
        ("h100", *QWEN[0]),
        ("l40s", *OTHERS[2]),
        ("l40s", *QWEN[2]),
        *(("l40s", *shape) for shape in (*QWEN[:2], *OTHERS[:2], *OTHERS[3:])),
        *((name, *QWEN[0]) for name in DEVICES if name not in ("l40s", "h100")),
        *((name, *QWEN[2]) for name in DEVICES if name != "l40s"),
    ],
)


def facts_of(device: DeviceFacts, heads: int, kv_heads: int, dim: int) -> AttentionFacts:
    return AttentionFacts(
        device=device, dtype=torch.bfloat16, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        block_size=BLOCK_SIZE,
    )  # fmt: skip


def half(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def pool_of(facts: AttentionFacts) -> torch.Tensor:
    pool = half(2, 2, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim)
    return pool.to(E4M3) if facts.fp8_cache else pool


def scales_of(facts: AttentionFacts) -> torch.Tensor | None:
    return torch.ones(2, facts.num_kv_heads) if facts.fp8_cache else None


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def fused(facts: AttentionFacts, count: int, *, has_norm: bool = True) -> CompiledLaunch:
    dim = facts.head_dim
    heads = ProjectedHeads(
        half(count, (facts.num_heads + 2 * facts.num_kv_heads) * dim),
        (half(dim), half(dim)) if has_norm else None, 1e-6,
        (half(count, dim // 2), half(count, dim // 2)), pool_of(facts),
        ints(2, count, dtype=torch.int64), kv_scales=scales_of(facts),
    )  # fmt: skip
    with compiled_launches(facts.device) as found:
        attend = fused_decode_attention.FusedDecodeAttention(facts, CPU)
        attend(heads, ints(9), ints(count), ints(count))
    return found[0]


def paged(facts: AttentionFacts, count: int, *, beside_prefill: bool) -> CompiledLaunch:
    query = half(count, facts.num_heads, facts.head_dim)
    with compiled_launches(facts.device) as found:
        attend = paged_decode_attention.PagedDecodeAttention(facts, CPU)
        attend(
            query, pool_of(facts), ints(9), ints(count), ints(count), out=torch.empty_like(query),
            kv_scales=scales_of(facts), beside_prefill=beside_prefill,
        )  # fmt: skip
    return found[0]


def prefill(facts: AttentionFacts, *, beside_decode: bool = False) -> CompiledLaunch:
    query = half(99, facts.num_heads, facts.head_dim)
    own = half(99, 2 * facts.num_kv_heads, facts.head_dim)
    with compiled_launches(facts.device) as found:
        attend = prefill_attention.PrefillAttention(facts, CPU)
        attend(
            query, own, pool_of(facts), ints(9), ints(2, 8), out=torch.empty_like(query),
            kv_scales=scales_of(facts), beside_decode=beside_decode,
        )  # fmt: skip
    return found[0]


@pytest.mark.parametrize(("name", "heads", "kv_heads", "dim"), CASES)
def test_decode_attention_compiles_and_fits(name: str, heads: int, kv_heads: int, dim: int) -> None:
    device = KNOWN_DEVICES[name]
    facts = facts_of(device, heads, kv_heads, dim)
    assert not fused_decode_obstacle(facts) and not paged_decode_obstacle(facts)
    # Shared memory of the fused kernel does not depend on the device.
    kernels = [fused(facts, 1)] if name == "l40s" or heads == 16 else []
    both = name == "h100" and heads == 16
    for count, beside in ((64, False), (65, True)) if both else ((64, False),):
        kernel = paged(facts, count, beside_prefill=beside)
        ctas_per_sm = kernel.grid[0] // device.num_sms
        # An SM reserves a KiB of shared memory per CTA.
        assert ctas_per_sm * (kernel.shared_bytes + 1024) <= device.shared_memory_bytes + 1024
        kernels.append(kernel)
    for kernel in kernels:
        assert kernel.shared_bytes <= device.shared_memory_bytes
        assert ("griddepcontrol" in kernel.ptx) == device.supports_pdl
        assert re.search(r"cp\.async\.bulk", kernel.ptx) is None or device.supports_pdl


def test_fused_decode_attention_compiles_without_norms_and_for_two() -> None:
    facts = facts_of(KNOWN_DEVICES["h100"], 16, 8, 128)
    with_norm, without = fused(facts, 1), fused(facts, 2, has_norm=False)
    assert "rsqrt" in with_norm.ptx and "rsqrt" not in without.ptx


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "beside_decode"),
    first(2, [(16, 8, 128, False), (14, 2, 64, True), (16, 4, 256, False)]),
)
def test_prefill_attention_compiles_for_hopper(
    heads: int, kv_heads: int, dim: int, beside_decode: bool
) -> None:
    """Two CTAs share an SM, so that one's GEMMs run while the other's softmax does; heads of 256
    elements leave no room for a second one.
    """
    facts = facts_of(KNOWN_DEVICES["h100"], heads, kv_heads, dim)
    kernel = prefill(facts, beside_decode=beside_decode)
    assert "wgmma" in kernel.ptx and copies_see_their_barriers(kernel.ptx)
    ctas_per_sm = 1 if dim == 256 else 2
    assert ctas_per_sm * (kernel.shared_bytes + 1024) <= facts.device.shared_memory_bytes + 1024


def test_the_copy_of_keys_compiles_for_hopper() -> None:
    facts = replace(facts_of(KNOWN_DEVICES["h100"], 32, 8, 128), max_num_blocks=2)
    with compiled_launches(facts.device) as found:
        dense_keys.DenseKeys(facts, CPU).gather(pool_of(facts), ints(9), ints(1), ints(1))
    (kernel,) = found
    assert kernel.grid[1] == 2 and "ld.global.v4" in kernel.ptx  # 16 bytes a thread


@pytest.mark.parametrize("name", first(1, ["a100", "h100", "l40s", "b200"]))
def test_kernels_with_a_cache_in_e4m3_compile_and_fit(name: str) -> None:
    """Without e4m3 of Triton's, which the A100 has not."""
    facts = replace(facts_of(KNOWN_DEVICES[name], 32, 8, 128), fp8_cache=True)
    kernels = [fused(facts, 1), paged(facts, 64, beside_prefill=False)]
    ctas_per_sm = kernels[1].grid[0] // facts.device.num_sms
    room = facts.device.shared_memory_bytes + 1024
    assert ctas_per_sm * (kernels[1].shared_bytes + 1024) <= room
    if name == "h100":
        kernels.append(prefill(facts))
        assert "wgmma" in kernels[-1].ptx and 2 * (kernels[-1].shared_bytes + 1024) <= room
    for kernel in kernels:
        decoding = "shl.b32 pair" if kernel is kernels[1] else "fma.rn.bf16x2"
        assert decoding in kernel.ptx and "e4m3" not in kernel.ptx


WIDE = [(16, 4, 256), (32, 8, 128), (32, 32, 80)]


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "dim"),
    first(1, [(name, *shape) for name in DEVICES for shape in WIDE]),
)
def test_values_are_read_as_words(name: str, heads: int, kv_heads: int, dim: int) -> None:
    """Not as single bytes, whose loads from shared memory would take longer than those from memory:
    a thread loads 32 bits of four values at a time, or 128 of keys.
    """
    device = KNOWN_DEVICES[name]
    facts = replace(facts_of(device, heads, kv_heads, dim), fp8_cache=True)
    for beside in (False, True):
        kernel = paged(facts, 65, beside_prefill=beside)
        ctas_per_sm = kernel.grid[0] // device.num_sms
        assert ctas_per_sm * (kernel.shared_bytes + 1024) <= device.shared_memory_bytes + 1024
        assert not re.search(r"ld\.shared\.\w*[bus]8", kernel.ptx)
        assert "shl.b32 pair" in kernel.ptx


@pytest.mark.parametrize("name", first(1, ["l40s", "h100"]))
def test_values_of_narrow_heads_are_read_as_bytes(name: str) -> None:
    facts = replace(facts_of(KNOWN_DEVICES[name], 14, 2, 64), fp8_cache=True)
    kernel = paged(facts, 64, beside_prefill=False)
    assert kernel.shared_bytes <= facts.device.shared_memory_bytes
    assert "shl.b32 pair" not in kernel.ptx and "fma.rn.bf16x2" in kernel.ptx


def test_kernels_say_what_they_cannot_serve() -> None:
    h100, l40s = KNOWN_DEVICES["h100"], KNOWN_DEVICES["l40s"]
    assert "wgmma" in prefill_obstacle(facts_of(l40s, 16, 8, 128))
    assert "head_dim" in prefill_obstacle(facts_of(h100, 16, 8, 96))
    for obstacle in (fused_decode_obstacle, paged_decode_obstacle):
        assert "compute capability" in obstacle(
            facts_of(DeviceFacts("cuda", "T4", (7, 5), 40, 64 << 10, True), 16, 8, 128)
        )
        assert "head_dim" in obstacle(facts_of(h100, 16, 8, 512))
        assert "query heads" in obstacle(facts_of(h100, 64, 1, 128))
