"""`rediss://`: the cache over TLS, with a real server that shows and asks for certificates."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_cache import RedisCache
from services.gateway.tenancy.lease_store import LeaseReport, LeaseStore
from tests.certificates import Authority, mount
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer, answers

KEY = b"k" * 32
SPEC = EmbeddingSpec("float32", 1, 64, 8)
VALUES = np.random.default_rng(0).normal(size=SPEC.shape).astype("<f4").tobytes()


class TlsRedisServer(RedisServer):
    """Takes TLS alone; `asks`: from clients with a certificate of the authority."""

    def __init__(self, directory: Path, *, asks: bool = True) -> None:
        super().__init__()
        self._tls = directory
        self._arguments = (
            "--port", "0", "--tls-port", str(self.port),
            "--tls-ca-cert-file", str(directory / "ca.crt"),
            "--tls-cert-file", str(directory / "tls.crt"),
            "--tls-key-file", str(directory / "tls.key"),
            "--tls-auth-clients", "yes" if asks else "no",
        )  # fmt: skip

    @property
    def url(self) -> str:
        return url_of(self.port, self._tls, self._tls)


def url_of(port: int, trusted: Path, shown: Path | None) -> str:
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={trusted / 'ca.crt'}"
    if shown is not None:
        url += f"&ssl_certfile={shown / 'tls.crt'}&ssl_keyfile={shown / 'tls.key'}"
    return url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedisServer]:
    directory = mount(Authority().issue("localhost"), tmp_path_factory.mktemp("redis-tls"))
    with TlsRedisServer(directory) as running:
        yield running


async def test_a_client_needs_no_more_than_a_password_and_the_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the component `redis-tls` has it."""
    directory = mount(Authority().issue("localhost"), tmp_path / "tls")
    with TlsRedisServer(directory, asks=False) as server, server.client() as client:
        client.acl_setuser(
            "encoder", enabled=True, passwords=["+secret"], keys=["*"], commands=["+ping"]
        )
        (tmp_path / "password").write_text("secret")
        url = f"rediss://encoder@localhost:{server.port}"
        for authority, expected in ((directory / "ca.crt", True), (None, False)):
            if authority is None:
                monkeypatch.delenv("SSL_CERT_FILE")
            else:
                monkeypatch.setenv("SSL_CERT_FILE", str(authority))
            cache = RedisCache(
                url, ttl_s=60, timeout_s=PATIENCE_S, password_file=tmp_path / "password"
            )
            assert await answers(cache) == expected
            await cache.close()


async def test_gateways_count_limits_over_tls(tmp_path: Path) -> None:
    """As the component `tenant-limits/tls` has it: the authority is in the URL."""
    directory = mount(Authority().issue("localhost"), tmp_path / "tls")
    foreign = mount(Authority("foreign").issue("localhost"), tmp_path / "foreign")
    (tmp_path / "password").write_text("secret")
    report = LeaseReport("t", (10, -1, -1, -1, -1), (0,) * 5, (4, 0, 0, 0, 0))
    with TlsRedisServer(directory, asks=False) as server, server.client() as client:
        client.acl_setuser(
            "gateway", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"]
        )
        for authority in (directory, foreign):
            url = f"rediss://gateway@localhost:{server.port}?ssl_ca_certs={authority / 'ca.crt'}"
            store = LeaseStore(url, "here", 60.0, 5.0, tmp_path / "password")
            if authority == directory:
                assert (await store.report([report])).rows[0][0] == [4, 0, 0, 0, 0]
            else:
                with pytest.raises(redis.RedisError, match="certificate"):
                    await store.report([report])
            await store.close()


async def _read(cache: RedisCache) -> bytes | None:
    into = memoryview(bytearray(SPEC.size_bytes))
    return bytes(into) if await cache.read(KEY, SPEC, into) else None


async def test_entries_are_written_and_read_over_tls(server: TlsRedisServer) -> None:
    cache = RedisCache(server.url, ttl_s=60, timeout_s=PATIENCE_S)
    await cache.connect()
    try:
        assert await cache.write(KEY, SPEC, digest(VALUES), VALUES)
        assert await _read(cache) == VALUES
        assert cache.counters["errors"] == 0
    finally:
        await cache.close()


@pytest.mark.parametrize("kind", ["no certificate", "foreign server", "plaintext", "other name"])
async def test_without_the_right_certificates_nothing_is_read(
    server: TlsRedisServer, tmp_path: Path, kind: str
) -> None:
    foreign = mount(Authority("foreign").issue("localhost"), tmp_path / "foreign")
    url = {
        "no certificate": url_of(server.port, server._tls, None),
        "foreign server": url_of(server.port, foreign, server._tls),
        "plaintext": f"redis://localhost:{server.port}/0",
        # The certificate is of `localhost`.
        "other name": server.url.replace("localhost", "127.0.0.1"),
    }[kind]
    cache = RedisCache(url, ttl_s=60, timeout_s=5.0)
    try:
        await asyncio.wait_for(cache.connect(), PATIENCE_S)
        assert await _read(cache) is None
        assert not await cache.write(KEY, SPEC, digest(VALUES), VALUES)
        assert cache.counters["hits"] == 0 and cache.counters["errors"] > 0
    finally:
        await cache.close()
