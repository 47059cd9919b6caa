"""Each kernel of the decoder's attention against its plain twin; tolerance as in `twins`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.gpu.twins import CUDA, TOLERANCE, error, fused, random

pytest.importorskip("triton")
from services.decoder.kernels import plain
from services.decoder.kernels.few_attention import FewAttention
from services.decoder.kernels.heads import HeadTransform, kv_rows
from services.decoder.kernels.many_attention import ManyAttention
from services.decoder.kernels.prompt_attention import PromptAttention, PromptChunk

pytestmark = pytest.mark.gpu
EPS = 1e-6


@pytest.mark.parametrize("lengths", [[1], [2], [65], [1100], [4096], [1, 33], [700, 2048]])
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "dim"),
    [(16, 8, 128), (32, 8, 128), (4, 2, 64), (5, 5, 32), (3, 1, 16)],
)
def test_attention_of_few_agrees_with_its_twin(
    lengths: list[int], num_heads: int, kv_heads: int, dim: int
) -> None:
    count = len(lengths)
    ops, block_size = fused(num_heads, kv_heads, dim), 16
    measured = num_heads // kv_heads <= 2
    assert ops.max_fused_context(count) == ({1: 4096, 2: 2048}[count] if measured else 0)
    attend = FewAttention(CUDA, num_heads, kv_heads, dim)
    sizes = [-(-length // block_size) for length in lengths]
    block_ids = torch.randperm(sum(sizes), device="cuda", dtype=torch.int32)
    last = [
        ids[(length - 1) // block_size].long() * block_size + (length - 1) % block_size
        for ids, length in zip(block_ids.split(sizes), lengths, strict=True)
    ]
    rows = kv_rows(torch.stack(last), block_size)
    cache = random(sum(sizes) + 1, 2, block_size, kv_heads, dim)
    weights = (random(dim), random(dim))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    for _ in range(3):  # the memory where programs meet is left as it was found
        qkv = random(count, (num_heads + 2 * kv_heads) * dim)
        angles = torch.rand(count, dim // 2, device="cuda") * 6.28
        rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
        twin = cache.clone()
        heads = HeadTransform(weights, EPS, rope, cache, rows).of(qkv)
        expected = plain.attend_few(replace(heads, kv_cache=twin), block_ids, seq_lens)
        found = attend(heads, block_ids, seq_lens)
        assert error(found, expected) <= 2 * TOLERANCE
        assert error(cache, twin) <= TOLERANCE
    # A padding token writes nothing.
    before = cache.clone()
    nowhere = kv_rows(torch.full((count,), -1, device="cuda"), block_size)
    attend(replace(heads, rows=nowhere), block_ids, seq_lens)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (8, 8, 64)])
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
def test_attention_of_prompts_agrees_with_its_twin(
    chunks: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, rising: bool
) -> None:
    """Tokens of nobody are not finite, and whoever runs the kernel twice gets the same."""
    size, before = 16, [part for part, _ in chunks]
    lengths = torch.tensor([length for _, length in chunks], dtype=torch.int32)
    seq_lens = torch.tensor([sum(chunk) for chunk in chunks], dtype=torch.int32)
    counts = -(-seq_lens // size)
    block_ids = torch.randperm(int(counts.sum()), dtype=torch.int32)
    cu_query_lens = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))
    num_tokens = int(cu_query_lens[-1])
    pool = torch.full((len(block_ids), 2, size, kv_heads, dim), torch.nan, device="cuda").bfloat16()
    query, own = random(num_tokens + 7, heads, dim), random(num_tokens + 7, 2 * kv_heads, dim)
    own[num_tokens:] = torch.nan
    if rising:  # scores that a float's exponent would not have room for, see `softmax`
        own[: num_tokens // 3 : 5, :kv_heads] *= 60
    attend = PromptAttention(CUDA, heads, dim)
    first_blocks = (counts.cumsum(0) - counts).tolist()
    listed = [
        PromptChunk(first, length, cached, block)
        for first, (cached, length), block in zip(
            cu_query_lens.tolist(), chunks, first_blocks, strict=False
        )
    ]
    items = attend.list_items(listed, attend.count_items(len(query), len(chunks)))
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
        attend(query, own, pool, block_ids.cuda(), torch.from_numpy(items).cuda(), out=out)
        found.append(out[:num_tokens])
        assert out[num_tokens:].isnan().all()
    assert torch.equal(*found)
    assert error(found[0], torch.cat(expected)) <= TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (8, 8, 64), (32, 16, 128)])
@pytest.mark.parametrize("count", [1, 48, 130, 512])
def test_attention_of_many_agrees_with_its_twin_in_a_graph(
    count: int, heads: int, kv_heads: int, dim: int
) -> None:
    """One graph, other lengths and blocks at each replay."""
    attend, block_size, most = ManyAttention(CUDA, heads, kv_heads, dim), 16, 3000
    pool = random(count * most // block_size // 4, 2, block_size, kv_heads, dim)
    block_ids = torch.zeros(count * -(-most // block_size), dtype=torch.int32, device="cuda")
    seq_lens = torch.ones(count, dtype=torch.int32, device="cuda")
    query = random(count, heads, dim)
    out = torch.empty_like(query)
    attend(query, pool, block_ids, seq_lens, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(query, pool, block_ids, seq_lens, out=out)
    for turn in range(6):
        generator = torch.Generator().manual_seed(turn)
        longest = (1, 16, 100, 700, 2000, most)[turn]
        lengths = torch.randint(1, longest + 1, (count,), generator=generator, dtype=torch.int32)
        if turn % 2:
            lengths[count // 2] = most
        sizes = (-(-lengths // block_size)).tolist()
        ids = torch.randint(0, len(pool), (sum(sizes),), generator=generator, dtype=torch.int32)
        block_ids[: len(ids)] = ids.cuda()
        seq_lens.copy_(lengths)
        query.copy_(random(count, heads, dim))
        found = []
        for _ in range(2):
            out.fill_(torch.nan)
            graph.replay()
            found.append(out.clone())
        assert torch.equal(*found)  # whoever comes last
        for index, (table, length) in enumerate(
            zip(ids.cuda().split(sizes), lengths.tolist(), strict=True)
        ):
            keys, values = (
                pool[table, part].flatten(0, 1)[:length].transpose(0, 1).float() for part in (0, 1)
            )
            asked = query[index, :, None].float()
            expected = F.scaled_dot_product_attention(asked, keys, values, enable_gqa=True)
            assert error(found[0][index], expected[:, 0]) <= 2 * TOLERANCE, (turn, index, length)


@pytest.mark.parametrize(("decodes", "lengths"), [(3, [1058]), (64, [290, 7, 300]), (25, [40] * 9)])
def test_attention_of_many_beside_prompts_is_as_one_after_the_other(
    decodes: int, lengths: list[int]
) -> None:
    """Layer by layer in the same memory: each takes what the one before has made of it."""
    heads, kv_heads, dim, size, layers = 16, 8, 128, 16, 6
    many, prompts = ManyAttention(CUDA, heads, kv_heads, dim), PromptAttention(CUDA, heads, dim)
    contexts = torch.randint(1, 1500, (decodes,)).tolist() + lengths
    counts = torch.tensor([-(-context // size) for context in contexts])
    num_blocks, num_tokens = int(counts.sum()), decodes + sum(lengths)
    block_ids = torch.randperm(num_blocks, dtype=torch.int32).cuda()
    seq_lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    first_blocks = (counts.cumsum(0) - counts).tolist()
    firsts = np.cumsum([decodes, *lengths]).tolist()
    chunks = [
        PromptChunk(firsts[index], length, 0, first_blocks[decodes + index])
        for index, length in enumerate(lengths)
    ]
    items = prompts.list_items(chunks, prompts.count_items(num_tokens, len(lengths)))
    work = torch.from_numpy(items).cuda()
    pool = random(num_blocks, 2, size, kv_heads, dim)
    own, start = random(num_tokens, 2 * kv_heads, dim), random(num_tokens, heads, dim)
    query, out = torch.empty_like(start), torch.empty_like(start)

    def run(between: Callable[[], None]) -> None:
        query.copy_(start)
        for _ in range(layers):
            decoded = out[:decodes]
            many(query[:decodes], pool, block_ids, seq_lens, out=decoded, accompanied=True)
            between()
            prompts(query, own, pool, block_ids, work, out=out, accompanies=True)
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
