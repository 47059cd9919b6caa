"""A request's pictures: from URL to bytes, grid and key. Nothing is decoded but the header."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import PIL.Image

from services.common.errors import InvalidImage, InvalidRequest, TriptychError
from services.common.image_geometry import ImageLimits, image_grid, open_image, upright_size
from services.common.image_key import image_key
from services.common.threads import INLINE_BYTES
from services.gateway.media import MediaLoader
from services.gateway.mrope import Grid

# `detail: low` asks for at most this many pixels; `high` and `auto` mean the model's own limits.
LOW_DETAIL_PIXELS = 512 * 512
_MAX_CONCURRENT_LOADS = 8


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A picture as a request names it.

    Attributes:
        url: where its bytes are.
        param: which field of the request it is, for errors.
        detail: `low`, `high` or `auto`.
        min_pixels, max_pixels: of the resized picture; None: the model's.
    """

    url: str
    param: str
    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(slots=True)
class Image:
    """A picture whose place in the prompt is known."""

    param: str
    data: bytes
    grid: Grid
    _keys: dict[tuple[bytes, bytes], bytes] = field(
        default_factory=dict[tuple[bytes, bytes], bytes]
    )

    async def key(self, prefix: bytes, salt: bytes) -> bytes:
        """The image key for encoders of that prefix and a tenant's salt; hashed once."""
        found = self._keys.get((prefix, salt))
        if found is None:
            if len(self.data) <= INLINE_BYTES:
                found = image_key(prefix, self.data, grid=self.grid, salt=salt)
            else:
                found = await asyncio.to_thread(
                    image_key, prefix, self.data, grid=self.grid, salt=salt
                )
            self._keys[(prefix, salt)] = found
        return found


class ImageReader:
    """Loads pictures and reads their headers.

    Args:
        loader: URL to bytes.
        limits: the model's.
        max_source_pixels: larger pictures are refused.
    """

    def __init__(self, loader: MediaLoader, limits: ImageLimits, max_source_pixels: int) -> None:
        self._loader = loader
        self._limits = limits
        self._max_source_pixels = max_source_pixels
        self._patch_area = limits.patch_size**2
        PIL.Image.init()  # loads its plugins now rather than in the first request

    async def read(
        self, sources: Sequence[ImageSource], hold: Callable[[int], None], max_patches: int
    ) -> list[Image]:
        """All pictures, in order.

        Args:
            sources: as the request names them.
            hold: told of the bytes now held; may refuse.
            max_patches: of one picture, before merging.

        Raises:
            TriptychError: the first failure; its `param` names the picture.
        """
        gate = asyncio.Semaphore(_MAX_CONCURRENT_LOADS)

        async def one(source: ImageSource) -> Image:
            async with gate:
                try:
                    limits = self.limits_for(source)
                    data = await self._loader.load(source.url)
                    if not source.url.startswith("data:"):
                        hold(len(data))
                    return await self._measure(data, source.param, limits, max_patches)
                except TriptychError as error:
                    error.param = error.param or source.param
                    raise

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(source)) for source in sources]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def limits_for(self, source: ImageSource) -> ImageLimits:
        """The model's limits, narrowed as the request asks.

        Raises:
            InvalidRequest: an empty range.
        """
        low, high = self._limits.min_pixels, self._limits.max_pixels
        least, most = source.min_pixels, source.max_pixels
        if least is not None and most is not None and least > most:
            raise InvalidRequest(f"min_pixels {least} is above max_pixels {most}")
        if most is None:
            most = LOW_DETAIL_PIXELS if source.detail == "low" else high
        least = min(max(least or low, low), high)
        return replace(
            self._limits, min_pixels=least, max_pixels=max(min(max(most, low), high), least)
        )

    async def _measure(
        self, data: bytes, param: str, limits: ImageLimits, max_patches: int
    ) -> Image:
        height, width = await asyncio.to_thread(self._upright_size, data)
        grid = image_grid(height, width, limits)
        if grid[0] * grid[1] * grid[2] > max_patches:
            raise InvalidImage(
                f"the image takes {grid[1] * self._patch_area * grid[2]} pixels after resizing; "
                f"at most {max_patches * self._patch_area} are served: lower max_pixels"
            )
        return Image(param, data, grid)

    def _upright_size(self, data: bytes) -> tuple[int, int]:
        image = open_image(data, max_source_pixels=self._max_source_pixels)
        with image:
            return upright_size(image)
