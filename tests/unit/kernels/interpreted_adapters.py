"""Run by interpreted.py."""

import torch

from kernels.adapters import plain, shrink_expand
from kernels.adapters.factors import AdapterRows, SlotFactors
from services.common.nn.layers import RMSNorm
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
    partials = shrink_expand.shrink_adapters(x, norm, made, rows)
    twin = plain.expand_adapters(base.sum(0), products, made, rows)
    assert shrink_expand.expand_adapters(out, partials, made, rows) is out
    assert_close(out.sum(0) if num_partials else out, twin, atol=3e-5, rtol=3e-5)
    if len(sizes) == 2:
        out = base.clone() if num_partials else base[0].clone()
        twin = plain.expand_adapters_swiglu(base.sum(0), products, made, rows)
        found = shrink_expand.expand_adapters_swiglu(out, partials, made, rows)
        assert_close(found, twin, atol=3e-5, rtol=3e-5)


if __name__ == "__main__":
    check([0], (64,), 328, 1, 8)
    check([1, -1, 0, 2], (40, 16, 16), 256, 3, 16, num_partials=2)  # tiles that are not full
    check([-1, -1], (48, 48), 128, 2, 4)  # nothing to add
    check([2, 2, 1], (48, 48), 128, 4, 24, first=1, last=3, num_partials=3)
    check([0, 1, 1, -1, 0], (70, 70), 200, 2, 16, dora=True, num_partials=2)
    check([0, 1, 1, -1, 0], (33,), 64, 2, 16, dora=True)
    check([3, 0, 7, -1] * 18, (32, 32), 128, 8, 64)  # more tokens than a tile has, chunks
    check([0, 3, 9], (16, 16, 16, 16), 64, 12, 128)  # chunks of a part of a rank
    print("agreed")
