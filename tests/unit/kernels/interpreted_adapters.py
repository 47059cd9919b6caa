"""Run by interpreted.py."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.adapters import plain, shrink_expand, token_groups
from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.adapters.group_tokens import group_tokens
from kernels.gemm import gemv, skinny_gemm
from kernels.plain import norm_linear, silu_and_mul
from kernels.tuning import GemvConfig, SkinnyConfig
from services.common.nn.layers import RMSNorm
from tests.cases import THOROUGH
from tests.unit.kernels.interpreter import assert_close


def factors_of(
    sizes: tuple[int, ...], columns: int, slots: int, rank: int, *, dora: bool = False
) -> SlotFactors:
    """Random factors of a layer."""
    bias = torch.randn(sum(sizes)) if dora else None
    made = SlotFactors.zeros(sizes, columns, slots, rank, torch.zeros(0), bias)
    made.a[:, :, :rank].normal_(0, columns**-0.5)
    made.b[..., :rank].normal_()
    if dora:
        made = made.with_factor()
        assert made.factor is not None
        made.factor[-1].uniform_(0.5, 2.0)
    return made


def check(
    slots: list[int], sizes: tuple[int, ...], columns: int, count: int, rank: int, *,
    first: int = 0, last: int | None = None, dora: bool = False, num_partials: int = 0,
) -> None:  # fmt: skip
    """The change of a layer's output, and of gate and up where the layer has these."""
    made = factors_of(sizes, columns, count, rank, dora=dora)
    rows = AdapterRows(torch.tensor(slots), count, first, count if last is None else last)
    x = torch.randn(len(slots), columns)
    base = torch.randn(max(num_partials, 1), len(slots), sum(sizes))
    out = base.clone() if num_partials else base[0].clone()
    norm = RMSNorm(columns, 1e-6) if len(slots) == 1 else None
    if norm is not None:
        norm.weight.data = torch.randn(columns)
    products = plain.shrink_adapters(x, norm, made, rows)
    room = {"shared_memory_bytes": 100_000}
    partials = shrink_expand.shrink_adapters(x, norm, made, rows, **room)
    twin = plain.expand_adapters(base.sum(0), products, made, rows)
    assert shrink_expand.expand_adapters(out, partials, made, rows, **room) is out
    assert_close(out.sum(0) if num_partials else out, twin, atol=3e-5, rtol=3e-5)
    if len(sizes) == 2:
        out = base.clone() if num_partials else base[0].clone()
        twin = plain.expand_adapters_swiglu(base.sum(0), products, made, rows)
        found = shrink_expand.expand_adapters_swiglu(out, partials, made, rows, **room)
        assert_close(found, twin, atol=3e-5, rtol=3e-5)
        consumer = factors_of((48,), sizes[0], count, rank)
        given = out, partials, made, consumer, rows
        if (pair := shrink_expand.expand_swiglu_shrink(*given, **room)) is not None:
            assert torch.equal(pair[0], found)
            own, products = rows.slots >= 0, plain.shrink_adapters(found, None, consumer, rows)
            assert_close(pair[1].sum(0)[own], products[0][own], atol=3e-5, rtol=3e-5)


def check_one_token(
    sizes: tuple[int, ...], columns: int, rank: int, config: GemvConfig | None = None, *,
    slots: Sequence[int] = (2, 0, -1),
) -> None:  # fmt: skip
    """GEMVs of one token that add the change of its slot, and their neighbours."""
    made, norm = factors_of(sizes, columns, 3, rank), RMSNorm(columns, 1e-6)
    norm.weight.data = torch.randn(columns)
    x, residual = torch.randn(1, columns), torch.randn(1, sum(sizes))
    weight, bias = torch.randn(sum(sizes), columns) * 0.1, torch.randn(sum(sizes))
    for slot in slots:
        rows = AdapterRows(torch.tensor([slot]), 3, 0, 3)

        def twin(normed: RMSNorm | None, base: Tensor, rows: AdapterRows = rows) -> Tensor:
            products = plain.shrink_adapters(x, normed, made, rows)
            return plain.expand_adapters(base, products, made, rows)

        for normed in (norm, None):
            changes = made.changes(rows)
            if normed is None:
                wanted = twin(None, torch.nn.functional.linear(x, weight, bias))
                found = gemv.linear(x, weight, bias, config=config, changes=changes)
                assert_close(found, wanted, atol=3e-5, rtol=3e-5)
                out = residual.clone()
                gemv.linear_residual(x, weight, bias, out, config=config, changes=changes)
                assert_close(out, residual + wanted, atol=3e-5, rtol=3e-5)
                assert not made.words.any()
                continue
            wanted = twin(normed, norm_linear(x, normed.weight, 1e-6, weight, bias))
            given = x, normed.weight, 1e-6, weight, bias
            found = gemv.norm_linear(*given, config=config, changes=changes)
            assert_close(found, wanted, atol=3e-5, rtol=3e-5)
            if len(sizes) == 2:
                found = gemv.norm_swiglu(*given, config=config, changes=changes)
                assert_close(found, silu_and_mul(wanted), atol=3e-5, rtol=3e-5)
            assert not made.words.any()


def check_few_tokens(
    slots: list[int], sizes: tuple[int, ...], columns: int, count: int, rank: int, *,
    first: int = 0, last: int | None = None, splits: int = 3,
) -> None:  # fmt: skip
    """Skinny GEMMs that add the changes of each token's slot."""
    made = factors_of(sizes, columns, count, rank)
    rows = AdapterRows(torch.tensor(slots), count, first, count if last is None else last)
    x = torch.randn(len(slots), columns)
    weight, bias = torch.randn(sum(sizes), columns) * columns**-0.5, torch.randn(sum(sizes))
    twin = plain.expand_adapters(
        torch.nn.functional.linear(x, weight, bias),
        plain.shrink_adapters(x, None, made, rows), made, rows,
    )  # fmt: skip
    config = SkinnyConfig(64, 64, 4, 1, 2, splits=splits)
    given = {"shared_memory_bytes": 100_000, "changes": made.changes(rows)}
    found = skinny_gemm.split_k_partials(x, weight, bias, config, **given)
    assert_close(found.sum(0), twin, atol=3e-5, rtol=3e-5)
    if len(sizes) == 2:
        found = skinny_gemm.linear_swiglu(x, weight, bias, replace(config, splits=1), **given)
        assert_close(found, silu_and_mul(twin), atol=3e-5, rtol=3e-5)
    assert not made.words.any()


def check_groups(num_tokens: int, count: int, most: int, size: int = 64) -> None:
    """Groups of tokens with the slots -1 up to `most`."""
    slots = torch.randint(-1, most, (num_tokens,))
    wanted = token_groups.group_tokens(slots, count, size)
    found = group_tokens(slots, count, size)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.slots, wanted.slots)


if __name__ == "__main__":
    check_groups(65, 1, 0)
    check_groups(66, 1, 1)
    check_groups(1088, 8, 8)
    check_groups(2500, 8, 1)  # several blocks of tokens
    check_groups(1100, 40, 40, 1)  # more groups than a block
    check_groups(8192, 64, 3)
    check([0], (64,), 328, 1, 8)
    check([1, -1, 0, 2], (40, 16, 16), 256, 3, 16, num_partials=2)  # tiles that are not full
    check([-1, -1], (48, 48), 128, 2, 4)  # nothing to add
    check([2, 2, 1], (48, 48), 128, 4, 24, first=1, last=3, num_partials=3)
    check([0, 1, 1, -1, 0], (70, 70), 200, 2, 16, dora=True, num_partials=2)
    check([0, 1, 1, -1, 0], (33,), 64, 2, 16, dora=True)
    check([3, 0, 7, -1] * 18, (32, 32), 128, 8, 64)  # more tokens than a tile has, chunks
    check([0, 2, -1, 2] * 18, (140, 40, 16), 64, 3, 16)  # many tokens
    check([-1] * 70 + [1] * 3, (70, 70), 64, 2, 64)
    check([0, 3, -1, 2] + [1] * 68 + [3] * 66, (1100, 1100), 64, 4, 16)  # several parts of rows
    check([1, -1, 0] * 23, (40, 24, 8), 328, 2, 24)  # several parts of the columns
    check([1, -1, 0] * 23, (136, 136), 328, 2, 24)  # the same, whose products gate and up add
    check([1] * 66, (32,), 64, 2, 65)  # a large rank
    check([1, -1] * 33, (32,), 64, 2, 16, dora=True)
    check([0, 3, 9], (16, 16, 16, 16), 64, 12, 128)  # chunks of a part of a rank
    check_one_token((40, 16, 18), 96, 16)
    # All configurations read the slot in the same way.
    some = (2, 0, -1) if THOROUGH else (2,)
    check_one_token((24, 24), 100, 24, GemvConfig(4, 32, 0, 1), slots=some)
    check_one_token((64,), 96, 128, GemvConfig(4, 32, 2, 1), slots=some)
    check_few_tokens([2, -1, 0, 2, 1], (128, 64, 64), 192, 3, 16)
    check_few_tokens([1, 7, -1, 0, 3] * 4, (64, 64), 128, 8, 24)  # several blocks of columns
    check_few_tokens([-1] * 3, (64, 64), 64, 2, 16)
    check_few_tokens([3, 2, 3], (64,), 64, 5, 130, first=2, last=4)  # blocks of a part of a rank
    check_few_tokens([0, 1, 1], (64, 64), 2112, 2, 16, splits=1)  # several parts of the columns
    print("agreed")
