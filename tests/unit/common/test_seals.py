"""Who can write to Redis, but has no key, changes no entry: each change is a counted miss."""

import struct
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.embeddings.embedding import (
    STORED_HEADER_BYTES,
    EmbeddingSpec,
    digest,
    pack_header,
)
from services.common.embeddings.embedding_cache import RedisCache
from services.common.process.service_process import run_service
from services.common.security.seals import NO_SEAL, SEAL_BYTES, SealKeys
from services.common.settings import SettingsError
from services.decoder.__main__ import DECODER
from services.decoder.settings import DecoderSettings
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer, redis_server  # noqa: F401
from tests.unit.common.test_embedding_cache import ENTRY, KEY, OTHER, SPEC, body, load

OLD, NEW, THEIRS = (bytes([n]) * 32 for n in (1, 2, 3))
MODEL = b"m" * 32
BODY_OFFSET = STORED_HEADER_BYTES + SEAL_BYTES


def write_keys(path: Path, *secrets: bytes) -> Path:
    path.write_text("# newest first\n" + "".join(f"{secret.hex()}\n" for secret in secrets))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys", OLD)


@pytest.fixture
async def open_cache(
    redis_server: RedisServer,  # noqa: F811
) -> AsyncIterator[Callable[..., RedisCache]]:
    caches: list[RedisCache] = []

    def make(keys: Path | None, fingerprint: bytes = MODEL) -> RedisCache:
        made = None if keys is None else SealKeys(keys, fingerprint, check_interval_s=0.0)
        caches.append(RedisCache(redis_server.url, ttl_s=60, timeout_s=PATIENCE_S, seals=made))
        return caches[-1]

    yield make
    for cache in caches:
        await cache.close()


@pytest.fixture
def sealed_by(tmp_path: Path) -> Callable[..., bytes]:
    """Makes an entry as someone with a secret writes it."""

    def make(
        secret: bytes, key: bytes, spec: EmbeddingSpec, data: bytes, model: bytes = MODEL
    ) -> bytes:
        header = pack_header(key, spec, digest(data))
        theirs = SealKeys(write_keys(tmp_path / "theirs", secret), model)
        return header + theirs.seal(header, memoryview(data)) + data

    return make


async def test_a_sealed_entry_is_read_with_its_key(
    keys: Path, open_cache: Callable[..., RedisCache]
) -> None:
    writer, reader = open_cache(keys), open_cache(keys)
    data = body()
    assert await writer.write(KEY, SPEC, digest(data), data)
    assert await load(reader) == data
    assert reader.counters["forged"] == reader.counters["corrupt"] == 0
    assert await load(open_cache(keys, b"x" * 32)) is None  # of another model
    assert await load(open_cache(None)) == data  # who has no key believes what it reads


async def test_what_others_write_is_a_miss_counted_and_logged_once(
    keys: Path,
    open_cache: Callable[..., RedisCache],
    redis_server: RedisServer,  # noqa: F811
    sealed_by: Callable[..., bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    red, blue = body(1), body(2)
    header = pack_header(KEY, SPEC, digest(red))
    ours = sealed_by(OLD, KEY, SPEC, blue)
    another = sealed_by(OLD, OTHER, SPEC, red)
    wider = replace(SPEC, num_features=SPEC.num_features * 2, num_tokens=SPEC.num_tokens // 2)
    values = {
        "without a seal": header + NO_SEAL + red,
        "of another key of seals": sealed_by(THEIRS, KEY, SPEC, red),
        "a seal of another entry": header + another[STORED_HEADER_BYTES:],
        "another entry whole": another,
        "another's header and seal under this key": header + another[STORED_HEADER_BYTES:],
        "our header and seal, another body": ours[:BODY_OFFSET] + red,
        "of another shape": pack_header(KEY, wider, digest(blue)) + ours[STORED_HEADER_BYTES:],
        "of another dtype": pack_header(
            KEY, replace(SPEC, dtype="bfloat16", hidden=SPEC.hidden * 2), digest(blue)
        ) + ours[STORED_HEADER_BYTES:],
        "truncated": ours[:-1],
        "truncated in the seal": ours[: BODY_OFFSET - 1],
        "of another model": sealed_by(OLD, KEY, SPEC, red, b"x" * 32),
    }  # fmt: skip
    cache = open_cache(keys)
    for name, value in values.items():
        before = dict(cache.counters)
        with redis_server.client() as client:
            client.set(ENTRY, value)
        assert await load(cache) is None, name
        refused = cache.counters["forged"] + cache.counters["corrupt"]
        assert refused == before["forged"] + before["corrupt"] + 1, name
        assert cache.counters["misses"] == before["misses"] + 1, name
    assert cache.counters["forged"] >= 4
    with redis_server.client() as client:
        client.set(ENTRY, ours)
    assert await load(cache) == blue
    assert len([r for r in caplog.records if "not used" in r.message]) == 1


async def test_a_body_with_the_same_digest_is_not_the_one_that_was_sealed(
    keys: Path,
    open_cache: Callable[..., RedisCache],
    redis_server: RedisServer,  # noqa: F811
    sealed_by: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """XXH3 can be forged; here any body passes it."""
    ours = sealed_by(OLD, KEY, SPEC, body(1))
    with redis_server.client() as client:
        client.set(ENTRY, ours[:BODY_OFFSET] + body(2))
    cache = open_cache(keys)
    monkeypatch.setattr(
        "services.common.embeddings.embedding_cache.digest_of", lambda _: digest(body(1))
    )
    assert await load(cache) is None
    assert (cache.counters["forged"], cache.counters["corrupt"]) == (1, 0)


async def test_keys_rotate_while_services_run(
    keys: Path, open_cache: Callable[..., RedisCache]
) -> None:
    writer, reader = open_cache(keys), open_cache(keys)
    old, new = body(1), body(2)
    await writer.write(KEY, SPEC, digest(old), old)
    write_keys(keys, OLD, NEW)  # each service opens both
    write_keys(keys, NEW, OLD)  # and seals with the new one
    await writer.write(OTHER, SPEC, digest(new), new)
    assert (await load(reader), await load(reader, OTHER)) == (old, new)
    write_keys(keys, NEW)  # the old one has gone, and what it sealed with it
    assert (await load(reader), await load(reader, OTHER)) == (None, new)


def test_a_bad_key_file_leaves_the_keys_before(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = SealKeys(keys, MODEL, check_interval_s=0.0)

    def sealing() -> bytes:
        return found.seal(b"header", memoryview(b"body"))

    before = sealing()
    keys.write_text("not a key")
    assert sealing() == sealing() == before
    keys.unlink()
    assert sealing() == sealing() == before
    assert len(caplog.records) == 2 and "not a key" not in caplog.text
    write_keys(keys, NEW)
    assert sealing() != before


@pytest.mark.parametrize(
    "content",
    ["", "# nothing\n", "ab" * 31, "ab" * 33, "x" * 64, ("ab" * 32 + "\n") * 9, "é"],
)
def test_bad_key_files_are_refused_at_start(
    tmp_path: Path,
    content: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "seal-keys"
    path.write_text(content)
    with pytest.raises(SettingsError, match=str(path)) as caught:
        SealKeys(path, MODEL)
    assert not content.strip() or content.strip() not in str(caught.value)
    monkeypatch.setenv("DECODER_MODEL", "/m")
    monkeypatch.setenv("DECODER_REDIS_DIRECTORY", str(tmp_path))
    assert run_service(DECODER) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "is_here"),
    [("", True), ("unix:///run/redis.sock", True), ("redis://localhost/0", True),
     ("redis://u:p@127.0.0.1:6379", True), ("redis://[::1]:6379", True),
     ("redis://redis:6379", False), ("rediss://10.0.0.1", False),
     ("redis://127.0.0.1.example.com", False), ("redis://localhost.example.com", False)],
)  # fmt: skip
def test_a_redis_elsewhere_needs_seals(tmp_path: Path, url: str, is_here: bool) -> None:
    environment = {"DECODER_MODEL": "/m", "DECODER_REDIS_URL": url}
    sealed = environment | {"DECODER_REDIS_DIRECTORY": str(tmp_path)}
    assert DecoderSettings.from_environment(sealed).redis_url == url
    if is_here:
        assert DecoderSettings.from_environment(environment).redis_url == url
    else:
        with pytest.raises(SettingsError, match=r"^DECODER_REDIS_URL .*set DECODER_REDIS_DIR"):
            DecoderSettings.from_environment(environment)


def test_every_byte_of_an_entry_is_sealed(keys: Path) -> None:
    spec = EmbeddingSpec("bfloat16", 1, 2, 3)
    data = np.ones(spec.size_bytes // 2, np.uint16).tobytes()
    header, found = pack_header(KEY, spec, digest(data)), SealKeys(keys, MODEL)
    seal = found.seal(header, memoryview(data))
    assert len(seal) == SEAL_BYTES and found.opens(header, memoryview(data), seal)
    whole = header + seal + data
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        parts = struct.unpack(f"{len(header)}s{SEAL_BYTES}s{len(data)}s", changed)
        assert not found.opens(parts[0], memoryview(parts[2]), parts[1]), position


async def test_bodies_are_sealed_and_checked_beside_the_event_loop(
    keys: Path,
    redis_server: RedisServer,  # noqa: F811
) -> None:
    """It takes milliseconds."""
    threads: list[int] = []

    class Recording(SealKeys):
        def seal(self, header: bytes, body: memoryview) -> bytes:
            threads.append(threading.get_ident())
            return super().seal(header, body)

        def opens(self, header: bytes, body: memoryview, seal: bytes) -> bool:
            threads.append(threading.get_ident())
            return super().opens(header, body, seal)

    seals = Recording(keys, MODEL)
    cache, data = RedisCache(redis_server.url, ttl_s=60, timeout_s=PATIENCE_S, seals=seals), body()
    assert await cache.write(KEY, SPEC, digest(data), data)
    assert await load(cache) == data
    await cache.close()
    assert len(threads) == 2 and threading.get_ident() not in threads
