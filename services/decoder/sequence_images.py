"""The images of all sequences, from their submission to the engine's last word on them.

An image's place in the arena is held from the moment it is there until the engine has read it. A
sequence that is preempted after that may want it once more; then it is brought as it was at first.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.arena import ArenaEntry
from services.common.errors import InternalError, TriptychError
from services.decoder.embedding_source import EmbeddingSource
from services.decoder.engine.messages import AddSequence, FrontMessage, ImageReady, ImagesOf
from services.decoder.submission import ImageRequest

log = logging.getLogger(__name__)


class Outgoing(Protocol):
    """The way to the engine."""

    def send(self, *messages: FrontMessage) -> None:
        """Queues messages."""
        ...


@dataclass(slots=True, eq=False)
class _Images:
    """Of one sequence: what it asks for, and what the engine may read."""

    requests: Sequence[ImageRequest]
    submitted_at: float
    transfer_s: float = 0.0
    entries: dict[bytes, ArenaEntry] = field(default_factory=dict[bytes, ArenaEntry])
    fetches: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


class SequenceImages:
    """Owner of all references to the arena that sequences have. Made and used in one event loop.

    Args:
        source: brings embeddings.
        channel: where the engine is told of them.
        on_failure: called with a sequence's number when an image is not to be had.
    """

    def __init__(
        self,
        source: EmbeddingSource,
        channel: Outgoing,
        on_failure: Callable[[int, TriptychError], None],
    ) -> None:
        self._source = source
        self._channel = channel
        self._on_failure = on_failure
        self._of: dict[int, _Images] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, message: AddSequence, requests: Sequence[ImageRequest]) -> None:
        """Tells the engine of a sequence and brings its images, which are distinct."""
        if not requests:
            self._channel.send(message)
            return
        number = message.sequence_id
        self._of[number] = _Images(requests, time.monotonic())
        self._bring(number, requests, message)

    def were_read(self, read: ImagesOf) -> None:
        """The engine needs their places no more."""
        if images := self._of.get(read.sequence_id):
            for key in read.keys:
                self._source.release(images.entries.pop(key))

    def are_wanted(self, wanted: ImagesOf) -> None:
        """The engine needs them once more."""
        if images := self._of.get(wanted.sequence_id):
            keys = frozenset(wanted.keys)
            self._bring(wanted.sequence_id, [r for r in images.requests if r.key in keys])

    def transfer_s(self, number: int) -> float:
        """Seconds from the submission until the last image was there; 0: it has none."""
        images = self._of.get(number)
        return images.transfer_s if images else 0.0

    def stop_bringing(self, number: int) -> None:
        """Those that are not there yet are not needed. The others stay: a step in flight may read
        them.
        """
        if images := self._of.get(number):
            for task in images.fetches:
                task.cancel()

    def forget(self, number: int) -> None:
        """The engine has ended the sequence."""
        self.stop_bringing(number)
        if images := self._of.pop(number, None):
            for entry in images.entries.values():
                self._source.release(entry)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._source.close()

    def _bring(self, number: int, requests: Sequence[ImageRequest], *before: AddSequence) -> None:
        images = self._of[number]
        entries = self._source.take_resident(requests)
        # In one piece, so that the engine does not start on the text before such an image.
        self._channel.send(*before, *(ImageReady(number, e.key, e.offset) for e in entries))
        if entries:
            images.entries.update((entry.key, entry) for entry in entries)
            images.transfer_s = time.monotonic() - images.submitted_at
            return
        task = asyncio.create_task(self._fetch(number, images, requests))
        for tasks in (self._tasks, images.fetches):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _fetch(self, number: int, images: _Images, requests: Sequence[ImageRequest]) -> None:
        def ready(key: bytes, entry: ArenaEntry) -> None:
            if number not in self._of:  # ended between two turns of the loop
                self._source.release(entry)
                return
            images.entries[key] = entry
            images.transfer_s = time.monotonic() - images.submitted_at
            self._channel.send(ImageReady(number, key, entry.offset))

        try:
            await self._source.obtain(requests, ready)
        except TriptychError as error:
            self._on_failure(number, error)
        except Exception:
            log.exception("bringing images failed", extra={"fields": {"sequence": number}})
            self._on_failure(number, InternalError("bringing the images failed"))
