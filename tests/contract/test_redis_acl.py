"""The user that the deployment's instructions give to our services may do what they do, no more."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from services.common.embedding import EmbeddingSpec, digest
from services.common.embedding_cache import RedisCache
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer

README = Path(__file__).resolve().parents[2] / "deploy" / "k8s" / "README.md"
KEY, SPEC = bytes(range(32)), EmbeddingSpec("float32", 2, 4, 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    rules = re.search(r"users\.acl=\"(user .*?)\"", README.read_text(), re.DOTALL)
    assert rules is not None
    users = tmp_path / "users.acl"
    users.write_text(rules[1].replace("$password", "secret") + "\n")
    with RedisServer("--aclfile", str(users), user="triptych", password="secret") as server:
        yield server


async def test_the_cache_may_do_all_that_it_does(server: RedisServer) -> None:
    cache = RedisCache(server.url, ttl_s=60, timeout_s=PATIENCE_S)
    try:
        assert await cache.ping()
        assert await cache.try_lock(KEY, b"me", 5.0)
        assert not await cache.try_lock(KEY, b"you", 5.0)
        await cache.unlock(KEY, b"me")
        assert await cache.try_lock(KEY, b"you", 5.0)
        data = np.ones(SPEC.shape, np.float32).tobytes()
        assert await cache.write(KEY, SPEC, digest(data), data)
        assert await cache.header(KEY) == (SPEC, digest(data))
        into = memoryview(bytearray(SPEC.size_bytes))
        assert await cache.read(KEY, SPEC, digest(data), into) and bytes(into) == data
        await cache.delete(KEY)
        assert await cache.header(KEY) is None
        assert cache.counters.errors == 0
    finally:
        await cache.close()


@pytest.mark.parametrize(
    "command",
    [("SET", "other", "1"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "dir"),
     ("EVAL", "return 1", "0"), ("SHUTDOWN",)],
    ids=lambda command: command[0],
)  # fmt: skip
def test_and_nothing_else(server: RedisServer, command: tuple[str, ...]) -> None:
    with server.client() as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)


def test_nobody_else_comes_in(server: RedisServer) -> None:
    with (
        redis.Redis(port=server.port, socket_timeout=PATIENCE_S) as client,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        client.ping()
