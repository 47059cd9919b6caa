"""The geometry of models that take an image whole, at its own shape, and turn by M-RoPE."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from services.common.errors import InvalidImage, InvalidRequest
from services.common.geometry import Int32s, Run, Size, Unit

_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class ResizedGrid:
    """An image is one unit, resized to whole image tokens within limits of pixels.

    Attributes:
        image_token_id: also stands for each of the image's tokens.
        patch_size: pixels per patch side.
        merge_size: patches per image-token side.
        min_pixels: smaller images are scaled up to at least this area.
        max_pixels: larger images are scaled down to at most this area.
        resample: filter of the resize.
    """

    image_token_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    resample: Literal["bilinear", "bicubic"] = "bicubic"

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def _token_size(self) -> int:
        """Pixels per image-token side."""
        return self.patch_size * self.merge_size

    def narrowed(self, min_pixels: int | None, max_pixels: int | None) -> "ResizedGrid":
        low, high = self.min_pixels, self.max_pixels
        least = min(max(min_pixels or low, low), high)
        most = high if max_pixels is None else min(max(max_pixels, low), high)
        return replace(self, min_pixels=least, max_pixels=max(most, least))

    def units(self, size: Size) -> tuple[Unit, ...]:
        height, width = self.resized(size)
        return (Unit((1, height // self.patch_size, width // self.patch_size)),)

    def resized(self, size: Size) -> Size:
        """Multiples of an image token's size within the limits.

        The formula of HF's Qwen2-VL image processor (`smart_resize`): round half to even, in double
        precision.

        Raises:
            InvalidImage: one side is more than 200 times the other.
        """
        height, width = size
        if max(size) > _MAX_ASPECT_RATIO * min(size):
            raise InvalidImage(
                f"the image's aspect ratio is over {_MAX_ASPECT_RATIO}: {height}x{width}"
            )
        side = self._token_size
        new_height, new_width = round(height / side) * side, round(width / side) * side
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(side, math.floor(height / shrink / side) * side)
            new_width = max(side, math.floor(width / shrink / side) * side)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / side) * side
            new_width = math.ceil(width * grow / side) * side
        return new_height, new_width

    def check(self, unit: Unit) -> None:
        time, *sides = unit.grid
        if time != 1 or not all(side and side % self.merge_size == 0 for side in sides):
            raise InvalidRequest(f"no image has a grid of {time}x{sides[0]}x{sides[1]} patches")

    def is_of(self, unit: Unit, size: Size) -> bool:
        # Limits decide the scale, which both sides share; each is rounded by less than a token.
        side = self._token_size
        scales = [
            ((resized - side) / given, (resized + side) / given)
            for resized, given in zip(self.size_of(unit), size, strict=True)
        ]
        return max(low for low, _ in scales) < min(high for _, high in scales)

    def size_of(self, unit: Unit) -> Size:
        _, height, width = unit.grid
        return height * self.patch_size, width * self.patch_size

    def num_tokens(self, unit: Unit) -> int:
        return unit.num_patches // self.patches_per_token

    def placeholders(self, units: Sequence[Unit]) -> tuple[Int32s, Sequence[int]]:
        (unit,) = units
        return np.full(self.num_tokens(unit), self.image_token_id, np.int32), (0,)

    def positions(self, num_tokens: int, runs: Sequence[Run]) -> tuple[Int32s, int]:
        """M-RoPE. A text token at p has position (p, p, p) and the next token p + 1. An image of
        h x w tokens at p has positions (p, p + row, p + column), row by row, and the next token
        p + max(h, w).
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
