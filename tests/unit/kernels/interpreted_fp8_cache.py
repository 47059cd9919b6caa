"""Kernels with a KV cache in e4m3; run by interpreted.py. They write the twins' bytes."""

# pyright: reportArgumentType=false
# (constants of the kernel)

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import plain
from kernels.attention.attention_tuning import (
    FusedDecodeConfig,
    PagedDecodeConfig,
    fused_decode_config,
)
from kernels.attention.fp8_codec import decode_e4m3, encode_e4m3, round_to_e4m3
from kernels.attention.fp8_pages import E4M3, as_bytes, quantize
from kernels.attention.fused_decode_attention import FusedDecodeAttention
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.qk_rope_cache import qk_rope_cache
from tests.block_tables import first_blocks
from tests.cases import cases
from tests.unit.kernels.interpreted_kernels import BLOCK_SIZE, EPS, attention_facts, close


@triton.jit
def _codec_kernel(x_ptr, scale_ptr, rounded_ptr, byte_ptr, decoded_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    rounded = round_to_e4m3(tl.load(x_ptr + index), tl.load(scale_ptr))
    tl.store(rounded_ptr + index, rounded)
    tl.store(byte_ptr + index, encode_e4m3(rounded))
    tl.store(decoded_ptr + index, decode_e4m3(tl.load(byte_ptr + index), tl.float32))


def check_codec() -> None:
    """Each value that e4m3 has, the middle between it and the next, and all sizes of numbers."""
    values = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    ties = (values[1:] + values[:-1]) / 2
    spread = torch.randn(1000) * torch.exp2(torch.randint(-14, 12, (1000,)).float())
    special = torch.tensor([torch.inf, 1e30, 464.0, 448.1])
    x = torch.cat((values, ties, spread, special))
    x = torch.cat((x, -x, torch.tensor([torch.nan])))
    size = 1 << 12
    x = torch.cat((x, torch.zeros(size - len(x))))
    for scale in (torch.ones(1), torch.full((1,), 2.0**-5)):
        rounded, decoded = torch.zeros(size), torch.zeros(size)
        found = torch.zeros(size, dtype=torch.uint8)
        _codec_kernel[(1,)](x * scale, scale, rounded, found, decoded, SIZE=size)
        expected = quantize((x * scale)[:, None, None], scale).flatten()
        # NaN has two bytes, one of either sign.
        assert torch.equal(found & 127, as_bytes(expected) & 127)
        number = ~x.isnan()
        assert torch.equal(found[number], as_bytes(expected)[number])
        assert torch.equal(rounded[number], expected.float()[number]) and rounded.isnan().sum() == 1
        assert torch.equal(decoded[number], expected.float()[number])


def scales_of(kv_heads: int) -> Tensor:
    """Powers of two, another for each head."""
    return torch.exp2(torch.arange(2 * kv_heads).view(2, kv_heads).float() % 5 - 6)


def pool_of(num_blocks: int, kv_heads: int, dim: int, scales: Tensor) -> Tensor:
    wide = torch.randn(num_blocks, BLOCK_SIZE, kv_heads, dim)
    pool = torch.zeros(num_blocks, 2, BLOCK_SIZE, kv_heads, dim, dtype=E4M3)
    for part in (0, 1):
        as_bytes(pool)[:, part] = as_bytes(quantize(wide.roll(part), scales[part]))
    return pool


def projected(
    count: int, heads: int, kv_heads: int, dim: int, slots: Tensor, pool: Tensor, scales: Tensor
) -> ProjectedHeads:
    angles = torch.rand(count, dim // 2) * 6.28
    return ProjectedHeads(
        torch.randn(count, (heads + 2 * kv_heads) * dim), (torch.randn(dim), torch.randn(dim)), EPS,
        (angles.cos(), angles.sin()), pool,
        kv_rows(slots, BLOCK_SIZE), kv_scales=scales,
    )  # fmt: skip


def check_written(found: Tensor, twin: Tensor) -> None:
    """The same bytes, but where the kernel's float32 lies on the other side of a tie."""
    assert (as_bytes(found) != as_bytes(twin)).float().mean() <= 1e-3


def check_kept(num_tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    """A step's own keys and values are what the cache has, without scales."""
    scales = scales_of(kv_heads)
    pool = pool_of(-(-num_tokens // BLOCK_SIZE) + 1, kv_heads, dim, scales)
    mine = projected(num_tokens, heads, kv_heads, dim, torch.randperm(num_tokens), pool, scales)
    twin = replace(mine, kv_cache=pool.clone())
    own, twins_own = (torch.zeros(num_tokens, 2 * kv_heads, dim) for _ in range(2))
    close(qk_rope_cache(mine, own), plain.qk_rope_cache(twin, twins_own))
    check_written(mine.kv_cache, twin.kv_cache)
    assert (own != twins_own).float().mean() <= 1e-3
    rows = as_bytes(mine.kv_cache).view(E4M3).flatten(0, 2)
    assert torch.equal(own, torch.cat([rows[at].float() for at in as_index(mine)], dim=1))


def as_index(heads: ProjectedHeads) -> tuple[Tensor, ...]:
    return heads.rows.unbind()


def check_fused(
    lengths: list[int], heads: int, kv_heads: int, dim: int, config: FusedDecodeConfig | None = None
) -> None:
    """One new token of each sequence, to which the cache's rounding applies, too."""
    count, sizes = len(lengths), [-(-length // BLOCK_SIZE) for length in lengths]
    block_ids = torch.randperm(sum(sizes), dtype=torch.int32)
    slots = [
        int(ids[(length - 1) // BLOCK_SIZE]) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        for ids, length in zip(block_ids.split(sizes), lengths, strict=True)
    ]
    scales = scales_of(kv_heads)
    pool = pool_of(sum(sizes) + 1, kv_heads, dim, scales)
    mine = projected(count, heads, kv_heads, dim, torch.tensor(slots), pool, scales)
    twin = replace(mine, kv_cache=pool.clone(), qkv=mine.qkv.clone())
    tables = block_ids, torch.from_numpy(first_blocks(lengths, BLOCK_SIZE))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    attend = FusedDecodeAttention(
        attention_facts(heads, kv_heads, dim), torch.device("cpu"),
        fused_decode_config if config is None else lambda *_: config,
    )  # fmt: skip
    found = attend(mine, *tables, seq_lens)
    close(found, plain.fused_decode_attention(twin, *tables, seq_lens))
    check_written(mine.kv_cache, twin.kv_cache)
    # A kernel that forgets the scales is found out.
    ones = replace(twin, kv_scales=torch.ones(2, kv_heads), qkv=mine.qkv.clone())
    other = plain.fused_decode_attention(ones, *tables, seq_lens)
    assert (found - other).norm() > 0.1 * found.norm()


def check_paged(
    lengths: list[int], heads: int, kv_heads: int, dim: int, num_sms: int,
    config: PagedDecodeConfig | None = None,
) -> None:  # fmt: skip
    """Paged decode attention, of items that are split anywhere."""
    facts = replace(attention_facts(heads, kv_heads, dim, num_sms), fp8_cache=True)
    attend = PagedDecodeAttention(facts, torch.device("cpu"), config)
    sizes = [-(-length // BLOCK_SIZE) for length in lengths]
    block_ids = torch.randperm(sum(sizes), dtype=torch.int32)
    scales = scales_of(kv_heads)
    pool = pool_of(sum(sizes) + 1, kv_heads, dim, scales)
    query = torch.randn(len(lengths), heads, dim)
    tables = block_ids, torch.from_numpy(first_blocks(lengths, BLOCK_SIZE))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    found = torch.empty_like(query)
    attend(query, pool, *tables, seq_lens, out=found, kv_scales=scales)
    wide = torch.stack([pool[:, part].float() * scales[part][:, None] for part in (0, 1)], dim=1)
    expected = torch.empty_like(query)
    attend(query, wide, *tables, seq_lens, out=expected)
    close(found, expected)


def check_all() -> None:
    check_codec()
    for shape in ((12, 4, 2, 32), (cases(20, 130), 2, 1, 64)):
        check_kept(*shape)
    check_fused([17, 64], 4, 2, 32)
    check_fused([100], 8, 2, 32)
    check_fused([33], 6, 2, 80)
    check_fused([80], 4, 2, 32, FusedDecodeConfig(2, 4, 16, tensor_cores=True))
    check_paged([15, 16, 7, 120], 16, 8, 16, 4)
    check_paged([60, 141], 10, 2, 32, 5)
    check_paged([33, 98], 6, 2, 48, 3)
    check_paged([60, 141], 32, 1, 16, 5)
    # Values as words of four bytes: tiles of whole blocks, of parts of one, and padded heads.
    check_paged([60, 141], 8, 2, 128, 5)
    check_paged([33, 98], 3, 1, 80, 3)
    check_paged([15, 16, 7, 120], 16, 4, 64, 4, PagedDecodeConfig(4, words=True))
    check_paged([60, 141], 10, 2, 32, 5, PagedDecodeConfig(1, 32, words=True))
    check_paged([33, 98], 6, 2, 48, 3, PagedDecodeConfig(2, words=True))


if __name__ == "__main__":
    check_all()
    print("agreed")
