"""Run by interpreted.py."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import draft_states, plain, step_entry, tuning
from kernels.attention.attention_tuning import (
    AttentionFacts,
    FusedDecodeConfig,
    PagedDecodeConfig,
    fused_decode_config,
    paged_decode_config,
)
from kernels.attention.dense_keys import DenseKeys, padded_to_tiles
from kernels.attention.fused_decode_attention import FusedDecodeAttention
from kernels.attention.heads import ProjectedHeads, kv_rows
from kernels.attention.paged_decode_attention import PagedDecodeAttention
from kernels.attention.qk_rope_cache import qk_rope_cache
from kernels.device import KNOWN_DEVICES, DeviceFacts
from kernels.gemm import add_norm, gemv, silu_mul, skinny_gemm, swiglu_gemm
from kernels.sampling import greedy, penalties, sampling, top_k_top_p_sampling
from kernels.tuning import GemvConfig, SkinnyConfig, SwigluGemmConfig
from services.common.model_spec import RopeSpec
from services.decoder.engine.messages import SamplingParams
from services.decoder.engine.run.sampler import Sampler
from services.decoder.engine.run.staging import Staging
from services.decoder.engine.step import RowSampling, SampleStep
from services.decoder.models.rope import RotaryEmbedding
from services.decoder.operations.ops import PlainOps
from tests import sampling_twins
from tests.block_tables import first_blocks
from tests.cases import THOROUGH
from tests.step_entries import check_draft_places, check_draft_states, check_step_entry
from tests.unit.kernels import interpreted_moe
from tests.unit.kernels.interpreter import assert_close

PLAIN = PlainOps()
BLOCK_SIZE, EPS = 16, 1e-6


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def attention_facts(heads: int, kv_heads: int, dim: int, num_sms: int = 4) -> AttentionFacts:
    return AttentionFacts(
        device=DeviceFacts("cpu", num_sms=num_sms, shared_memory_bytes=227 << 10),
        dtype=torch.float32, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        block_size=BLOCK_SIZE,
    )  # fmt: skip


def check_fused(
    lengths: list[int], heads: int, kv_heads: int, dim: int,
    config: FusedDecodeConfig | None = None, *, has_norm: bool = True, num_partials: int = 0,
) -> None:  # fmt: skip
    """One new token of each sequence: normalised, rotated, written to the cache, attended from; its
    projection may be split-K partials.
    """
    count, sizes = len(lengths), [-(-length // BLOCK_SIZE) for length in lengths]
    block_ids = torch.randperm(sum(sizes), dtype=torch.int32)
    slots = [
        int(ids[(length - 1) // BLOCK_SIZE]) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        for ids, length in zip(block_ids.split(sizes), lengths, strict=True)
    ]
    rows = kv_rows(torch.tensor(slots), BLOCK_SIZE)
    pool = torch.randn(sum(sizes) + 1, 2, BLOCK_SIZE, kv_heads, dim)
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim)
    if num_partials:
        qkv = torch.randn(num_partials, *qkv.shape)
    weights = (torch.randn(dim), torch.randn(dim)) if has_norm else None
    angles = torch.rand(count, dim // 2) * 6.28
    rope = (angles.cos(), angles.sin())
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    tables = block_ids, torch.from_numpy(first_blocks(lengths, BLOCK_SIZE))
    of_plain, of_rope, of_few = (
        ProjectedHeads(qkv, weights, EPS, rope, pool.clone(), rows) for _ in range(3)
    )
    expected = plain.fused_decode_attention(of_plain, *tables, seq_lens)
    query = plain.qk_rope_cache(replace(of_plain, kv_cache=pool.clone()))
    close(qk_rope_cache(of_rope), query)
    close(of_rope.kv_cache, of_plain.kv_cache)
    attend = FusedDecodeAttention(
        attention_facts(heads, kv_heads, dim), torch.device("cpu"),
        fused_decode_config if config is None else lambda *_: config,
    )  # fmt: skip
    for _ in range(2):  # its scratch is left as it was
        close(attend(of_few, *tables, seq_lens), expected)
    close(of_few.kv_cache, of_plain.kv_cache)
    nowhere = kv_rows(torch.full((count,), -1), BLOCK_SIZE)  # padding
    attend(replace(of_few, rows=nowhere), *tables, seq_lens)
    close(of_few.kv_cache, of_plain.kv_cache)


def check_paged(
    lengths: list[int], heads: int, kv_heads: int, dim: int, num_sms: int,
    config: PagedDecodeConfig | None = None,
) -> None:  # fmt: skip
    """Paged decode attention: items that are split anywhere, in scratch that is used again."""
    facts = attention_facts(heads, kv_heads, dim, num_sms)
    attend = PagedDecodeAttention(facts, torch.device("cpu"), config)
    for turn in range(2):
        contexts = [1 + (length + 13 * turn) % 150 for length in lengths]
        sizes = [-(-length // BLOCK_SIZE) for length in contexts]
        block_ids = torch.randperm(sum(sizes) + 3, dtype=torch.int32)
        pool = torch.full((sum(sizes) + 3, 2, BLOCK_SIZE, kv_heads, dim), torch.nan)
        query = torch.randn(len(contexts), heads, dim)
        expected: list[Tensor] = []
        for ids, length, asked in zip(
            block_ids[: sum(sizes)].split(sizes), contexts, query, strict=True
        ):
            keys, values = (torch.randn(length, kv_heads, dim) for _ in range(2))
            for index in range(length):
                place = int(ids[index // BLOCK_SIZE]), slice(None), index % BLOCK_SIZE
                pool[place] = torch.stack((keys[index], values[index]))
            attended = F.scaled_dot_product_attention(
                asked[:, None], keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True
            )
            expected.append(attended[:, 0])
        seq_lens = torch.tensor([*contexts, 99], dtype=torch.int32)  # one behind them
        found = torch.empty_like(query)
        tables = block_ids, torch.from_numpy(first_blocks(contexts, BLOCK_SIZE))
        attend(query, pool, *tables, seq_lens, out=found, beside_prefill=turn == 1)
        close(found, torch.stack(expected))


def check_dense(lengths: list[int], kv_heads: int) -> None:
    """Copied keys and values of sequences, some of which are padding without tokens. Zeros fill the
    last tile of each, and what is in blocks of nobody is not finite.
    """
    facts = replace(attention_facts(kv_heads, kv_heads, 16), max_num_blocks=20)
    dense = DenseKeys(facts, torch.device("cpu"))
    blocks = torch.randperm(60, dtype=torch.int32)
    pool = torch.full((60, 2, BLOCK_SIZE, kv_heads, 16), torch.nan)
    starts = first_blocks(np.array(lengths), BLOCK_SIZE)
    for start, length in zip(starts.tolist(), lengths, strict=True):
        for token in range(length):
            block = blocks[start + token // BLOCK_SIZE]
            pool[block, :, token % BLOCK_SIZE] = torch.randn(2, kv_heads, 16)
    inputs = pool, blocks, torch.from_numpy(starts), torch.tensor(lengths).int()
    found, count = [], int(padded_to_tiles(np.array(lengths)).sum())
    for gather in (dense.gather, dense.gather_plainly):
        dense.keys.fill_(7.0)
        dense.values.fill_(7.0)
        gather(*inputs)
        found.append((dense.keys.clone(), dense.values.clone()))
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected) and actual.isfinite().all()
        assert (actual[count:] == 7.0).all(), "beyond the sequences"
        assert int((actual[:count] == 0).all(dim=(1, 2)).sum()) == count - sum(lengths)


def check_kept(num_tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    """A step's own keys and values beside the cache, and padding behind them that is not finite."""
    padding = 5
    slots = torch.cat((torch.randperm(num_tokens), torch.full((padding,), -1)))
    angles = torch.rand(num_tokens + padding, dim // 2) * 6.28
    qkv = torch.randn(num_tokens + padding, (heads + 2 * kv_heads) * dim)
    qkv[num_tokens:] = float("nan")
    pool = torch.randn(-(-num_tokens // BLOCK_SIZE) + 1, 2, BLOCK_SIZE, kv_heads, dim)
    projected = ProjectedHeads(
        qkv, (torch.randn(dim), torch.randn(dim)), EPS, (angles.cos(), angles.sin()), pool,
        kv_rows(slots, BLOCK_SIZE),
    )  # fmt: skip
    twin = replace(projected, kv_cache=pool.clone())
    own, twins_own = (torch.zeros(num_tokens + padding, 2 * kv_heads, dim) for _ in range(2))
    query = qk_rope_cache(projected, own)
    close(query[:num_tokens], plain.qk_rope_cache(twin, twins_own)[:num_tokens])
    close(own[:num_tokens], twins_own[:num_tokens])
    close(projected.kv_cache[:-1], twin.kv_cache[:-1])


def check_entry(count: int, half: int) -> None:
    """What a step computes before its first layer."""
    check_step_entry(step_entry.enter_step, count, "cpu")
    section = (half // 2, half // 4, half // 4)
    mrope = RotaryEmbedding(
        RopeSpec(theta=5e6, rotary_dim=2 * half, mrope_section=section, attention_factor=1.3)
    )
    mrope.reset_buffers(torch.device("cpu"))
    positions = torch.randint(0, 40_000, (3, count), dtype=torch.int32)
    slots = torch.randint(-1, 500, (count,))
    rope, found = step_entry.rope_and_rows(positions, slots, mrope, torch.float32, BLOCK_SIZE)
    expected = plain.rope_and_rows(positions, slots, mrope, torch.float32, BLOCK_SIZE)
    assert torch.equal(found, expected[1])
    for part, twin in zip(rope, expected[0], strict=True):
        close(part, twin)


def check_rows(count: int, width: int) -> None:
    """Norms, SwiGLU, and the most likely tokens."""
    x, residual, weight = torch.randn(count, width), torch.randn(count, width), torch.randn(width)
    expected = plain.add_rms_norm(x, residual.clone(), weight, EPS)
    for found, twin in zip(
        add_norm.add_rms_norm(x, residual.clone(), weight, EPS), expected, strict=True
    ):
        close(found, twin)
    close(add_norm.rms_norm(x, weight, EPS), plain.rms_norm(x, weight, EPS))
    gate_up = torch.randn(count, 2 * width)
    close(silu_mul.silu_and_mul(gate_up), plain.silu_and_mul(gate_up))
    logits = torch.randn(count + 4, width)
    logits[0, 3], logits[1, 5], logits[2, -1] = torch.nan, torch.inf, 100.0
    logits[3] = 0.5  # all equal: the first wins
    assert torch.equal(greedy.greedy(logits), sampling.greedy(logits))
    sampling_twins.check_greedy_masked(greedy.greedy_masked, torch.randn(9, width))
    sampling_twins.check_greedy_rescored(greedy.greedy_rescored, width, 72, torch.float32, "cpu")


def check_gemv(width: int, rows: int, config: GemvConfig | None) -> None:
    """GEMVs with their neighbours, with biases and without."""
    x, norm, residual = torch.randn(1, width), torch.randn(width), torch.randn(1, rows)
    weight, bias = torch.randn(2 * rows, width) * 0.02, torch.randn(2 * rows)
    half = weight[:rows]
    close(gemv.linear(x, half, config=config), plain.linear(x, half))
    for both in (None, bias):
        one = None if both is None else both[:rows]
        found = gemv.norm_linear(x, norm, EPS, half, one, config=config)
        close(found, plain.norm_linear(x, norm, EPS, half, one))
        found = gemv.norm_swiglu(x, norm, EPS, weight, both, config=config)
        close(found, plain.norm_swiglu(x, norm, EPS, weight, both))
        out, twin = residual.clone(), residual.clone()
        gemv.linear_residual(x, half, one, out, config=config)
        plain.linear_residual(x, half, one, twin)
        close(out, twin)


def check_tiles_of_tokens(count: int) -> None:
    """More tokens than a CTA of the skinny GEMM has."""
    x, weight = torch.randn(count, 256), torch.randn(64, 256) * 0.02
    config, shared = SkinnyConfig(64, 64, 4, 1, 2, 2), KNOWN_DEVICES["h200"].shared_memory_bytes
    partials = skinny_gemm.split_k_partials(x, weight, None, config, shared_memory_bytes=shared)
    close(plain.reduce_split_k(partials, torch.float32), plain.linear(x, weight))


def check_split_k(count: int, columns: int, rows: int, splits: int, dim: int) -> None:
    """Split-K partials, and what reduces them: norm and rotation, which may lack the q/k norm."""
    x, norm, bias = torch.randn(count, columns), torch.randn(rows), torch.randn(rows)
    weight = torch.randn(rows, columns) * 0.02
    config = SkinnyConfig(64, 64, 4, 1, 2, splits)
    device = {"shared_memory_bytes": KNOWN_DEVICES["h200"].shared_memory_bytes}
    partials = skinny_gemm.split_k_partials(x, weight, None, config, **device)
    assert len(partials) == splits
    expected = plain.linear(x, weight)
    close(plain.reduce_split_k(partials, torch.float32), expected)
    biased = skinny_gemm.split_k_partials(x, weight, bias, config, **device)
    close(plain.reduce_split_k(biased, torch.float32), expected + bias)
    for both in (None, bias):
        found = skinny_gemm.linear_swiglu(x, weight, both, replace(config, splits=1), **device)
        close(found, plain.linear_swiglu(x, weight, both))
    residual = torch.randn(count, rows)
    for found, twin in zip(
        add_norm.add_rms_norm(partials, residual.clone(), norm, EPS),
        plain.add_rms_norm(partials, residual.clone(), norm, EPS),
        strict=True,
    ):
        close(found, twin)
    heads, kv_heads = rows // dim // 2, rows // dim // 4
    angles = torch.rand(count, dim // 2)
    slots = kv_rows(torch.randperm(4 * BLOCK_SIZE)[:count].sort().values, BLOCK_SIZE)
    for norms in ((norm[:dim], norm[dim : 2 * dim]), None):
        pools = [torch.zeros(5, 2, BLOCK_SIZE, kv_heads, dim) for _ in range(2)]
        in_splits, whole = (
            ProjectedHeads(qkv, norms, EPS, (angles.cos(), angles.sin()), pool, slots)
            for qkv, pool in zip((partials, expected), pools, strict=True)
        )
        assert in_splits.num_heads == heads and in_splits.num_tokens == count
        close(qk_rope_cache(in_splits), plain.qk_rope_cache(whole))
        close(*pools)
        close(plain.qk_rope_cache(in_splits), plain.qk_rope_cache(whole))


def check_swiglu_gemm(count: int, columns: int, rows: int) -> None:
    """SwiGLU's GEMM, in tiles of which the last holds fewer tokens than it could."""
    x, weight = torch.randn(count, columns), torch.randn(2 * rows, columns) * 0.1
    found = swiglu_gemm.linear_swiglu(x, weight, SwigluGemmConfig(num_sms=3))
    close(found, plain.linear_swiglu(x, weight))


def check_sampling() -> None:
    """With few splits and rows: the interpreter runs one program instance after the other. float32,
    whose threshold takes longest to find, is the last check's.
    """
    top_k_top_p_sampling._SPLITS, top_k_top_p_sampling._BLOCK = 2, 32
    sample = top_k_top_p_sampling.sample
    kinds = ((1, 4, 6), (2, 4, 9)) if THOROUGH else ((1, 6), (4, 9))
    some, others = ([sampling_twins.ROWS[i] for i in which] for which in kinds)
    shape = len(some), 70
    sampling_twins.check(sample, torch.randn(shape).half() * 2, some, 0)
    equal = (torch.randn(shape) * 2).round().half()
    sampling_twins.check(sample, equal, others, 1, np.random.default_rng(0).random(shape) < 0.3)
    sampling_twins.check_masked_out(sample, torch.randn(5, 70))


class SamplingOps(PlainOps):
    """Plain but for sampling and penalties."""

    sample = staticmethod(top_k_top_p_sampling.sample)  # pyright: ignore[reportAssignmentType]
    penalize = staticmethod(penalties.penalize)  # pyright: ignore[reportAssignmentType]
    count_tokens = staticmethod(penalties.count_tokens)  # pyright: ignore[reportAssignmentType]


def check_sampler(logits: Tensor, params: list[SamplingParams]) -> None:
    """The same tokens by the kernels and by torch, one step after the other."""
    found: list[list[list[int]]] = []
    for ops in (PLAIN, SamplingOps()):
        rows, (count, vocab_size) = np.arange(len(logits)), logits.shape
        staging = Staging(1 << 20, torch.device("cpu"))
        sampler = Sampler(count, vocab_size, torch.device("cpu"), ops)
        for row, one in enumerate(params):
            seen = np.array([1, 2], np.int32).tobytes()
            sampler.start_row(RowSampling(row, one, 0, seen))
        found.append([])
        for step in range(2):
            staging.begin()
            inputs = sampler.prepare(rows, np.full(count, step), staging, SampleStep())
            staging.upload()
            assert isinstance(inputs, sampling.SamplingInputs)
            found[-1].append(sampler.sample(logits.roll(step, 0), inputs).token_ids.tolist())
    assert found[0] == found[1]


if __name__ == "__main__":
    check_sampling()
    for dtype in (torch.float16, torch.float32):
        sampling_twins.check_penalties(SamplingOps(), 70, dtype, torch.device("cpu"))
    many = [
        SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1),
        SamplingParams(temperature=1.2, top_p=0.95, min_p=0.1, seed=2, top_logprobs=1),
        SamplingParams(),
    ]
    broken = torch.randn(3, 60).half() * 3
    broken[1, 9] = torch.nan
    check_sampler(broken, many)
    liked = SamplingParams(temperature=1.0, top_k=5, presence_penalty=0.5, logit_bias={7: 2.0})
    rare = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.4, seed=3)
    check_sampler(torch.randn(3, 60).half() * 3, [liked, rare, many[2]])
    if THOROUGH:
        check_sampler(torch.randn(3, 60).half() * 3, [rare, *many[1:]])
    check_swiglu_gemm(130, 128, 256)
    check_gemv(100, 24, None)
    check_gemv(100, 24, GemvConfig(4, 32, 0, 1))  # tiles, the last one not full
    check_gemv(96, 24, GemvConfig(4, 32, 2, 1))  # in a pipelined loop
    for kind in ("linear", "norm_linear", "norm_swiglu", "linear_residual"):
        for columns in (2048, 2560, 5120, 9728, 12288, 25600):
            tuned = tuning.gemv_config(kind, 4096, columns)
            assert tuning.pads_little(columns, tuned.tile) or tuned.tile >= columns
    for size in ((1, 96), (3, 1100)) if THOROUGH else ((3, 1100),):
        check_rows(*size)
    for size in ((1, 16), (300, 32)):
        check_entry(*size)
    check_draft_places(step_entry.draft_places, 9, (3, 8, 72), "cpu")
    check_draft_places(step_entry.draft_places, 2, (2, 3, 1100), "cpu")
    for count, width in ((7, 1100), (30, 72)):
        check_draft_states(
            draft_states.draft_sources, draft_states.keep_hidden, count, width, "cpu"
        )
    check_fused([1], 4, 2, 32)
    check_fused([17, 64], 3, 1, 32)  # a group padded to the rows of an MMA
    check_fused([1, 40], 10, 2, 32)
    check_fused([90], 8, 1, 32)
    check_fused([33], 4, 2, 48)  # half a head is padded
    if THOROUGH:
        check_fused([100], 4, 2, 32)
        check_fused([30], 3, 3, 32)
        check_fused([70], 8, 2, 32)
        check_fused([40], 16, 1, 32)
        check_fused([33], 6, 2, 80)
    check_fused([33], 6, 2, 32, has_norm=False)
    check_fused([33, 5], 4, 2, 32, num_partials=3)
    check_fused([80], 8, 1, 32, FusedDecodeConfig(heads=4, num_splits=4, tile=16))
    check_fused([80], 4, 2, 32, FusedDecodeConfig(2, 4, 16, tensor_cores=True))
    for case in ((3, 512, 128, 4, 32), (17, 128, 128, 1, 32), (3, 320, 320, 3, 80)):
        check_split_k(*case)
    check_tiles_of_tokens(70)
    check_paged([0, 15, 16, 7, 120], 16, 8, 16, 4)
    check_paged([33, 1, 98], 8, 8, 16, 40)  # more CTAs than units
    check_paged([60, 141], 32, 16, 16, 3)
    check_paged([60, 141], 16, 4, 16, 3)  # groups 4, 8, 16, 3, 5, 7: a tile covers whole blocks
    check_paged([0, 141], 16, 2, 16, 4)
    check_paged([0, 141], 32, 2, 16, 4)
    check_paged([149, 5], 9, 3, 16, 3)
    check_paged([60, 141], 10, 2, 32, 5)
    check_paged([60, 141], 14, 2, 16, 5)
    check_paged([60, 141], 32, 1, 16, 5)  # more query rows than one MMA has
    check_paged([33, 98], 6, 2, 48, 3)  # head_dim is padded
    narrow = paged_decode_config(attention_facts(8, 4, 16))
    check_paged([33, 98], 8, 4, 16, 3, replace(narrow, kv_heads=2, tile_rows=32))
    check_kept(130, 2, 1, 64)
    check_dense([9, 0, 31, 16, 0], kv_heads=3)  # columns are padded
    check_dense([150, 128], kv_heads=2)
    interpreted_moe.check_all()
    print("agreed")
