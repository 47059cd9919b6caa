"""What becomes of images when their engine ends."""

import pytest

from services.common.errors import EngineLost, TriptychError, Unavailable
from services.common.geometry import Unit
from services.common.process.channel import ChannelClosed
from services.encoder.engine.messages import (
    ActiveJobs,
    EngineMessage,
    FrontMessage,
    ImageDone,
    Source,
)
from services.encoder.front.engine_client import EngineClient
from services.encoder.metrics import EncoderMetrics

UNIT = Unit((1, 4, 4))


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


async def errors_of(*said: EngineMessage) -> list[type[BaseException] | None]:
    """Of three images, 1 to 3."""
    client = EngineClient(Link(*said), EncoderMetrics())
    jobs = [client.submit(Source(b"image"), UNIT) for _ in range(3)]
    await client.run()
    with pytest.raises(Unavailable):
        client.submit(Source(b"image"), UNIT)
    found = [job.done.exception() for job in jobs]
    assert all(error is None or isinstance(error, TriptychError) for error in found)
    return [error and type(error) for error in found]


async def test_images_in_work_may_be_the_cause_and_those_that_waited_are_not() -> None:
    assert await errors_of(ActiveJobs([1]), ActiveJobs([1, 2]), ActiveJobs([2])) == [
        Unavailable, EngineLost, Unavailable
    ]  # fmt: skip
    assert await errors_of(ActiveJobs([1, 2]), ImageDone(1)) == [None, EngineLost, Unavailable]
    assert await errors_of(ActiveJobs([1, 3])) == [EngineLost, Unavailable, EngineLost]
    assert await errors_of() == [Unavailable] * 3
