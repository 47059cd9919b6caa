"""Messages cross between the processes whole and in order; a peer's end is noticed."""

import asyncio
import itertools
import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import uvloop

from services.common.process import channel
from services.common.process.channel import (
    ChannelClosed,
    EngineChannel,
    FrontChannel,
    create_socket_pair,
)
from tests.noise import PATIENCE_S


class Text(msgspec.Struct, tag="text"):
    number: int
    body: str = ""


class Blob(msgspec.Struct, tag="blob"):
    data: bytes


Message = Text | Blob
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = create_socket_pair()
    yield ends
    for end in ends:
        end.close()


async def test_both_ways(pair: Pair) -> None:
    front = await FrontChannel.open(pair[0], Message)
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    front.send(Text(1), Blob(b"\x00\xff"), Text(2, "ü"))
    assert await asyncio.to_thread(engine.receive, PATIENCE_S) == [
        Text(1), Blob(b"\x00\xff"), Text(2, "ü"),
    ]  # fmt: skip
    engine.send(Text(3))
    engine.send(Blob(b"x"))
    assert [await front.receive(), await front.receive()] == [Text(3), Blob(b"x")]
    front.close()


def test_a_joined_channel_is_heard_until_it_is_closed(pair: Pair) -> None:
    others = [create_socket_pair() for _ in range(2)]
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    front: EngineChannel[Message] = EngineChannel(pair[0], Message)
    for _, end in others:
        engine.include(EngineChannel(end, Message))
    ends = [EngineChannel[Message](end, Message) for end, _ in others]
    ends[1].send(Text(1))
    assert engine.receive(PATIENCE_S) == [Text(1)]
    ends[0].send(Text(2))
    ends[0].send(Text(3))
    others[0][0].close()
    front.send(Text(4))
    found = [*engine.receive(PATIENCE_S), *engine.receive(0.0)]
    assert [message for message in found if message != Text(4)] == [Text(2), Text(3)]
    assert Text(4) in found
    ends[1].send(Text(5))
    assert engine.receive(PATIENCE_S) == [Text(5)]
    pair[0].close()
    with pytest.raises(ChannelClosed):
        engine.receive(PATIENCE_S)
    for each in others:
        for end in each:
            end.close()


async def test_a_message_larger_than_any_buffer(pair: Pair) -> None:
    front = await FrontChannel.open(pair[0], Message)
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    large = Blob(bytes(range(256)) * (120_000))  # 30 MB
    front.send(large, Text(1))
    received: list[Message] = []
    while len(received) < 2:
        received += await asyncio.to_thread(engine.receive, PATIENCE_S)
    assert received == [large, Text(1)]
    sender = threading.Thread(target=engine.send, args=(large,))
    sender.start()
    assert await front.receive() == large
    await asyncio.to_thread(sender.join)
    front.close()


def test_polling_does_not_wait(pair: Pair) -> None:
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    assert engine.receive(0.0) == []
    assert engine.receive(0.01) == []


def test_an_engine_asks_for_messages_without_reading_them(pair: Pair) -> None:
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    assert not engine.has_messages()
    body = msgspec.msgpack.encode(Text(7, "here"))
    pair[0].sendall(len(body).to_bytes(4, "little") + body)
    assert engine.has_messages() and engine.has_messages()
    assert engine.receive(0.0) == [Text(7, "here")]
    assert not engine.has_messages()


def test_an_engine_stays_awake_for_a_while(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    body = msgspec.msgpack.encode(Text(7, "late"))
    timeouts: list[float | None] = []
    looks_until_sent = 0  # 0: it is sent to an engine that sleeps

    def recorded(*arguments: Any) -> Any:
        timeouts.append(arguments[3])
        if len(timeouts) == looks_until_sent or (not looks_until_sent and arguments[3] is None):
            pair[0].sendall(len(body).to_bytes(4, "little") + body)
        return original(*arguments)

    original = select.select
    monkeypatch.setattr(channel.select, "select", recorded)
    seconds = itertools.count()
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert engine.receive(None, awake_s=10.0) == [Text(7, "late")]
    assert timeouts[:10] == [0.0] * 9 + [None]
    timeouts.clear()
    looks_until_sent = 3
    assert engine.receive(None, awake_s=60.0) == [Text(7, "late")]
    assert timeouts[:3] == [0.0] * 3


def test_messages_in_pieces(pair: Pair) -> None:
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    body = msgspec.msgpack.encode(Text(7, "piecewise"))
    frame = len(body).to_bytes(4, "little") + body
    for byte in frame * 2:
        pair[0].send(bytes([byte]))
        engine_has = engine.receive(0.0)
        if engine_has:
            assert engine_has == [Text(7, "piecewise")]
    assert engine.receive(0.0) == []


async def test_the_engines_end_is_noticed(pair: Pair) -> None:
    front = await FrontChannel.open(pair[0], Message)
    pair[1].close()
    with pytest.raises(ChannelClosed):
        await front.receive()
    front.close()


def test_messages_to_an_engine_that_has_ended_are_dropped(pair: Pair) -> None:
    """In uvloop, too, whose transports raise when they are closed."""

    async def send_to_nobody() -> None:
        front = await FrontChannel.open(pair[0], Message)
        pair[1].close()
        with pytest.raises(ChannelClosed):
            await front.receive()
        for number in range(3):
            front.send(Text(number))
            await asyncio.sleep(0.01)
        front.close()

    uvloop.run(send_to_nobody())


def test_the_fronts_end_is_noticed(pair: Pair) -> None:
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    pair[0].close()
    with pytest.raises(ChannelClosed):
        engine.receive(PATIENCE_S)
    with pytest.raises(ChannelClosed):
        for _ in range(100):
            engine.send(Blob(bytes(1 << 20)))


def test_only_the_known_messages_are_decoded(pair: Pair) -> None:
    engine: EngineChannel[Message] = EngineChannel(pair[1], Message)
    body = msgspec.msgpack.encode({"type": "exec", "code": "1"})
    pair[0].sendall(len(body).to_bytes(4, "little") + body)
    with pytest.raises(msgspec.ValidationError):
        engine.receive(PATIENCE_S)
