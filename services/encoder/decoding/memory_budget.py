"""A budget of memory for the images that are decoded at the same time."""

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from services.common.errors import InvalidImage


class MemoryBudget:
    """A budget of bytes that threads reserve before they use memory, in order of arrival.

    Args:
        total_bytes: size of the budget.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._free_bytes = total_bytes
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of threads that wait for bytes."""
        return len(self._waiting)

    @contextmanager
    def reserved(self, num_bytes: int) -> Generator[None]:
        """Waits until bytes are free, and reserves them during the `with` block.

        Raises:
            InvalidImage: the whole budget has fewer bytes.
        """
        if num_bytes > self.total_bytes:
            raise InvalidImage(
                f"decoding the image may take {num_bytes} bytes; an image may take at most "
                f"{self.total_bytes}, which is a quarter of the encoder's memory"
            )
        me = object()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(lambda: self._waiting[0] is me and self._free_bytes >= num_bytes)
            self._waiting.popleft()
            self._free_bytes -= num_bytes
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += num_bytes
                self._changed.notify_all()
