"""The plain twin of the encoder's `DecodePool`."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from services.common.geometry import Geometry, Unit
from services.common.images.image_header import ImageHeader
from services.encoder.decoding.decode import decode
from services.encoder.decoding.preprocess import Preprocessor
from services.encoder.engine.messages import Source


@contextmanager
def decode_in_process(data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
    """Decodes in the calling thread, without limits."""
    pixels = np.empty((*header.upright_size, 3), np.uint8)
    decode(data, header, pixels)
    yield pixels


def preprocess(data: bytes, unit: Unit, geometry: Geometry) -> Tensor:
    """A still image's pixels."""
    return Preprocessor(geometry, decode_in_process, pinned=False)(Source(data), unit, lambda: None)
