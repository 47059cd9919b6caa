"""What of an image or a video is encoded, and where it stands in a prompt: known from its size, and
for a video from the number and the rate of its frames, alone.

A unit is what is encoded at once, cached by one key and placed as one run of tokens: a still image,
or a pair of frames of a video (`frame_pairs`). The gateway places units in prompts and the encoder
makes their pixels, both by the `Geometry` of the model's spec, so that they cannot differ. The
decoder knows runs of embeddings, and nothing of pixels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]  # (t, h, w) in patches before merging
Size = tuple[int, int]  # (height, width) in pixels
Int32s = npt.NDArray[np.int32]


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
        num_tokens: of the unit.
        unit: what is encoded.
        image: index of the request's image that the unit is of.
    """

    offset: int
    num_tokens: int
    unit: Unit
    image: int


class Geometry(Protocol):
    """How a model divides images into units, and what stands for them in its prompts. Pure; a
    family of models has its own, in `services.common.families`.
    """

    @property
    def image_token_id(self) -> int:
        """The token that the chat template writes once per image."""
        ...

    @property
    def patches_per_token(self) -> int:
        """Patches before merging of one image token."""
        ...

    @property
    def resample(self) -> Literal["bilinear", "bicubic"]:
        """The filter of the resize to `size_of`."""
        ...

    def narrowed(self, min_pixels: int | None, max_pixels: int | None) -> "Geometry":
        """With a request's limits on a unit's pixels, as far as the model's own allow them."""
        ...

    def units(self, size: Size) -> tuple[Unit, ...]:
        """The units of an upright image of that size.

        Raises:
            InvalidImage: the model takes no image of that shape.
        """
        ...

    def check(self, unit: Unit) -> None:
        """Raises InvalidRequest if no image has such a unit."""
        ...

    def is_of(self, unit: Unit, size: Size) -> bool:
        """Whether an image of that size may have the unit, whatever limits its request sets."""
        ...

    def size_of(self, unit: Unit) -> Size:
        """The size that a unit's pixels are resized to."""
        ...

    def num_tokens(self, unit: Unit) -> int:
        """The tokens of a unit's run."""
        ...

    def placeholders(self, units: Sequence[Unit]) -> tuple[Int32s, Sequence[int]]:
        """The tokens that take the place of an image's `image_token_id`, and the offset of each
        unit's run among them.
        """
        ...

    def positions(self, num_tokens: int, runs: Sequence[Run]) -> tuple[Int32s | None, int]:
        """Positions of a prompt.

        Args:
            num_tokens: of the prompt.
            runs: in order of offset, not overlapping.

        Returns:
            `[3, num_tokens]` (time, height, width), or None: 0 to num_tokens - 1 on each axis; and
            the delta that decode steps add to a token's index.
        """
        ...
