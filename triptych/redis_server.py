"""A private Redis: in memory, bounded, on a Unix socket that only this user can open."""

import functools
import shutil
from pathlib import Path

from triptych.probes import redis_ready
from triptych.stack import ChildSpec

_MAX_MEMORY = "1gb"


def redis_url(directory: Path) -> str:
    """The URL of the server that `redis_spec` runs in this directory."""
    return f"unix://{directory / 'redis.sock'}"


def redis_spec(directory: Path, log_path: Path) -> ChildSpec | None:
    """The server process, or None where no `redis-server` is installed.

    Args:
        directory: private to this user; for the socket. Nothing else is written.
        log_path: for its output.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        return None
    socket_path = str(directory / "redis.sock")
    command = [
        binary, "--port", "0", "--unixsocket", socket_path, "--unixsocketperm", "700",
        "--dir", str(directory), "--save", "", "--appendonly", "no",
        "--maxmemory", _MAX_MEMORY, "--maxmemory-policy", "allkeys-lru",
        "--loglevel", "warning", "--daemonize", "no",
    ]  # fmt: skip
    return ChildSpec("redis", command, {}, functools.partial(redis_ready, socket_path), log_path)
