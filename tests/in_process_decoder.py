"""An image decoder in the calling process, in the place of the encoder's `DecodePool`."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from services.common.geometry import Geometry, Unit
from services.common.images.image_header import MAX_SOURCE_PIXELS, ImageHeader
from services.encoder.decoding.decode import decode
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.decoding.source import Source


class InProcessDecoders:
    """Decodes in the calling thread, without limits. It takes the place of a `DecodePool`."""

    @contextmanager
    def decoded(self, data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
        pixels = np.empty((*header.upright_size, 3), np.uint8)
        decode(data, header, pixels)
        yield pixels


def preprocess(
    data: bytes, unit: Unit, geometry: Geometry, max_source_pixels: int = MAX_SOURCE_PIXELS
) -> Tensor:
    """Returns a still image's pixels."""
    made = Preprocessor(
        geometry,
        InProcessDecoders(),  # type: ignore[arg-type]
        pinned=False,
        max_source_pixels=max_source_pixels,
    )
    return made.prepare(Source(data), unit)
