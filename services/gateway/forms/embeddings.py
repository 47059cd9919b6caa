"""Embeddings in requests: vLLM's content part `image_embeds`.

The tensor is the base64 of an .npy or a safetensors file, or the `media:` URL of such a file that
was uploaded. A file that `torch.save` has written is a pickle and is refused.
"""

from typing import Annotated

import numpy as np
import pybase64
from msgspec import Meta, Struct

from services.common.embeddings.tensor_file import INTEGERS, find_tensor
from services.common.errors import InvalidRequest
from services.common.geometry import Grid

_MAX_GRID_CHARACTERS = 4096
_MAX_GRIDS = 1024
_Patches = Annotated[int, Meta(ge=1, le=1 << 16)]
_Row = Annotated[list[_Patches], Meta(max_length=3)]


class ImageEmbeds(Struct, forbid_unknown_fields=True):
    """The tensor `[tokens, hidden * (1 + DeepStack levels)]` and its grid (t, h, w) in patches
    before merging. The grid is given as numbers, or as the base64 of a file of integers. If there
    are several grids, the tensor contains the embeddings of as many images, in order.
    """

    image_embeds: Annotated[str, Meta(min_length=1)]
    image_grid_thw: Annotated[list[_Patches | _Row], Meta(max_length=_MAX_GRIDS)] | str


class ImageEmbedsPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="image_embeds"):
    """vLLM's content part for embeddings."""

    image_embeds: ImageEmbeds | str

    def source(self, path: str) -> tuple[str, list[Grid]]:
        """Returns the URL of the tensor's file, and the grid of each image in the tensor.

        Args:
            path: path of the part in the request, for errors.

        Raises:
            InvalidRequest: the grid is missing or malformed.
        """
        if isinstance(self.image_embeds, str):
            raise InvalidRequest(
                "a model of this kind needs the grid: "
                '{"image_embeds": "<base64>", "image_grid_thw": [t, h, w]}',
                param=f"{path}.image_embeds",
            )
        given = self.image_embeds
        text = given.image_embeds
        url = text if text.startswith(("data:", "media:")) else f"data:;base64,{text}"
        try:
            return url, _read_grids(given.image_grid_thw)
        except InvalidRequest as error:
            error.param = f"{path}.image_embeds.image_grid_thw"
            raise


def _read_grids(given: list[int | list[int]] | str) -> list[Grid]:
    if isinstance(given, str):
        rows = _read_file(given)
    else:
        rows = [row for row in given if isinstance(row, list)]
        numbers = [number for number in given if not isinstance(number, list)]
        if numbers:  # one grid without a list around it
            rows.append(numbers)
    grids: list[Grid] = []
    for row in rows:
        if len(row) != 3 or not all(0 < number <= 1 << 16 for number in row):
            raise InvalidRequest("a grid is three positive numbers: t, h, w")
        time, height, width = row
        grids.append((time, height, width))
    if not grids:
        raise InvalidRequest("a grid is three positive numbers: t, h, w; there is none")
    return grids


def _read_file(text: str) -> list[list[int]]:
    """Returns the rows of a file of integers with the shape [3] or [images, 3].

    Args:
        text: base64 of the file.
    """
    if len(text) > _MAX_GRID_CHARACTERS:
        raise InvalidRequest(f"grids have at most {_MAX_GRID_CHARACTERS} characters")
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:
        raise InvalidRequest("the grid is not valid base64") from None
    place = find_tensor(data, INTEGERS)
    if place.shape[-1] != 3 or len(place.shape) > 2:
        raise InvalidRequest("a grid is three numbers: t, h, w")
    return np.frombuffer(data, place.dtype, offset=place.offset).reshape(-1, 3).tolist()
