"""Which layouts come often enough to be captured. Pure: no tensors, no clock.

A capture costs as much as several forwards, so a layout must have been seen before, and one that is
still in use is not given up for a newcomer: with more layouts than room, nothing is captured twice.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

_REMEMBERED = 1024

Layout = TypeVar("Layout")


@dataclass(slots=True)
class _Entry:
    last_seen: int
    count: int = 0
    captured: bool = False


class FrequentLayouts(Generic[Layout]):
    """Counts layouts and says which to capture next.

    Args:
        room: captured layouts at a time.
        sightings: how often a layout is seen before it is worth a capture.
        patience: a captured layout not seen for so many launches gives up its place.
    """

    def __init__(self, *, room: int, sightings: int = 2, patience: int = 256) -> None:
        assert room > 0
        self._room = room
        self._sightings = sightings
        self._patience = patience
        self._launches = 0
        self._entries: OrderedDict[Layout, _Entry] = OrderedDict()  # least recently seen first
        self._wanted: deque[Layout] = deque()
        self._num_captured = 0

    def see(self, layout: Layout | None) -> None:
        """Notes a launch; None: of a layout that is never captured."""
        self._launches += 1
        if layout is None:
            return
        entry = self._entries.setdefault(layout, _Entry(self._launches))
        self._entries.move_to_end(layout)
        entry.last_seen = self._launches
        entry.count += 1
        if entry.count >= self._sightings and not entry.captured and layout not in self._wanted:
            self._wanted.append(layout)
        if len(self._entries) > _REMEMBERED:
            stale = next(key for key, entry in self._entries.items() if not entry.captured)
            self._forget(stale)

    def next_capture(self) -> tuple[Layout, Layout | None] | None:
        """The layout to capture now, and the one that gives up its place for it, if one must.

        The first counts as captured from here on, the other as never seen.
        """
        if not self._wanted:
            return None
        victim = None
        if self._num_captured >= self._room:
            victim = next(key for key, entry in self._entries.items() if entry.captured)
            if self._launches - self._entries[victim].last_seen < self._patience:
                self._wanted.clear()  # they come back when they are seen again
                return None
            self._forget(victim)
        layout = self._wanted.popleft()
        self._entries[layout].captured = True
        self._num_captured += 1
        return layout, victim

    def clear(self) -> None:
        """Nothing is captured any more, and nothing was seen."""
        self._entries.clear()
        self._wanted.clear()
        self._num_captured = 0

    def _forget(self, layout: Layout) -> None:
        self._num_captured -= self._entries.pop(layout).captured
        if layout in self._wanted:
            self._wanted.remove(layout)
