"""An encoder that only serves Fetch, and can misbehave in every way a decoder must survive."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import numpy as np

from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.errors import InvalidImage
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import Servicer, abort, create_server

DTYPE = pb.DTYPE_BFLOAT16


def embedding_bytes(key: bytes, spec: EmbeddingSpec) -> bytes:
    """Finite bfloat16 values that depend on the key."""
    rng = np.random.default_rng(int.from_bytes(key[:8], "little"))
    values = rng.standard_normal(spec.size_bytes // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


class FakeFetchServicer(Servicer):
    """Serves `embedding_bytes`.

    Attributes:
        fault: how to misbehave; see `Fetch`. None: not at all.
        gate: cleared, Fetch waits before its header.
        words: by key, whether it is in work: said often, where it is asked for, before the header.
        num_calls, num_cancelled: counters.
    """

    SERVICE = pb.DESCRIPTOR.services_by_name["Encoder"]

    def __init__(self, num_features: int = 2, hidden: int = 8, chunk_bytes: int = 64) -> None:
        self.fault: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.words: dict[bytes, bool] = {}
        self.num_words = 0
        self.num_calls = 0
        self.num_cancelled = 0
        self.sizes: dict[bytes, int] = {}
        self._num_features, self._hidden = num_features, hidden
        self._chunk_bytes = chunk_bytes

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchResponse]:
        self.num_calls += 1
        fault = self.fault
        key = request.image_key
        try:
            while request.tell_waiting and key in self.words:
                waiting = pb.FetchWaiting(in_work=self.words[key])
                yield pb.FetchResponse(waiting=waiting)
                self.num_words += 1
                await asyncio.sleep(0.02)
            await self.gate.wait()
            if fault == "hang":
                await asyncio.Event().wait()
            if fault == "invalid image":
                await abort(context, InvalidImage("the file is truncated"))
            if fault == "error":
                raise RuntimeError("a bug")
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        spec = EmbeddingSpec("bfloat16", self._num_features, self.sizes[key], self._hidden)
        header = pb.FetchHeader(
            image_key=b"x" * 32 if fault == "wrong key" else key,
            dtype=pb.DTYPE_FLOAT16 if fault == "wrong dtype" else DTYPE,
            num_features=spec.num_features + (fault == "wrong features"),
            num_tokens=spec.num_tokens + (fault == "wrong shape"),
            hidden=spec.hidden,
        )
        data = bytearray(embedding_bytes(key, spec))
        tensor_digest = digest(bytes(data))
        if fault == "nan":
            data[40:42] = b"\xff\x7f"
            tensor_digest = digest(bytes(data))
        if fault == "bit flip":
            data[41] ^= 1
        if fault != "no header":
            yield pb.FetchResponse(header=header)
        chunks = [
            pb.FetchChunk(offset=start, data=bytes(data[start : start + self._chunk_bytes]))
            for start in range(0, len(data), self._chunk_bytes)
        ]
        match fault:
            case "missing chunk":
                del chunks[1]
            case "chunk twice":
                chunks.append(chunks[0])
            case "overlap":
                chunks[1].offset -= 2
            case "beyond the end":
                chunks[-1].offset += 2
            case "odd offset":
                chunks[0].offset += 1
            case _:
                chunks.reverse()  # the order is free
        for number, chunk in enumerate(chunks):
            if fault == "dies" and number == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            if fault == "hangs in the middle" and number == 1:
                await asyncio.Event().wait()
            yield pb.FetchResponse(chunk=chunk)
        if fault != "no trailer":
            yield pb.FetchResponse(trailer=pb.FetchTrailer(digest=tensor_digest))


# Each makes the decoder say EmbeddingUnavailable, by naming the encoder.
FAULTS = (
    "error", "wrong key", "wrong dtype", "wrong features", "wrong shape", "nan", "bit flip",
    "no header", "missing chunk", "chunk twice", "overlap", "beyond the end", "odd offset", "dies",
    "no trailer", "hang", "hangs in the middle",
)  # fmt: skip


@contextlib.asynccontextmanager
async def serve_fetch(servicer: FakeFetchServicer) -> AsyncIterator[str]:
    """A real gRPC server; its address."""
    server = create_server()
    servicer.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
