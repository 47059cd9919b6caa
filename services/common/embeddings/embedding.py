"""An image's embedding as bytes: shape, digest and stored form.

An embedding is a tensor `[num_features, num_tokens, hidden]` in C order, little-endian. Feature 0
is the merged output of the vision tower; the other features are its DeepStack features. A feature
is contiguous and can be sent as soon as it is computed.

Encoder and decoder both use this file. It imports no torch and does not know where embeddings are
stored. Bytes that are not a valid embedding raise `CorruptEmbedding`.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from xxhash import xxh3_128_digest

from services.common.images.image_key import KEY_BYTES

DIGEST_BYTES = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The smallest bit pattern that is infinite or NaN, and the integer types to compare it in.
_NOT_FINITE = {
    "float32": (np.int32, np.uint32, 0x7F800000),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float16": (np.int16, np.uint16, 0x7C00),
}
# Largest sum of a token's features in the residual stream of a language model, whose norms sum the
# squares of a row in float32: 2^112, times a hidden size below 2^15, is below float32's 2^128. In
# float16 half of the range is left for what the model's own layers add.
_MAX_TOKEN_MAGNITUDE = {"float32": 2.0**56, "bfloat16": 2.0**56, "float16": 2.0**15}
# A tensor's digest is the digest of its blocks' digests, so that threads can work in parallel.
BLOCK_BYTES = 1 << 20

_MAGIC = b"TRPTEMB5"
_DTYPES = tuple(ITEM_BYTES)
_HEADER = struct.Struct("<8s32sB3xIII16s")
STORED_HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Shape and dtype of one embedding.

    Attributes:
        dtype: `float32`, `bfloat16` or `float16`.
        num_features: number of features, the merged output included.
        num_tokens: number of image tokens.
        hidden: hidden size of the language model.
    """

    dtype: str
    num_features: int
    num_tokens: int
    hidden: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_features, self.num_tokens, self.hidden)

    @property
    def size_bytes(self) -> int:
        return self.num_features * self.num_tokens * self.hidden * ITEM_BYTES[self.dtype]

    @property
    def max_magnitude(self) -> float:
        """Largest magnitude of a value at which no model overflows. A model adds all features of a
        token to its residual stream.
        """
        return _MAX_TOKEN_MAGNITUDE[self.dtype] / self.num_features


class CorruptEmbedding(ValueError):
    """Raised for stored or received bytes that are not the embedding that was asked for."""


def digest(data: bytes | memoryview) -> bytes:
    """Returns the digest of a tensor: XXH3 (128 bits) of the XXH3 digests of its blocks, the last
    of which may be short. It releases the interpreter lock.

    The digest detects accidents, at the speed of memory. `seals` protects against attackers.
    """
    whole = TensorDigest(memoryview(data))
    whole.add(0, len(data))
    return whole.finish()


class TensorDigest:
    """Computes the digest of a tensor whose ranges arrive in any order, from any thread.

    Args:
        data: memory of the whole tensor, which the ranges fill.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        starts = range(0, len(data), BLOCK_BYTES)
        self._missing = [min(BLOCK_BYTES, len(data) - start) for start in starts]
        self._digests = [b""] * len(starts)
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> None:
        """Digests the blocks that the written bytes `[start, stop)` complete. It releases the
        interpreter lock.
        """
        for index, (first, last) in enumerate(split_blocks(start, stop), start // BLOCK_BYTES):
            with self._lock:
                self._missing[index] -= last - first
                is_complete = self._missing[index] == 0
            if is_complete:
                block = self._data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
                self._digests[index] = xxh3_128_digest(block)

    def finish(self) -> bytes:
        """Returns the digest. Every `add` must have returned.

        Raises:
            CorruptEmbedding: the ranges do not cover each byte of the tensor exactly once.
        """
        if any(self._missing):
            raise CorruptEmbedding("ranges of the tensor are missing or have come twice")
        return xxh3_128_digest(b"".join(self._digests))


def split_blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """Splits a range of bytes at the boundaries of the tensor's blocks."""
    first = start // BLOCK_BYTES * BLOCK_BYTES
    cuts = [start, *range(first + BLOCK_BYTES, stop, BLOCK_BYTES), stop]
    return [cut for cut in pairwise(cuts) if cut[0] < cut[1]]


def split_evenly(ranges: Sequence[tuple[int, int]], max_parts: int) -> list[list[tuple[int, int]]]:
    """Distributes ranges, in order, among at most `max_parts` threads."""
    parts = max(1, min(max_parts, len(ranges)))
    cuts = [len(ranges) * part // parts for part in range(parts + 1)]
    return [list(ranges[begin:end]) for begin, end in pairwise(cuts)]


def all_finite(data: bytes | memoryview, dtype: str) -> bool:
    """Returns whether no value is infinite or NaN. It releases the interpreter lock."""
    return _all_below(data, dtype, _NOT_FINITE[dtype][2])


def all_within(data: bytes | memoryview, dtype: str, magnitude: float) -> bool:
    """Returns whether no value is NaN or beyond a magnitude. It releases the interpreter lock."""
    nearest = np.float16(magnitude) if dtype == "float16" else np.float32(magnitude)
    bits = int.from_bytes(nearest.tobytes(), "little") - (float(nearest) > magnitude)
    if dtype == "bfloat16":  # the upper half of a float32
        bits >>= 16
    return _all_below(data, dtype, bits + 1)


def _all_below(data: bytes | memoryview, dtype: str, least: int) -> bool:
    """Returns whether the bits of every value, without its sign, are below `least`. Larger
    magnitudes have larger bits, and NaN has the largest.

    Bits are compared because numpy has no bfloat16. Two passes need no temporary arrays: the
    maximum as signed integers is that of the positive values, the maximum as unsigned integers is
    that of the negative values.
    """
    signed, unsigned, _ = _NOT_FINITE[dtype]
    if not len(data):
        return True
    sign = least + np.iinfo(signed).max + 1
    return bool(
        np.frombuffer(data, signed).max() < least and np.frombuffer(data, unsigned).max() < sign
    )


def pack_header(key: bytes, spec: EmbeddingSpec, tensor_digest: bytes) -> bytes:
    """Returns the header of a stored entry. The seal and the tensor's bytes follow the header."""
    return _HEADER.pack(
        _MAGIC,
        key,
        _DTYPES.index(spec.dtype),
        spec.num_features,
        spec.num_tokens,
        spec.hidden,
        tensor_digest,
    )


def unpack_header(header: bytes, key: bytes) -> tuple[EmbeddingSpec, bytes]:
    """Reads the header of a stored entry.

    Returns:
        The spec and the digest of the bytes that must follow.

    Raises:
        CorruptEmbedding: the bytes are not an entry of this format, or the entry of another key.
    """
    if len(header) != STORED_HEADER_BYTES:
        raise CorruptEmbedding("the header is truncated")
    magic, stored_key, dtype, features, num_tokens, hidden, tensor_digest = _HEADER.unpack(header)
    if magic != _MAGIC or len(key) != KEY_BYTES or stored_key != key or dtype >= len(_DTYPES):
        raise CorruptEmbedding("the entry has another format or another key")
    return EmbeddingSpec(_DTYPES[int(dtype)], features, num_tokens, hidden), tensor_digest
