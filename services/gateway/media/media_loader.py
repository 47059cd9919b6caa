"""The bytes behind a URL of a request: a data: URL, a web address, an upload or a local file.

`ImageReader`, `VideoReader` and `ClientEmbeddings` load bytes here. Text of a request is never
searched for URLs. Each kind of URL has a bound of bytes, which is checked before the bytes are
allocated.
"""

import re
from dataclasses import dataclass, field

import pybase64

from services.common.errors import InvalidRequest
from services.common.threads import INLINE_BYTES, WorkerThreads, num_threads
from services.gateway.bounds import MEMORY_PER_FETCHED_BYTE
from services.gateway.clients.uploads import Uploads
from services.gateway.media.kinds import IMAGE, Kind
from services.gateway.media.local_files import LocalFiles
from services.gateway.media.web_media import WebMedia
from services.gateway.tenancy.slot import Slot

# Most loads of one request at a time.
MAX_CONCURRENT_LOADS = 8
# Least share of base64 characters in a data: URL. The rest may be line breaks: two characters after
# each 64.
_LEAST_BASE64 = 0.96
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")
# A type may contain commas: browsers record `video/webm;codecs=vp9,opus`.
_DATA_HEADER = re.compile(r"data:.{0,256}?;\s*base64\s*,", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MediaLoader:
    """Loads the bytes behind a URL.

    Attributes:
        web: fetcher of http: and https: URLs. None if these URLs are refused.
        local: files behind file: URLs. None if these URLs are refused.
        uploads: files behind media: URLs. None if these URLs are refused.
    """

    web: WebMedia | None
    local: LocalFiles | None = None
    uploads: Uploads | None = None
    _threads: WorkerThreads = field(default_factory=lambda: WorkerThreads(num_threads(), "media"))

    async def load(self, url: str, max_bytes: int, kind: Kind, slot: Slot) -> bytes:
        """Returns the bytes behind a URL.

        Args:
            max_bytes: most bytes of the encoded image or video.
            kind: kind of media that is expected behind the URL.
            slot: admission slot of the request. Its memory counts bytes that are not in the
                request's body.

        Raises:
            InvalidRequest: the URL is refused or malformed.
            InvalidImage, InvalidVideo: there are more than `max_bytes` bytes.
            MediaFetchFailed: the origin has no such media.
            Overloaded: the gateway has no memory left for the bytes.
            Unavailable: the origin cannot be reached now.
        """
        scheme = url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                if len(url) > INLINE_BYTES:
                    return await self._threads.run(decode_data_url, url, max_bytes, kind)
                return decode_data_url(url, max_bytes, kind)
            case "http" | "https" if self.web is not None:
                return await self.web.fetch(url, max_bytes, kind, slot)
            case "media" if self.uploads is not None:
                data = await self.uploads.get(slot.tenant.name, url)
            case "file" if self.local is not None:
                data = await self._threads.run(self.local.read, url, max_bytes, kind)
            case "file":
                raise InvalidRequest("file: URLs are not allowed here")
            case _:
                raise InvalidRequest(f"{kind.noun} URLs must be data:, http: or https: URLs")
        if len(data) > max_bytes:
            raise kind.too_large(max_bytes)
        slot.memory.add(len(data) * MEMORY_PER_FETCHED_BYTE)
        return data

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()


def decode_data_url(url: str, max_bytes: int, kind: Kind = IMAGE) -> bytes:
    """Returns the bytes of a base64 data: URL, whose number is checked before they are decoded. The
    type in the URL is ignored: the bytes themselves show their type.

    Raises:
        InvalidRequest: the URL is malformed or not base64.
        InvalidImage, InvalidVideo: there are more than `max_bytes` bytes, or none.
    """
    head = _DATA_HEADER.match(url)
    if head is None:
        raise InvalidRequest("a data: URL must be data:<type>;base64,<data>")
    return decode_base64(url[head.end() :], max_bytes, kind)


def decode_base64(text: str, max_bytes: int, kind: Kind = IMAGE) -> bytes:
    """Returns the bytes of base64 text.

    Raises:
        InvalidRequest: the text is not base64.
        InvalidImage, InvalidVideo: there are more than `max_bytes` bytes, or none.
    """
    if int(len(text) * _LEAST_BASE64) // 4 * 3 - 2 > max_bytes:
        raise kind.too_large(max_bytes)
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:
        data = _decode_variant(text)
    if not data:
        raise kind.error("the data: URL is empty")
    if len(data) > max_bytes:
        raise kind.too_large(max_bytes)
    return data


def _decode_variant(text: str) -> bytes:
    """Decodes base64 with line breaks, blanks or percent escapes, in the URL-safe alphabet, or
    without padding.
    """
    try:
        encoded = text.encode("ascii").translate(_STANDARD_ALPHABET, b" \t\r\n")
        encoded = encoded.replace(b"%2B", b"+").replace(b"%2F", b"/").replace(b"%3D", b"=")
        if not encoded.endswith(b"="):
            encoded += b"=" * (-len(encoded) % 4)
        return pybase64.b64decode(encoded, validate=True)
    except ValueError:
        raise InvalidRequest("the data: URL is not valid base64") from None
