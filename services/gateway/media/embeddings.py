"""Embeddings that clients bring: from URL to a file whose tensor has the model's shape.

`ImageReader` reads them here. A header is read and sizes are compared before base64 is decoded; the
encoder looks at the values.
"""

from services.common.embeddings.tensor_file import ITEM_BYTES, MAX_HEADER_BYTES, find_tensor
from services.common.errors import InvalidRequest
from services.gateway.media.images import Hold, MediaLoader
from services.gateway.media.kinds import EMBEDDING

_MOST_ITEM_BYTES = ITEM_BYTES["float32"]


async def load_embedding(
    width: int, loader: MediaLoader, url: str, num_tokens: int, hold: Hold, tenant: str
) -> bytes:
    """The file with a tensor of so many rows.

    Args:
        width: of a row: hidden size times features.

    Raises:
        TriptychError: as of `MediaLoader.load`; or the file holds no such tensor.
    """
    if not url.startswith(("data:", "media:")):
        raise InvalidRequest("an embedding is base64, or a media: URL")
    most = num_tokens * width * _MOST_ITEM_BYTES + MAX_HEADER_BYTES + 16
    data = await loader.load(url, most, EMBEDDING, hold, tenant)
    place, wanted = find_tensor(data), (num_tokens, width)
    if place.shape != wanted:
        raise InvalidRequest(
            f"the tensor has shape {list(place.shape)}; an embedding of this grid and model "
            f"has {list(wanted)}: tokens, hidden size times (1 + DeepStack levels)"
        )
    return data
