"""The changes of a linear layer's output by adapters, which kernels of this package add."""

from dataclasses import dataclass

from torch import Tensor

LEAST_RANK = 16  # smallest rank, which is the smallest width that tensor cores multiply
LEAST_PART = 32  # fewest rows of `b` that a program multiplies by the products of one token
MODULES = 4  # modules of a layer at most


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of the output of T tokens.

    Attributes:
        a: `[slots, modules, rank, K]`, factors of all slots that are applied to the input.
        b: `[N, slots, rank]`, factors that are applied to the products.
        sizes: number of rows of each of the layer's modules.
        words: int32 memory in which programs of a kernel hand results to each other, see
            `kernels.hand_over`. They are zeros between two launches. A layer has one launch at a
            time.
        slots: `[T]` int64, slot of each token, -1 for none.
        first, last: range [first, last) of the slots that may occur.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[int, ...]
    words: Tensor
    slots: Tensor
    first: int
    last: int


def num_words(sizes: tuple[int, ...], slots: int, rank: int) -> int:
    """Number of words that the kernels of a layer need, see `Changes`.

    One token needs a word for each row, and one for each product of each part of the rows. Several
    tokens need a count for each CTA of the GEMM, of which there are fewer than rows, and one for
    each tile of the factors `a`.
    """
    parts = sum(-(-size // LEAST_PART) for size in sizes)
    return sum(sizes) + max(parts * rank, slots * len(sizes) * rank)
