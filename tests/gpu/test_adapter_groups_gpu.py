"""Kernels of adapters for tokens in groups of one slot, on a GPU."""

import pytest
import torch

from kernels.adapters import plain, token_groups
from tests.gpu.adapter_kernels import CHANGE, DOWN, GATE_UP, factors_of, given, rows_of, slots_of
from tests.gpu.twins import CUDA, error, random

pytest.importorskip("triton")
from kernels.adapters import shrink_expand
from kernels.adapters.group_tokens import group_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("count", "slots"), [(65, 1), (1088, 8), (8192, 8), (3000, 200)])
def test_tokens_are_grouped_in_one_launch(count: int, slots: int) -> None:
    for most in (0, 1, slots):  # without adapters, one slot, all slots
        of = torch.randint(-1, most, (count,), device=CUDA)
        wanted = token_groups.group_tokens(of, slots)
        found = group_tokens(of, slots)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.slots, wanted.slots)


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("count", [65, 1000, 3000])
def test_swiglu_shrinks_the_input_of_its_consumer(rank: int, count: int) -> None:
    torch.manual_seed(0)
    factors, consumer = factors_of(GATE_UP, 4096, rank), factors_of(DOWN, GATE_UP[0], rank)
    x, out = random(count, 4096), random(count, sum(GATE_UP))
    for kind in ("none", "one", "eight", "some"):
        rows = rows_of(slots_of(count, kind))
        own = rows.slots >= 0
        products = shrink_expand.shrink_adapters(x, None, factors, rows, **given())
        known = out, products, factors
        pair = shrink_expand.expand_swiglu_shrink(*known, consumer, rows, **given())
        assert pair is not None
        assert torch.equal(pair[0], shrink_expand.expand_adapters_swiglu(*known, rows, **given()))
        if own.any():
            wanted = plain.shrink_adapters(pair[0], None, consumer, rows)
            assert error(pair[1].sum(0)[own], wanted.sum(0)[own]) < CHANGE, kind
