import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from services.common.embeddings.fetch_wire import WireChunk, parse, serialize
from services.common.pb import encoder_pb2 as pb

OFFSETS = st.integers(0, 2**64 - 1)
DATA = st.binary(max_size=300)


@given(offset=OFFSETS, data=DATA)
def test_protobuf_reads_what_we_write(offset, data):
    message = serialize(WireChunk(offset, memoryview(data)))
    assert pb.FetchResponse.FromString(message).chunk == pb.FetchChunk(offset=offset, data=data)


@given(offset=OFFSETS, data=DATA)
def test_we_read_what_protobuf_writes(offset, data):
    chunk = pb.FetchResponse(chunk=pb.FetchChunk(offset=offset, data=data))
    for message in (chunk.SerializeToString(), serialize(WireChunk(offset, memoryview(data)))):
        found = parse(message)
        assert isinstance(found, WireChunk)
        assert (found.offset, bytes(found.data)) == (offset, data)


@given(st.binary(max_size=64) | DATA.map(lambda data: b"\x12" + data))
def test_we_read_what_protobuf_reads_and_nothing_else(message):
    try:
        known = pb.FetchResponse.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            parse(message)
        return
    found = parse(message)
    if isinstance(found, WireChunk):
        assert known.chunk.offset == found.offset & (2**64 - 1)
        assert known.chunk.data == bytes(found.data)
    else:
        assert found == known


def test_fields_in_another_order_are_read():
    message = b"\x12\x05\x12\x01x\x08\x07"  # data, then offset
    assert parse(message) == WireChunk(7, memoryview(b"x"))


def test_other_parts_go_through_protobuf():
    trailer = pb.FetchResponse(trailer=pb.FetchTrailer(digest=b"d"))
    assert parse(serialize(trailer)) == trailer


def test_a_chunk_is_not_copied():
    message = serialize(WireChunk(0, memoryview(bytes(1 << 20))))
    chunk = parse(message)
    assert isinstance(chunk, WireChunk)
    assert chunk.data.obj is message
