"""What a hostile or broken encoder may say about shared memory."""

import numpy as np
import pytest

from services.common.embeddings.embedding import BLOCK_BYTES, EmbeddingSpec, digest
from services.common.embeddings.fetch_wire import WireChunk, serialize
from services.common.pb import encoder_pb2 as pb
from services.decoder.images.embedding_fetch import Receiver, WrongContent

KEY = b"k" * 32
SPEC = EmbeddingSpec("bfloat16", 2, 4, 8)
SIZE = SPEC.size_bytes

HEADER = pb.FetchResponse(
    header=pb.FetchHeader(
        image_key=KEY, dtype=pb.DTYPE_BFLOAT16, num_features=2, num_tokens=4, hidden=8
    )
)
SHARED = pb.FetchResponse(shared=pb.FetchShared(pid=1, fd=2, name="n", size_bytes=SIZE))
READY = pb.FetchResponse(ready=pb.FetchReady(offset=0, size_bytes=SIZE))
TRAILER = pb.FetchResponse(trailer=pb.FetchTrailer(digest=b"d" * 32))
CHUNK = WireChunk(0, memoryview(bytes(16)))


def receiver(spec: EmbeddingSpec = SPEC) -> Receiver:
    return Receiver(KEY, spec, memoryview(bytearray(spec.size_bytes)))


def outside(offset: int) -> pb.FetchResponse:
    return pb.FetchResponse(shared=pb.FetchShared(size_bytes=SIZE, offset=offset))


def ready(offset: int, size_bytes: int) -> pb.FetchResponse:
    return pb.FetchResponse(ready=pb.FetchReady(offset=offset, size_bytes=size_bytes))


@pytest.mark.parametrize(
    "parts",
    [
        [SHARED],
        [HEADER, SHARED, SHARED],
        [HEADER, CHUNK, SHARED],
        [HEADER, SHARED, CHUNK],
        [HEADER, SHARED, TRAILER, TRAILER],
        [HEADER, READY],
        [HEADER, SHARED, READY, READY],
        [HEADER, SHARED, ready(0, 0)],
        [HEADER, SHARED, ready(1, 2)],
        [HEADER, SHARED, ready(0, SIZE - 1)],
        [HEADER, SHARED, ready(2, SIZE)],
        [HEADER, SHARED, ready(2**64 - 2, 4)],
        [HEADER, outside(2)],
        [HEADER, outside(2**64 - 2)],
        [HEADER, pb.FetchResponse()],
    ],
)
def test_what_makes_no_sense_is_refused(parts):
    fed = receiver()
    for part in parts[:-1]:
        fed.accept(serialize(part))
    with pytest.raises(WrongContent):
        fed.accept(serialize(parts[-1]))


def test_a_message_that_cannot_be_read_is_refused():
    with pytest.raises(WrongContent, match="cannot be parsed"):
        receiver().accept(b"\xff\xff")


def told(*parts: pb.FetchResponse) -> Receiver:
    fed = receiver()
    for part in parts:
        fed.accept(serialize(part))
    return fed


def test_the_copys_digest_must_be_the_encoders():
    right = pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest(bytes(SIZE))))
    fed = told(HEADER, SHARED, READY, right)
    assert fed.is_complete
    fed.digest.add(0, SIZE)
    assert fed.finish() == digest(bytes(SIZE))
    fed = told(HEADER, SHARED, READY, TRAILER)
    fed.digest.add(0, SIZE)
    with pytest.raises(WrongContent, match="digest"):
        fed.finish()


def test_what_was_not_ready_or_not_copied_is_missing():
    fed = told(HEADER, SHARED, ready(0, SIZE - 2), TRAILER)
    with pytest.raises(WrongContent, match="ended after"):
        fed.finish()
    fed = told(HEADER, SHARED, READY, TRAILER)
    fed.digest.add(0, SIZE - 2)
    with pytest.raises(WrongContent, match="missing"):
        fed.finish()


@pytest.mark.parametrize("chunk_bytes", [BLOCK_BYTES // 2 + 6, BLOCK_BYTES, 3 * BLOCK_BYTES + 2])
@pytest.mark.parametrize("order", [1, -1])
def test_chunks_of_any_size_and_order_have_the_tensors_digest(chunk_bytes, order):
    spec = EmbeddingSpec("bfloat16", 1, 5 * BLOCK_BYTES // 32 + 3, 16)
    data = np.random.default_rng(0).integers(0, 0x7F, spec.size_bytes, np.uint8).tobytes()
    fed = receiver(spec)
    fed.accept(
        pb.FetchResponse(
            header=pb.FetchHeader(
                image_key=KEY, dtype=pb.DTYPE_BFLOAT16, num_features=1,
                num_tokens=spec.num_tokens, hidden=16,
            )
        ).SerializeToString()
    )  # fmt: skip
    for start in list(range(0, len(data), chunk_bytes))[::order]:
        view = memoryview(data)[start : start + chunk_bytes]
        chunk = fed.accept(serialize(WireChunk(start, view)))
        assert isinstance(chunk, WireChunk)
        fed.store(chunk)
    fed.accept(serialize(pb.FetchResponse(trailer=pb.FetchTrailer(digest=digest(data)))))
    assert fed.finish() == digest(data)
    assert bytes(fed.into) == data
