"""What of an image or a video is encoded, and where it stands in a prompt: known from its size, and
for a video from the number and the rate of its frames, alone.

A unit is what is encoded at once, cached by one key and placed as one run of tokens: a still image,
or a pair of frames of a video (`frame_pairs`). The gateway places units in prompts and the encoder
makes their pixels, both by the `Geometry` of the model's spec, so that they cannot differ. The
decoder knows runs of embeddings, and nothing of pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from services.common.errors import InvalidImage, InvalidRequest

Grid = tuple[int, int, int]  # (t, h, w) in patches before merging
Size = tuple[int, int]  # (height, width) in pixels
Int32s = npt.NDArray[np.int32]
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class Unit:
    """With the file it decides the pixels, so image keys cover all of it.

    Attributes:
        frames: of a video's unit: indices of its two frames; None: of a still image.
    """

    grid: Grid
    frames: tuple[int, int] | None = None

    @property
    def num_patches(self) -> int:
        """Patches before merging."""
        return math.prod(self.grid)


class Run(NamedTuple):
    """The tokens of a unit in a prompt, which its embedding replaces.

    Attributes:
        offset: of the first token.
        image: index of the request's image that the unit is of.
    """

    offset: int
    num_tokens: int
    unit: Unit
    image: int


class Patches:
    """How units are divided: into patches of `patch_size` pixels a side, of which `merge_size` a
    side are a token.
    """

    __slots__ = ()
    patch_size: int
    merge_size: int

    @property
    def patches_per_token(self) -> int:
        """Patches before merging of one token."""
        return self.merge_size**2

    @property
    def token_size(self) -> int:
        """Pixels per token side."""
        return self.patch_size * self.merge_size

    def size_of(self, unit: Unit) -> Size:
        """The size that a unit's pixels are resized to."""
        _, height, width = unit.grid
        return height * self.patch_size, width * self.patch_size

    def num_tokens(self, unit: Unit) -> int:
        """The tokens of a unit's run."""
        return unit.num_patches // self.patches_per_token


@dataclass(frozen=True, slots=True)
class Geometry(Patches):
    """How a model divides images into units, and what stands for them in its prompts. Pure. Here an
    image is one unit, taken whole at its own shape, and positions are those of M-RoPE; a family
    whose images are something else overrides that.

    Attributes:
        image_token_id: the chat template writes it once per image; it also stands for each of the
            image's tokens.
        min_pixels: smaller images are scaled up to at least this area.
        max_pixels: larger images are scaled down to at most this area.
        resample: filter of the resize to `size_of`.
    """

    image_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: Literal["bilinear", "bicubic"] = "bicubic"

    def narrowed(self, min_pixels: int | None, max_pixels: int | None) -> "Geometry":
        """With a request's limits on a unit's pixels, as far as the model's own allow them."""
        low, high = self.min_pixels, self.max_pixels
        least = min(max(min_pixels or low, low), high)
        most = high if max_pixels is None else min(max(max_pixels, low), high)
        return replace(self, min_pixels=least, max_pixels=max(most, least))

    def units(self, size: Size) -> tuple[Unit, ...]:
        """The units of an upright image of that size.

        Raises:
            InvalidImage: the model takes no image of that shape.
        """
        height, width = self.resized(size)
        return (Unit((1, height // self.patch_size, width // self.patch_size)),)

    def resized(self, size: Size) -> Size:
        """Multiples of an image token's size within the limits.

        Raises:
            InvalidImage: one side is more than 200 times the other.
        """
        height, width = size
        if max(size) > MAX_ASPECT_RATIO * min(size):
            raise InvalidImage(
                f"the image's aspect ratio is over {MAX_ASPECT_RATIO}: {height}x{width}"
            )
        return fitted(size, self.token_size, self.min_pixels, self.max_pixels)

    def check(self, unit: Unit) -> None:
        """Raises InvalidRequest if no image has such a unit."""
        time, *sides = unit.grid
        if time != 1 or not all(side and side % self.merge_size == 0 for side in sides):
            raise InvalidRequest(f"no image has a grid of {time}x{sides[0]}x{sides[1]} patches")

    def is_of(self, unit: Unit, size: Size) -> bool:
        """Whether an image of that size may have the unit, whatever limits its request sets."""
        # Limits decide the scale, which both sides share; each is rounded by less than a token.
        side = self.token_size
        scales = [
            ((resized - side) / given, (resized + side) / given)
            for resized, given in zip(self.size_of(unit), size, strict=True)
        ]
        return max(low for low, _ in scales) < min(high for _, high in scales)

    def placeholders(self, units: Sequence[Unit]) -> tuple[Int32s, Sequence[int]]:
        """The tokens that take the place of an image's `image_token_id`, and the offset of each
        unit's run among them.
        """
        (unit,) = units
        return np.full(self.num_tokens(unit), self.image_token_id, np.int32), (0,)

    def positions(self, num_tokens: int, runs: Sequence[Run]) -> tuple[Int32s | None, int]:
        """Positions of a prompt. A text token at p has position (p, p, p) and the next token p + 1.
        An image of h x w tokens at p has positions (p, p + row, p + column), row by row, and the
        next token p + max(h, w).

        Args:
            runs: in order of offset, not overlapping.

        Returns:
            `[3, num_tokens]` (time, height, width), or None: 0 to num_tokens - 1 on each axis; and
            the delta that decode steps add to a token's index.
        """
        positions = np.empty((3, num_tokens), np.int32)
        index, position = 0, 0
        for run in runs:
            text = run.offset - index
            positions[:, index : run.offset] = np.arange(position, position + text, dtype=np.int32)
            position += text
            _, height, width = run.unit.grid
            rows, columns = height // self.merge_size, width // self.merge_size
            index = run.offset + rows * columns
            span = positions[:, run.offset : index].reshape(3, rows, columns)
            span[0] = position
            span[1] = position + np.arange(rows, dtype=np.int32)[:, None]
            span[2] = position + np.arange(columns, dtype=np.int32)
            position += max(rows, columns)
        tail = num_tokens - index
        positions[:, index:] = np.arange(position, position + tail, dtype=np.int32)
        return positions, position + tail - num_tokens


def fitted(
    size: Size, side: int, low: int, high: int, *, frames: int = 1, counted: int = 1
) -> Size:
    """A size near this one whose sides are multiples of `side`, and whose pixels are within limits:
    `smart_resize` of HF's processors, which rounds half to even, in double precision.

    Args:
        low, high: pixels of all `frames`.
        counted: the frames that count where the rounded size is compared with the limits.
    """
    height, width = size
    pixels = frames * height * width
    new_height, new_width = round(height / side) * side, round(width / side) * side
    area = counted * new_height * new_width
    if area > high:
        factor = math.sqrt(pixels / high)
        new_height, new_width = (max(side, math.floor(x / factor / side) * side) for x in size)
    elif area < low:
        factor = math.sqrt(low / pixels)
        new_height, new_width = (math.ceil(x * factor / side) * side for x in size)
    return new_height, new_width
