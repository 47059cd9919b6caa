"""An image's embedding as bytes: its shape, its digest, its stored form.

An embedding is `[levels, num_tokens, hidden]`, C order, little-endian: level 0 the merged output of
the vision tower, levels 1.. its DeepStack outputs. Level-major, so that a level is contiguous and
can be sent as soon as it is done.
"""

import struct
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from services.common.image_key import KEY_BYTES

DIGEST_BYTES = 32
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bits of the exponent: all ones means infinity or NaN.
_EXPONENT = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}

_MAGIC = b"TRPTEMB1"
_DTYPES = tuple(ITEM_BYTES)
_HEADER = struct.Struct("<8s32sB3xIII32s")
STORED_HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Shape and dtype of one embedding."""

    dtype: str
    levels: int
    num_tokens: int
    hidden: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(levels, num_tokens, hidden)`."""
        return (self.levels, self.num_tokens, self.hidden)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.levels * self.num_tokens * self.hidden * ITEM_BYTES[self.dtype]


class CorruptEmbedding(ValueError):
    """Stored or received bytes that are not the embedding they are said to be."""


def digest(data: bytes | memoryview) -> bytes:
    """BLAKE3 of a tensor's bytes; releases the interpreter lock."""
    return blake3(data).digest(DIGEST_BYTES)


def all_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Whether no value is infinite or NaN, read from the exponent bits (numpy has no bfloat16)."""
    kind, mask = _EXPONENT[dtype]
    return not bool(((np.frombuffer(data, dtype=kind) & mask) == mask).any())


def pack_header(key: bytes, spec: EmbeddingSpec, tensor_digest: bytes) -> bytes:
    """The head of a stored entry; the tensor's bytes follow it."""
    return _HEADER.pack(
        _MAGIC, key, _DTYPES.index(spec.dtype), spec.levels, spec.num_tokens, spec.hidden,
        tensor_digest,
    )  # fmt: skip


def unpack_header(header: bytes, key: bytes) -> tuple[EmbeddingSpec, bytes]:
    """Reads the head of a stored entry.

    Returns:
        The spec and the digest of the bytes that must follow.

    Raises:
        CorruptEmbedding: not an entry of this format, or another key's.
    """
    if len(header) != STORED_HEADER_BYTES:
        raise CorruptEmbedding("truncated header")
    magic, stored_key, dtype, levels, num_tokens, hidden, tensor_digest = _HEADER.unpack(header)
    if magic != _MAGIC or len(key) != KEY_BYTES or stored_key != key or dtype >= len(_DTYPES):
        raise CorruptEmbedding("not the entry of this key")
    return EmbeddingSpec(_DTYPES[int(dtype)], levels, num_tokens, hidden), tensor_digest
