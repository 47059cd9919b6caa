"""Device code by which programs of a kernel hand results to other programs of the same kernel.

A GPU starts the programs of a grid in the order of their ids, on which scans with look-back rely,
too. A program that waits for programs with lower ids therefore waits for programs that run or have
ended. The programs that are waited for must wait for none but programs with still lower ids.

A *word* is an int32 in global memory that one program writes and one program reads. An empty word
is zero. A full word has the bits of a float32 number, with -0.0 for zero. The reader exchanges the
word for zero, so that all words are empty when the kernel ends, and a CUDA graph can be replayed.
The result is in the word itself, hence no fence stands between a result and its announcement.

Many readers, or results larger than a word, need a *count* for each reader: writers increment it
when a result is in memory, and the reader waits for the number of writers and sets it to zero.
"""

import triton
import triton.language as tl

_MINUS_ZERO = tl.constexpr(-(1 << 31))  # bits of -0.0 as a number


@triton.jit
def hand_over(ptr, value, mask):  # noqa: ANN201 - nothing
    """Writes float32 values into empty words."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    tl.atomic_xchg(ptr, tl.where(bits == 0, _MINUS_ZERO, bits), mask=mask, sem="relaxed")


@triton.jit
def take(ptr):  # noqa: ANN201 - Triton blocks have no type
    """Takes the words that have been written. The others are zeros."""
    return tl.atomic_xchg(ptr, tl.zeros(ptr.shape, tl.int32), sem="relaxed")


@triton.jit
def take_rest(ptr, taken):  # noqa: ANN201 - Triton blocks have no type
    """Waits for the words that an earlier call has not taken. Returns the float32 values of all."""
    while tl.max((taken == 0).to(tl.int32)) > 0:
        missing = taken == 0
        found = tl.atomic_xchg(ptr, tl.zeros(ptr.shape, tl.int32), mask=missing, sem="relaxed")
        taken = tl.where(missing, found, taken)
    return taken.to(tl.float32, bitcast=True)


@triton.jit
def wait_for_count(ptr, count):  # noqa: ANN201 - nothing
    """Waits until an int32 that other programs increment is `count`, and sets it to zero.

    What these programs wrote before they incremented it can be read afterwards.
    """
    found = tl.atomic_cas(ptr, count, 0, sem="acquire")
    while found != count:
        found = tl.atomic_cas(ptr, count, 0, sem="acquire")
    return found


@triton.jit
def prefetch(ptr, PDL: tl.constexpr):  # noqa: ANN201 - nothing
    """Asks the L2 cache for the lines at `ptr`, before `wait_for_earlier`.

    No earlier kernel of the stream may write these lines. Without PDL, nothing happens.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
