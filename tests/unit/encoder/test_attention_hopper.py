"""Attention of the tower without a GPU: the list of work, and that the kernel compiles.

What the kernel computes is compared with its twin in tests/gpu/test_encoder_kernels.py: Triton's
interpreter does not run Gluon.
"""

import numpy as np
import pytest

pytest.importorskip("triton")
from services.encoder.attention import hopper
from services.encoder.attention.hopper import count_blocks, list_items
from services.encoder.kernels.segment_kernel import segment_kernel
from tests.hopper_compiler import compile_for_hopper, copies_see_their_barriers

SHARED_MEMORY = 227 << 10  # of a Hopper processor


@pytest.mark.parametrize(
    "lengths",
    [[1], [127, 128, 129], [4096], [1000, 4, 2304, 640], [16] * 40],
    ids=["one", "edges", "large", "mixed", "many"],
)
@pytest.mark.parametrize("block", [64, 128])
def test_each_row_attends_once_to_its_segment(lengths: list[int], block: int) -> None:
    items = list_items(lengths, block)
    assert items.dtype == np.int32 and items[0].tolist() == [len(items) - 1, 0, 0, 0]
    assert len(items) - 1 <= count_blocks(sum(lengths), len(lengths), block)
    ends = np.cumsum(lengths)
    segments = np.repeat(np.stack((ends - lengths, ends), axis=1), lengths, axis=0)
    seen = np.full((sum(lengths), 2), -1)
    for first, size, begin, end in items[1:].tolist():
        assert 0 < size <= block
        assert (seen[first : first + size] == -1).all()
        seen[first : first + size] = begin, end
    assert (seen == segments).all()


@pytest.mark.parametrize(("dtype", "block"), [("bf16", 64), ("bf16", 128), ("fp16", 128)])
def test_the_kernel_compiles_for_hopper(dtype: str, block: int) -> None:
    """Two programs share a processor, so that one multiplies while the other does not."""
    tiles = {
        name: f"tensordesc<{dtype}[{rows}, 64],{hopper._TILE!r}>"
        for name, rows in (("query_tiles", block), ("key_tiles", 64), ("value_tiles", 64))
    }
    compiled = compile_for_hopper(
        segment_kernel,
        {**tiles, "items_ptr": "*i32", "out_ptr": f"*{dtype}", "scale": "fp32"},
        {"HEADS": 16, "DIM": 64, "BLOCK": block},
    )
    assert "wgmma" in compiled.asm["ptx"]
    assert copies_see_their_barriers(compiled.asm["ptx"])
    assert 2 * (compiled.metadata.shared + 1024) <= SHARED_MEMORY
