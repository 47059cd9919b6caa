"""Encoder and decoder log in to Redis as users that may do what they do, no more."""

import asyncio
import functools
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
import yaml

from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_cache import RedisCache
from services.gateway.tenancy.lease_store import LeaseReport, LeaseStore
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer, answers
from triptych.serve import REDIS_RULES, redis_spec

SECRETS = Path(__file__).resolve().parents[2] / "deploy" / "k8s" / "secrets.sh"
KEY, SPEC = bytes(range(32)), EmbeddingSpec("float32", 2, 4, 4)
ENTRY = b"triptych:embedding:" + KEY
DATA = np.ones(SPEC.shape, np.float32).tobytes()


@functools.cache
def secret(name: str = "redis") -> dict[str, str]:
    """What the deployment's server and its clients are given."""
    text = subprocess.run([SECRETS, name], capture_output=True, text=True, check=True).stdout
    return yaml.safe_load(text)["stringData"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    users = tmp_path_factory.mktemp("redis") / "users.acl"
    users.write_text(secret()["users.acl"])
    password = secret()["encoder-password"]
    with RedisServer("--aclfile", str(users), user="encoder", password=password) as server:
        yield server


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:{secret()[f'{user}-password']}@127.0.0.1:{server.port}/0"


@pytest.fixture
async def encoder(server: RedisServer) -> AsyncIterator[RedisCache]:
    cache = RedisCache(url_of(server, "encoder"), ttl_s=60, timeout_s=PATIENCE_S)
    yield cache
    await cache.close()
    with server.client() as client:
        client.execute_command("SET", ENTRY, b"", "PX", 1)  # all that it may do to take it away


@pytest.fixture
async def decoder(server: RedisServer) -> AsyncIterator[RedisCache]:
    url = url_of(server, "decoder")
    cache = RedisCache(url, ttl_s=60, timeout_s=PATIENCE_S)
    yield cache
    await cache.close()


def test_the_local_stack_has_the_same_rules() -> None:
    given = dict(re.findall(r"user (\w+) on >\S+ (.*)", secret()["users.acl"]))
    given |= re.findall(r"user (\w+) on >\S+ (.*)", secret("limits")["users.acl"])
    assert given == REDIS_RULES


async def test_the_gateway_may_count_and_nothing_else(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    rules = {"default": "~* +@all", "gateway": REDIS_RULES["gateway"]}
    users.write_text("".join(f"user {u} on nopass {r}\n" for u, r in rules.items()))
    with RedisServer("--aclfile", str(users)) as server:
        url = server.url_of("gateway")
        store = LeaseStore(url, "here", 60.0, 5.0)
        report = LeaseReport("t", (10, -1, -1, -1, -1), (0,) * 5, (4, 0, 0, 0, 0))
        for _ in range(2):
            answer = await store.report([report], all_tenants=True)
            assert answer.rows[0][0] == [4, 0, 0, 0, 0] and answer.gateways == 1
        # One that has gone is forgotten, with its leases.
        await asyncio.sleep(0.02)
        other = LeaseStore(url, "there", 0.001, alive_s=0.001)
        answer = await other.report([report], all_tenants=True)
        assert (answer.gateways, answer.rows[0][1], answer.held_by_others) == (1, [0] * 5, {})
        for each in (store, other):
            await each.close()
        with redis.Redis.from_url(url) as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.hgetall("triptych:embedding:key")


async def test_the_encoder_may_do_all_that_it_does(
    encoder: RedisCache, caplog: pytest.LogCaptureFixture
) -> None:
    await encoder.connect()
    assert not caplog.records
    assert await encoder.write(KEY, SPEC, digest(DATA), DATA)
    assert await encoder.has(KEY, SPEC)
    into = memoryview(bytearray(SPEC.size_bytes))
    assert await encoder.read(KEY, SPEC, into) == digest(DATA) and bytes(into) == DATA
    for size in (10, 1 << 20):  # the second takes the first one's place
        assert await encoder.write_file(b"tenant/file", bytes(size), 60)
        assert await encoder.read_file(b"tenant/file", 1 << 20) == bytes(size)
    assert await encoder.delete_file(b"tenant/file")
    assert await encoder.read_file(b"tenant/file", 1 << 20) is None
    assert encoder.counters["errors"] == 0


async def test_an_encoder_of_an_older_secret_keeps_embeddings_and_no_files(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user encoder on nopass ~triptych:embedding:* -@all +ping +getrange +set\n")
    with RedisServer("--aclfile", str(users), user="encoder", password="any") as server:
        cache = RedisCache(server.url, ttl_s=60, timeout_s=PATIENCE_S)
        try:
            assert not await cache.write_file(b"tenant/file", b"x", 60)
            assert await cache.read_file(b"tenant/file", 1) is None
            assert await cache.delete_file(b"tenant/file") is None
            assert await cache.write(KEY, SPEC, digest(DATA), DATA) and cache.available
        finally:
            await cache.close()


async def test_the_decoder_reads_and_leaves_what_is_corrupt_to_the_encoder(
    encoder: RedisCache,
    decoder: RedisCache,
    server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await decoder.connect()
    assert not caplog.records
    assert await encoder.write(KEY, SPEC, digest(DATA), DATA)
    into = memoryview(bytearray(SPEC.size_bytes))
    assert await decoder.read(KEY, SPEC, into) == digest(DATA) and bytes(into) == DATA
    assert not await decoder.write(KEY, SPEC, digest(DATA), DATA)
    assert decoder.counters["errors"] == 1 and decoder.available
    with server.client() as client:
        client.set(ENTRY, b"garbage")
    assert await decoder.read(KEY, SPEC, into) is None
    assert decoder.counters["corrupt"] == 1
    assert not await encoder.has(KEY, SPEC)
    assert await encoder.write(KEY, SPEC, digest(DATA), DATA)
    assert await decoder.read(KEY, SPEC, into) == digest(DATA)


NEITHER = [
    ("SET", "other", "1"), ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("SCAN", "0"),
    ("CONFIG", "GET", "dir"), ("CONFIG", "SET", "dir", "/"),
    ("SHUTDOWN",), ("ACL", "LIST"), ("MONITOR",), ("DEBUG", "SLEEP", "0"), ("SAVE",),
    ("REPLICAOF", "NO", "ONE"), ("SUBSCRIBE", "triptych:x"), ("PUBLISH", "triptych:x", "1"),
    ("MODULE", "LIST"), ("CLIENT", "LIST"), ("RENAME", ENTRY, "triptych:x"),
    ("GETRANGE", "x", 0, 1), ("GETRANGE", "triptych:x", 0, 1), ("SET", "triptych:x", "1"),
    ("DEL", ENTRY), ("UNLINK", ENTRY), ("GET", ENTRY), ("EXPIRE", ENTRY, "1"),
    ("SETRANGE", ENTRY, "0", "x"), ("APPEND", ENTRY, "x"), ("GETDEL", ENTRY),
    ("RESTORE", ENTRY, 0, b"x"), ("COPY", ENTRY, "triptych:embedding:x"),
]  # fmt: skip
FILE = "triptych:file:tenant/file"
NOT_THE_DECODER = [
    ("SET", ENTRY, "1"), ("SET", ENTRY, "1", "NX", "PX", "5"), ("EVAL", "return 1", "0"),
    ("GETRANGE", FILE, 0, 1), ("SET", FILE, "1"), ("INFO",),
]  # fmt: skip


@pytest.mark.parametrize(
    ("user", "command"),
    [
        *(("encoder", command) for command in NEITHER),
        *(("decoder", command) for command in (*NEITHER, *NOT_THE_DECODER)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_and_nothing_else(server: RedisServer, user: str, command: tuple[object, ...]) -> None:
    with (
        redis.Redis.from_url(url_of(server, user), socket_timeout=PATIENCE_S) as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command)


@pytest.mark.parametrize(
    "command", ["'DEL', ARGV[1]", "'GET', ARGV[1]", "'CONFIG', 'GET', '*'", "'FLUSHALL'"]
)
@pytest.mark.parametrize(
    "key", [ENTRY, "triptych:kept:t/x", "triptych:limits"], ids=["embedding", "kept", "limits"]
)
def test_a_script_of_the_encoder_reaches_files_alone(
    server: RedisServer, command: str, key: str | bytes
) -> None:
    with (
        redis.Redis.from_url(url_of(server, "encoder"), socket_timeout=PATIENCE_S) as client,
        pytest.raises(redis.exceptions.ResponseError, match=r"can't (run|access)|not allowed"),
    ):
        client.eval(f"return redis.call({command})", 0, key)  # type: ignore[arg-type]


def test_nobody_else_comes_in(server: RedisServer) -> None:
    with (
        redis.Redis(port=server.port, socket_timeout=PATIENCE_S) as client,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        client.ping()


async def test_a_password_from_a_file_is_read_at_each_connection(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("one\n")
    with RedisServer() as server, server.client() as client:

        def change(password: str) -> None:
            client.acl_setuser(
                "decoder", enabled=True, reset_passwords=True, passwords=[f"+{password}"],
                keys=["*"], commands=["+ping"],
            )  # fmt: skip
            client.client_kill_filter(user="decoder")

        change("one")
        url = f"redis://decoder@127.0.0.1:{server.port}"
        cache = RedisCache(url, ttl_s=60, timeout_s=PATIENCE_S, password_file=path)
        try:
            assert await answers(cache)
            change("another")
            assert not await answers(cache)
            path.write_text("another")
            assert await answers(cache)
        finally:
            await cache.close()


async def test_gateways_read_their_password_at_each_connection_too(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("none\n")
    report = LeaseReport("t", (10, -1, -1, -1, -1), (0,) * 5, (4, 0, 0, 0, 0))
    with RedisServer() as server, server.client() as client:
        url = f"redis://gateway@127.0.0.1:{server.port}"
        store = LeaseStore(url, "here", 60.0, 5.0, path)
        try:
            for password in ("one", "another"):
                client.acl_setuser(
                    "gateway", enabled=True, reset_passwords=True, passwords=[f"+{password}"],
                    keys=["triptych:limits"], commands=["+@all"],
                )  # fmt: skip
                client.client_kill_filter(user="gateway")
                with pytest.raises(redis.RedisError):
                    await store.report([report])
                path.write_text(f"{password}\n")
                assert (await store.report([report])).rows[0][0] == [4, 0, 0, 0, 0]
            path.unlink()
            client.client_kill_filter(user="gateway")
            with pytest.raises((redis.RedisError, OSError)):
                await store.report([report])
        finally:
            await store.close()


async def test_images_take_no_room_from_limits_in_the_redis_of_triptych_serve(
    tmp_path: Path,
) -> None:
    made = redis_spec(tmp_path, "16mb")
    assert made is not None
    spec, urls = made
    report = LeaseReport("t", [10] * 5, [10] * 5, [10] * 5)
    process = subprocess.Popen(spec.command)  # noqa: ASYNC220 - it returns at once
    with process, redis.Redis.from_url(urls["encoder"]) as encoder:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await spec.is_ready():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.01)
            one, other = (
                LeaseStore(urls["gateway"], n, 60.0, PATIENCE_S) for n in ("one", "other")
            )
            await one.report([report])
            for number in range(64):
                name = b"triptych:embedding:%d" % number
                encoder.set(name, bytes(1 << 20), ex=60)
            found = [encoder.getrange(b"triptych:embedding:%d" % n, 0, 0) for n in range(64)]
            assert 0 < sum(map(bool, found)) < 32
            answer = await other.report([report])
            assert answer.gateways == 2 and sum(answer.rows[0][1]) > 0
            await asyncio.gather(one.close(), other.close())
        finally:
            process.terminate()
