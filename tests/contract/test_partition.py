"""A partition between gateway and decoder: packets vanish, and no connection is reset."""

import asyncio
from contextlib import suppress

import grpc.aio
import pytest

from services.common.pb import decoder_pb2 as pb
from services.common.transport import rpc
from tests.decoder_service_harness import Decoder, prompt_of, submit_of, until
from tests.noise import PATIENCE_S
from tests.stubs import DecoderStub


class BlackHole:
    """A proxy to `address` that can stop forwarding, in both directions."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    def swallow(self) -> None:
        """Nothing passes from now on."""
        self._open.clear()

    async def _accept(self, reader, writer) -> None:
        there = await asyncio.open_connection(self._host, self._port)
        self._writers += [there[1], writer]
        for ends in ((reader, there[1]), (there[0], writer)):
            self._tasks.add(asyncio.create_task(self._forward(*ends)))

    async def _forward(self, reader, writer) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            writer.write(data)


async def test_a_decoder_that_cannot_reach_its_gateway_ends_its_sequences(monkeypatch):
    """Within the keepalive's period and its time-out: 10 + 5 s; here the period is shorter."""
    period = ("grpc.keepalive_time_ms", 10_000)
    assert period in rpc.CHANNEL_OPTIONS
    for name in ("CHANNEL_OPTIONS", "_SERVER_OPTIONS"):
        options = [o if o != period else (period[0], 1000) for o in getattr(rpc, name)]
        monkeypatch.setattr(rpc, name, options)
    async with Decoder(max_model_len=4096, num_blocks=4096) as decoder:
        hole = BlackHole(decoder.address)
        async with hole as address:
            channel = rpc.create_channel(address)
            call = DecoderStub(channel).Generate()
            submit = submit_of(1, prompt_of(1, 4), max_tokens=4000)
            await call.write(pb.GenerateCommand(submit=submit))
            await call.read()
            decoder.engine.running.clear()
            hole.swallow()
            await until(lambda: not decoder.front._streams)  # for ever without keepalives
            decoder.engine.running.set()
            await until(decoder.is_idle)
            with pytest.raises(grpc.aio.AioRpcError):  # and the gateway sees it lost
                async with asyncio.timeout(PATIENCE_S):
                    while await call.read():
                        pass
            await channel.close()
