"""The decoder's gRPC methods, which convert between proto messages and calls of the front.

`Generate` is one long call of each gateway, which carries all of its sequences. If one sequence
fails, an event of the call says so, and the call continues for the other sequences.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from services.common.embeddings.fetch_wire import DTYPES
from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import PROTOCOL
from services.decoder.front.adapter_calls import AdapterCalls
from services.decoder.front.front import DecoderFront
from services.decoder.front.stream import Stream


class DecoderServicer(AdapterCalls):
    """Implements the calls of proto/decoder.proto.

    Args:
        front: owner of the sequences.
        fingerprint: fingerprint of the served checkpoint, which `Describe` returns.
    """

    SERVICE = pb.DESCRIPTOR.services_by_name["Decoder"]

    def __init__(self, front: DecoderFront, fingerprint: bytes = b"") -> None:
        self._front = front
        self._fingerprint = fingerprint
        self.adapters = front.adapters

    async def Describe(
        self, request: pb.DescribeDecoderRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeDecoderResponse:
        engine = self._front.engine
        return pb.DescribeDecoderResponse(
            model_name=engine.model_name,
            dtype=DTYPES[engine.dtype],
            num_features=engine.num_features,
            hidden=engine.hidden,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            max_num_sequences=engine.max_num_sequences,
            fingerprint=self._fingerprint,
            protocol=PROTOCOL,
            task=engine.task,
            takes_batches=True,
        )

    async def Load(
        self, request: pb.LoadRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadResponse:
        stats = self._front.stats()
        # An engine that hangs while it has work is ended within 10 s by `EngineWatch`. An engine
        # that hangs without work is not ended, but its last report becomes older and older.
        if stats is None:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "the engine has not reported for 30 seconds"
            )
        return pb.LoadResponse(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_blocks_used=stats.num_blocks - stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            adapters=self.adapters.described(),
            max_adapters=self._front.engine.max_adapters,
        )

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResetPrefixCacheResponse:
        self._front.reset_prefix_cache()
        return pb.ResetPrefixCacheResponse()

    async def Generate(
        self, request_iterator: AsyncIterator[pb.GenerateCommand], context: grpc.aio.ServicerContext
    ) -> None:
        stream = self._front.open_stream()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (message := await stream.outbox.take()) is not None:
                await context.write(message)
            if reader.done():
                await reader  # If `_read` has failed, its error is raised here.
        finally:
            reader.cancel()
            self._front.close_stream(stream)

    async def _read(self, commands: AsyncIterator[pb.GenerateCommand], stream: Stream) -> None:
        try:
            async for message in commands:
                for command in message.batch.commands or (message,):
                    match command.WhichOneof("command"):
                        case "submit":
                            self._front.submit(stream, command.submit)
                        case "cancel":
                            self._front.cancel(stream, command.cancel.sequence_id)
                        case "accept":
                            stream.outbox.takes_bare_tokens = command.accept.bare_tokens
                        case _:  # a command of a newer gateway
                            pass
        except Exception:
            self._front.close_stream(stream)
            raise
        self._front.half_close(stream)
