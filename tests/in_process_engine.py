"""A decoder engine in the front's own event loop, in place of an engine process."""

import asyncio

from msgspec import structs

from services.common.channel import ChannelClosed
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import (
    EngineInfo,
    EngineMessage,
    FrontMessage,
    ImageReady,
    MaskMemory,
    MaskMemoryOpened,
)
from services.decoder.mask_rows import open_rows
from tests.fake_runner import FakeRunner


class InProcessEngine:
    """Implements `services.decoder.front.Channel` with an Engine on a FakeRunner.

    Attributes:
        opens_masks: it reads the front's memory of masks, as an engine does that may.
        running: while cleared, the engine takes no steps.
        arena: arena offset → key, kept for the FakeRunner.
    """

    def __init__(
        self, runner: FakeRunner, *, overlap: bool = True, opens_masks: bool = True
    ) -> None:
        self.opens_masks = opens_masks
        self.runner = runner
        self.engine = Engine(runner, overlap=overlap, min_partial_tokens=1)
        self.running = asyncio.Event()
        self.running.set()
        self._inbox: list[FrontMessage] = []
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def ready(self) -> EngineInfo:
        return structs.replace(self.runner.info, max_model_len=self.engine.max_model_len)

    def send(self, *messages: FrontMessage) -> None:
        self._inbox += messages
        self._wake.set()

    async def receive(self) -> EngineMessage:
        while True:
            await asyncio.sleep(0)
            await self.running.wait()
            if self._closed:
                raise ChannelClosed
            inbox, self._inbox = self._inbox, []
            opened = False
            for message in inbox:
                if isinstance(message, MaskMemory):
                    if opened := self.opens_masks:
                        self.engine.mask_rows[message.link] = open_rows(message)
                    continue
                if isinstance(message, ImageReady):
                    self.runner.arena[message.arena_offset] = message.key
                self.engine.handle(message)  # type: ignore[arg-type]
            if opened:
                return MaskMemoryOpened()
            if self.engine.waits_for_masks:
                continue
            if self.engine.has_work:
                done = self.engine.step()
                if done is not None:
                    return done
            elif not self._inbox:
                self._wake.clear()
                await self._wake.wait()

    def die(self) -> None:
        self._closed = True
        self._wake.set()
