"""Attention kernels with a KV cache in e4m3 against their plain twins; tolerance as in `twins`.

The cache's bytes are compared, too: kernel and twin round the same values, but for those where the
twin's own q/k norm lies an ulp beside the kernel's, on the other side of a tie. Free blocks hold
the largest value, which no attention over them would hide.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.gpu.twins import CUDA, TOLERANCE, attention_facts, error, random

pytest.importorskip("triton")
from kernels import plain
from kernels.attention.attention_tuning import prefill_obstacle
from kernels.attention.fp8_pages import E4M3, as_bytes, dequantize, quantize
from kernels.attention.fused_decode_attention import FusedDecodeAttention
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk
from kernels.attention.qk_rope_cache import qk_rope_cache
from tests.block_tables import first_blocks

pytestmark = pytest.mark.gpu
EPS, BLOCK_SIZE = 1e-6, 16
SHAPES = [(16, 8, 128), (32, 8, 128), (64, 8, 128), (14, 2, 64), (16, 4, 80), (8, 4, 256)]


def scales_of(kv_heads: int) -> torch.Tensor:
    """Powers of two, another for each head."""
    exponents = torch.arange(2 * kv_heads, device=CUDA).view(2, kv_heads) % 5 - 7
    return torch.exp2(exponents.float())


def pool_of(num_blocks: int, kv_heads: int, dim: int, scales: torch.Tensor) -> torch.Tensor:
    pool = torch.empty(num_blocks, 2, BLOCK_SIZE, kv_heads, dim, dtype=E4M3, device=CUDA)
    for part in (0, 1):
        wide = random(num_blocks, BLOCK_SIZE, kv_heads, dim)
        as_bytes(pool)[:, part] = as_bytes(quantize(wide, scales[part]))
    return pool


def projected(
    count: int, heads: int, kv_heads: int, dim: int, slots: torch.Tensor, pool: torch.Tensor,
    scales: torch.Tensor,
) -> ProjectedHeads:  # fmt: skip
    angles = torch.rand(count, dim // 2, device=CUDA) * 6.28
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    return ProjectedHeads(
        random(count, (heads + 2 * kv_heads) * dim), (random(dim), random(dim)), EPS, rope, pool,
        kv_rows(slots.to(CUDA), BLOCK_SIZE),
        kv_scales=scales,
    )  # fmt: skip


def check_bytes(found: torch.Tensor, twin: torch.Tensor) -> None:
    assert (as_bytes(found) != as_bytes(twin)).float().mean() <= 1e-3


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("count", [3, 200])
def test_keys_and_values_are_written_as_the_twin_writes_them(
    count: int, heads: int, kv_heads: int, dim: int
) -> None:
    scales = scales_of(kv_heads)
    pool = pool_of(-(-count // BLOCK_SIZE) + 1, kv_heads, dim, scales)
    mine = projected(count, heads, kv_heads, dim, torch.randperm(count), pool, scales)
    twin = replace(mine, kv_cache=pool.clone(), qkv=mine.qkv.clone())
    own, twins_own = (torch.zeros(count, 2 * kv_heads, dim, device=CUDA).bfloat16() for _ in "ab")
    assert error(qk_rope_cache(mine, own), plain.qk_rope_cache(twin, twins_own)) <= TOLERANCE
    check_bytes(mine.kv_cache, twin.kv_cache)
    flat = as_bytes(mine.kv_cache).view(-1, kv_heads, dim)
    stored = torch.cat([flat[rows].view(E4M3).bfloat16() for rows in mine.rows], dim=1)
    assert torch.equal(own, stored)  # what prefill attends to is what later steps read


@pytest.mark.parametrize("lengths", [[1], [65], [1100], [1, 33], [700, 2048]])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_fused_decode_attention_agrees_with_its_twin(
    lengths: list[int], heads: int, kv_heads: int, dim: int
) -> None:
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
    tables = block_ids.cuda(), torch.from_numpy(first_blocks(lengths, BLOCK_SIZE)).cuda()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
    attend = FusedDecodeAttention(attention_facts(heads, kv_heads, dim), CUDA)
    found = attend(mine, *tables, seq_lens)
    expected = plain.fused_decode_attention(twin, *tables, seq_lens)
    assert error(found, expected) <= 3 * TOLERANCE
    check_bytes(mine.kv_cache, twin.kv_cache)
    ones = replace(twin, kv_scales=torch.ones_like(scales), qkv=mine.qkv.clone())
    other = plain.fused_decode_attention(ones, *tables, seq_lens)
    if max(lengths) > 1:  # one token is written and read by the same scales
        assert error(found, other) > 0.1  # scales that are dropped do not pass


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("lengths", [[1, 16, 700], [9000], [1000, 30] * 70])
def test_paged_decode_attention_agrees_with_its_twin(
    lengths: list[int], heads: int, kv_heads: int, dim: int
) -> None:
    facts = replace(attention_facts(heads, kv_heads, dim), fp8_cache=True)
    sizes = [-(-length // BLOCK_SIZE) for length in lengths]
    block_ids = torch.randperm(sum(sizes) + 3, dtype=torch.int32)
    scales = scales_of(kv_heads)
    pool = pool_of(len(block_ids), kv_heads, dim, scales)
    as_bytes(pool)[block_ids[sum(sizes) :].long().cuda()] = 0x7E  # 448
    query = random(len(lengths), heads, dim)
    tables = block_ids.cuda(), torch.from_numpy(first_blocks(lengths, BLOCK_SIZE)).cuda()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
    found = []
    for beside in (False, False, True):
        out = torch.empty_like(query)
        attend = PagedDecodeAttention(facts, CUDA)
        attend(query, pool, *tables, seq_lens, out=out, kv_scales=scales, beside_prefill=beside)
        found.append(out)
    assert torch.equal(found[0], found[1])
    for index, ids in enumerate(block_ids[: sum(sizes)].split(sizes)):
        stored = as_bytes(pool)[ids.long().cuda()].view(E4M3)
        keys, values = (
            dequantize(stored[:, part], scales[part], torch.float32)
            .flatten(0, 1)[: lengths[index]]
            .transpose(0, 1)
            for part in (0, 1)
        )
        asked = query[index, :, None].float()
        expected = F.scaled_dot_product_attention(asked, keys, values, enable_gqa=True)[:, 0]
        for out in found:
            assert error(out[index], expected) <= 2 * TOLERANCE, (index, lengths[index])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 4, 256)]
)
@pytest.mark.parametrize(
    "chunks", [[(0, 300)], [(333, 700), (0, 290), (16, 2)], [(9000, 40)], [(64, 64), (1, 1)]]
)
def test_prefill_attention_agrees_with_its_twin(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, dim: int
) -> None:
    """`chunks`: (cached, new) tokens."""
    facts = replace(attention_facts(heads, kv_heads, dim), fp8_cache=True)
    if why := prefill_obstacle(facts):
        pytest.skip(why)
    contexts = [sum(chunk) for chunk in chunks]
    sizes = [-(-context // BLOCK_SIZE) for context in contexts]
    block_ids = torch.randperm(sum(sizes), dtype=torch.int32)
    scales = scales_of(kv_heads)
    pool = pool_of(sum(sizes), kv_heads, dim, scales)
    starts = [sum(length for _, length in chunks[:index]) for index in range(len(chunks) + 1)]
    query = random(starts[-1], heads, dim)
    own = quantize(random(starts[-1], 2 * kv_heads, dim), scales.flatten()).bfloat16()
    firsts = first_blocks(contexts, BLOCK_SIZE).tolist()
    listed = [
        PrefillChunk(start, length, cached, block)
        for start, (cached, length), block in zip(starts, chunks, firsts, strict=False)
    ]
    attend = PrefillAttention(facts, CUDA)
    work = attend.list_work(listed, attend.count_work(len(query), len(chunks)))
    found = []
    for _ in range(2):
        out = torch.full_like(query, torch.nan)
        attend(
            query, own, pool, block_ids.cuda(), torch.from_numpy(work).cuda(), out=out,
            kv_scales=scales,
        )  # fmt: skip
        found.append(out)
    assert torch.equal(*found)
    for index, ids in enumerate(block_ids.split(sizes)):
        cached, rows = chunks[index][0], slice(starts[index], starts[index + 1])
        stored = as_bytes(pool)[ids.long().cuda()].view(E4M3)
        mine = own[rows].float().unflatten(1, (2, kv_heads))
        keys, values = (
            torch.cat((
                dequantize(stored[:, part], scales[part], torch.float32).flatten(0, 1)[:cached],
                mine[:, part] * scales[part][:, None],
            )).transpose(0, 1)
            for part in (0, 1)
        )  # fmt: skip
        size = keys.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=CUDA).tril()[cached:]
        expected = F.scaled_dot_product_attention(
            query[rows].float().transpose(0, 1)[None], keys[None], values[None], attn_mask=mask,
            enable_gqa=True,
        )  # fmt: skip
        assert error(found[0][rows], expected[0].transpose(0, 1)) <= TOLERANCE
