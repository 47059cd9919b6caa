"""Work items of prefill attention. What the kernel computes is compared with its twin in
tests/gpu/test_attention_kernels.py: Triton's interpreter does not run Gluon.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.attention.attention_tuning import AttentionFacts
from kernels.attention.dense_keys import TILE, dense_chunks, padded_to_tiles
from kernels.attention.prefill_attention import PrefillAttention, PrefillChunk
from kernels.device import KNOWN_DEVICES

HEADS = 4
FACTS = AttentionFacts(
    device=KNOWN_DEVICES["h200"], dtype=torch.bfloat16, num_heads=HEADS, num_kv_heads=2,
    head_dim=64, block_size=16,
)  # fmt: skip


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, 64), (40, 3), (70, 90), (0, 1)],
        [(131, 65), (0, 129)],
        [(9000, 40)],
        [(330, 10), (600, 70)],
        [(16, 2)] * 80,
    ],
    ids=["token", "ragged", "blocks", "split", "questions", "many"],
)
def test_each_token_attends_once_to_all_up_to_itself(chunks: list[tuple[int, int]]) -> None:
    """`chunks`: (cached, new) tokens."""
    cached, lengths = np.array(chunks).T
    starts = np.concatenate(([7], 7 + lengths.cumsum())).tolist()  # behind decodes
    listed = [
        PrefillChunk(starts[index], new, before, 1000 * index)
        for index, (before, new) in enumerate(chunks)
    ]
    attend = PrefillAttention(FACTS, torch.device("cpu"))
    room = attend.count_work(starts[-1], len(chunks)) + 2
    items = attend.list_work(listed, room)
    assert items.shape == (room, 8)
    seen = [np.zeros((new, before + new), np.int64) for before, new in chunks]
    place = 0
    while place < room and items[place, 1]:
        splits = items[place, 6]
        for split, item in enumerate(items[place : place + splits]):
            first, size, chunk, begins, cached_from, cached_to, count, which = item.tolist()
            assert (count, which) == (splits, split) and 0 < size <= 64
            assert (item[:4] == items[place, :4]).all()
            index = starts.index(chunk)
            assert begins == 1000 * index
            at = first - chunk
            seen[index][at : at + size, cached_from:cached_to] += 1
            if split == splits - 1:
                before = chunks[index][0]
                for row in range(at, at + size):
                    seen[index][row, before : before + row + 1] += 1
        place += splits
    assert not items[place:].any()
    for counts, before in zip(seen, cached, strict=True):
        assert (counts == np.tri(*counts.shape, before)).all()


@pytest.mark.parametrize(
    ("new", "cached", "captured", "eager"),
    [
        (1000, 0, True, True), (1000, 100, True, True), (1000, 200, True, False),
        (1000, 5000, True, False), (1000, 7000, False, False), (50, 100_000, True, False),
        (2000, 400, True, False), (2000, 1000, False, False),
    ],
)  # fmt: skip
def test_many_cached_tokens_are_for_fa3(new: int, cached: int, captured: bool, eager: bool) -> None:
    chunks = [PrefillChunk(0, new, cached, 0)]
    facts = replace(FACTS, num_heads=16, num_kv_heads=8, head_dim=128)  # of the 2B
    assert PrefillAttention(facts, torch.device("cpu")).is_faster_captured(chunks) == captured
    assert PrefillAttention.is_faster_than_fa3(chunks) == eager


@pytest.mark.parametrize(
    ("new", "cached", "captured"),
    [(960, 500, True), (960, 600, False), (256, 4000, True), (256, 13_000, False)],
)
def test_a_larger_model_hides_its_launches_with_fewer_tokens(
    new: int, cached: int, captured: bool
) -> None:
    """8B: 534 tokens of it take as long as 2,048 of the 2B, and a pair twice as long."""
    facts = replace(FACTS, num_heads=32, num_kv_heads=8, head_dim=128, launch_hiding_tokens=534)
    attend = PrefillAttention(facts, torch.device("cpu"))
    assert attend.is_faster_captured([PrefillChunk(0, new, cached, 0)]) == captured


def test_dense_keys_of_a_chunk_begin_with_a_tile() -> None:
    """What FA3 takes for a chunk's keys are its context; the rest of the tile has no queries."""
    starts, contexts = np.array([3, 703, 704, 704], np.int32), np.array([830, 128, 0], np.int32)
    queries, keys = dense_chunks(starts, contexts)
    assert np.diff(queries).tolist() == [700, 0, 1, 0, 0, 0] and queries[0] == 3
    assert np.diff(keys).tolist() == [830, 66, 128, 0, 0, 0] and keys[0] == 0
    assert not (keys[::2] % TILE).any()
    assert padded_to_tiles(contexts).tolist() == [896, 128, 0]
