"""The images of a request: from URLs to bytes, units and image keys. Only headers are decoded here.

`ChatService` reads a request's images with `ImageReader`. An error's `param` names the image that
caused the error.
"""

import asyncio
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from services.common.errors import InvalidImage, InvalidRequest, TriptychError
from services.common.geometry import Geometry, Grid, Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader, read_header
from services.common.images.image_key import embedding_key, image_key
from services.common.pb.encoder_pb2 import EncodeRequest
from services.common.threads import INLINE_BYTES
from services.gateway.bounds import MEMORY_PER_FETCHED_BYTE, Bounds
from services.gateway.gather import gather
from services.gateway.media.embeddings import ClientEmbeddings
from services.gateway.media.kinds import IMAGE, Kind
from services.gateway.media.media_loader import MAX_CONCURRENT_LOADS, MediaLoader
from services.gateway.tenancy.slot import Slot

# `detail: low` limits an image to this many pixels. `high` and `auto` mean the model's own limits.
LOW_DETAIL_PIXELS = 512 * 512


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as a request names it.

    Attributes:
        url: URL of the image. Empty if the image is stored under `stored_name`.
        param: place of the image in the request.
        detail: `low`, or a value that means the model's limits.
        min_pixels: fewest pixels of the resized image. None if the model's limit holds.
        max_pixels: most pixels of the resized image. None if the model's limit holds.
        stored_name: name under which later requests of the tenant can name the image. None if
            there is none.
        grids: grids of the images whose embeddings are in the client's file behind the URL. Empty
            if the URL is an image's.
    """

    url: str
    param: str
    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    stored_name: str | None = None
    grids: Sequence[Grid] = ()

    @property
    def key(self) -> Hashable:
        """Everything that decides what is loaded: all fields but the place in the request."""
        options = (self.detail, self.min_pixels, self.max_pixels, self.stored_name)
        return (self.url, *options, tuple(map(tuple, self.grids)))

    @property
    def num_images(self) -> int:
        """Number of images behind the URL."""
        return len(self.grids) or 1


@dataclass(slots=True)
class Image:
    """A loaded image.

    Attributes:
        param: place of the image in the request.
        data: the encoded file.
        units: units into which the encoder divides the image.
        is_embedding: True if the file holds the embedding of the only unit instead of an image.
        kind: kind of media, for errors.
        file: always None. Only videos are sent to an encoder before their units are encoded.
    """

    param: str
    data: bytes
    units: Sequence[Unit]
    is_embedding: bool = False
    kind: ClassVar[Kind] = IMAGE
    file: ClassVar[None] = None

    def clip_s(self, unit: Unit) -> float:
        """Returns 0, because no frames are decoded for an image."""
        return 0.0

    def num_bytes(self, unit: Unit) -> int:
        """Returns the number of bytes that the encode call of a unit carries."""
        return len(self.data)

    def encode_request(self, unit: Unit) -> EncodeRequest:
        """Returns an encode request with the pixels of a unit, and no other field."""
        return EncodeRequest(image=self.data, is_embedding=self.is_embedding)

    async def key(self, prefix: bytes, unit: Unit, salt: bytes) -> bytes:
        """Returns the image key of a unit.

        Args:
            prefix: key prefix of the encoders.
            salt: salt of the tenant.
        """
        digest = embedding_key if self.is_embedding else image_key
        key_of = partial(digest, prefix, self.data, unit=unit, salt=salt)
        return key_of() if len(self.data) <= INLINE_BYTES else await asyncio.to_thread(key_of)


class StoredImages(Protocol):
    """A store of images that later requests can name. Each tenant has names of its own.

    Attributes:
        terms: conditions under which an entry is dropped, for the error about a missing entry.
    """

    terms: str

    async def get(self, tenant: str, name: str) -> bytes | None:
        """Returns an entry, and restarts its lifetime. None if there is no such entry.

        Raises:
            Unavailable: the store does not answer.
        """
        ...

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        """Stores an entry in place of an entry of that name. Returns whether it is stored."""
        ...


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Loads images and divides them into units.

    Attributes:
        store: store of the images that have a name for later requests.
        embeddings: loader of embeddings that clients send in place of images. None if clients may
            not send embeddings.
    """

    loader: MediaLoader
    geometry: Geometry
    bounds: Bounds
    store: StoredImages
    embeddings: ClientEmbeddings | None = None

    async def read(
        self, sources: Sequence[ImageSource], slot: Slot, max_patches: int
    ) -> list[Image]:
        """Loads all images, in order.

        Args:
            slot: admission slot of the request. Its memory counts the loaded bytes, and its tenant
                has a limit of fetches at a time.
            max_patches: most patches of one unit, before merging.

        Raises:
            TriptychError: the error of the first image that fails. Its `param` names the image.
        """

        async def read_one(source: ImageSource) -> list[Image]:
            try:
                return await self._read(source, slot, max_patches)
            except TriptychError as error:
                error.param = error.param or source.param
                raise

        found = await gather(read_one, sources, MAX_CONCURRENT_LOADS)
        return [image for images in found for image in images]

    async def _read(self, source: ImageSource, slot: Slot, max_patches: int) -> list[Image]:
        """Returns the images of one source: several if the source is a file of embeddings."""
        if source.grids:
            return await self._read_embeddings(source, slot, max_patches)
        geometry, name = self._geometry_for(source), source.stored_name
        if name is not None and not source.url:
            data = await self._read_stored(name, slot)
            return [self._measure(data, source.param, geometry, max_patches)]
        data = await self.loader.load(source.url, self.bounds.max_image_bytes, IMAGE, slot)
        image = self._measure(data, source.param, geometry, max_patches)
        if name is not None:
            await self.store.put(slot.tenant.name, name, data)
        return [image]

    async def _read_embeddings(
        self, source: ImageSource, slot: Slot, max_patches: int
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
                    f"the grid has {unit.num_patches} patches; at most {max_patches} are allowed"
                )
        num_tokens = [self.geometry.num_tokens(unit) for unit in units]
        files = await self.embeddings.load(source.url, num_tokens, slot)
        return [
            Image(source.param, data, (unit,), is_embedding=True)
            for data, unit in zip(files, units, strict=True)
        ]

    async def _read_stored(self, name: str, slot: Slot) -> bytes:
        data = await self.store.get(slot.tenant.name, name)
        if data is None:
            raise InvalidRequest(
                f"no image is stored under this uuid, or no longer: send the image with its URL. "
                f"{self.store.terms}"
            )
        slot.memory.add(len(data) * MEMORY_PER_FETCHED_BYTE)
        return data

    def _geometry_for(self, source: ImageSource) -> Geometry:
        """Returns the model's geometry, narrowed to the pixel limits of the request.

        Raises:
            InvalidRequest: no number of pixels is within the limits.
        """
        lower, upper = source.min_pixels, source.max_pixels
        if lower is not None and upper is not None and lower > upper:
            raise InvalidRequest(f"min_pixels {lower} is above max_pixels {upper}")
        if upper is None and source.detail == "low":
            upper = LOW_DETAIL_PIXELS
        return self.geometry.narrowed(lower, upper)

    def _measure(self, data: bytes, param: str, geometry: Geometry, max_patches: int) -> Image:
        """Divides an image into units, from the size in its header."""
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
    """Returns the header of an image that has no more pixels than the bounds allow.

    Raises:
        InvalidImage: the image has more pixels, or is no readable image.
    """
    header = read_header(data, max_source_pixels=MAX_SOURCE_PIXELS)
    if header.width * header.height > bounds.max_source_pixels:
        raise InvalidImage(
            f"the image has {header.width}x{header.height} pixels; at most "
            f"{bounds.max_source_pixels} are allowed (GATEWAY_MAX_IMAGE_PIXELS)"
        )
    return header
