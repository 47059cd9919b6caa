"""The pieces of a weight that are loaded into the L2 cache lie within the weight, each once."""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")
from kernels.gemm import gemv
from kernels.gemm.prefetch import Prefetch, behind, first_columns


def places(found: Prefetch) -> list[int]:
    """First elements of the pieces, as the kernel computes them."""
    layout = found.start, found.inner, found.outer, found.step
    start, inner, outer, step = layout
    return [start + i // inner * outer + i % inner * step for i in range(found.count)]


def check(found: Prefetch, most_bytes: int) -> None:
    first, size = places(found), found.size // found.weight.itemsize
    assert found.size % 16 == 0 and found.size > 0
    assert all(place * found.weight.itemsize % 16 == 0 for place in first)
    assert min(first) >= 0 and max(first) + size <= found.weight.numel()
    ordered = sorted(first)
    assert all(b - a >= size for a, b in pairwise(ordered))
    assert found.count * found.size <= most_bytes


@pytest.mark.parametrize(
    ("rows", "columns", "span"),
    [
        (6144, 4096, 1024),
        (24576, 4096, 4096),
        (4096, 12288, 6144),
        (192, 200, 128),
        (51200, 5120, 5120),
    ],
)
def test_each_split_has_its_first_columns(rows: int, columns: int, span: int) -> None:
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    found = first_columns(weight, span)
    check(found, 16 << 20)
    assert {place % columns % span for place in places(found)} == {0}


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(
    ("rows", "columns", "held_rows", "held_columns"),
    [(6144, 4096, 2112, 4096), (4096, 12288, 9999, 2048), (640, 1024, 300, 1024), (64, 96, 8, 32)],
)
def test_what_follows_the_held_part_is_loaded(
    rows: int, columns: int, held_rows: int, held_columns: int, halves: int
) -> None:
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    found = behind(weight, held_rows, held_columns, halves)
    if found is None:
        assert held_columns == columns and held_rows * halves >= rows
        return
    check(found, 8 << 20)
    if held_columns == columns:
        half = weight.numel() // halves
        assert {place // half for place in places(found)} == set(range(halves))
        assert min(place % half for place in places(found)) == held_rows * columns
    else:
        assert {place % columns for place in places(found)} == {held_columns}


def test_a_gemv_whose_ctas_hold_all_rows_needs_nothing() -> None:
    weight = torch.empty(512, 1024, dtype=torch.bfloat16, device="meta")
    assert gemv.held("linear", weight, 132) is None
