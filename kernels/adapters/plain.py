"""Reference implementations of the kernels of adapters in plain torch, also used on CPUs.

A step multiplies its tokens by the factors of all slots that may occur, and keeps for each token
the products of the token's own slot. The shapes depend neither on which token has which adapter nor
on the number of sequences.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.adapters.factors import AdapterRows, Norm, SlotFactors
from kernels.plain import reduce_split_k, rms_norm, silu_and_mul


def shrink_adapters(
    x: Tensor, norm: Norm | None, factors: SlotFactors, rows: AdapterRows
) -> Tensor:
    """Multiplies tokens by the factors `a` of their slots.

    Args:
        x: `[T, K]`, input of the layer, before the norm if there is one.
        norm: norm of the input. None if `x` is normalized.
        factors: factors of the layer.
        rows: adapters of the tokens.

    Returns:
        `[S, T, modules, rank]`, partial products, whose sum over S is the product. Those of tokens
        without adapter are undefined.
    """
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    own = slice(rows.first, rows.last)
    a = factors.a[own]
    products = F.linear(x, a.flatten(0, 2)).view(len(x), *a.shape[:3])
    # Products of other slots are not multiplied by 0: they may be infinite.
    return products.masked_fill(~rows.mask[:, own, None, None], 0).sum(1)[None]


def expand_adapters(
    out: Tensor, products: Tensor, factors: SlotFactors, rows: AdapterRows
) -> Tensor:
    """Returns a layer's output with the adapters' changes, perhaps in the memory of `out`.

    Args:
        out: `[T, N]`, output of the base layer, or split-K partials of it, `[S, T, N]` float32.
        products: result of `shrink_adapters`.
        factors: factors of the layer.
        rows: adapters of the tokens.
    """
    dtype = factors.b.dtype
    out, mask, own = reduce_split_k(out, dtype), rows.mask, slice(rows.first, rows.last)
    if factors.factor is not None:
        scale = factors.factor[rows.slots.clamp(min=0)]
        scale = scale.masked_fill((rows.slots < 0)[:, None], 1)
        if factors.bias is not None:
            out = (out - factors.bias) * scale + factors.bias
        else:
            out = out * scale
    hidden = products.sum(0).to(dtype)[:, None]
    hidden = torch.where(mask[:, own, None, None], hidden, torch.zeros_like(hidden))
    start = 0
    for index, size in enumerate(factors.sizes):
        b = factors.b[start : start + size, own]
        out[:, start : start + size] += F.linear(hidden[:, :, index].flatten(1), b.flatten(1))
        start += size
    return out


def expand_adapters_swiglu(
    out: Tensor, products: Tensor, factors: SlotFactors, rows: AdapterRows
) -> Tensor:
    """Adds the changes to the output of gate and up, and applies SwiGLU: `[T, N / 2]`."""
    return silu_and_mul(expand_adapters(out, products, factors, rows))


def expand_swiglu_shrink(
    out: Tensor, products: Tensor, factors: SlotFactors, consumer: SlotFactors, rows: AdapterRows
) -> tuple[Tensor, Tensor] | None:
    """Computes `expand_adapters_swiglu`, and `shrink_adapters` of the result for its consumer."""
    found = expand_adapters_swiglu(out, products, factors, rows)
    return found, shrink_adapters(found, None, consumer, rows)
