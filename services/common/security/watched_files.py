"""Reads mounted files that are replaced while the process runs: keys, tokens, certificates."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from services.common.settings import SettingsError

log = logging.getLogger(__name__)

# Files are checked for a change at most once in this time, and only when their content is used.
CHECK_INTERVAL_S = 1.0
_MAX_FILE_BYTES = 4 << 20

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """Files whose content is replaced while the process runs.

    If the files cannot be read after a change, the content that was read before stays in use.

    Args:
        paths: paths of the files, which belong together.
        parse: function from the files' bytes to their content. It raises ValueError if the content
            is not valid.
        check_interval_s: shortest time between two checks for a change.

    Raises:
        SettingsError: the files cannot be read, or are not valid, when this object is created.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        parse: Callable[[Sequence[bytes]], Content],
        *,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self._paths = paths
        self._parse = parse
        self._check_interval_s = check_interval_s
        self._lock = threading.Lock()
        self._complaint = ""
        self._next_check = 0.0
        self._state: object = None
        try:
            self._state, self._content = self._read()
        except (OSError, ValueError) as error:
            raise SettingsError(str(error)) from None

    def current(self) -> Content:
        """Returns the newest valid content, which is the same object until the files change. Any
        thread may call it.
        """
        if time.monotonic() >= self._next_check:
            with self._lock:
                self._next_check = time.monotonic() + self._check_interval_s
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
                log.error(
                    "the changed files are not valid, so their previous content stays in use: %s",
                    error,
                )
            return
        self._complaint = ""
        log.info("read the changed files: %s", ", ".join(map(str, self._paths)))

    def _read(self) -> tuple[object, Content]:
        for _ in range(5):
            state = self._stat()
            data = [path.read_bytes() for path in self._paths]
            if self._stat() == state:  # otherwise the files were replaced meanwhile
                return state, self._parse(data)
        raise ValueError(f"{self._paths[0]} changed during each of five attempts to read it")

    def _stat(self) -> object:
        found = [os.stat(path) for path in self._paths]
        for path, each in zip(self._paths, found, strict=True):
            if each.st_size > _MAX_FILE_BYTES:
                raise ValueError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        return [(each.st_mtime_ns, each.st_size, each.st_ino) for each in found]
