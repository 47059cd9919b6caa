"""Block tables of sequences whose blocks lie one sequence after the other."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def first_blocks(
    seq_lens: Sequence[int] | npt.NDArray[np.int32], block_size: int
) -> npt.NDArray[np.int32]:
    """Where each sequence's blocks begin among those of all."""
    counts = -(-np.asarray(seq_lens, np.int32) // block_size)
    return (counts.cumsum() - counts).astype(np.int32)
