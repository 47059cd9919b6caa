"""The images of the sequences: the references that sequences have to entries of the arena."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from services.common.embeddings.arena import ArenaEntry
from services.common.errors import InternalError, TriptychError
from services.common.process.channel import FrontChannel
from services.decoder.engine.messages import AddSequence, EngineMessage, ImageReady, ImagesOf
from services.decoder.images.embedding_source import EmbeddingSource, ImageRequest
from services.decoder.input_listener import InputListener

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Images:
    """The images of one sequence.

    Attributes:
        requests: all images that the sequence names.
        submitted_at: time of the submission, as `time.monotonic()`.
        transfer_s: seconds from the submission until the last image was ready. 0 before.
        entries: entries that the engine may read, by image key.
        fetches: tasks that obtain the other images.
    """

    requests: Sequence[ImageRequest]
    submitted_at: float
    transfer_s: float = 0.0
    entries: dict[bytes, ArenaEntry] = field(default_factory=dict[bytes, ArenaEntry])
    fetches: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


@dataclass(slots=True, eq=False)
class SequenceImages:
    """Owner of all references to the arena that sequences have, created and used in one event loop.

    An image's entry stays in the arena until the engine has read the image. A sequence that is
    preempted afterwards may need the image again. The image is then obtained in the same way.

    Attributes:
        source: source of the embeddings. It is closed with this object.
        engine: receives the sequences and the places of their images.
        listener: owner of the sequences, which ends those whose images cannot be obtained.
    """

    source: EmbeddingSource
    engine: FrontChannel[EngineMessage]
    listener: InputListener
    _by_number: dict[int, _Images] = field(default_factory=dict[int, _Images])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def num_sequences(self) -> int:
        """Number of sequences with images."""
        return len(self._by_number)

    @property
    def num_fetches(self) -> int:
        """Number of running tasks that obtain images."""
        return len(self._tasks)

    def ready_keys(self, number: int) -> Collection[bytes]:
        """Returns the keys of the sequence's images that the engine may read."""
        images = self._by_number.get(number)
        return images.entries.keys() if images else ()

    def add(self, message: AddSequence, requests: Sequence[ImageRequest]) -> None:
        """Sends a sequence to the engine and obtains its images.

        Args:
            message: the engine's message about the sequence.
            requests: distinct images of the sequence.
        """
        if not requests:
            self.engine.send(message)
            return
        number = message.sequence_id
        self._by_number[number] = _Images(requests, time.monotonic())
        self._obtain(number, requests, message)

    def release_read(self, read: ImagesOf) -> None:
        """Releases the images that the engine has read."""
        if images := self._by_number.get(read.sequence_id):
            for key in read.keys:
                self.source.release(images.entries.pop(key))

    def obtain_again(self, wanted: ImagesOf) -> None:
        """Obtains images that the engine needs again after a preemption."""
        if images := self._by_number.get(wanted.sequence_id):
            keys = frozenset(wanted.keys)
            self._obtain(wanted.sequence_id, [r for r in images.requests if r.key in keys])

    def transfer_s(self, number: int) -> float:
        """Returns the seconds from the submission until the last image was ready. 0 if the sequence
        has no images.
        """
        images = self._by_number.get(number)
        return images.transfer_s if images else 0.0

    def cancel_fetches(self, number: int) -> None:
        """Cancels the fetches of a sequence that has been aborted. Images that are ready stay in
        the arena, because a running step may read them.
        """
        if images := self._by_number.get(number):
            for task in images.fetches:
                task.cancel()

    def remove(self, number: int) -> None:
        """Releases all images of a sequence that the engine has ended."""
        self.cancel_fetches(number)
        if images := self._by_number.pop(number, None):
            for entry in images.entries.values():
                self.source.release(entry)

    async def close(self) -> None:
        """Cancels all fetches and closes the source."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.source.close()

    def _obtain(self, number: int, requests: Sequence[ImageRequest], *first: AddSequence) -> None:
        images = self._by_number[number]
        entries = self.source.take_resident(requests)
        # One call of `send`, so that the engine does not start a step on the text alone.
        self.engine.send(*first, *(ImageReady(number, e.key, e.offset) for e in entries))
        if entries:
            images.entries.update((entry.key, entry) for entry in entries)
            images.transfer_s = time.monotonic() - images.submitted_at
            return
        task = asyncio.create_task(self._fetch(number, images, requests))
        for tasks in (self._tasks, images.fetches):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _fetch(self, number: int, images: _Images, requests: Sequence[ImageRequest]) -> None:
        try:
            async with aclosing(self.source.obtain(requests)) as entries:
                async for entry in entries:
                    if number not in self._by_number:  # ended before this task could be cancelled
                        self.source.release(entry)
                        continue
                    images.entries[entry.key] = entry
                    images.transfer_s = time.monotonic() - images.submitted_at
                    self.engine.send(ImageReady(number, entry.key, entry.offset))
        except TriptychError as error:
            self.listener.input_failed(number, error)
        except Exception:
            log.exception(
                "the decoder failed to obtain images", extra={"fields": {"sequence": number}}
            )
            error = InternalError("the decoder failed to obtain the images")
            self.listener.input_failed(number, error)
