"""Files that are mounted, and replaced while the process runs: keys, tokens, certificates."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from services.common.settings import SettingsError

log = logging.getLogger(__name__)

# How soon a change is seen: files are looked at once in this time at most, and only when asked for.
CHECK_INTERVAL_S = 1.0

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """The content of some files, read again when one of them has changed. Any thread may use it.

    Args:
        paths: the files.
        parse: makes the content of their bytes; raises ValueError for one that is not valid.

    Raises:
        SettingsError: they cannot be read at first. Later, what was read before stays.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], Content]) -> None:
        self._paths = paths
        self._parse = parse
        self._lock = threading.Lock()
        self._next_check = 0.0
        self._complaint = ""
        try:
            self._state = self._stat()
            self._content = self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(str(error)) from None

    def current(self) -> Content:
        """The newest valid content, the same object until it changes."""
        with self._lock:
            if time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + CHECK_INTERVAL_S
                self._reload()
            return self._content

    def _reload(self) -> None:
        try:
            state = self._stat()
            if state == self._state:
                return
            self._state = state  # older than what is read: a change meanwhile is seen next time
            self._content = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("not read, what was there before stays: %s", error)
            return
        self._complaint = ""
        log.info("read anew: %s", ", ".join(map(str, self._paths)))

    def _read(self) -> Content:
        return self._parse([path.read_bytes() for path in self._paths])

    def _stat(self) -> list[tuple[int, int, int]]:
        found = [os.stat(path) for path in self._paths]
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in found]
