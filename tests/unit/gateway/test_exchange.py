"""What runs for a client ends with it, and only then."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from services.gateway.http.exchange import Exchange


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


async def test_the_result_is_returned_and_nobody_watches_on(exchange, connection):
    async def serve() -> str:
        await asyncio.sleep(0.01)
        return "served"

    assert await exchange.while_connected(serve()) == "served"
    connection.gone.set()
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1


async def test_a_client_that_goes_ends_what_runs_for_it(exchange, connection):
    steps: list[str] = []

    async def serve() -> None:
        try:
            connection.gone.set()
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)
            steps.append("ended")

    async with asyncio.timeout(5):  # is not taken for the client
        with pytest.raises(ClientDisconnect):
            await exchange.while_connected(serve())
        assert steps == ["ended"]
        await asyncio.sleep(0.01)  # the task itself goes on


async def test_a_client_that_goes_after_the_last_byte_ends_nothing(exchange, connection):
    async def serve() -> str:
        exchange.finished = True
        connection.gone.set()
        await asyncio.sleep(0.01)
        return "served"

    assert await exchange.while_connected(serve()) == "served"


async def test_a_cancellation_of_the_server_stays_one(exchange):
    request = asyncio.create_task(exchange.while_connected(asyncio.sleep(10)))
    await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a_timeout_that_comes_with_the_disconnect_stays_outside(exchange, connection):
    async def serve() -> None:
        connection.gone.set()
        await asyncio.sleep(10)

    with pytest.raises((ClientDisconnect, TimeoutError)):
        async with asyncio.timeout(0):
            await exchange.while_connected(serve())
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()
