"""Embeddings that clients send in place of images: from a URL to files of the model's shape.

`ImageReader` loads the embeddings here. The header of a file and its size are checked before base64
is decoded. The encoder checks the values.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.embeddings.tensor_file import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    find_tensor,
    split_rows,
)
from services.common.errors import InvalidRequest
from services.gateway.media.kinds import EMBEDDING
from services.gateway.media.media_loader import MediaLoader
from services.gateway.tenancy.slot import Slot

_MOST_ITEM_BYTES = ITEM_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class ClientEmbeddings:
    """Loads the embeddings that clients send.

    Attributes:
        width: length of a row: hidden size times number of features.
    """

    width: int
    loader: MediaLoader

    async def load(self, url: str, num_tokens: Sequence[int], slot: Slot) -> list[bytes]:
        """Loads the file of one or several embeddings, and returns one file for each embedding.

        Args:
            num_tokens: number of rows of each embedding. The file contains the embeddings one after
                another.
            slot: admission slot of the request.

        Raises:
            InvalidRequest: the file contains no tensor of the expected shape.
            TriptychError: see `MediaLoader.load`.
        """
        if not url.startswith(("data:", "media:")):
            raise InvalidRequest("an embedding is base64, or a media: URL")
        max_bytes = sum(num_tokens) * self.width * _MOST_ITEM_BYTES + MAX_HEADER_BYTES + 16
        data = await self.loader.load(url, max_bytes, EMBEDDING, slot)
        place, wanted = find_tensor(data), (sum(num_tokens), self.width)
        if place.shape != wanted:
            grids = "this grid" if len(num_tokens) == 1 else f"these {len(num_tokens)} grids"
            raise InvalidRequest(
                f"the tensor has shape {list(place.shape)}; an embedding of {grids} and model "
                f"has {list(wanted)}: tokens, hidden size times (1 + DeepStack levels)"
            )
        if len(num_tokens) == 1:
            return [data]
        return await asyncio.to_thread(split_rows, data, place, num_tokens)
