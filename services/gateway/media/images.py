"""A request's images: from URL to bytes, units and image keys. Only headers are decoded here.

An `image_url` is a data: URL, a file under one directory, or a web address. Text is never searched
for URLs. Each kind of URL has its own bound on bytes, checked before the bytes are held.
`ChatService` reads a request's images here; an error's `param` names the image that caused it.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

import pybase64

from services.common.errors import InvalidImage, InvalidRequest, TriptychError
from services.common.geometry import Geometry, Grid, Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader, read_header
from services.common.images.image_key import embedding_key, image_key
from services.common.pb.encoder_pb2 import EncodeRequest
from services.common.threads import INLINE_BYTES, WorkerThreads, num_threads
from services.gateway.bounds import Bounds
from services.gateway.gather import gather
from services.gateway.media.kinds import IMAGE, Kind

# Counts bytes that are now held; may refuse.
Hold = Callable[[int], None]
# The file of a tenant behind a `media:` URL; raises NotFound.
Uploaded = Callable[[str, str], Awaitable[bytes]]
# `detail: low` means at most this many pixels; `high` and `auto` mean the model's own limits.
LOW_DETAIL_PIXELS = 512 * 512
MAX_CONCURRENT_LOADS = 8
# Lines of 64 characters end with two more, which are no base64.
_LEAST_BASE64 = 0.96
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")
# A type has commas, too: `video/webm;codecs=vp9,opus` is what browsers record.
_DATA_HEADER = re.compile(r"data:.{0,256}?;\s*base64\s*,", re.DOTALL | re.IGNORECASE)
# Of an image that is not in the request's body: as received, and in the call to an encoder.
_MEMORY_PER_FETCHED_BYTE = 3


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a request names it.

    Attributes:
        url: of its bytes; empty: they are kept under `kept_name`.
        detail: `low`, or one that means the model's limits.
        min_pixels, max_pixels: of the resized image; None: the model's.
        kept_name: name of the image's entry among what is kept for the tenant. None if no later
            request names the image.
        grids: grids of the images whose embeddings the client brings in one file, behind the URL.
            Empty if the URL is an image's.
    """

    url: str
    param: str
    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    kept_name: str | None = None
    grids: Sequence[Grid] = ()

    @property
    def num_images(self) -> int:
        """Number of images behind the URL."""
        return len(self.grids) or 1


@dataclass(slots=True)
class Image:
    """A loaded image.

    Attributes:
        data: the encoded file.
        is_embedding: the file holds the only unit's embedding.
    """

    param: str
    data: bytes
    units: Sequence[Unit]
    is_embedding: bool = False
    kind: ClassVar[Kind] = IMAGE
    file: ClassVar[None] = None  # a video's may lie with an encoder

    def sent(self, unit: Unit) -> EncodeRequest:
        """What an encode call says of a unit's pixels."""
        return EncodeRequest(image=self.data, is_embedding=self.is_embedding)

    async def key(self, prefix: bytes, unit: Unit, salt: bytes) -> bytes:
        """A unit's image key for encoders of that prefix and a tenant's salt."""
        name = embedding_key if self.is_embedding else image_key
        key_of = partial(name, prefix, self.data, unit=unit, salt=salt)
        return key_of() if len(self.data) <= INLINE_BYTES else await asyncio.to_thread(key_of)


class KeptImages(Protocol):
    """Images that later requests name, of tenants that have names of their own.

    Attributes:
        terms: when an entry is no longer found, for the error that says so.
    """

    terms: str

    async def get(self, tenant: str, name: str) -> bytes | None:
        """An entry, whose hour begins anew. Raises Unavailable: the store does not answer."""
        ...

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        """Keeps an entry in place of one of that name; returns whether it is kept."""
        ...


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Loads images and divides them into units.

    Attributes:
        kept: store of the images that have a name for later requests.
        embeddings: loads the files of embeddings, see `load_embeddings`; None: clients may not
            bring them.
    """

    loader: "MediaLoader"
    geometry: Geometry
    bounds: Bounds
    kept: KeptImages
    embeddings: Callable[[str, Sequence[int], Hold, str], Awaitable[list[bytes]]] | None = None

    async def read(
        self, sources: Sequence[ImageSource], hold: Hold, max_patches: int, tenant: str = ""
    ) -> list[Image]:
        """All images, in order.

        Args:
            hold: counts the bytes now held; may refuse.
            max_patches: of one unit, before merging.
            tenant: which of several asks; each has a limit of fetches at a time.

        Raises:
            TriptychError: of the first image that fails; its `param` names the image.
        """

        async def read_one(source: ImageSource) -> list[Image]:
            try:
                if source.grids:
                    return await self._embeddings(source, hold, max_patches, tenant)
                geometry = self._geometry_for(source)
                if source.kept_name is not None and not source.url:
                    data = await self._kept_image(source.kept_name, hold, tenant)
                    return [self._measure(data, source.param, geometry, max_patches)]
                most = self.bounds.max_image_bytes
                data = await self.loader.load(source.url, most, IMAGE, hold, tenant)
                image = self._measure(data, source.param, geometry, max_patches)
                if source.kept_name is not None:
                    await self.kept.put(tenant, source.kept_name, data)
                return [image]
            except TriptychError as error:
                error.param = error.param or source.param
                raise

        found = await gather(read_one, sources, MAX_CONCURRENT_LOADS)
        return [image for images in found for image in images]

    async def _embeddings(
        self, source: ImageSource, hold: Hold, max_patches: int, tenant: str
    ) -> list[Image]:
        if self.embeddings is None:
            raise InvalidRequest(
                "this gateway takes no embeddings of clients: GATEWAY_EMBEDDINGS=true allows them"
            )
        units = [Unit(grid) for grid in source.grids]
        for unit in units:
            self.geometry.check(unit)
            if unit.num_patches > max_patches:
                raise InvalidImage(
                    f"the grid has {unit.num_patches} patches, more than {max_patches}"
                )
        num_tokens = [self.geometry.num_tokens(unit) for unit in units]
        files = await self.embeddings(source.url, num_tokens, hold, tenant)
        return [
            Image(source.param, data, (unit,), is_embedding=True)
            for data, unit in zip(files, units, strict=True)
        ]

    async def _kept_image(self, name: str, hold: Hold, tenant: str) -> bytes:
        data = await self.kept.get(tenant, name)
        if data is None:
            raise InvalidRequest(
                f"this image is not kept here, or no longer: send it with its URL. "
                f"{self.kept.terms}"
            )
        hold(len(data) * _MEMORY_PER_FETCHED_BYTE)
        return data

    def _geometry_for(self, source: ImageSource) -> Geometry:
        """The model's within the request's limits; raises InvalidRequest if those are empty."""
        lower, upper = source.min_pixels, source.max_pixels
        if lower is not None and upper is not None and lower > upper:
            raise InvalidRequest(f"min_pixels {lower} is above max_pixels {upper}")
        if upper is None and source.detail == "low":
            upper = LOW_DETAIL_PIXELS
        return self.geometry.narrowed(lower, upper)

    def _measure(self, data: bytes, param: str, geometry: Geometry, max_patches: int) -> Image:
        header = header_within(data, self.bounds)
        units = geometry.units(header.upright_size)
        for unit in units:
            if unit.num_patches > max_patches:
                area = math.prod(self.geometry.size_of(unit))
                raise InvalidImage(
                    f"the image has {area} pixels after resizing; at most "
                    f"{area // unit.num_patches * max_patches} are served: lower max_pixels"
                )
        return Image(param, data, units)


def header_within(data: bytes, bounds: Bounds) -> ImageHeader:
    """The header of an image that has no more pixels than the bounds allow.

    Raises:
        InvalidImage: it has more pixels, or it is no readable image.
    """
    header = read_header(data, max_source_pixels=MAX_SOURCE_PIXELS)
    if header.width * header.height > bounds.max_source_pixels:
        raise InvalidImage(
            f"the image has {header.width}x{header.height} pixels; at most "
            f"{bounds.max_source_pixels} are allowed (GATEWAY_MAX_IMAGE_PIXELS)"
        )
    return header


@dataclass(frozen=True, slots=True)
class MediaLoader:
    """Loads the bytes behind a URL.

    Attributes:
        fetch: the bytes behind an http: or https: URL, see `WebMedia.fetch`.
        read_file: the file behind a file: URL, see `read_local_file`; None: they are refused.
        uploads: a tenant's file behind a `media:` URL; None: there are none.
    """

    fetch: Callable[[str, int, Kind, Hold, str], Awaitable[bytes]]
    read_file: Callable[[str, int, Kind], bytes] | None
    uploads: Uploaded | None = None
    _threads: WorkerThreads = field(default_factory=lambda: WorkerThreads(num_threads(), "media"))

    async def load(self, url: str, max_bytes: int, kind: Kind, hold: Hold, tenant: str) -> bytes:
        """The bytes behind a URL.

        Args:
            max_bytes: of one image or video, encoded.
            hold: counts the memory of bytes that are not in the request's body; may refuse.
            tenant: as `ImageReader.read`.

        Raises:
            InvalidRequest: the URL is refused or malformed.
            InvalidImage: more bytes than allowed.
            MediaFetchFailed: the origin has no such image.
            Unavailable: the origin cannot be reached now.
        """
        scheme = url[:8].partition(":")[0].lower()
        match scheme:
            case "data":
                if len(url) > INLINE_BYTES:
                    return await self._threads.run(decode_data_url, url, max_bytes, kind)
                return decode_data_url(url, max_bytes, kind)
            case "http" | "https":
                return await self.fetch(
                    url, max_bytes, kind, lambda n: hold(n * _MEMORY_PER_FETCHED_BYTE), tenant
                )
            case "media" if self.uploads is not None:
                data = await self.uploads(tenant, url)
            case "file" if self.read_file is not None:
                data = await self._threads.run(self.read_file, url, max_bytes, kind)
            case "file":
                raise InvalidRequest("file: URLs are not allowed here")
            case _:
                raise InvalidRequest(f"{kind.noun} URLs must be data:, http: or https: URLs")
        if len(data) > max_bytes:
            raise kind.too_large(max_bytes)
        hold(len(data) * _MEMORY_PER_FETCHED_BYTE)
        return data

    def close(self) -> None:
        self._threads.close()


def decode_data_url(url: str, max_bytes: int, kind: Kind = IMAGE) -> bytes:
    """The bytes of a base64 `data:` URL; their number is checked before they are decoded. They
    decide what they are, not its type.

    Raises:
        InvalidRequest: not base64, or malformed.
        InvalidImage, InvalidVideo: more than `max_bytes`.
    """
    head = _DATA_HEADER.match(url)
    if head is None:
        raise InvalidRequest("a data: URL must be data:<type>;base64,<data>")
    return decode_base64(url[head.end() :], max_bytes, kind)


def decode_base64(text: str, max_bytes: int, kind: Kind = IMAGE) -> bytes:
    """Raises as `decode_data_url`."""
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
    """Base64 in lines or with blanks, escaped, of the URL-safe alphabet, or without padding."""
    try:
        encoded = text.encode("ascii").translate(_STANDARD_ALPHABET, b" \t\r\n")
        encoded = encoded.replace(b"%2B", b"+").replace(b"%2F", b"/").replace(b"%3D", b"=")
        if not encoded.endswith(b"="):
            encoded += b"=" * (-len(encoded) % 4)
        return pybase64.b64decode(encoded, validate=True)
    except ValueError:
        raise InvalidRequest("the data: URL is not valid base64") from None
