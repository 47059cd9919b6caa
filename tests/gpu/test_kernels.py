"""Each fused kernel against its plain twin, on fresh random inputs.

Tolerance: ‖out - twin‖ / ‖twin‖ <= 4e-3 in bf16: half a unit in the last place of each value on
average is 2^-9 = 2e-3, and a sum taken in another order may move each value's rounding by one.
Where two such roundings follow each other in the twin (probabilities and their sum, two products
and theirs), twice that.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from services.common.nn import cublaslt, launches
from services.common.nn.linear import add_product, sum_parts
from services.decoder.attention.base import kv_rows
from services.decoder.kernels import prompt_swiglu
from services.decoder.kernels.few_attention import FewAttention
from services.decoder.kernels.many_attention import ManyAttention
from services.decoder.kernels.ops import PlainOps
from services.decoder.kernels.prompt_attention import Chunks, PromptAttention
from services.decoder.kernels.triton_ops import TritonOps
from services.decoder.models.rope import InterleavedMRope, ProjectedHeads

pytestmark = pytest.mark.gpu
TOLERANCE = 4e-3
EPS = 1e-6
CUDA = torch.device("cuda")
PLAIN = PlainOps()


def fused(heads: int = 16, kv_heads: int = 8, dim: int = 128) -> TritonOps:
    return TritonOps(max_few_tokens=2, few_attention=FewAttention(CUDA, heads, kv_heads, dim))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return ((out.float() - twin.float()).norm() / twin.float().norm()).item()


@pytest.mark.parametrize("num_tokens", [900, 1024, 1088, 1280, 2048, 3000, 8192])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 2048), (2048, 2048), (2048, 6144)])
def test_products_by_chosen_tiles_are_those_of_torch(
    num_tokens: int, rows: int, columns: int
) -> None:
    x, weight, bias = random(num_tokens, columns), random(rows, columns), random(rows)
    with launches.captured():
        tile = cublaslt.tile_tokens(num_tokens, rows, columns)
        assert (tile == 0) == (columns > 2048 and num_tokens in (2048, 8192))
        found = [cublaslt.linear(x, weight), cublaslt.linear(x, weight, bias)]
        gelu = cublaslt.linear(x, weight, bias, gelu=True)
    if tile == 0:
        assert found == [None, None] and gelu is None
        return
    assert torch.equal(found[0], F.linear(x, weight))
    assert torch.equal(found[1], F.linear(x, weight, bias))
    assert torch.equal(gelu, torch._addmm_activation(bias, x, weight.t(), use_gelu=True))


@pytest.mark.parametrize("num_tokens", [700, 900, 3000, 8192])
@pytest.mark.parametrize(("rows", "columns"), [(2048, 2048), (2048, 6144), (1024, 4096)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_that_add_are_as_exact_as_a_product_and_a_sum(
    num_tokens: int, rows: int, columns: int, biased: bool
) -> None:
    """To a hundredth, for chance: the product need not be rounded before it is added, but may be.
    (Without that rounding the error would be 0.73 to 0.78 of a product's and a sum's here.)
    """
    x, weight = random(num_tokens, columns), random(rows, columns)
    residual, bias = random(num_tokens, rows) * 50, random(rows) if biased else None
    wide = None if bias is None else bias.double()
    truth = residual.double() + F.linear(x.double(), weight.double(), wide)
    twin, found = residual + F.linear(x, weight, bias), residual.clone()
    with launches.captured():
        by_us = cublaslt.tile_tokens(num_tokens, rows, columns) > 0
        done = add_product(x, weight, bias, found)
    assert done == (num_tokens > 832 and (by_us or not biased))
    if done:
        assert error(found, truth) <= 1.01 * error(twin, truth)
    else:
        assert torch.equal(found, residual)


@pytest.mark.parametrize("num_tokens", [1000, 1024, 1408, 8058])
@pytest.mark.parametrize("rows", [6144, 9728])
def test_swiglu_of_prompts_agrees_with_its_twin(num_tokens: int, rows: int) -> None:
    x, weight = random(num_tokens, 2048), random(2 * rows, 2048) / 45
    found = prompt_swiglu.linear_swiglu(x, weight)
    assert error(found, PLAIN.linear_swiglu(x, weight)) <= TOLERANCE
    if rows == 6144:  # the 2B's, for which these are the lengths that fill the processors
        with launches.captured():
            assert prompt_swiglu.gains(x, weight)
            assert torch.equal(fused().linear_swiglu(x, weight), found)


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("width", [256, 2048, 2560, 5120])
def test_norms_agree_with_their_twins(num_tokens: int, width: int) -> None:
    x, residual, weight = random(num_tokens, width), random(num_tokens, width), random(width)
    expected, expected_residual = PLAIN.add_rms_norm(x, residual.clone(), weight, EPS)
    out, new_residual = fused().add_rms_norm(x, residual.clone(), weight, EPS)
    assert error(out, expected) <= TOLERANCE
    assert torch.equal(new_residual, expected_residual)  # one addition, one rounding
    assert error(fused().rms_norm(x, weight, EPS), PLAIN.rms_norm(x, weight, EPS)) <= TOLERANCE


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 768), (300, 6144), (7, 9728)])
def test_silu_and_mul_agrees_with_its_twin(num_tokens: int, width: int) -> None:
    gate_up = random(num_tokens, 2 * width)
    assert error(fused().silu_and_mul(gate_up), PLAIN.silu_and_mul(gate_up)) <= TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 127, 200])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 128), (4, 2, 64), (5, 5, 32), (3, 1, 16)]
)
def test_qk_rope_cache_agrees_with_its_twin(
    num_tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = random(num_tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(num_tokens, dim // 2, device="cuda") * 6.28
    rope = (angles.cos().bfloat16(), angles.sin().bfloat16())
    slots = torch.randperm(39 * 16, device="cuda")[:num_tokens]
    slots[-1] = -1  # a padding token
    rows = kv_rows(slots, 16)
    cache = torch.full((40, 2, 16, kv_heads, dim), torch.nan, device="cuda").bfloat16()
    twin = cache.clone()
    weights = (random(dim), random(dim))
    expected = PLAIN.qk_rope_cache(ProjectedHeads(qkv, weights, EPS, rope, twin, rows))
    query = fused().qk_rope_cache(ProjectedHeads(qkv, weights, EPS, rope, cache, rows))
    assert error(query, expected) <= TOLERANCE
    cache, twin = cache[:39], twin[:39]  # the last block is scratch
    assert torch.equal(cache.isnan(), twin.isnan())  # the same slots, and no other
    assert error(cache.nan_to_num(), twin.nan_to_num()) <= TOLERANCE or num_tokens == 1


@pytest.mark.parametrize("count", [1, 64, 3000])
def test_what_comes_before_the_layers_agrees_with_its_twins(count: int) -> None:
    ops = fused()
    known = torch.randint(0, 9, (count,), dtype=torch.int32, device="cuda")
    rows = torch.randint(-1, 257, (count,), device="cuda")
    last_tokens = torch.arange(257, dtype=torch.int32, device="cuda")
    arguments = (known, rows, last_tokens)
    assert torch.equal(ops.pick_tokens(*arguments), PLAIN.pick_tokens(*arguments))
    mrope = InterleavedMRope(128, 5e6, (24, 20, 20))
    mrope.reset_buffers(CUDA)
    positions = torch.randint(0, 262_144, (3, count), dtype=torch.int32, device="cuda")
    slots = torch.randint(-1, 1_000_000, (count,), device="cuda")
    arguments = (positions, slots, mrope, torch.bfloat16, 16)
    (cos, sin), found = ops.rope_and_rows(*arguments)
    (twin_cos, twin_sin), expected = PLAIN.rope_and_rows(*arguments)
    assert torch.equal(found, expected)
    assert error(cos, twin_cos) <= TOLERANCE and error(sin, twin_sin) <= TOLERANCE


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
        heads = ProjectedHeads(qkv, weights, EPS, rope, cache, rows)
        expected = PLAIN.attend_few(replace(heads, kv_cache=twin), block_ids, seq_lens)
        found = ops.attend_few(heads, block_ids, seq_lens)
        assert error(found, expected) <= 2 * TOLERANCE
        assert error(cache, twin) <= TOLERANCE
    # A padding token writes nothing.
    before = cache.clone()
    nowhere = kv_rows(torch.full((count,), -1, device="cuda"), block_size)
    ops.attend_few(replace(heads, rows=nowhere), block_ids, seq_lens)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("num_tokens", [3, 16, 33, 64])
@pytest.mark.parametrize(("columns", "rows"), [(2048, 4096), (2048, 2048), (6144, 2048), (128, 64)])
def test_products_of_small_batches_agree_with_their_twins(
    num_tokens: int, columns: int, rows: int
) -> None:
    ops = fused()
    x, weight = random(num_tokens, columns), random(rows, columns) * columns**-0.5
    parts = ops.linear_parts(x, weight)
    whole = PLAIN.linear(x, weight)
    assert error(sum_parts(parts, torch.bfloat16), whole) <= TOLERANCE
    swiglu = ops.linear_swiglu(x, weight)
    assert error(swiglu, PLAIN.linear_swiglu(x, weight)) <= 2 * TOLERANCE
    residual, norm = random(num_tokens, rows), random(rows)
    expected = PLAIN.add_rms_norm(parts, residual.clone(), norm, EPS)
    found = ops.add_rms_norm(parts, residual.clone(), norm, EPS)
    assert error(found[0], expected[0]) <= TOLERANCE
    assert torch.equal(found[1], expected[1]) or error(found[1], expected[1]) <= TOLERANCE
    if rows < 4096:
        return
    heads = ProjectedHeads(
        parts, (random(128), random(128)), EPS, (random(num_tokens, 64), random(num_tokens, 64)),
        random(9, 2, 16, 8, 128), kv_rows(torch.arange(num_tokens, device="cuda"), 16),
    )  # fmt: skip
    twin = replace(heads, kv_cache=heads.kv_cache.clone())
    assert error(ops.qk_rope_cache(heads), PLAIN.qk_rope_cache(twin)) <= TOLERANCE
    assert error(heads.kv_cache, twin.kv_cache) <= TOLERANCE


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
    first_blocks = (counts.cumsum(0) - counts).numpy()
    items = attend.list_items(
        Chunks(cu_query_lens.numpy(), seq_lens.numpy(), first_blocks),
        attend.count_items(len(query), len(chunks)),
    )
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
    first_blocks = (counts.cumsum(0) - counts).numpy()
    ends = np.cumsum([decodes, *lengths]).astype(np.int32)
    chunks = Chunks(ends, np.array(lengths, np.int32), first_blocks[decodes:])
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


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(
    ("width", "rows"), [(2048, 4096), (6144, 2048), (2560, 9728), (12288, 4096), (256, 100)]
)
def test_products_of_few_tokens_agree_with_their_twins(
    num_tokens: int, width: int, rows: int
) -> None:
    x, norm, residual = random(num_tokens, width), random(width), random(num_tokens, rows)
    weight = (torch.randn(2 * rows, width, device="cuda") * 0.02).bfloat16()
    half = weight[:rows]
    assert error(fused().linear(x, half), PLAIN.linear(x, half)) <= TOLERANCE
    expected = PLAIN.norm_linear(x, norm, EPS, half)
    assert error(fused().norm_linear(x, norm, EPS, half), expected) <= TOLERANCE
    expected = PLAIN.norm_swiglu(x, norm, EPS, weight)
    assert error(fused().norm_swiglu(x, norm, EPS, weight), expected) <= 2 * TOLERANCE
    twin = residual.clone()
    fused().linear_add(x, half, residual)
    PLAIN.linear_add(x, half, twin)
    assert error(residual, twin) <= TOLERANCE


@pytest.mark.parametrize("vocab_size", [100, 1024, 151936])
def test_greedy_agrees_with_its_twin(vocab_size: int) -> None:
    logits = random(9, vocab_size)
    logits[3, 7], logits[4, 11], logits[5, -1] = torch.nan, torch.inf, -torch.inf
    logits[6] = 0.5  # all equal: the first wins
    logits[7, -1] = 100.0
    found = fused().greedy(logits).tolist()
    assert found[3:8] == [-1, -1, -1, 0, vocab_size - 1]
    values = logits.gather(1, torch.tensor(found, device="cuda").clamp(min=0)[:, None].long())
    for row in (0, 1, 2, 6, 7, 8):
        assert values[row] == logits[row].max()
