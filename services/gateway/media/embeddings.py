"""Embeddings that clients bring: from URL to a file whose tensor has the model's shape.

`ImageReader` reads them here. A header is read and sizes are compared before base64 is decoded; the
encoder looks at the values.
"""

import asyncio
from collections.abc import Callable

from services.common.embeddings.tensor_file import ITEM_BYTES, MAX_HEADER_BYTES, find_tensor
from services.common.errors import InvalidRequest
from services.gateway.forms.json_body import LargeImages
from services.gateway.media.images import UploadedFiles, decode_data_url, decode_large
from services.gateway.media.kinds import EMBEDDING

_MOST_ITEM_BYTES = ITEM_BYTES["float32"]


class BroughtReader:
    """Loads embeddings.

    Args:
        width: of a row: hidden size times features.
        uploads: files behind `media:` URLs.
    """

    def __init__(self, width: int, uploads: UploadedFiles) -> None:
        self._width = width
        self._uploads = uploads

    async def load(
        self,
        url: str,
        num_tokens: int,
        hold: Callable[[int], None],
        tenant: str,
        large: LargeImages | None,
    ) -> bytes:
        """See `EmbeddingReader`."""
        most = num_tokens * self._width * _MOST_ITEM_BYTES + MAX_HEADER_BYTES + 16
        if url.startswith("media:"):
            data = await self._uploads.get(tenant, url)
            hold(len(data))
        elif not url.startswith("data:"):
            raise InvalidRequest("an embedding is base64, or a media: URL")
        elif large is not None and (place := large.range_of(url)):
            data = await asyncio.to_thread(decode_large, large, place, most, EMBEDDING)
        else:
            data = await asyncio.to_thread(decode_data_url, url, most, EMBEDDING)
        place, wanted = find_tensor(data), (num_tokens, self._width)
        if place.shape != wanted:
            raise InvalidRequest(
                f"the tensor has shape {list(place.shape)}; an embedding of this grid and model "
                f"has {list(wanted)}: tokens, hidden size times (1 + DeepStack levels)"
            )
        return data
