"""Division of the work of shrink and expand for more than 64 tokens, see `grouped`.

The tiles were measured on an H200 with 960, 1,088 and 1,408 tokens, rank 16, eight slots and the
layers of the 8B (`benchmarks/LOG.md`, "Adapters"). A device with less shared memory than an H200
has fewer pipeline stages in flight, of the same tiles.
"""

from typing import NamedTuple

from kernels.adapters.token_groups import GROUP_TOKENS

FEW_TOKENS = 64  # largest number of tokens of a step whose kernels need no groups
MOST_RANK = 64  # largest rank of the grouped expand, which keeps the products in registers
_BYTES = 2  # of an element in half precision


class ShrinkTiles(NamedTuple):
    """Division of the work of shrink among CTAs.

    Attributes:
        columns: columns of a pipeline stage.
        warps: warps of a CTA.
        most_stages: pipeline stages at most.
    """

    columns: int
    warps: int
    most_stages: int

    def stages(self, rows: int, shared_memory_bytes: int) -> int:
        """Returns the number of pipeline stages that fit.

        A stage has the inputs of a group, and a tile of `rows` rows of `a`.
        """
        elements = (GROUP_TOKENS + rows) * self.columns
        return _fitting(self.most_stages, elements, shared_memory_bytes)


class ExpandTiles(NamedTuple):
    """Division of the work of expand among CTAs.

    Attributes:
        rows: rows of a tile, and as many of up with SwiGLU.
        tiles: tiles of a CTA, which reads the products once for all of them.
        warps: warps of a CTA.
        most_stages: tiles at most whose loads are in flight.
    """

    rows: int
    tiles: int
    warps: int
    most_stages: int

    def stages(
        self, rank: int, shared_memory_bytes: int, *, is_swiglu: bool, width: int = 0
    ) -> int:
        """Returns the number of tiles whose loads fit.

        A stage has the base layer's output of a group and rows of `b`, both twice with SwiGLU, and
        columns of the consumer's `a`. Beside the stages, the products are an operand.

        Args:
            rank: rank of the layer, padded.
            shared_memory_bytes: largest shared memory of a CTA.
            is_swiglu: True if tiles are of gate and of up.
            width: padded rank of the consumer. 0 if the kernel computes no products for it.
        """
        elements = self.rows * ((1 + is_swiglu) * (GROUP_TOKENS + rank) + width)
        room = shared_memory_bytes - GROUP_TOKENS * rank * _BYTES
        return _fitting(self.most_stages, elements, room)


# About half of the SMs with a CTA each read as much as L2 gives, so shrink has few parts of the
# columns. Each CTA of expand reads all parts.
_SPLITS = ((512, 8),)  # parts of the columns by the largest number of tokens
_LEAST_SPLITS = 4
SHRINK = ShrinkTiles(128, 4, 6)
EXPAND = ExpandTiles(64, 4, 4, 3)
EXPAND_SWIGLU = ExpandTiles(64, 8, 4, 3)
EXPAND_SWIGLU_SHRINK = ExpandTiles(64, 16, 4, 3)  # parts are 1,024 columns of the consumer


def shrink_splits(num_tokens: int) -> int:
    """Returns into how many parts shrink divides the columns of a layer."""
    return next((parts for most, parts in _SPLITS if num_tokens <= most), _LEAST_SPLITS)


def _fitting(most_stages: int, elements: int, shared_memory_bytes: int) -> int:
    """Returns the number of stages of some elements that fit, at most `most_stages`."""
    return max(1, min(most_stages, shared_memory_bytes // (elements * _BYTES)))
