"""Embeddings that clients bring: from URL to files whose tensors have the model's shape.

`ImageReader` reads them here. A header is read and sizes are compared before base64 is decoded; the
encoder looks at the values.
"""

import asyncio
from collections.abc import Sequence

from services.common.embeddings.tensor_file import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    find_tensor,
    split_rows,
)
from services.common.errors import InvalidRequest
from services.gateway.media.images import Hold, MediaLoader
from services.gateway.media.kinds import EMBEDDING

_MOST_ITEM_BYTES = ITEM_BYTES["float32"]


async def load_embeddings(
    width: int, loader: MediaLoader, url: str, num_tokens: Sequence[int], hold: Hold, tenant: str
) -> list[bytes]:
    """Loads the file of one or several embeddings, and returns a file for each.

    Args:
        width: length of a row: hidden size times features.
        num_tokens: number of rows of each embedding. The file has them one after the other.

    Raises:
        TriptychError: as of `MediaLoader.load`; or the file holds no such tensor.
    """
    if not url.startswith(("data:", "media:")):
        raise InvalidRequest("an embedding is base64, or a media: URL")
    most = sum(num_tokens) * width * _MOST_ITEM_BYTES + MAX_HEADER_BYTES + 16
    data = await loader.load(url, most, EMBEDDING, hold, tenant)
    place, wanted = find_tensor(data), (sum(num_tokens), width)
    if place.shape != wanted:
        grids = "this grid" if len(num_tokens) == 1 else f"these {len(num_tokens)} grids"
        raise InvalidRequest(
            f"the tensor has shape {list(place.shape)}; an embedding of {grids} and model "
            f"has {list(wanted)}: tokens, hidden size times (1 + DeepStack levels)"
        )
    if len(num_tokens) == 1:
        return [data]
    return await asyncio.to_thread(split_rows, data, place, num_tokens)
