"""Serializes and parses the messages of `Fetch` with one copy of a chunk's bytes on either side.

The bytes are exactly those of `proto/encoder.proto`. protobuf's own code copies a chunk three times
in each direction, which takes half the time of a transfer. The encoder's servicer serializes the
messages, and the decoder's fetcher parses them. A malformed message raises protobuf's
`DecodeError`.
"""

from dataclasses import dataclass

from services.common.pb import encoder_pb2 as pb

DTYPES = {
    "float32": pb.DTYPE_FLOAT32,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "float16": pb.DTYPE_FLOAT16,
}
_LENGTH_DELIMITED = 2
_CHUNK = bytes([pb.FetchResponse.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_OFFSET = bytes([pb.FetchChunk.OFFSET_FIELD_NUMBER << 3])
_DATA = bytes([pb.FetchChunk.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class WireChunk:
    """A `FetchChunk` whose data is a view of other memory.

    Attributes:
        offset: offset of the data in the embedding, in bytes.
        data: the chunk's bytes.
    """

    offset: int
    data: memoryview


def serialize(part: pb.FetchResponse | WireChunk) -> bytes:
    """Returns the bytes of one message."""
    if isinstance(part, pb.FetchResponse):
        return part.SerializeToString()
    head = b"".join((_OFFSET, _varint(part.offset), _DATA, _varint(len(part.data))))
    return b"".join((_CHUNK, _varint(len(head) + len(part.data)), head, part.data))


def parse(message: bytes) -> pb.FetchResponse | WireChunk:
    """Reads a message that `serialize` or protobuf has written. A chunk's data is a view of
    `message`.

    Raises:
        google.protobuf.message.DecodeError: the bytes are not a FetchResponse.
    """
    if message[:1] == _CHUNK and (chunk := _parse_chunk(message)) is not None:
        return chunk
    response = pb.FetchResponse.FromString(message)
    if response.WhichOneof("part") != "chunk":
        return response
    return WireChunk(response.chunk.offset, memoryview(response.chunk.data))


def _parse_chunk(message: bytes) -> WireChunk | None:
    """Reads a chunk. Returns None if the fields have another order or are malformed; then
    protobuf's parser reads the message.
    """
    head = message[: 4 * (1 + _MAX_VARINT_BYTES)]
    offset = 0
    try:
        size, at = _read_varint(head, 1)
        if size != len(message) - at:
            return None
        if head[at : at + 1] == _OFFSET:
            offset, at = _read_varint(head, at + 1)
        if head[at : at + 1] != _DATA:
            return None
        size, at = _read_varint(head, at + 1)
    except IndexError:
        return None
    return WireChunk(offset, memoryview(message)[at:]) if size == len(message) - at else None


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Returns a varint's value and the index after it.

    Raises:
        IndexError: the data ends before the varint.
    """
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = data[start + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, start + index + 1
    raise IndexError("the varint has no end")
