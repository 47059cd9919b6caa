"""Sizing of the KV pool."""

from dataclasses import replace

import psutil
import pytest
import torch

from services.decoder.engine.run.kv_cache import (
    DeviceMemory,
    KVCacheShape,
    allocate,
    count_blocks,
    device_budget,
)

SHAPE = KVCacheShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_a_pool_and_its_scratch_block_fit_the_budget() -> None:
    assert SHAPE.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    for budget in (10 * SHAPE.block_bytes, 11 * SHAPE.block_bytes - 1):
        num_blocks = count_blocks(SHAPE, budget, max_model_len=8)
        pool = allocate(SHAPE, num_blocks, torch.device("cpu"))
        assert pool.shape == (3, 10, 2, 4, 2, 8)
        assert num_blocks == 9 and pool.nbytes <= budget
        assert not pool.any()


def test_a_pool_in_e4m3_has_twice_as_many_blocks() -> None:
    narrow = replace(SHAPE, dtype=torch.float8_e4m3fn)
    assert 2 * narrow.block_bytes == SHAPE.block_bytes
    budget = 10 * SHAPE.block_bytes
    num_blocks = count_blocks(narrow, budget, max_model_len=8)
    assert num_blocks == 19
    pool = allocate(narrow, num_blocks, torch.device("cpu"))
    assert pool.dtype == torch.float8_e4m3fn and pool.nbytes <= budget and not pool.float().any()


def test_a_pool_on_a_cpu_takes_memory_when_it_is_used() -> None:
    process = psutil.Process()
    before, size = process.memory_info().rss, 256 << 20
    pool = allocate(SHAPE, size // SHAPE.block_bytes - 1, torch.device("cpu"))
    assert process.memory_info().rss - before < size // 4
    assert pool.nbytes > size - 2 * SHAPE.block_bytes and not pool.any()


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    count_blocks(SHAPE, 4 * SHAPE.block_bytes, max_model_len=12)
    with pytest.raises(ValueError, match="one sequence of 13 tokens"):
        count_blocks(SHAPE, 4 * SHAPE.block_bytes, max_model_len=13)


@pytest.mark.parametrize(("fraction", "free_gib"), [(0.5, 100), (0.9, 100), (0.9, 30)])
def test_a_pool_leaves_room_for_a_step_and_for_graphs(fraction: float, free_gib: int) -> None:
    """Weights of 4 GiB, a forward that takes 2 more at most, and sampling 3."""
    gib, total = 1 << 30, 140 << 30
    memory = DeviceMemory(total, free_gib * gib, in_use=4 * gib, peak=7 * gib)
    budget = device_budget(memory, fraction, forward_peak=6 * gib)
    to_come = 3 * gib + 2 * gib  # a step, and what graphs hold
    left_of_share = total * fraction - 4 * gib - budget - to_come
    left_of_free = free_gib * gib - budget - to_come
    assert left_of_share >= gib and left_of_free >= 0
    assert left_of_share < 2 * gib or left_of_free < gib  # no more than is needed
