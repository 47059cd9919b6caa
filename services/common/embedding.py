"""An image's embedding as bytes: its shape, its digest, its stored form.

An embedding is `[levels, num_tokens, hidden]`, C order, little-endian: level 0 the merged output of
the vision tower, levels 1.. its DeepStack outputs. Level-major, so that a level is contiguous and
can be sent as soon as it is done.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from xxhash import xxh3_128_digest

from services.common.image_key import KEY_BYTES

DIGEST_BYTES = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The least bit pattern that is infinite or NaN, and integers to compare it with.
_NOT_FINITE = {
    "float32": (np.int32, np.uint32, 0x7F800000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
# Of the digest, which is a tree of two levels, so that threads can make it of parts.
BLOCK_BYTES = 1 << 20

_MAGIC = b"TRPTEMB3"
_DTYPES = tuple(ITEM_BYTES)
_HEADER = struct.Struct("<8s32sB3xIII16s")
STORED_HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Shape and dtype of one embedding."""

    dtype: str
    num_features: int
    num_tokens: int
    hidden: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(levels, num_tokens, hidden)`."""
        return (self.num_features, self.num_tokens, self.hidden)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_features * self.num_tokens * self.hidden * ITEM_BYTES[self.dtype]


class CorruptEmbedding(ValueError):
    """Stored or received bytes that are not the embedding they are said to be."""


def digest(data: bytes | memoryview) -> bytes:
    """Of a tensor's bytes: XXH3 (128 bits) of the XXH3 digests of its blocks, of which the last may
    be short. Releases the interpreter lock.

    It tells accidents, at memory's speed. Who can change an embedding on purpose, in Redis say, can
    change its digest, too, whatever the function.
    """
    whole = TensorDigest(memoryview(data))
    whole.add(0, len(data))
    return whole.finish()


class TensorDigest:
    """The digest of a tensor whose ranges come in any order. Ranges may be added by any thread.

    Args:
        data: where the tensor's bytes will be.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        starts = range(0, len(data), BLOCK_BYTES)
        self._missing = [min(BLOCK_BYTES, len(data) - start) for start in starts]
        self._digests = [b""] * len(starts)
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> None:
        """These bytes are there. Digests the blocks that they complete, without the interpreter
        lock.
        """
        for index, (first, last) in enumerate(split_blocks(start, stop), start // BLOCK_BYTES):
            with self._lock:
                self._missing[index] -= last - first
                is_complete = self._missing[index] == 0
            if is_complete:
                block = self._data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                self._digests[index] = xxh3_128_digest(block)

    def finish(self) -> bytes:
        """The digest, once every `add` has returned.

        Raises:
            CorruptEmbedding: the ranges were not the tensor's, each byte once.
        """
        if any(self._missing):
            raise CorruptEmbedding("parts are missing, or came twice")
        return xxh3_128_digest(b"".join(self._digests))


def split_blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """Cuts a range where blocks of the tensor begin."""
    first = start // BLOCK_BYTES * BLOCK_BYTES
    cuts = [start, *range(first + BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    return [cut for cut in pairwise(cuts) if cut[0] < cut[1]]


def split_evenly(ranges: Sequence[tuple[int, int]], max_parts: int) -> list[list[tuple[int, int]]]:
    """Ranges for so many threads, in their order."""
    parts = max(1, min(max_parts, len(ranges)))
    cuts = [len(ranges) * part // parts for part in range(parts + 1)]
    return [list(ranges[begin:end]) for begin, end in pairwise(cuts)]


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
        _MAGIC, key, _DTYPES.index(spec.dtype), spec.num_features, spec.num_tokens, spec.hidden,
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
