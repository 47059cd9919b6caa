"""Device code that quantizes activations: scales, and quotients that are divisions' to the bit."""

# ruff: noqa: ANN201 - blocks of the kernels' compiler

import triton
import triton.language as tl

_LEAST = tl.constexpr(2.0**-126)  # of what has a reciprocal


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(x, axis: tl.constexpr, LARGEST: tl.constexpr):
    """The largest magnitude over LARGEST, at least the smallest normal number; 1 for zeros. What is
    no number stays none: integers would hide it.
    """
    amax = tl.reduce(tl.abs(x), axis, _larger)
    return tl.where(amax == 0, 1.0, _larger(tl.div_rn(amax, LARGEST), _LEAST))


@triton.jit
def quotient(x, scale):
    """`x / scale`, rounded once: three instructions an element, where a division takes ten. What
    the product with the reciprocal lacks is known exactly (Markstein, 1990).
    """
    inverse = tl.div_rn(1.0, scale)
    near = x * inverse
    return tl.fma(tl.fma(-near, scale, x), inverse, near)
