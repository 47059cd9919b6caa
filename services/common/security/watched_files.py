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
_MAX_FILE_BYTES = 4 << 20

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """Files whose content is replaced while the process runs.

    Args:
        paths: the files; a change of any of them is a change.
        parse: makes the content of their bytes; raises ValueError for one that is not valid.

    Raises:
        SettingsError: they cannot be read at first. Later, what was read before stays.
    """

    def __init__(self, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], Content]) -> None:
        self._paths = paths
        self._parse = parse
        self._lock = threading.Lock()
        self._complaint = ""
        self._next_check = 0.0
        self._state: object = None
        try:
            self._state, self._content = self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(str(error)) from None

    def current(self) -> Content:
        """The newest valid content, the same object until it changes. Any thread may call."""
        if time.monotonic() >= self._next_check:
            with self._lock:
                self._next_check = time.monotonic() + CHECK_INTERVAL_S
                self._reload()
        return self._content

    def _reload(self) -> None:
        try:
            if self._stat() == self._state:
                return
            self._state, self._content = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("not read, what was there before stays: %s", error)
            return
        self._complaint = ""
        log.info("read anew: %s", ", ".join(map(str, self._paths)))

    def _read(self) -> tuple[object, Content]:
        for _ in range(5):
            state = self._stat()
            data = [path.read_bytes() for path in self._paths]
            if self._stat() == state:  # else they were replaced meanwhile
                return state, self._parse(data)
        raise ValueError(f"{self._paths[0]} changes all the time")

    def _stat(self) -> object:
        found = [os.stat(path) for path in self._paths]
        for path, each in zip(self._paths, found, strict=True):
            if each.st_size > _MAX_FILE_BYTES:
                raise ValueError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in found]
