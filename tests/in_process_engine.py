"""A decoder engine in the front's own event loop, in place of an engine process."""

import asyncio
import contextlib
import socket

from services.common.process.channel import ChannelClosed, EngineChannel
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import (
    EngineInfo,
    EngineMessage,
    FrontMessage,
    ImageReady,
    MaskLink,
)
from services.decoder.masks.links import open_link, send_tokens
from tests.engine_harness import Untimed
from tests.fake_runner import FakeRunner


class InProcessEngine:
    """Implements `services.decoder.front.front.Channel` with an Engine on a FakeRunner.

    Attributes:
        link: takes the descriptors of processes that fill masks.
        running: while cleared, the engine takes no steps.
        arena: arena offset → key, kept for the FakeRunner.
    """

    def __init__(self, runner: FakeRunner, *, overlap: bool = True) -> None:
        self._link, self.link = socket.socketpair()
        self._links: dict[int, EngineChannel] = {}
        self._opened: list[EngineChannel] = []  # `send_tokens` drops those that have ended
        self.runner = runner
        most = runner.info.max_drafts
        # Untimed, drafts cost nothing: the time of fake steps says nothing of their tokens.
        cost = Untimed() if most else None
        self.engine = Engine(runner, overlap=overlap, max_drafts=most, step_cost=cost)
        self.engine.scheduler.prefills.min_partial_tokens = 1
        self.running = asyncio.Event()
        self.running.set()
        self._inbox: list[FrontMessage] = []
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def ready(self) -> EngineInfo:
        return self.runner.info

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
            for message in inbox:
                if isinstance(message, MaskLink):
                    link, rows = open_link(self._link, message)
                    self._links[message.link] = link
                    self._opened.append(link)
                    self.engine.gate.rows[message.link] = rows
                    continue
                if isinstance(message, ImageReady):
                    self.runner.arena[message.arena_offset] = message.key
                self.engine.handle(message)  # type: ignore[arg-type]
            self._receive_masks()
            if self.engine.waits:
                await asyncio.sleep(0.0002)  # for masks, as long as there is no other work
                continue
            if self.engine.has_work:
                done = self.engine.step()
                if done is not None:
                    send_tokens(self.engine, self._links, done)
                    return done
            elif not self._inbox:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    timeout_s = 0.001 if self._links else None  # nothing wakes it up for masks
                    await asyncio.wait_for(self._wake.wait(), timeout_s)

    def _receive_masks(self) -> None:
        for number, link in list(self._links.items()):
            try:
                for message in link.receive(0.0):
                    self.engine.handle(message)
            except ChannelClosed:
                self._links.pop(number).close()

    def close(self) -> None:
        """Closes the ends of links."""
        for end in (self._link, self.link, *self._opened):
            end.close()

    def die(self) -> None:
        self._closed = True
        self._wake.set()
