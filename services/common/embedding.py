"""An image's embedding as bytes: its shape, its digest, its stored form.

An embedding is `[levels, num_tokens, hidden]`, C order, little-endian: level 0 the merged output of
the vision tower, levels 1.. its DeepStack outputs. Level-major, so that a level is contiguous and
can be sent as soon as it is done.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from blake3 import blake3

from services.common.image_key import KEY_BYTES

DIGEST_BYTES = 32
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The least bit pattern that is infinite or NaN, and integers to compare it with.
_NOT_FINITE = {
    "float32": (np.int32, np.uint32, 0x7F800000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
# Of the digest, which is a tree of two levels, so that threads can make it of parts.
BLOCK_BYTES = 1 << 20

_MAGIC = b"TRPTEMB2"
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
    """Of a tensor's bytes: BLAKE3 of the BLAKE3 digests of its blocks, of which the last may be
    short. Releases the interpreter lock.
    """
    return join_digests(block_digests(data))


def block_digests(data: bytes | memoryview) -> list[bytes]:
    """Of each block of `data`, which starts where a block of the tensor does."""
    view = memoryview(data)
    return [
        blake3(view[start : start + BLOCK_BYTES]).digest(DIGEST_BYTES)
        for start in range(0, len(view), BLOCK_BYTES)
    ]


def join_digests(blocks: Iterable[bytes]) -> bytes:
    """The tensor's digest, of the digests of all its blocks in their order."""
    return blake3(b"".join(blocks)).digest(DIGEST_BYTES)


def split_blocks(data: memoryview, max_parts: int) -> list[memoryview]:
    """Parts of about one size, each of whole blocks (the last: to the end)."""
    num_blocks = -(-len(data) // BLOCK_BYTES)
    num_parts = max(1, min(max_parts, num_blocks))
    cuts = [BLOCK_BYTES * (num_blocks * part // num_parts) for part in range(num_parts + 1)]
    return [data[start:stop] for start, stop in pairwise(cuts)]


def all_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Whether no value is infinite or NaN; releases the interpreter lock.

    Read from the bits (numpy has no bfloat16), in two passes that store nothing: as signed integers
    the greatest values are the positive ones that are not finite, as unsigned ones the negative.
    """
    signed, unsigned, least = _NOT_FINITE[dtype]
    if not len(data):
        return True
    sign = least + np.iinfo(signed).max + 1
    return bool(
        np.frombuffer(data, signed).max() < least and np.frombuffer(data, unsigned).max() < sign
    )


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
