"""The plain twin of the encoder's `DecodePool`."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from services.common.images.image_header import ImageHeader
from services.encoder.decode import decode


@contextmanager
def decode_in_process(data: bytes, header: ImageHeader) -> Generator[np.ndarray]:
    """Decodes in the calling thread, without limits."""
    pixels = np.empty((*header.upright_size, 3), np.uint8)
    decode(data, header, pixels)
    yield pixels
