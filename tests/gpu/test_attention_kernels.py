"""Each kernel of the decoder's attention against its plain twin; tolerance as in `twins`.

Free blocks and rows of padding hold NaN: a kernel that reads them gives NaN. Probabilities and
their row sum are rounded one after the other, hence twice the tolerance for decodes.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from services.decoder.attention.base import AttentionMetadata
from tests.gpu.decoder_2b import needs_flashinfer
from tests.gpu.twins import CUDA, TOLERANCE, attention_facts, error, random

pytest.importorskip("triton")
from kernels import plain
from kernels.attention.attention_tuning import (
    FusedDecodeConfig,
    PagedDecodeConfig,
    fused_decode_config,
    fused_decode_obstacle,
    paged_decode_obstacle,
    prefill_obstacle,
)
from kernels.attention.dense_keys import padded_to_tiles
from kernels.attention.fused_decode_attention import FusedDecodeAttention
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk
from tests.block_tables import first_blocks

pytestmark = pytest.mark.gpu
EPS, BLOCK_SIZE = 1e-6, 16
# Groups 2 (2B), 4 (4B, 8B), 8 (32B), 7, 5, 3, 1, 16, and heads of 64, 80 and 256.
SHAPES = [
    (16, 8, 128), (32, 8, 128), (64, 8, 128), (28, 4, 128), (40, 8, 128), (24, 8, 128), (8, 8, 128),
    (32, 2, 128), (14, 2, 64), (32, 8, 64), (16, 4, 80), (8, 4, 256), (8, 1, 256), (5, 5, 32),
]  # fmt: skip


def poisoned_pool(num_blocks: int, kv_heads: int, dim: int) -> torch.Tensor:
    shape = (num_blocks, 2, BLOCK_SIZE, kv_heads, dim)
    return torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)


def fill_pool(pool: torch.Tensor, tables: list[torch.Tensor], lengths: list[int]) -> None:
    """Random keys and values for the tokens of each sequence; all other slots stay as they are."""
    for table, length in zip(tables, lengths, strict=True):
        token = torch.arange(length, device="cuda")
        block = table.cuda().long()[token // BLOCK_SIZE]
        pool[block, :, token % BLOCK_SIZE] = random(length, *pool.shape[1:2], *pool.shape[3:])


def check_fused(
    lengths: list[int], heads: int, kv_heads: int, dim: int, config: FusedDecodeConfig | None,
    *, has_norm: bool = True,
) -> None:  # fmt: skip
    count, facts = len(lengths), attention_facts(heads, kv_heads, dim)
    assert not fused_decode_obstacle(facts)
    attend = FusedDecodeAttention(
        facts, CUDA, fused_decode_config if config is None else lambda *_: config
    )
    sizes = [-(-length // BLOCK_SIZE) for length in lengths]
    block_ids = torch.randperm(sum(sizes) + 5, dtype=torch.int32)  # five blocks are free
    tables = list(block_ids[: sum(sizes)].split(sizes))
    last = [
        ids[(length - 1) // BLOCK_SIZE].long() * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        for ids, length in zip(tables, lengths, strict=True)
    ]
    rows = kv_rows(torch.stack(last).cuda(), BLOCK_SIZE)
    cache = poisoned_pool(len(block_ids), kv_heads, dim)
    fill_pool(cache, tables, [length - 1 for length in lengths])
    tables = block_ids.cuda(), torch.from_numpy(first_blocks(lengths, BLOCK_SIZE)).cuda()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    norms = (random(dim), random(dim)) if has_norm else None
    finite = ~cache.isnan()
    for _ in range(3):  # the scratch is left as it was
        qkv = random(count, (heads + 2 * kv_heads) * dim)
        angles = torch.rand(count, dim // 2, device="cuda") * 6.28
        rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
        twin = cache.nan_to_num()  # the twin zeroes what it masks only after it has read it
        projected = ProjectedHeads(qkv, norms, EPS, rope, cache, rows)
        of_twin = replace(projected, kv_cache=twin)
        expected = plain.fused_decode_attention(of_twin, *tables, seq_lens)
        found = attend(projected, *tables, seq_lens)
        assert error(found, expected) <= 2 * TOLERANCE
        assert error(cache.nan_to_num(), twin) <= TOLERANCE
    written = ~cache.isnan() & ~finite
    assert written.any(-1).sum() == 2 * count * kv_heads  # a key and a value per sequence and head
    # A padding token writes nothing.
    before = cache.clone()
    nowhere = kv_rows(torch.full((count,), -1, device="cuda"), BLOCK_SIZE)
    attend(replace(projected, rows=nowhere), *tables, seq_lens)
    torch.testing.assert_close(cache, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lengths", [[1], [2], [65], [1100], [4096], [9000], [1, 33], [700, 2048]])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_fused_decode_attention_agrees_with_its_twin(
    lengths: list[int], heads: int, kv_heads: int, dim: int
) -> None:
    check_fused(lengths, heads, kv_heads, dim, None)


@pytest.mark.parametrize(
    "config",
    [
        FusedDecodeConfig(2, 16), FusedDecodeConfig(4, 8, 32), FusedDecodeConfig(8, 32),
        FusedDecodeConfig(8, 32, tensor_cores=True), FusedDecodeConfig(4, 64, 32, True, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_norm", [False, True])
def test_fused_decode_attention_agrees_for_other_configurations(
    config: FusedDecodeConfig, has_norm: bool
) -> None:
    check_fused([1500], 64, 8, 128, config, has_norm=has_norm)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(16, 8, 128), (32, 8, 128), (64, 8, 128), (28, 4, 128), (8, 8, 64), (14, 2, 64)],
)
@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, 64), (1000, 64)],
        [(0, 1058)],
        [(333, 700), (0, 290), (16, 2), (0, 1056)],
        [(9000, 40)],
        [(2000, 100), (50, 3), (700, 64)],
    ],
    ids=["token", "whole", "prompt", "ragged", "question", "questions"],
)
@pytest.mark.parametrize("rising", [False, True])
def test_prefill_attention_agrees_with_its_twin(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, rising: bool
) -> None:
    """Rows of no sequence are not finite; two runs are equal bit for bit."""
    facts = attention_facts(heads, kv_heads, dim)
    if why := prefill_obstacle(facts):
        pytest.skip(why)
    size, before = BLOCK_SIZE, [part for part, _ in chunks]
    lengths = torch.tensor([length for _, length in chunks], dtype=torch.int32)
    seq_lens = torch.tensor([sum(chunk) for chunk in chunks], dtype=torch.int32)
    counts = -(-seq_lens // size)
    block_ids = torch.randperm(int(counts.sum()), dtype=torch.int32)
    cu_query_lens = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))
    num_tokens = int(cu_query_lens[-1])
    pool = torch.full((len(block_ids), 2, size, kv_heads, dim), torch.nan, device="cuda").bfloat16()
    query, own = random(num_tokens + 7, heads, dim), random(num_tokens + 7, 2 * kv_heads, dim)
    own[num_tokens:] = torch.nan
    if rising:  # scores that overflow relative to the first tile's row max, see `softmax`
        own[: num_tokens // 3 : 5, :kv_heads] *= 60
    attend = PrefillAttention(facts, CUDA)
    firsts = first_blocks(seq_lens, size).tolist()
    listed = [
        PrefillChunk(first, length, cached, block)
        for first, (cached, length), block in zip(
            cu_query_lens.tolist(), chunks, firsts, strict=False
        )
    ]
    work = attend.list_work(listed, attend.count_work(len(query), len(chunks)))
    expected = []
    for index, ids in enumerate(block_ids.cuda().split(counts.tolist())):
        rows = slice(int(cu_query_lens[index]), int(cu_query_lens[index + 1]))
        cached = random(before[index], 2 * kv_heads, dim)
        both = torch.cat((cached, own[rows]))
        place = torch.arange(len(cached), device="cuda")
        parts = cached.unflatten(1, (2, kv_heads))
        pool[ids[place // size].long(), :, place % size] = parts
        keys, values = both.float().unflatten(1, (2, kv_heads)).permute(1, 2, 0, 3)
        mask = torch.ones(len(both), len(both), dtype=torch.bool, device="cuda").tril()
        attended = F.scaled_dot_product_attention(
            query[rows].float().transpose(0, 1)[None], keys[None], values[None],
            attn_mask=mask[before[index] :], enable_gqa=True,
        )  # fmt: skip
        expected.append(attended[0].transpose(0, 1))
    found = []
    for _ in range(2):
        out = torch.full_like(query, torch.nan)
        attend(query, own, pool, block_ids.cuda(), torch.from_numpy(work).cuda(), out=out)
        found.append(out[:num_tokens])
        assert out[num_tokens:].isnan().all()
    assert torch.equal(*found)
    assert error(found[0], torch.cat(expected)) <= TOLERANCE


# Chunks of (cached tokens, new tokens), padded to four, and whether eager steps copy their keys.
LONG_CHUNKS = [
    ([(12_000, 1024)], True),
    ([(5001, 900), (2000, 700), (31, 440)], True),
    ([(100_000, 640)], True),
    ([(0, 300), (5001, 700), (2000, 1)], False),
    ([(0, 1)], False),
]
LONG_DECODES, MOST_TOKENS = 3, 2051


def long_step(chunks: list[tuple[int, int]], block_ids: torch.Tensor) -> AttentionMetadata:
    """A step of three decodes of one token, whose attention is not computed, and chunks."""
    parts = [(0, 1)] * LONG_DECODES + chunks
    seq_lens = np.array([sum(part) for part in parts], np.int32)
    starts = first_blocks(seq_lens, BLOCK_SIZE)
    return AttentionMetadata(
        num_decodes=LONG_DECODES,
        cu_query_lens=np.cumsum([0, *(new for _, new in parts)]).astype(np.int32),
        seq_lens=seq_lens,
        first_blocks=starts,
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_ids=block_ids,
        first_blocks_device=torch.from_numpy(starts).cuda(),
        seq_lens_device=torch.from_numpy(seq_lens).cuda(),
    )


@needs_flashinfer
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (28, 4, 128), (32, 8, 64)])
def test_fa3_over_dense_keys_agrees_with_keys_in_blocks(
    heads: int, kv_heads: int, dim: int
) -> None:
    """Planned for an eager step, and captured once and planned before each replay. Copied keys are
    equal to their twin's bit for bit. Blocks of no sequence, and the copy before, are not finite.
    """
    from services.decoder.attention import flashinfer

    facts = replace(attention_facts(heads, kv_heads, dim), max_num_blocks=7000)
    if why := prefill_obstacle(facts):
        pytest.skip(why)
    attend = flashinfer.FlashInferPrefill(facts, CUDA, flashinfer.make_float_workspace(CUDA))
    dense = attend._dense
    assert dense is not None and len(dense.keys) >= 101_000
    block_ids = torch.randperm(facts.max_num_blocks, dtype=torch.int32).cuda()
    pool = poisoned_pool(facts.max_num_blocks, kv_heads, dim)
    query, out = random(MOST_TOKENS, heads, dim), random(MOST_TOKENS, heads, dim)
    largest = long_step([(0, 2000), (0, 48), (0, 0), (0, 0)], block_ids)
    planned = attend.plan(largest, captured=True)
    planned.run(query, pool, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned.run(query, pool, out=out)
    for chunks, copies_eagerly in LONG_CHUNKS:
        step = long_step([*chunks, *[(0, 0)] * (4 - len(chunks))], block_ids)
        pool.fill_(torch.nan)
        counts = (-(-step.seq_lens // BLOCK_SIZE)).tolist()
        fill_pool(pool, list(block_ids[: sum(counts)].split(counts)), step.seq_lens.tolist())
        largest.first_blocks_device.copy_(step.first_blocks_device)
        largest.seq_lens_device.copy_(step.seq_lens_device)
        count = int(step.cu_query_lens[-1])
        expected = torch.full_like(query[:count], torch.nan)
        attend._plan_paged(step).run(query[:count], pool, out=expected)
        found = torch.full_like(expected, torch.nan)
        for each in (dense.keys, dense.values):
            each.fill_(torch.nan)
        eager = attend.plan(step)
        assert isinstance(eager, flashinfer.DenseChunks) == copies_eagerly
        eager.run(query[:count], pool, out=found)
        for each in (out, dense.keys, dense.values):
            each.fill_(torch.nan)
        attend.plan(step, captured=True)
        graph.replay()
        tensors = step.first_blocks_device[LONG_DECODES:], step.seq_lens_device[LONG_DECODES:]
        copied = int(padded_to_tiles(step.seq_lens[LONG_DECODES:]).sum())
        copies = dense.keys[:copied].clone(), dense.values[:copied].clone()
        dense.gather_plainly(pool, block_ids, *tensors)
        assert torch.equal(copies[0], dense.keys[:copied])
        assert torch.equal(copies[1], dense.values[:copied])
        for each in (found, out[:count]):
            assert each[:LONG_DECODES].isnan().all(), "rows of decodes"
            assert each[LONG_DECODES:].isfinite().all()
            assert error(each[LONG_DECODES:], expected[LONG_DECODES:]) <= TOLERANCE
        assert out[count:].isnan().all()


@needs_flashinfer
def test_keys_and_values_that_are_not_finite_stay_with_their_sequence() -> None:
    """In the copy, a sequence follows another one and lies where an earlier one lay."""
    from services.decoder.attention import flashinfer

    facts = replace(attention_facts(32, 8, 128), max_num_blocks=400)
    if why := prefill_obstacle(facts):
        pytest.skip(why)
    attend = flashinfer.FlashInferPrefill(facts, CUDA, flashinfer.make_float_workspace(CUDA))
    block_ids = torch.arange(400, dtype=torch.int32, device="cuda")
    pool = random(400, 2, BLOCK_SIZE, 8, 128)
    query = random(MOST_TOKENS, 32, 128)
    both, one = [(130, 700), (100, 800)], [(130, 700)]
    places = {len(chunks): slice(3, 703) for chunks in (both, one)}
    alone = torch.empty_like(query[:703])
    attend.plan(long_step(one, block_ids)).run(query[:703], pool, out=alone)
    step = long_step(both, block_ids)
    poisoned = pool.clone()
    poisoned[int(step.first_blocks[4]) :] = torch.nan  # the second chunk's blocks, and all behind
    out = torch.empty_like(query[:1503])
    attend.plan(step).run(query[:1503], poisoned, out=out)
    assert torch.equal(out[places[2]], alone[places[1]]) and out[703:].isnan().all()
    attend.plan(long_step(one, block_ids)).run(query[:703], pool, out=out[:703])
    assert torch.equal(out[places[1]], alone[places[1]])


def check_paged_in_a_graph(
    count: int, heads: int, kv_heads: int, dim: int, config: PagedDecodeConfig | None = None,
    longest: tuple[int, ...] = (1, 16, 100, 700, 2000, 3000),
) -> None:  # fmt: skip
    """One graph, other lengths and blocks at each replay; the last sequence is padding."""
    facts, most = attention_facts(heads, kv_heads, dim), max(longest)
    assert not paged_decode_obstacle(facts)
    attend = PagedDecodeAttention(facts, CUDA, config)
    num_blocks = max(count * most // BLOCK_SIZE // 4, 2 * -(-most // BLOCK_SIZE)) + 8
    block_ids = torch.zeros(count * -(-most // BLOCK_SIZE), dtype=torch.int32, device="cuda")
    seq_lens = torch.ones(count + 1, dtype=torch.int32, device="cuda")
    firsts = torch.zeros_like(seq_lens)
    query = random(count + 1, heads, dim)
    out = torch.empty_like(query)
    pool = random(num_blocks, 2, BLOCK_SIZE, kv_heads, dim)
    clean = pool.clone()
    attend(query, pool, block_ids, firsts, seq_lens, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(query, pool, block_ids, firsts, seq_lens, out=out)
    for turn, limit in enumerate(longest):
        generator = torch.Generator().manual_seed(turn)
        lengths = torch.randint(1, limit + 1, (count,), generator=generator, dtype=torch.int32)
        if turn % 2:
            lengths[count // 2] = limit
        sizes = (-(-lengths // BLOCK_SIZE)).tolist()
        ids = torch.randint(0, num_blocks - 8, (sum(sizes),), generator=generator).int()
        # Free blocks are poisoned, and so are slots after a sequence's last token in a block of
        # its own.
        tail_blocks = torch.arange(num_blocks - 8, num_blocks, dtype=torch.int32)
        pool.copy_(clean)
        pool[tail_blocks.long().cuda()] = torch.nan
        tables = list(ids.split(sizes))
        for index in range(min(count, 8)):
            block, used = tail_blocks[index], (int(lengths[index]) - 1) % BLOCK_SIZE + 1
            tables[index][-1] = block
            pool[int(block), :, :used] = clean[int(block), :, :used]
        block_ids[: len(ids)] = ids.cuda()
        firsts[:count].copy_(torch.from_numpy(first_blocks(lengths, BLOCK_SIZE)))
        seq_lens[:count].copy_(lengths)
        seq_lens[count] = 0
        query.copy_(random(count + 1, heads, dim))
        found = []
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            found.append(out[:count].clone())
            assert out[count].isnan().all()  # padding is not written
        assert torch.equal(*found)  # whichever CTA arrives last
        for index, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
            keys, values = (
                pool[table.cuda().long(), part].flatten(0, 1)[:length].transpose(0, 1).float()
                for part in (0, 1)
            )
            asked = query[index, :, None].float()
            expected = F.scaled_dot_product_attention(asked, keys, values, enable_gqa=True)
            assert error(found[0][index], expected[:, 0]) <= 2 * TOLERANCE, (turn, index, length)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("count", [1, 48, 130])
def test_paged_decode_attention_agrees_with_its_twin_in_a_graph(
    count: int, heads: int, kv_heads: int, dim: int
) -> None:
    check_paged_in_a_graph(count, heads, kv_heads, dim)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128)])
@pytest.mark.parametrize(("count", "longest"), [(512, (700, 2000)), (3, (9000, 9000))])
def test_paged_decode_attention_agrees_for_many_and_for_long(
    count: int, longest: tuple[int, ...], heads: int, kv_heads: int, dim: int
) -> None:
    check_paged_in_a_graph(count, heads, kv_heads, dim, None, longest)


@pytest.mark.parametrize(
    "config",
    [
        PagedDecodeConfig(1, 32, 2), PagedDecodeConfig(2, 64, alone=(2, 3)),
        PagedDecodeConfig(4, 128, 8, alone=(1, 3)), PagedDecodeConfig(8, 64, alone=(3, 2)),
    ],
)  # fmt: skip
def test_paged_decode_attention_agrees_for_other_configurations(config: PagedDecodeConfig) -> None:
    check_paged_in_a_graph(65, 16, 8, 128, config, (100, 3000))


@pytest.mark.parametrize(("decodes", "lengths"), [(3, [1058]), (64, [290, 7, 300]), (25, [40] * 9)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (64, 8)])
def test_decode_beside_prefill_is_as_one_after_the_other(
    decodes: int, lengths: list[int], heads: int, kv_heads: int
) -> None:
    """Layer by layer in the same memory: each layer reads what the one before has written."""
    dim, size, layers = 128, BLOCK_SIZE, 6
    facts = attention_facts(heads, kv_heads, dim)
    if why := prefill_obstacle(facts):
        pytest.skip(why)
    decode, prefill = PagedDecodeAttention(facts, CUDA), PrefillAttention(facts, CUDA)
    contexts = torch.randint(1, 1500, (decodes,)).tolist() + lengths
    counts = torch.tensor([-(-context // size) for context in contexts])
    num_blocks, num_tokens = int(counts.sum()), decodes + sum(lengths)
    block_ids = torch.randperm(num_blocks, dtype=torch.int32).cuda()
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    starts = torch.from_numpy(first_blocks(contexts, size)).cuda()
    firsts = np.cumsum([decodes, *lengths]).tolist()
    chunks = [
        PrefillChunk(firsts[index], length, 0, int(starts[decodes + index]))
        for index, length in enumerate(lengths)
    ]
    listed = prefill.list_work(chunks, prefill.count_work(num_tokens, len(lengths)))
    work = torch.from_numpy(listed).cuda()
    pool = random(num_blocks, 2, size, kv_heads, dim)
    own, start = random(num_tokens, 2 * kv_heads, dim), random(num_tokens, heads, dim)
    query, out = torch.empty_like(start), torch.empty_like(start)

    def run(between: Callable[[], None]) -> None:
        query.copy_(start)
        for _ in range(layers):
            decoded = out[:decodes]
            decode(
                query[:decodes], pool, block_ids, starts, seq_lens, out=decoded, beside_prefill=True
            )
            between()
            prefill(query, own, pool, block_ids, work, out=out, beside_decode=True)
            between()
            torch.add(start, out, alpha=3, out=query)

    run(torch.cuda.synchronize)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
