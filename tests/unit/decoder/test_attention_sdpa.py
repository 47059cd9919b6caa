"""The sdpa backend against attention written out token by token, and where it is used."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import plain
from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.heads import ProjectedHeads, kv_rows, write_kv
from kernels.device import KNOWN_DEVICES, DeviceFacts
from services.common.nn.dispatch import UnknownOverride
from services.decoder.attention import create_backend
from services.decoder.attention.base import AttentionBackend, AttentionMetadata
from services.decoder.attention.sdpa import SdpaBackend
from tests.block_tables import first_blocks

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 4, 40
FACTS = AttentionFacts(
    device=DeviceFacts("cpu"), dtype=torch.float32, num_heads=6, num_kv_heads=2, head_dim=16,
    block_size=BLOCK_SIZE,
)  # fmt: skip


def layout(lengths: list[tuple[int, int]], seed: int = 0) -> AttentionMetadata:
    """Sequences of (context, query) tokens on shuffled blocks."""
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    tables: list[Tensor] = []
    slots: list[int] = []
    for context, query in lengths:
        blocks = [order.pop() for _ in range(-(-context // BLOCK_SIZE))]
        tables.append(torch.tensor(blocks, dtype=torch.int32))
        slots += [
            blocks[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE
            for t in range(context - query, context)
        ]
    queries = [query for _, query in lengths]
    seq_lens = np.array([context for context, _ in lengths], np.int32)
    num_decodes = next((i for i, q in enumerate(queries) if q != 1), len(queries))
    return AttentionMetadata(
        num_decodes=num_decodes,
        cu_query_lens=np.cumsum([0, *queries]).astype(np.int32),
        seq_lens=seq_lens,
        slot_mapping=torch.tensor(slots),
        block_ids=torch.cat(tables),
        first_blocks=(firsts := first_blocks(seq_lens, BLOCK_SIZE)),
        first_blocks_device=torch.from_numpy(firsts),
        seq_lens_device=torch.from_numpy(seq_lens),
    )


def expected(query: Tensor, pool: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Softmax written out, in float64, one token and head at a time."""
    out = torch.zeros_like(query, dtype=torch.float64)
    group = query.shape[1] // pool.shape[3]
    tables = metadata.block_ids.split((-(-metadata.seq_lens // BLOCK_SIZE)).tolist())
    for s, context in enumerate(metadata.seq_lens.tolist()):
        start, stop = metadata.cu_query_lens[s : s + 2].tolist()
        tokens = pool[tables[s].long()].double()  # [blocks, 2, size, KVH, D]
        keys, values = tokens.transpose(0, 1).flatten(1, 2)[:, :context]
        for t in range(start, stop):
            reach = context - (stop - 1 - t)
            for h in range(query.shape[1]):
                scores = keys[:reach, h // group] @ query[t, h].double() / query.shape[-1] ** 0.5
                out[t, h] = scores.softmax(0) @ values[:reach, h // group]
    return out


def run(metadata: AttentionMetadata, facts: AttentionFacts, dtype: torch.dtype):
    torch.manual_seed(1)
    pool = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, facts.num_kv_heads, facts.head_dim).to(dtype)
    num_tokens = int(metadata.cu_query_lens[-1])
    query = torch.randn(num_tokens, facts.num_heads, facts.head_dim).to(dtype)
    key, value = torch.randn(2, num_tokens, facts.num_kv_heads, facts.head_dim).to(dtype)
    write_kv(pool, kv_rows(metadata.slot_mapping, BLOCK_SIZE), key, value)
    backend = create_backend(replace(facts, dtype=dtype), CPU)
    metadata.plan = backend.plan(metadata)
    return backend.forward(query, pool, metadata), query, pool, (key, value)


BATCHES = {
    "decodes": [(1, 1), (9, 1), (16, 1), (17, 1)],
    "prefill": [(11, 11)],
    "chunk": [(23, 6)],
    "mixed": [(5, 1), (30, 1), (7, 7), (20, 3), (13, 12)],
}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_agrees_with_attention_written_out(lengths, heads: int, kv_heads: int) -> None:
    facts = replace(FACTS, num_heads=heads, num_kv_heads=kv_heads)
    metadata = layout(lengths)
    actual, query, pool, _ = run(metadata, facts, torch.float32)
    assert (actual - expected(query, pool, metadata)).abs().max() < 2e-6


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_agrees(dtype: torch.dtype, tolerance: float) -> None:
    metadata = layout(BATCHES["mixed"])
    actual, query, pool, _ = run(metadata, FACTS, dtype)
    assert actual.dtype == dtype
    assert (actual.double() - expected(query, pool, metadata)).abs().max() < tolerance


def test_new_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    metadata = layout(BATCHES["mixed"])
    torch.manual_seed(1)
    before = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, 2, 16)
    _, _, pool, (key, value) = run(metadata, FACTS, torch.float32)
    written = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for t, slot in enumerate(metadata.slot_mapping.tolist()):
        block, offset = divmod(slot, BLOCK_SIZE)
        assert torch.equal(pool[block, 0, offset], key[t])
        assert torch.equal(pool[block, 1, offset], value[t])
        written[block, offset] = True
    kept = ~written[:, None].expand(-1, 2, -1)
    assert torch.equal(pool[kept], before[kept])


def test_padding_writes_to_the_last_slot_only() -> None:
    pool = torch.zeros(5, 2, BLOCK_SIZE, 2, 16)
    write_kv(pool, kv_rows(torch.tensor([-1, 2]), BLOCK_SIZE), torch.ones(2, 2, 16),
             torch.ones(2, 2, 16))  # fmt: skip
    touched = pool.any(-1).any(-1).nonzero().tolist()
    assert touched == [[0, 0, 2], [0, 1, 2], [4, 0, 3], [4, 1, 3]]


def test_unused_pool_contents_do_not_matter() -> None:
    metadata = layout([(6, 1), (9, 1), (5, 5)])
    base, *_ = run(metadata, FACTS, torch.float32)
    torch.manual_seed(1)
    pool = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, 2, 16)
    query = torch.randn(7, 6, 16)
    key, value = torch.randn(2, 7, 2, 16)
    write_kv(pool, kv_rows(metadata.slot_mapping, BLOCK_SIZE), key, value)
    used = set(metadata.block_ids.tolist())
    unused = [b for b in range(NUM_BLOCKS) if b not in used]
    pool[unused] = 1e4
    backend = create_backend(FACTS, CPU)
    metadata.plan = backend.plan(metadata)
    assert torch.equal(backend.forward(query, pool, metadata), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_attention_in_torch(dtype: torch.dtype) -> None:
    assert isinstance(create_backend(replace(FACTS, dtype=dtype), CPU), SdpaBackend)


def test_a_gpu_has_attention_in_torch_where_no_kernel_exists() -> None:
    def create(device: DeviceFacts, dtype: torch.dtype, **overrides: str) -> AttentionBackend:
        facts = replace(FACTS, device=device, head_dim=64, dtype=dtype)
        return create_backend(facts, torch.device("cuda", 0), overrides)

    h200 = KNOWN_DEVICES["h200"]
    assert isinstance(create(h200, torch.float32), SdpaBackend)
    assert isinstance(create(replace(h200, has_triton=False), torch.bfloat16), SdpaBackend)
    assert isinstance(create(h200, torch.bfloat16, **{"*": "plain"}), SdpaBackend)


@pytest.mark.parametrize(("name", "reason"), [("paged", "needs Triton"), ("fancy", "fancy")])
def test_what_cannot_run_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnknownOverride, match=reason):
        create_backend(replace(FACTS, dtype=torch.bfloat16), CPU, {"decode_attention": name})


def test_calls_are_counted_by_operation() -> None:
    backend = create_backend(FACTS, CPU)
    assert backend.table is not None
    pool = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, FACTS.num_kv_heads, FACTS.head_dim)
    for lengths in (BATCHES["decodes"], BATCHES["chunk"], BATCHES["mixed"]):
        metadata = layout(lengths)
        metadata.plan = backend.plan(metadata)
        query = torch.zeros(int(metadata.cu_query_lens[-1]), FACTS.num_heads, FACTS.head_dim)
        backend.forward(query, pool, metadata)
    assert backend.table.calls() == {
        ("decode_attention", "plain"): 2, ("prefill_attention", "plain"): 2,
    }  # fmt: skip


@pytest.mark.parametrize("contexts", [[1], [4], [9, 1], [30, 17, 5]])
def test_fused_decode_attention_is_rotation_and_then_attention(contexts: list[int]):
    metadata = layout([(context, 1) for context in contexts])
    heads, kv_heads, dim = FACTS.num_heads, FACTS.num_kv_heads, FACTS.head_dim
    count = len(contexts)
    pool = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, kv_heads, dim)
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim)
    weights = (torch.randn(dim), torch.randn(dim))
    angles = torch.rand(count, dim // 2) * 6.28
    rope = (angles.cos(), angles.sin())
    rows = kv_rows(metadata.slot_mapping, BLOCK_SIZE)
    written = pool.clone()
    projected = ProjectedHeads(qkv, weights, 1e-6, rope, pool, rows)
    query = plain.qk_rope_cache(replace(projected, kv_cache=written))
    truth = expected(query, written, metadata).flatten(1)
    attend = plain.fused_decode_attention
    found = attend(
        projected, metadata.block_ids, metadata.first_blocks_device, metadata.seq_lens_device
    )
    assert torch.equal(pool, written)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


def test_a_token_and_its_drafts_attend_as_a_chunk_does() -> None:
    """Sequences with different numbers of drafts, without drafts, and next to each other by chance:
    a decode of another sequence may have one more token.
    """
    lengths = [(26, 5), (9, 1), (10, 1), (40, 3), (23, 2)]
    chunks = layout(lengths)
    queries = [query for _, query in lengths]
    seq_lens = [c - q + 1 + i for c, q in lengths for i in range(q)]
    firsts = chunks.first_blocks.repeat(queries)
    decodes = replace(
        chunks,
        num_decodes=len(seq_lens),
        cu_query_lens=np.arange(len(seq_lens) + 1, dtype=np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        first_blocks=firsts,
    )
    torch.manual_seed(1)
    pool = torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, FACTS.num_kv_heads, FACTS.head_dim)
    query = torch.randn(len(seq_lens), FACTS.num_heads, FACTS.head_dim)
    backend = SdpaBackend(FACTS)
    planned, _ = backend.plan(decodes)
    assert sum(len(group.mask) for group in planned) == len(lengths)  # a copy of each context
    chunks.plan, decodes.plan = backend.plan(chunks), (planned, [])
    found = backend.forward(query, pool, decodes)
    assert (found - backend.forward(query, pool, chunks)).abs().max() < 2e-6
