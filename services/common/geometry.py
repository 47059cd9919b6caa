"""Division of images and videos into units, and the tokens and positions of units in a prompt.

All of that follows from an image's size alone, and for a video from the number, the rate and the
size of its frames.

A unit is encoded at once, cached by one key, and placed as one run of tokens. It is a still image,
or a pair of frames of a video (`frame_pairs`). The gateway places units in prompts, and the encoder
computes their pixels, both by the `Geometry` of the model's spec, so that they cannot differ. The
decoder knows runs of embeddings and nothing about pixels.
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
    """A part of an image or video that is encoded at once. Together with the file, a unit decides
    the pixels, so image keys cover all of it.

    Attributes:
        grid: (time, height, width) in patches, before merging.
        frames: indices of the two frames of a video's unit. None for a still image.
    """

    grid: Grid
    frames: tuple[int, int] | None = None

    @property
    def num_patches(self) -> int:
        """Number of patches, before merging."""
        return math.prod(self.grid)


class Run(NamedTuple):
    """The tokens of a unit in a prompt, which the unit's embedding replaces.

    Attributes:
        offset: index of the first token in the prompt.
        num_tokens: number of tokens.
        unit: the unit.
        image: index of the unit's image in the request.
        time: time of the unit since the beginning of its video, in positions. 0 if the model places
            each unit as an image of its own.
    """

    offset: int
    num_tokens: int
    unit: Unit
    image: int
    time: int = 0


class Patches:
    """The division of units into patches and tokens.

    Attributes:
        patch_size: side of a patch in pixels.
        merge_size: side of a token in patches.
    """

    __slots__ = ()
    patch_size: int
    merge_size: int

    @property
    def patches_per_token(self) -> int:
        """Number of patches that are merged into one token."""
        return self.merge_size**2

    @property
    def token_size(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge_size

    def size_of(self, unit: Unit) -> Size:
        """Returns the size (height, width) to which a unit's pixels are resized."""
        _, height, width = unit.grid
        return height * self.patch_size, width * self.patch_size

    def num_tokens(self, unit: Unit) -> int:
        """Returns the number of tokens of a unit's run."""
        return unit.num_patches // self.patches_per_token


@dataclass(frozen=True, slots=True)
class Geometry(Patches):
    """A model's division of images into units, and the tokens that stand for units in its prompts.

    In this class an image is a single unit of its own shape, and positions follow M-RoPE. A family
    with other images overrides the methods.

    Attributes:
        image_token_id: token that the chat template writes once per image, and that also stands for
            each of the image's tokens.
        min_pixels: area to which smaller images are scaled up.
        max_pixels: area to which larger images are scaled down.
        resample: filter of the resize to `size_of`.
    """

    image_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: Literal["bilinear", "bicubic"] = "bicubic"

    def narrowed(self, min_pixels: int | None, max_pixels: int | None) -> "Geometry":
        """Returns this geometry with a request's limits on a unit's pixels, which are clipped to
        the model's own limits.
        """
        low, high = self.min_pixels, self.max_pixels
        least = min(max(min_pixels or low, low), high)
        most = high if max_pixels is None else min(max(max_pixels, low), high)
        return replace(self, min_pixels=least, max_pixels=max(most, least))

    def units(self, size: Size) -> tuple[Unit, ...]:
        """Returns the units of an upright image of this size (height, width).

        Raises:
            InvalidImage: the model accepts no image of this shape.
        """
        height, width = self.resized(size)
        return (Unit((1, height // self.patch_size, width // self.patch_size)),)

    def resized(self, size: Size) -> Size:
        """Returns the size to which an image is resized: multiples of a token's side, within the
        limits.

        Raises:
            InvalidImage: one side is more than 200 times the other.
        """
        height, width = size
        if max(size) > MAX_ASPECT_RATIO * min(size):
            raise InvalidImage(
                f"the image has {width}x{height} pixels, and one side may be at most "
                f"{MAX_ASPECT_RATIO} times as long as the other"
            )
        return fitted(size, self.token_size, self.min_pixels, self.max_pixels)

    def check(self, unit: Unit) -> None:
        """Checks that an image can have this unit.

        Raises:
            InvalidRequest: no image has such a unit.
        """
        time, *sides = unit.grid
        if time != 1 or not all(side and side % self.merge_size == 0 for side in sides):
            raise InvalidRequest(f"no image has a grid of {time}x{sides[0]}x{sides[1]} patches")

    def is_of(self, unit: Unit, size: Size) -> bool:
        """Returns whether an image of this size has the unit under some limits of a request."""
        # The limits decide the scale of both sides. Each side is rounded by less than a token.
        side = self.token_size
        scales = [
            ((resized - side) / given, (resized + side) / given)
            for resized, given in zip(self.size_of(unit), size, strict=True)
        ]
        return max(low for low, _ in scales) < min(high for _, high in scales)

    def placeholders(self, units: Sequence[Unit]) -> tuple[Int32s, Sequence[int]]:
        """Returns the token ids that replace an image's `image_token_id`, and the offset of each
        unit's run among them.
        """
        (unit,) = units
        return np.full(self.num_tokens(unit), self.image_token_id, np.int32), (0,)

    def positions(self, num_tokens: int, runs: Sequence[Run]) -> tuple[Int32s | None, int]:
        """Computes the positions of a prompt.

        A text token at position p has (p, p, p), and the next token is at p + 1. An image of h x w
        tokens at p has positions (p, p + row, p + column), row by row, and the next token is at
        p + max(h, w). The runs of a video without text between them all begin at the same p. A unit
        at time t of the video has (p + t, p + row, p + column), and the next text token is at
        p + max(h, w, t + 1).

        Args:
            num_tokens: number of tokens of the prompt.
            runs: runs of the units, in order of their offsets, without overlaps.

        Returns:
            Positions `[3, num_tokens]` (time, height, width), or None if they are 0 to
            num_tokens - 1 on each axis; and the delta that decode steps add to a token's index.
        """
        positions = np.empty((3, num_tokens), np.int32)
        index, position, start, image = 0, 0, 0, -1
        for run in runs:
            text = run.offset - index
            positions[:, index : run.offset] = np.arange(position, position + text, dtype=np.int32)
            if text or run.image != image:
                start, image = position + text, run.image
            _, height, width = run.unit.grid
            rows, columns = height // self.merge_size, width // self.merge_size
            index = run.offset + rows * columns
            span = positions[:, run.offset : index].reshape(3, rows, columns)
            span[0] = start + run.time
            span[1] = start + np.arange(rows, dtype=np.int32)[:, None]
            span[2] = start + np.arange(columns, dtype=np.int32)
            position = start + max(rows, columns, run.time + 1)
        tail = num_tokens - index
        positions[:, index:] = np.arange(position, position + tail, dtype=np.int32)
        return positions, position + tail - num_tokens


def fitted(
    size: Size, side: int, low: int, high: int, *, frames: int = 1, counted: int = 1
) -> Size:
    """Returns a size near the given size whose sides are multiples of `side` and whose pixels are
    within limits. It is `smart_resize` of transformers' processors, which computes in double
    precision and rounds half to even.

    Args:
        size: (height, width) in pixels.
        low, high: limits on the pixels of all frames together.
        frames: number of frames.
        counted: number of frames by which the rounded size is compared with the limits.
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
