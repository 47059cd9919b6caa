"""Attention of prompts without a GPU: the list of work, and that the kernel compiles.

What the kernel computes is compared with its twin in tests/gpu/test_attention_kernels.py: Triton's
interpreter does not run Gluon.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from services.decoder.kernels import prompt_attention
from services.decoder.kernels.prompt_attention import PromptAttention, PromptChunk
from services.decoder.kernels.prompt_kernel import prompt_kernel
from tests.hopper_compiler import compile_for_hopper, copies_see_their_barriers

HEADS = 4
SHARED_MEMORY = 227 << 10  # of a Hopper processor


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
    ids=["token", "ragged", "blocks", "in parts", "questions", "many"],
)
def test_each_token_attends_once_to_all_up_to_itself(chunks: list[tuple[int, int]]) -> None:
    """`chunks`: tokens in the cache, and new ones."""
    cached, lengths = np.array(chunks).T
    starts = np.concatenate(([7], 7 + lengths.cumsum())).tolist()  # behind decodes
    listed = [
        PromptChunk(starts[index], new, before, 1000 * index)
        for index, (before, new) in enumerate(chunks)
    ]
    attend = PromptAttention(torch.device("cpu"), HEADS, 64)
    room = attend.count_items(starts[-1], len(chunks)) + 2
    items = attend.list_items(listed, room)
    assert items.shape == (room, 8)
    seen = [np.zeros((new, before + new), np.int64) for before, new in chunks]
    place = 0
    while place < room and items[place, 1]:
        parts = items[place, 6]
        for part, item in enumerate(items[place : place + parts]):
            first, size, chunk, begins, cached_from, cached_to, count, which = item.tolist()
            assert (count, which) == (parts, part) and 0 < size <= 64
            assert (item[:4] == items[place, :4]).all()
            index = starts.index(chunk)
            assert begins == 1000 * index
            at = first - chunk
            seen[index][at : at + size, cached_from:cached_to] += 1
            if part == parts - 1:
                before = chunks[index][0]
                for row in range(at, at + size):
                    seen[index][row, before : before + row + 1] += 1
        place += parts
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
    chunks = [PromptChunk(0, new, cached, 0)]
    assert PromptAttention.gains(chunks) == captured
    assert PromptAttention.outruns_fa3(chunks) == eager


@pytest.mark.parametrize("accompanies", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim"), [("bf16", 16, 8, 128), ("fp16", 8, 8, 64)]
)
def test_the_kernel_compiles_for_hopper(
    dtype: str, heads: int, kv_heads: int, dim: int, accompanies: bool
) -> None:
    """Two programs share a processor, so that one multiplies while the other does not."""
    tiles = f"tensordesc<{dtype}[64, {dim}],{prompt_attention._TILE!r}>"
    pointers = {
        "cache_ptr": f"*{dtype}", "block_ids_ptr": "*i32", "items_ptr": "*i32", "sums_ptr": "*fp32",
        "scales_ptr": "*fp32", "arrived_ptr": "*i32", "out_ptr": f"*{dtype}",
    }  # fmt: skip
    constants = {
        "PLACES": 1000, "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "POOL_BLOCK": 16,
        "BLOCK": 64, "FIELDS": 8, "ACCOMPANIES": accompanies,
    }  # fmt: skip
    signature = {"query_tiles": tiles, "own_tiles": tiles, **pointers, "scale": "fp32"}
    compiled = compile_for_hopper(prompt_kernel, signature, constants)
    assert "wgmma" in compiled.asm["ptx"]
    assert copies_see_their_barriers(compiled.asm["ptx"])
    assert 2 * (compiled.metadata.shared + 1024) <= SHARED_MEMORY
