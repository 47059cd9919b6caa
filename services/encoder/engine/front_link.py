"""The engine's connection to the front, on which several threads send."""

import threading

import msgspec

from services.common.process.channel import EngineChannel
from services.encoder.engine.messages import ActiveJobs, FrontMessage, ImageDone


class FrontLink:
    """Sends messages to the front, and tells it which jobs the engine works on.

    Args:
        channel: connection to the front. One thread receives from it.
    """

    def __init__(self, channel: EngineChannel[FrontMessage]) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._active: set[int] = set()

    def receive(self) -> list[FrontMessage]:
        """Waits for messages of the front. Raises ChannelClosed if the front has ended."""
        return self._channel.receive(None)

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message. Raises ChannelClosed if the front has ended."""
        with self._lock:
            self._channel.send(message)

    def begin(self, *job_ids: int) -> None:
        """Tells the front that work on these jobs is about to begin. If this process then dies, the
        front knows which images may have killed it.
        """
        with self._lock:
            self._active.update(job_ids)
            self._channel.send(ActiveJobs(sorted(self._active)))

    def pause(self, job_id: int) -> None:
        """Tells the front that nothing works on a job for now, because it waits for its batch."""
        with self._lock:
            self._active.discard(job_id)
            self._channel.send(ActiveJobs(sorted(self._active)))

    def end(self, done: ImageDone) -> None:
        """Reports the end of a job, on which the engine no longer works."""
        with self._lock:
            self._active.discard(done.job_id)
            self._channel.send(done)
