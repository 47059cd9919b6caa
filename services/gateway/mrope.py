"""Token ids' places on the three axes of M-RoPE (time, height, width), as the decoder wants them.

A text token stands at (p, p, p) and moves p on by one. An image of h x w merged cells starting at p
takes (p, p + row, p + column), row by row, and moves p on by max(h, w).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
Int32s = npt.NDArray[np.int32]


def image_tokens(grid: Grid, merge_size: int) -> int:
    """Placeholders that an image of that grid (patches before merging) takes in the prompt."""
    t, h, w = grid
    return t * h * w // merge_size**2


def mrope_positions(
    num_tokens: int, images: Sequence[tuple[int, Grid]], merge_size: int
) -> tuple[Int32s, int]:
    """Positions of an expanded prompt.

    Args:
        num_tokens: length of the prompt, placeholders included.
        images: (offset of the first placeholder, grid) in order of offset, not overlapping.
        merge_size: patches per image-token side.

    Returns:
        positions [3, num_tokens], and the delta that decode steps add to a token's index.
    """
    positions = np.empty((3, num_tokens), np.int32)
    index, position = 0, 0
    for offset, (t, h, w) in images:
        text = offset - index
        positions[:, index:offset] = np.arange(position, position + text, dtype=np.int32)
        position += text
        rows, columns = h // merge_size, w // merge_size
        index = offset + t * rows * columns
        span = positions[:, offset:index].reshape(3, t, rows, columns)
        span[0] = position
        span[1] = position + np.arange(rows, dtype=np.int32)[:, None]
        span[2] = position + np.arange(columns, dtype=np.int32)
        position += max(rows, columns)
    tail = num_tokens - index
    positions[:, index:] = np.arange(position, position + tail, dtype=np.int32)
    return positions, position + tail - num_tokens
