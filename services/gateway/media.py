"""An `image_url` to the bytes it names: data: URLs, files under one directory, and the web.

Text is never looked at for URLs. Each source has its own bound on bytes, checked before they are
held; what the bytes are is decided later, from their header.
"""

import asyncio
import os
import stat
from pathlib import Path
from urllib.parse import unquote

import pybase64

from services.common.errors import InvalidImage, InvalidRequest
from services.common.threads import INLINE_BYTES
from services.gateway.web_media import WebMedia

_MEDIA_TYPES = frozenset(
    ("", "application/octet-stream", "image/*", "image/gif", "image/jpeg", "image/jpg",
     "image/png", "image/webp")
)  # fmt: skip
_MAX_DATA_HEADER = 256


class MediaLoader:
    """Turns URLs into bytes.

    Args:
        max_bytes: of one image, encoded.
        web: fetches http: and https:.
        allowed_directory: where file: URLs may point; None refuses them all.
    """

    def __init__(self, max_bytes: int, web: WebMedia, allowed_directory: Path | None) -> None:
        self._max_bytes = max_bytes
        self._web = web
        self._directory = None if allowed_directory is None else allowed_directory.resolve()

    async def load(self, url: str) -> bytes:
        """The bytes a URL names.

        Raises:
            InvalidRequest: a URL that is refused, or malformed.
            InvalidImage: more bytes than allowed.
            MediaFetchFailed: the origin has no such image.
            Unavailable: the origin cannot be reached now.
        """
        scheme = url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                if len(url) > INLINE_BYTES:
                    return await asyncio.to_thread(decode_data_url, url, self._max_bytes)
                return decode_data_url(url, self._max_bytes)
            case "http" | "https":
                return await self._web.fetch(url)
            case "file":
                return await asyncio.to_thread(self._read_file, url)
            case _:
                raise InvalidRequest("image URLs must be data:, http: or https: URLs")

    async def close(self) -> None:
        """Closes connections."""
        await self._web.close()

    def _read_file(self, url: str) -> bytes:
        if self._directory is None:
            raise InvalidRequest("file: URLs are not allowed here")
        rest = url[len("file:") :]
        if rest.startswith("//"):
            rest = rest[2:]
        path = unquote(rest)
        if not path.startswith("/") or "\0" in path:
            raise InvalidRequest("a file: URL must name an absolute path")
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self._directory):
            raise InvalidRequest("the file is outside the allowed directory")
        try:
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise InvalidRequest("the file: URL names no regular file")
                data = file.read(self._max_bytes + 1)
        except OSError:
            raise InvalidRequest("the file: URL names no readable file") from None
        if len(data) > self._max_bytes:
            raise InvalidImage(f"the image has more than {self._max_bytes} bytes")
        return data


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a base64 `data:` URL; its size is checked before it is decoded.

    Raises:
        InvalidRequest: not base64, malformed, or of a media type that is no picture's.
        InvalidImage: more than `max_bytes`.
    """
    comma = url.find(",", 0, _MAX_DATA_HEADER)
    if comma < 0:
        raise InvalidRequest("a data: URL must be data:<type>;base64,<data>")
    media_type, *parameters = url[len("data:") : comma].lower().split(";")
    if not parameters or parameters[-1].strip() != "base64":
        raise InvalidRequest("a data: URL must be base64-encoded")
    if media_type.strip() not in _MEDIA_TYPES:
        raise InvalidRequest(
            f"media type {media_type[:40]!r} is not allowed; allowed: image/jpeg, image/png, "
            "image/webp, image/gif"
        )
    length = len(url) - comma - 1
    if length // 4 * 3 - 2 > max_bytes:
        raise InvalidImage(f"the image has more than {max_bytes} bytes")
    try:
        data = pybase64.b64decode(url[comma + 1 :], validate=True)
    except ValueError:
        raise InvalidRequest("the data: URL is not valid base64") from None
    if not data:
        raise InvalidImage("the data: URL is empty")
    if len(data) > max_bytes:
        raise InvalidImage(f"the image has more than {max_bytes} bytes")
    return data
