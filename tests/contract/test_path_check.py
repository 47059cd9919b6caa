"""The check of the ways of embeddings at a decoder's start: each way, and each broken one."""

import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest

from services.common.embeddings.embedding_cache import RedisCache
from services.common.embeddings.shared_memory import NotReadable
from services.common.security.credentials import NO_CREDENTIALS
from services.decoder.images import embedding_fetch, path_check
from services.decoder.images.embedding_fetch import EncoderFetcher
from services.decoder.images.known_encoders import KnownEncoders
from services.decoder.images.path_check import PathCheck
from tests.certificates import Authority
from tests.contract.encoder_pod import GEOMETRY, LIKE, run_pod
from tests.contract.test_service_credentials import Mounts, serving
from tests.noise import PATIENCE_S
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server  # noqa: F401


@asynccontextmanager
async def checking(
    *addresses: str, cache: RedisCache | None = None, **fetcher: object
) -> AsyncIterator[PathCheck]:
    known = KnownEncoders(addresses)
    fetch = EncoderFetcher(known=known, **fetcher)  # type: ignore[arg-type]
    check = PathCheck(fetch, known, GEOMETRY, LIKE, cache, retry_s=0.05)
    try:
        yield check
    finally:
        await check.close()
        await fetch.close()


async def test_the_line_names_each_way_and_its_rate(
    redis_server: RedisServer,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cache = RedisCache(redis_server.url, ttl_s=60, timeout_s=PATIENCE_S)
    try:
        async with run_pod(redis_server.url, max_image_patches=1 << 14) as pod:
            async with checking(pod.address, cache=cache) as check:
                await check.start()
                assert check._task is not None
                await check._task
            text = caplog.text
            assert f"from encoder {pod.address} through shared memory: " in text
            assert "; from Redis: " in text and text.count(" MB/s") == 2
            async with checking(pod.address, shared_memory=False) as check:
                line = await check.check(pod.address)
                assert " over gRPC: " in line and line.endswith("; no Redis is set")
            # Each check has its own image, which the engine has computed as background work.
            assert pod.metrics.registry.get_sample_value(
                "triptych_encoder_cache_misses_total", {"tier": "memory"}
            ) in (None, 2.0)
    finally:
        await cache.close()


async def test_a_decoder_starts_without_encoders_and_checks_them_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A port on which nobody listens is named in one line, however often it is tried."""
    caplog.set_level(logging.INFO)
    address = f"127.0.0.1:{free_port()}"
    async with checking(address) as check:
        await check.start()
        assert check._task is not None and not check._task.done()
        for _ in range(3):
            assert not await check._is_checked(address)
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert f"no embedding can come from encoder {address} now: " in record.getMessage()


async def test_an_encoder_of_another_model_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with run_pod() as pod, checking(pod.address) as check:
        check._like = LIKE.__class__(LIKE.dtype, LIKE.num_features + 1, 0, LIKE.hidden)
        assert not await check._is_checked(pod.address)
        assert "it serves another model" in caplog.text


@pytest.mark.parametrize("kind", ["plaintext", "foreign authority"])
async def test_a_wrong_certificate_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """One line names the encoder and that its connection is refused, however often it is tried."""
    authority, mounts = Authority(), Mounts(tmp_path)
    shown = NO_CREDENTIALS
    if kind == "foreign authority":
        shown = mounts.certificates(Authority("foreign").issue("decoder"))
    async with serving(mounts.certificates(authority.issue("encoder"))) as server:
        async with checking(server.address, credentials=shown) as check:
            for _ in range(2):
                assert not await check._is_checked(server.address)
        found = [r.getMessage() for r in caplog.records if "no embedding can come" in r.message]
        assert len(found) == 1 and server.address in found[0], found
        if kind == "foreign authority":
            assert "certificate" in found[0].lower() or "handshake" in found[0].lower(), found


async def test_shared_memory_that_cannot_be_read_is_named() -> None:
    async with run_pod() as pod, checking(pod.address) as check:
        with mock.patch.object(embedding_fetch, "ForeignMemory", side_effect=NotReadable("gone")):
            line = await check.check(pod.address)
    assert " over gRPC: " in line and "(its shared memory cannot be read)" in line


async def test_a_redis_that_gets_no_embeddings_is_named(
    redis_server: RedisServer,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The encoder has no Redis, or cannot write to it."""
    cache = RedisCache(redis_server.url, ttl_s=60, timeout_s=PATIENCE_S)
    try:
        async with run_pod() as pod, checking(pod.address, cache=cache) as check:
            with mock.patch.object(path_check, "_REDIS_S", 0.2):
                assert (await check.check(pod.address)).endswith("; not from Redis")
        assert "Redis does not have an embedding" in caplog.text
    finally:
        await cache.close()


_FULL = """
import mmap, os
from services.common.embeddings.shared_memory import ForeignMemory, MemoryAddress, create_memory
try:
    with open("/dev/shm/file", "wb") as file:
        file.write(bytes(1 << 20))
    print("not full")
except OSError as error:
    print(os.strerror(error.errno))
size = 8 << 20
fd, name = create_memory(size)
mmap.mmap(fd, size)[:] = b"x" * size
found = ForeignMemory(MemoryAddress(os.getpid(), fd, name, size)).view(0, size)
print(found == b"x" * size)
"""


def test_a_full_dev_shm_changes_nothing() -> None:
    """Embeddings lie in anonymous memory of the kernel, and no file system limits it. In a mount
    namespace of its own, `/dev/shm` holds 64 KiB; a file in it, the control, does not fit.
    """
    script = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, sys.executable, _FULL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no namespace of mounts here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["No space left on device", "True"], done.stderr
