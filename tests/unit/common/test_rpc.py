"""Errors on the wire: what one service raises is what the other one catches."""

import asyncio
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from services.common.errors import (
    BY_CODE,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.common.transport import rpc
from services.common.transport.rpc import abort, create_server, error_from_rpc
from tests.noise import PATIENCE_S


async def sent(error: TriptychError) -> grpc.aio.AioRpcError:
    """What a peer receives when a servicer aborts with `error`."""

    async def serve(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await abort(context, error)

    handler = grpc.unary_unary_rpc_method_handler(serve)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/s/m")(b"", wait_for_ready=True, timeout=PATIENCE_S)
            return caught.value
    finally:
        await server.stop(None)


@pytest.mark.parametrize("code", sorted(BY_CODE))
async def test_each_error_arrives_as_itself(code: str) -> None:
    found = error_from_rpc(await sent(BY_CODE[code]("why")), "the peer")
    assert type(found) is BY_CODE[code]
    assert (found.message, found.param, found.retry_after_s) == ("why", None, None)


async def test_details_arrive_too() -> None:
    found = error_from_rpc(await sent(InvalidRequest("why", param="messages[0]")), "the peer")
    assert (found.param, found.retry_after_s) == ("messages[0]", None)
    found = error_from_rpc(await sent(Overloaded("full", retry_after_s=2.5)), "the peer")
    assert (found.param, found.retry_after_s) == (None, 2.5)


def failure(status: grpc.StatusCode, *trailers: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), "secret")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, ProcessLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
    ],
)
def test_a_status_without_our_code_is_grpcs_own(status: grpc.StatusCode, kind: type) -> None:
    found = error_from_rpc(failure(status), "the peer")
    assert type(found) is kind
    assert "secret" not in found.message


def test_a_call_that_was_never_sent_has_lost_no_process() -> None:
    refused = "failed to connect to all addresses; last error: Connection refused"
    unsent = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), refused
    )
    assert type(error_from_rpc(unsent, "the peer")) is Unavailable


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1", ""])
def test_a_senseless_delay_counts_as_none(text: str) -> None:
    trailers = ("triptych-code", "overloaded"), ("triptych-retry-after-s", text)
    found = error_from_rpc(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, *trailers), "the peer")
    assert isinstance(found, Overloaded)
    assert found.retry_after_s is None


async def test_pings_that_arrive_together_end_no_connection() -> None:
    """As after a pause of the network; gRPC adds pings of its own to those of keepalive."""
    server = create_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        settings, ping = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), bytes((0, 0, 8, 6, 0, 0, 0, 0, 0))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        for number in range(8):
            writer.write(ping + struct.pack("!Q", number))
        answered = 0
        async with asyncio.timeout(PATIENCE_S):
            while answered < 8:
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                body = await reader.readexactly(size)
                assert kind != 7, f"GOAWAY: {body!r}"
                answered += kind == 6 and flags == 1
    finally:
        writer.close()
        await server.stop(None)


@asynccontextmanager
async def _echo() -> "AsyncGenerator[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]":
    """Starts a server of `create_server` that answers with what it gets, and yields its method."""

    async def serve(message: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return message

    handler = grpc.unary_unary_rpc_method_handler(serve)
    server = create_server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            yield channel.unary_unary("/s/m")
    finally:
        await server.stop(None)


async def test_a_burst_of_calls_to_a_busy_server_is_answered() -> None:
    """The units of 60 clips at once; gRPC would cancel some above 1,000, by lot."""
    async with _echo() as call:
        calls = [asyncio.ensure_future(_answer(call(b"%d" % n))) for n in range(3600)]
        await asyncio.sleep(0)  # they are sent
        time.sleep(0.5)  # noqa: ASYNC251 (the server's loop is busy while they arrive)
        assert await asyncio.gather(*calls) == [b"%d" % n for n in range(3600)]


async def test_calls_to_a_busy_server_wait_until_their_own_deadlines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC would cancel those that no handler takes for half a minute."""
    name = "grpc.server_max_unrequested_time_in_server"
    options = dict(rpc._SERVER_OPTIONS)
    assert options[name] >= 3600
    # With a second in place of the hour, calls do end: the option is the one that decides.
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", tuple((options | {name: 1}).items()))
    failures: list[grpc.aio.AioRpcError] = []
    async with _echo() as call:
        for busy_s in (2.0, 4.0, 8.0):  # longer if the calls arrive late
            calls = [asyncio.ensure_future(_answer(call(b"x"))) for _ in range(10)]
            await asyncio.sleep(0)  # they are sent
            time.sleep(busy_s)  # noqa: ASYNC251 (nobody takes them from the server)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            failures += [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
            if failures:
                break
    assert failures
    assert {failure.code() for failure in failures} == {grpc.StatusCode.CANCELLED}


async def _answer(call: "grpc.aio.UnaryUnaryCall[bytes, bytes]") -> bytes:
    return await call
