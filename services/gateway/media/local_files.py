"""Files of this machine behind `file:` URLs, under the one directory that the settings allow."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote

from services.common.errors import InvalidRequest
from services.gateway.media.kinds import Kind

# Linux opens no longer one, and to resolve it takes the square of its length.
_MAX_PATH_CHARS = 4095


def read_local_file(directory: Path, url: str, max_bytes: int, kind: Kind) -> bytes:
    """The file that a URL names.

    Args:
        directory: resolved; nothing outside it is read.
        max_bytes: of the file.

    Raises:
        InvalidRequest: the URL is malformed, or names no readable file there.
        InvalidImage, InvalidVideo: more than `max_bytes`.
    """
    rest = url[len("file:") :]
    if rest.startswith("//"):
        rest = rest[2:]
    path = unquote(rest)
    if not path.startswith("/") or "\0" in path:
        raise InvalidRequest("a file: URL must name an absolute path")
    if len(path) > _MAX_PATH_CHARS:
        raise InvalidRequest("the file: URL names no readable file")
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(directory):
        raise InvalidRequest("the file is outside the allowed directory")
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            # Of what is open: a folder of the path may be a link by now.
            real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not real.is_relative_to(directory):
                raise InvalidRequest("the file is outside the allowed directory")
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest("the file: URL names no regular file")
            data = file.read(max_bytes + 1)
    except OSError:
        raise InvalidRequest("the file: URL names no readable file") from None
    if len(data) > max_bytes:
        raise kind.too_large(max_bytes)
    return data
