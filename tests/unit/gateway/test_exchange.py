"""What runs for a client ends with it, and only then."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

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
