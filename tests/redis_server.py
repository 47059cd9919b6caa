"""A real redis-server for tests: start, stop, freeze, flush."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
import redis

from services.common.embeddings.embedding_cache import RedisCache
from tests.noise import PATIENCE_S
from tests.ports import free_port


class RedisServer:
    """One redis-server on a free port of 127.0.0.1, without persistence.

    Use as a context manager, or through the fixture `redis_server`. `port` stays the same over
    `stop` and `start`, so that a client may be pointed at a server that comes and goes.
    """

    def __init__(self, *arguments: str, user: str = "", password: str = "") -> None:
        self._arguments = arguments
        self._user, self._password = user, password
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="triptych-redis-"))
        self.port = free_port()

    @property
    def url(self) -> str:
        login = f"{self._user}:{self._password}@" if self._user else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def url_of(self, user: str) -> str:
        """Of a user with any password."""
        return f"redis://{user}:any@127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A new synchronous client; close it (`with server.client() as client`)."""
        return redis.Redis.from_url(self.url, socket_timeout=PATIENCE_S)

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--dir", str(self._directory), "--logfile", "redis.log",
             "--enable-debug-command", "yes", *self._arguments],
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError("redis-server did not start") from None
                time.sleep(0.02)

    def stop(self) -> None:
        """Ends it at once; nothing is kept."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        with self.client() as client:
            client.flushall()

    def keys(self) -> list[bytes]:
        with self.client() as client:
            return sorted(client.keys())  # type: ignore[arg-type]

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A running server of this test's own."""
    with RedisServer() as server:
        yield server


async def answers(cache: RedisCache) -> bool:
    """Whether Redis takes a new or kept connection of the cache, whatever its breaker says."""
    try:
        return bool(await cache._redis.execute_command("PING"))
    except redis.RedisError:
        return False
