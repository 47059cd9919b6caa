"""What runs for a client ends with it, and only then; and long answers."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from services.gateway.forms.responses import encode_json
from services.gateway.http.exchange import Exchange
from tests.noise import PATIENCE_S, turns


class Connection:
    """The receiving side of an ASGI channel."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def no_send(message: object) -> None:
    raise AssertionError("nothing is sent")


@pytest.fixture
async def connection() -> Connection:
    return Connection()


@pytest.fixture
async def exchange(connection: Connection) -> Exchange:
    return Exchange({}, connection.receive, no_send)  # pyright: ignore


async def test_nobody_watches_on_after_the_end(exchange, connection):
    with exchange.while_connected():
        await turns()
    connection.gone.set()
    await turns()
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_goes_ends_what_runs_for_it(exchange, connection):
    steps: list[str] = []

    async def serve() -> None:
        try:
            connection.gone.set()
            await asyncio.sleep(PATIENCE_S)
        finally:
            await turns()
            steps.append("ended")

    async with asyncio.timeout(PATIENCE_S):  # is not taken for the client
        with pytest.raises(ClientDisconnect), exchange.while_connected():
            await serve()
        assert steps == ["ended"]
        await turns()  # the task itself goes on


async def test_a_client_that_goes_after_the_last_byte_ends_nothing(exchange, connection):
    ended = False
    with exchange.while_connected():
        exchange.finished = True
        connection.gone.set()
        await turns()
        ended = True
    assert ended


@pytest.mark.parametrize("num_entries", [1, 3])
async def test_a_long_list_is_sent_entry_by_entry(connection, num_entries):
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    exchange = Exchange({}, connection.receive, send)  # pyright: ignore
    entries = [{"index": index, "data": "x" * 100_000} for index in range(num_entries)]
    content = {"model": '"data":[]', "data": [], "object": "list"}
    await exchange.write_long_json(content, list(map(encode_json, entries)))
    start, *pieces = sent
    body = b"".join(piece["body"] for piece in pieces)
    assert json.loads(body) == {**content, "data": entries} and exchange.finished
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body)
    assert max(len(piece["body"]) for piece in pieces) < 100_000
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]


async def test_a_cancellation_of_the_server_stays_one(exchange):
    async def serve() -> None:
        with exchange.while_connected():
            await asyncio.sleep(PATIENCE_S)

    request = asyncio.create_task(serve())
    await turns()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a_timeout_that_comes_with_the_disconnect_stays_outside(exchange, connection):
    with pytest.raises((ClientDisconnect, TimeoutError)):
        async with asyncio.timeout(0):
            with exchange.while_connected():
                connection.gone.set()
                await asyncio.sleep(PATIENCE_S)
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()
