"""What becomes of images when their engine ends."""

from collections.abc import Awaitable, Callable

import pytest

from services.common.channel import ChannelClosed
from services.common.errors import DeadlyImage, EngineEnded, TriptychError, Unavailable
from services.encoder.engine.messages import EngineMessage, FrontMessage, ImageDone, InHand
from services.encoder.engine_client import EngineClient

GRID = (1, 4, 4)


class Link:
    """An engine that says these messages and ends."""

    def __init__(self, *said: EngineMessage) -> None:
        self._said = list(said)

    async def receive(self) -> EngineMessage:
        if not self._said:
            raise ChannelClosed
        return self._said.pop(0)

    def send(self, *messages: FrontMessage) -> None:
        pass


def saying(result: bool) -> Callable[[], Awaitable[bool]]:
    async def say() -> bool:
        return result

    return say


async def errors_of(*said: EngineMessage, crashed: bool) -> list[type[BaseException] | None]:
    """Of three images, 1 to 3."""
    client = EngineClient(Link(*said), lambda _: None, saying(crashed))
    jobs = [client.submit(b"image", GRID) for _ in range(3)]
    await client.run()
    with pytest.raises(EngineEnded):
        client.submit(b"image", GRID)
    found = [job.done.exception() for job in jobs]
    assert all(error is None or isinstance(error, TriptychError) for error in found)
    return [error and type(error) for error in found]


async def test_the_image_that_was_in_work_alone_is_deadly_and_the_others_are_innocent() -> None:
    assert await errors_of(InHand([1]), InHand([1, 2]), InHand([2]), crashed=True) == [
        EngineEnded, DeadlyImage, EngineEnded
    ]  # fmt: skip
    assert await errors_of(InHand([1, 2]), ImageDone(1), crashed=True) == [
        None, DeadlyImage, EngineEnded
    ]  # fmt: skip


async def test_several_images_in_work_are_suspects() -> None:
    assert await errors_of(InHand([1, 3]), crashed=True) == [Unavailable, EngineEnded, Unavailable]


async def test_nobody_is_blamed_for_an_engine_that_somebody_ended() -> None:
    assert await errors_of(InHand([2]), crashed=False) == [EngineEnded, Unavailable, EngineEnded]
    assert await errors_of(crashed=True) == [EngineEnded] * 3
