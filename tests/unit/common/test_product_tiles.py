"""Products whose tiles another warp group finishes, without a GPU: when they gain, and that they
compile.

What they compute is compared with their twins in tests/gpu: Triton's interpreter does not run
Gluon.
"""

import itertools
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from services.common.nn import launches, product_tiles
from services.decoder.kernels import prompt_heads
from services.decoder.models.rope import HeadTransform
from tests.hopper_compiler import compile_for_hopper, copies_see_their_barriers

SHARED_MEMORY = 227 << 10  # of a Hopper processor
REGISTERS = 64 << 10


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_tiles, "_is_hopper", lambda: True)


def gain(num_tokens: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    x, weight = (torch.empty(size, columns, dtype=dtype) for size in (num_tokens, rows))
    with launches.captured():
        return product_tiles.gains(x, weight)


@pytest.mark.parametrize(
    ("num_tokens", "rows", "columns", "expected"),
    [
        (1008, 4096, 2048, True),  # 128 tiles for 132 processors
        (8064, 4096, 2048, True),
        (1088, 4096, 2048, False),  # 144: most of a second wave is idle
        (3200, 4096, 2048, False),
        (8192, 3072, 1024, True),
        (1024, 3072, 1024, False),
        (8064, 4224, 2048, False),  # half a tile
        (8064, 4096, 2016, False),
    ],
)
def test_they_gain_where_tiles_fill_the_processors(
    num_tokens: int, rows: int, columns: int, expected: bool
) -> None:
    assert gain(num_tokens, rows, columns) == expected
    assert not gain(num_tokens, rows, columns, torch.float32)  # tensor cores would round it


def test_they_are_not_launched_where_launches_cost() -> None:
    x, weight = torch.empty(1008, 2048).bfloat16(), torch.empty(4096, 2048).bfloat16()
    assert not product_tiles.gains(x, weight)
    assert product_tiles.gains(torch.empty(8064, 2048).bfloat16(), weight)


@pytest.mark.parametrize(("kv_heads", "expected"), [(8, True), (2, True), (1, False), (5, False)])
def test_a_tile_of_a_prompt_has_heads_of_one_kind(kv_heads: int, expected: bool) -> None:
    cache, empty = torch.empty(1, 2, 16, kv_heads, 128), torch.empty(0)
    transform = HeadTransform((empty, empty), 1e-6, (empty, empty), cache, empty)
    rows = (16 + 2 * kv_heads) * 128
    tokens = 264 // -(-rows // 256) * 128  # two waves, as full as they can be
    x, weight = torch.empty(tokens, 2048).bfloat16(), torch.empty(rows, 2048).bfloat16()
    assert prompt_heads.gains(x, weight, transform) == expected


@pytest.mark.parametrize("half", [16, 32, 64])
def test_a_thread_has_both_elements_of_each_of_its_pairs(half: int) -> None:
    layout = product_tiles.pairs_layout(half)
    threads = (*layout.lane_bases, *layout.warp_bases)

    def places(bases: tuple[list[int], ...]) -> set[tuple[int, int]]:
        """All sums of some of the bases, which have no bit in common."""
        chosen = itertools.product((0, 1), repeat=len(bases))
        return {
            tuple(
                sum(n * base[axis] for n, base in zip(some, bases, strict=True)) for axis in (0, 1)
            )
            for some in chosen
        }

    own = places(tuple(layout.reg_bases))
    assert {(row, column ^ half) for row, column in own} == own
    all_places = {(row + r, column + c) for row, column in places(threads) for r, c in own}
    assert all_places == set(itertools.product(range(16), range(256)))
    assert len(own) * 2 ** len(threads) == 16 * 256  # none twice


def compiled(kernel: object, dtype: str, pointers: dict[str, str], **constants: int) -> Any:
    tiles = {
        name: f"tensordesc<{dtype}[{rows}, 64],{product_tiles._TILE!r}>"
        for name, rows in (("x_tiles", 128), ("weight_tiles", 256))
    }
    return compile_for_hopper(
        kernel, {**tiles, **pointers}, constants, enable_fp_fusion=False, **product_tiles.OPTIONS
    )


def fits_a_processor(kernel: Any) -> bool:
    threads = 32 * kernel.metadata.num_warps
    registers = threads * product_tiles.OPTIONS["maxnreg"]
    return kernel.metadata.shared <= SHARED_MEMORY and registers <= REGISTERS


@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("fp16", 128), ("bf16", 64)])
def test_the_projection_of_prompts_compiles_for_hopper(dtype: str, head_dim: int) -> None:
    names = ("q_weight", "k_weight", "cos", "sin", "rows", "cache", "query", "kept")
    pointers = {f"{name}_ptr": f"*{dtype}" for name in names} | {"rows_ptr": "*i64"}
    kernel = compiled(
        prompt_heads._prompt_heads_kernel, dtype,
        {**pointers, "num_tokens": "i32", "eps": "fp32"},
        WIDE=16, STEPS=32, HALF=head_dim // 2, KV_SIZE=1024,
    )  # fmt: skip
    ptx = kernel.asm["ptx"]
    assert fits_a_processor(kernel)
    assert "wgmma" in ptx and copies_see_their_barriers(ptx)
    # Each product is rounded before it is added to another.
    narrow = dtype.replace("fp", "f")
    assert re.search(rf"mul[.a-z0-9]*\.{narrow}", ptx)
    assert not re.search(rf"fma[.a-z0-9]*\.{narrow}", ptx)
