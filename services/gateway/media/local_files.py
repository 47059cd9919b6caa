"""Files of this machine behind file: URLs, below the one directory that the settings allow."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote

from services.common.errors import InvalidRequest
from services.gateway.media.kinds import Kind

# Linux opens no longer path, and the time to resolve a path grows with the square of its length.
_MAX_PATH_CHARS = 4095


class LocalFiles:
    """The files below one directory.

    Args:
        directory: directory of the files. Nothing outside of it is read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def read(self, url: str, max_bytes: int, kind: Kind) -> bytes:
        """Reads the file that a file: URL names.

        Args:
            max_bytes: most bytes of the file.
            kind: kind of media that is expected in the file, for errors.

        Raises:
            InvalidRequest: the URL is malformed, or names no readable file below the directory.
            InvalidImage, InvalidVideo: the file has more than `max_bytes` bytes.
        """
        rest = url[len("file:") :]
        if rest.startswith("//"):
            rest = rest[2:]
        path = unquote(rest)
        if not path.startswith("/") or "\0" in path:
            raise InvalidRequest("a file: URL must name an absolute path")
        if len(path) > _MAX_PATH_CHARS:
            raise InvalidRequest("the file: URL names no readable file")
        real = self.resolve(path)
        self._check_inside(real)
        try:
            descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                # The open file is checked again: a folder of its path may have become a link.
                self._check_inside(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise InvalidRequest("the file: URL names no regular file")
                data = file.read(max_bytes + 1)
        except OSError:
            raise InvalidRequest("the file: URL names no readable file") from None
        if len(data) > max_bytes:
            raise kind.too_large(max_bytes)
        return data

    def resolve(self, path: str) -> Path:
        """Returns a path without links and dots. Tests override it to change the path behind it."""
        return Path(os.path.realpath(path))

    def _check_inside(self, path: Path) -> None:
        if not path.is_relative_to(self._directory):
            raise InvalidRequest("the file is outside the allowed directory")
