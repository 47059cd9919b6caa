"""Ragged attention without a GPU: the list of the work, and that the Hopper kernel compiles.

Its results are compared with the plain twin's in tests/gpu/test_encoder_kernels.py: Triton's
interpreter does not run Gluon.
"""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from kernels.attention import hopper_attention, warpgroups
from kernels.attention.attention_tuning import HOPPER_HEAD_DIMS
from kernels.attention.hopper_attention import HopperAttention, ragged_attention_kernel
from kernels.attention.segments import (
    BLOCK_SIZES,
    BatchSegments,
    StaticSegments,
    count_blocks,
    list_work,
)
from kernels.device import KNOWN_DEVICES
from tests.cases import first
from tests.gpu_compiler import compile_for_hopper, copies_see_their_barriers

CPU = torch.device("cpu")
H200 = KNOWN_DEVICES["h200"]
RESERVED_SHARED_MEMORY = 1024  # bytes of each CTA that the driver takes
LENGTHS = {
    "one": [1], "edges": [127, 128, 129], "large": [4096], "mixed": [1000, 4, 2304, 640],
    "many": [16] * 40,
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_each_row_attends_once_to_its_segment(lengths: list[int], block: int) -> None:
    items = list_work(lengths, block)
    assert items.dtype == np.int32 and items[0].tolist() == [len(items) - 1, 0, 0, 0]
    assert len(items) - 1 <= count_blocks(sum(lengths), len(lengths), block)
    ends = np.cumsum(lengths)
    segments = np.repeat(np.stack((ends - lengths, ends), axis=1), lengths, axis=0)
    seen = np.full((sum(lengths), 2), -1)
    for row, size, begin, end in items[1:].tolist():
        assert 0 < size <= block
        assert (seen[row : row + size] == -1).all()
        seen[row : row + size] = begin, end
    assert (seen == segments).all()


def test_static_segments_hold_what_a_batchs_segments_do() -> None:
    static = StaticSegments(5000, 64, CPU)
    address = static.cu_seqlens.data_ptr()
    for lengths in LENGTHS.values():
        static.set(lengths)
        batch, num_rows = BatchSegments(lengths, CPU), sum(lengths)
        assert static.cu_seqlens.tolist()[: len(lengths) + 1] == batch.cu_seqlens.tolist()
        assert set(static.cu_seqlens.tolist()[len(lengths) :]) == {num_rows}  # the rest is empty
        assert static.max_length(num_rows) >= batch.max_length(num_rows) == max(lengths)
        for block in BLOCK_SIZES:
            expected, found = (of.work_list(block, num_rows) for of in (batch, static))
            assert torch.equal(found.items[: len(expected.items)], expected.items)
            assert expected.max_blocks <= found.max_blocks < len(found.items)
            assert found.items.data_ptr() % 16 == 0
    assert static.cu_seqlens.data_ptr() == address


def test_few_rows_have_small_blocks_so_that_no_sm_is_idle() -> None:
    attention = HopperAttention(H200.num_sms)
    assert [attention.block_m(rows, 16) for rows in (256, 1024, 1025, 4096)] == [64, 64, 128, 128]


def compiled(dtype: str, head_dim: int, block: int) -> Any:
    tiles: dict[str, str] = {}
    tail_columns = 16 if head_dim > 64 else 0
    constants = {
        "HEADS": 16, "HEAD_DIM": head_dim, "BLOCK_M": block, "TAIL_TILE": tail_columns
    }  # fmt: skip
    for name, rows in (("query", block), ("key", 64), ("value", 64)):
        main, tail = warpgroups.TILE_LAYOUT, hopper_attention._TAIL_LAYOUT
        tiles[f"{name}_tiles"] = f"tensordesc<{dtype}[{rows}, 64],{main!r}>"
        tiles[f"{name}_tails"] = tiles[f"{name}_tiles"]
        if tail_columns:
            tiles[f"{name}_tails"] = f"tensordesc<{dtype}[{rows}, 16],{tail!r}>"
    pointers = {"work_ptr": "*i32", "out_ptr": f"*{dtype}", "scale": "fp32"}
    return compile_for_hopper(ragged_attention_kernel, {**tiles, **pointers}, constants)


# Each dtype, block and head_dim, with a tail and without; test_kernel_table.py has those of towers.
COMPILED = [("bf16", 64, 80), ("bf16", 128, 64), ("bf16", 128, 80), ("fp16", 128, 72)]


def test_each_head_dim_is_compiled() -> None:
    assert {head_dim for _, _, head_dim in COMPILED} == set(HOPPER_HEAD_DIMS)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "block", "head_dim"), first(2, COMPILED))
def test_the_kernel_compiles_for_hopper(dtype: str, block: int, head_dim: int) -> None:
    """Two CTAs share an SM, so that the GEMMs of one overlap the softmax of the other."""
    kernel = compiled(dtype, head_dim, block)
    ptx = kernel.asm["ptx"]
    assert "m64n64k16" in ptx and ("m64n16k16" in ptx) == (head_dim > 64)
    assert copies_see_their_barriers(ptx)
    assert 2 * (kernel.metadata.shared + RESERVED_SHARED_MEMORY) <= H200.shared_memory_bytes
