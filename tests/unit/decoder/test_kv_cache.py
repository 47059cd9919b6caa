"""Sizing of the KV pool."""

import pytest
import torch

from services.decoder.engine.kv_cache import KVCacheShape, allocate, count_blocks

SHAPE = KVCacheShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def test_a_pool_and_its_scratch_block_fit_the_budget() -> None:
    assert SHAPE.block_bytes == 3 * 2 * 4 * 2 * 8 * 2
    for budget in (10 * SHAPE.block_bytes, 11 * SHAPE.block_bytes - 1):
        num_blocks = count_blocks(SHAPE, budget, max_model_len=8)
        pool = allocate(SHAPE, num_blocks, torch.device("cpu"))
        assert pool.shape == (3, 10, 2, 4, 2, 8)
        assert num_blocks == 9 and pool.nbytes <= budget
        assert not pool.any()


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    count_blocks(SHAPE, 4 * SHAPE.block_bytes, max_model_len=12)
    with pytest.raises(ValueError, match="one sequence of 13 tokens"):
        count_blocks(SHAPE, 4 * SHAPE.block_bytes, max_model_len=13)
