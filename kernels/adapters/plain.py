"""Reference implementations of the kernels of adapters in plain torch, also used on CPUs.

A step multiplies its tokens by the factors of all slots that may occur, and keeps for each token
the products of the token's own slot. The shapes depend neither on which token has which adapter nor
on the number of sequences.
"""

from torch import Tensor
from torch.nn import functional as F

from kernels.adapters.factors import AdapterRows, SlotFactors
from kernels.plain import reduce_split_k, silu_and_mul


def add_adapters(out: Tensor, x: Tensor, factors: SlotFactors, rows: AdapterRows) -> Tensor:
    """Returns a layer's output with the adapters' changes.

    Args:
        out: `[T, N]`, output of the base layer, or split-K partials of it, `[S, T, N]` float32.
        x: `[T, K]`, input of the layer.
        factors: factors of the layer.
        rows: adapters of the tokens.
    """
    out = reduce_split_k(out, x.dtype)
    mask, own = rows.mask, slice(rows.first, rows.last)
    if factors.factor is not None:
        scale = factors.factor[rows.slots.clamp(min=0)]
        scale = scale.masked_fill((rows.slots < 0)[:, None], 1)
        if factors.bias is not None:
            out = (out - factors.bias) * scale + factors.bias
        else:
            out = out * scale
    a = factors.a[own]
    hidden = F.linear(x, a.flatten(0, 2)).view(len(x), *a.shape[:3])
    # Products of other slots are not multiplied by 0: they may be infinite.
    hidden = hidden.masked_fill(~mask[:, own, None, None], 0)
    start = 0
    for index, size in enumerate(factors.sizes):
        b = factors.b[start : start + size, own]
        out[:, start : start + size] += F.linear(hidden[:, :, index].flatten(1), b.flatten(1))
        start += size
    return out


def add_adapters_swiglu(out: Tensor, x: Tensor, factors: SlotFactors, rows: AdapterRows) -> Tensor:
    """Adds the changes to the output of gate and up, and applies SwiGLU: `[T, N / 2]`."""
    return silu_and_mul(add_adapters(out, x, factors, rows))
