"""Embeddings in Redis. The encoder writes them, the decoder reads them.

Redis is an accelerator: no method raises because of it, and the delay it may cause is bounded. The
first command that fails or is late opens a breaker, after which Redis is skipped, but for one
command now and then. Nothing read is trusted: what does not match its header, its key, its digest
or its seal is counted as a miss and logged once. The encoder that then computes the embedding
writes it anew.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from redis import Redis as BlockingRedis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.retry import Retry as BlockingRetry

from services.common.embeddings.embedding import (
    STORED_HEADER_BYTES,
    CorruptEmbedding,
    EmbeddingSpec,
    all_finite,
    pack_header,
    unpack_header,
)
from services.common.embeddings.embedding import digest as digest_of
from services.common.security.redis_login import login
from services.common.security.seals import NO_SEAL, SEAL_BYTES, SealKeys
from services.common.tenancy.bounded_entries import BOUNDED_ENTRIES, OVERHEAD_BYTES
from services.common.threads import finished

log = logging.getLogger(__name__)

# A value's largest size (proto-max-bulk-len's default).
MAX_VALUE_BYTES = 512 << 20
# An entry: its header, its seal, the tensor.
_BODY_OFFSET = STORED_HEADER_BYTES + SEAL_BYTES
_ENTRY = b"triptych:embedding:"
# A client's file: its size in 8 bytes, the file. Decoders may not read these keys.
_FILE = b"triptych:file:"
_SIZE_BYTES = 8
# Shares of a Redis' memory: what files may take, so that embeddings keep their place; the files of
# one tenant; one file, which takes twice its size while it arrives, beside those that it replaces.
_FILES_SHARE, _TENANT_SHARE, _FILE_SHARE = 3 / 8, 1 / 4, 1 / 32
_MEMORY_WITHOUT_LIMIT = 1 << 30  # where Redis has no `maxmemory`
_ALLOCATED = 5, 4  # jemalloc rounds the size of a value up by at most a quarter
# A short file counts as so many bytes, so that a long file never takes the place of more than some
# thousand: Redis does nothing else meanwhile.
_LEAST_FILE_BYTES = 64 << 10
_BOUNDED_SHA = hashlib.sha1(BOUNDED_ENTRIES.encode(), usedforsecurity=False).hexdigest()
# Of one command: its reply is parsed, and copied into the arena, in the event loop.
_RANGE_BYTES = 1 << 20
# Slower than this, Redis is no accelerator: bytes per second of a body.
_MIN_READ_RATE = 100 << 20
_MAX_CONNECTIONS = 8
_CONNECT_TIMEOUT_S = 1.0
_WRITE_TIMEOUT_S = 2.0
# If this event loop was late itself, the reply lies in the socket: time to read it.
_GRACE_S = 0.002
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
_EVENTS = "hits", "misses", "corrupt", "forged", "errors", "skipped", "writes"

_Result = TypeVar("_Result")


class _Absent(Exception):
    """Nothing is there, or Redis is away, which is counted already."""


class _Forged(CorruptEmbedding):
    """None of our keys has sealed the entry."""


class Breaker:
    """Keeps commands from a Redis that does not answer. A failure opens it for a pause; then one
    command may try, and the next one after a pause twice as long. Any answer closes it. A command
    that fails while others are answered, as in a burst, does not open it.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._next_try = 0.0
        self._answered_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._pause_s > 0

    def lets_through(self) -> bool:
        """Whether a command may be sent; `answered` or `failed` follows, if it is not cancelled."""
        now = time.monotonic()
        if self.is_open:
            if now < self._next_try:
                return False
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            self._next_try = now + self._pause_s
        return True

    def answered(self) -> None:
        self._pause_s = 0.0
        self._answered_at = time.monotonic()

    def failed(self, sent_at: float) -> None:
        if not self.is_open and sent_at >= self._answered_at:
            self._pause_s = _FIRST_PAUSE_S
            self._next_try = time.monotonic() + _FIRST_PAUSE_S


def _without_timeout(url: str) -> tuple[str, float | None]:
    """The URL without its `socket_timeout`, and that."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    timeout = options.pop("socket_timeout", None)
    if timeout is None:
        return url, None
    return parts._replace(query=urlencode(options)).geturl(), float(timeout)


class RedisCache(Collector):
    """The entries of one Redis, for one event loop. Close it with `close`.

    Args:
        url: `redis://`, `rediss://` or `unix://`; with `?socket_timeout=` instead of `timeout_s`.
        password_file: password of the URL's user, read at each connection; None: the URL's.
        ttl_s: how long an entry lives.
        timeout_s: the most that a header or one range of a body may take.
        seals: seal what is written and open what is read; None: entries are not sealed.
        service: exports `counters` as `<service>_redis_events_total`.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int,
        timeout_s: float = 0.03,
        password_file: Path | None = None,
        seals: SealKeys | None = None,
        service: str = "",
    ) -> None:
        self.counters = dict.fromkeys(_EVENTS, 0)
        self._service = service
        self._breaker = Breaker()
        self._seals = seals
        self._has_warned = False
        self._ttl_s = ttl_s
        url, in_url_s = _without_timeout(url)
        self._timeout_s = timeout_s if in_url_s is None else in_url_s
        url, options = login(url, password_file)
        # Without time limits of their own: `_within` bounds waiting for a connection, connecting
        # and answering together.
        self._redis: Any = Redis.from_pool(
            cast("Any", BlockingConnectionPool).from_url(
                url, protocol=2, retry=Retry(NoBackoff(), 0), max_connections=_MAX_CONNECTIONS,
                timeout=None, socket_timeout=None, socket_connect_timeout=None,
                socket_read_size=_RANGE_BYTES, **options,
            )
        )  # fmt: skip
        # A thread sends values: over TLS the event loop would stand still for 1 ms per MiB. Not
        # packed by hiredis, which copies them twice and keeps the interpreter lock meanwhile.
        self._blocking: Any = cast("Any", BlockingRedis).from_url(
            url, protocol=2, retry=BlockingRetry(NoBackoff(), 0),
            socket_timeout=_WRITE_TIMEOUT_S, socket_connect_timeout=_CONNECT_TIMEOUT_S,
            command_packer=PythonRespSerializer(6000, _as_bytes), **options,
        )  # fmt: skip

    @property
    def available(self) -> bool:
        """Whether Redis has answered the last command."""
        return not self._breaker.is_open

    def collect(self) -> Iterable[CounterMetricFamily]:
        what = f"Redis lookups, writes and failures, by event: {', '.join(_EVENTS)}."
        family = CounterMetricFamily(f"{self._service}_redis_events", what, labels=["event"])
        for event, count in self.counters.items():
            family.add_metric([event], count)
        yield family

    async def connect(self) -> None:
        """Connects before the first request; called once, at a service's start."""
        try:
            await _within(_CONNECT_TIMEOUT_S, self._redis.execute_command("PING"))
        except Exception as error:
            log.warning("Redis does not answer; it is skipped until it does: %s", error)

    async def has(self, key: bytes, spec: EmbeddingSpec) -> bool:
        """Whether there is an entry, as far as its header tells."""
        return await self._found(self._head(key, spec)) is not None

    async def read(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> bytes | None:
        """Reads a tensor into `into` (`spec.size_bytes` bytes, contiguous) and checks it.

        Returns:
            Its digest: `into` now holds exactly what was stored, all finite. None: a miss, and
            `into` holds anything.
        """
        return await self._found(self._read(key, spec, into))

    async def write(
        self, key: bytes, spec: EmbeddingSpec, digest: bytes, data: bytes | memoryview
    ) -> bool:
        """Stores an entry, best effort; not on a request's path (it may take seconds).

        Returns:
            Whether it was stored.
        """
        if _BODY_OFFSET + spec.size_bytes > MAX_VALUE_BYTES:
            return False
        arguments = _ENTRY + key, pack_header(key, spec, digest), data
        try:
            with self._guarded():
                loop = asyncio.get_running_loop()
                await finished([loop.run_in_executor(None, self._set, *arguments)])
        except _Absent:
            return False
        self.counters["writes"] += 1
        return True

    async def read_file(self, name: bytes, max_bytes: int) -> bytes | None:
        """What `write_file` has stored, unchecked; None: nothing, more than that, or no answer."""
        key = _FILE + name
        try:
            head = await self._range(key, 0, _SIZE_BYTES, self._timeout_s)
            end = _SIZE_BYTES + int.from_bytes(head, "little")
            if end > _SIZE_BYTES + max_bytes:
                return None
            pieces: list[bytes] = []
            limit_s = self._timeout_s + _RANGE_BYTES / _MIN_READ_RATE
            for start in range(_SIZE_BYTES, end, _RANGE_BYTES):
                stop = min(start + _RANGE_BYTES, end)
                pieces.append(await self._range(key, start, stop, limit_s))
        except (_Absent, CorruptEmbedding):
            return None
        return b"".join(pieces)

    async def write_file(self, name: bytes, data: bytes, ttl_s: int) -> bool:
        """Stores a client's file within the bytes of its tenant; best effort, as `write`.

        Args:
            name: `<tenant>/<file>`.

        Returns:
            Whether the file was stored. Older files of its tenant, or of the tenant with the most,
            have made room for it.
        """
        value = len(data).to_bytes(_SIZE_BYTES, "little") + data
        try:
            with self._guarded():
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(None, self._set_file, name, value, ttl_s)
                await finished([writing])  # also for a caller that leaves: one file at a time
                return writing.result()
        except _Absent:
            return False

    async def delete_file(self, name: bytes) -> bool | None:
        """Forgets what `write_file` has stored.

        Returns:
            Whether there was such a file. None if Redis does not answer.
        """
        try:
            with self._guarded():
                return bool(await asyncio.to_thread(self._run_bounded, "delete", name, 0))
        except _Absent:
            return None

    async def close(self) -> None:
        self._blocking.close()
        await self._redis.aclose()

    async def _found(self, reading: Awaitable[bytes]) -> bytes | None:
        """What was read; None: a miss. Counts which, and what is not ours."""
        found = None
        try:
            found = await reading
        except _Absent:
            pass
        except CorruptEmbedding as error:
            self.counters["forged" if isinstance(error, _Forged) else "corrupt"] += 1
            self._warn(error)
        self.counters["misses" if found is None else "hits"] += 1
        return found

    async def _head(self, key: bytes, spec: EmbeddingSpec) -> bytes:
        """An entry's header and seal, not opened yet."""
        head = await self._range(_ENTRY + key, 0, _BODY_OFFSET, self._timeout_s)
        if unpack_header(head[:STORED_HEADER_BYTES], key)[0] != spec:
            raise CorruptEmbedding("an entry has another shape")
        return head

    async def _read(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> bytes:
        head = await self._head(key, spec)
        limit_s = self._timeout_s + _RANGE_BYTES / _MIN_READ_RATE  # of a range
        deadline = time.monotonic() + self._timeout_s + spec.size_bytes / _MIN_READ_RATE
        for start in range(0, spec.size_bytes, _RANGE_BYTES):
            stop = min(start + _RANGE_BYTES, spec.size_bytes)
            left_s = min(limit_s, deadline - time.monotonic())
            place = _BODY_OFFSET + start, _BODY_OFFSET + stop
            data = await self._range(_ENTRY + key, *place, left_s)
            into[start:stop] = data
        return await asyncio.to_thread(self._checked, key, head, into[: spec.size_bytes])

    def _checked(self, key: bytes, head: bytes, body: memoryview) -> bytes:
        """In a thread: 0.04 ms per MiB, and 0.15 ms per MiB and thread for a seal.

        Returns:
            The digest of the body, which is the tensor that was stored.
        """
        header, seal = head[:STORED_HEADER_BYTES], head[STORED_HEADER_BYTES:]
        spec, digest = unpack_header(header, key)
        if digest_of(body) != digest or not all_finite(body, spec.dtype):
            raise CorruptEmbedding("a body does not match its digest")
        if self._seals is not None and not self._seals.opens(header, body, seal):
            raise _Forged("not sealed with a key of ours")
        return digest

    def _set(self, name: bytes, header: bytes, body: bytes | memoryview) -> None:
        """In a thread: copies, seals and sends without the interpreter lock."""
        entry = np.empty(_BODY_OFFSET + len(body), np.uint8)
        entry[_BODY_OFFSET:] = np.frombuffer(body, np.uint8)
        seal = self._seals.seal(header, entry[_BODY_OFFSET:].data) if self._seals else NO_SEAL
        entry[:_BODY_OFFSET] = np.frombuffer(header + seal, np.uint8)
        self._blocking.set(name, entry.data, ex=self._ttl_s)

    def _set_file(self, name: bytes, value: bytes, ttl_s: int) -> bool:
        """Makes room for a file and sends it, in a thread; returns whether there is room."""
        memory: int = self._blocking.info("memory").get("maxmemory") or _MEMORY_WITHOUT_LIMIT
        if len(value) > memory * _FILE_SHARE:
            return False
        size = (len(value) + len(name)) * _ALLOCATED[0] // _ALLOCATED[1] + OVERHEAD_BYTES
        put = (
            "put", name, ttl_s, max(size, _LEAST_FILE_BYTES),
            int(memory * _TENANT_SHARE), int(memory * _FILES_SHARE),
        )  # fmt: skip
        if not self._run_bounded(*put):
            return False
        self._blocking.set(_FILE + name, value, ex=ttl_s)
        return bool(self._run_bounded(*put))

    def _run_bounded(self, what: str, name: bytes, ttl_s: int, *more: int) -> int:
        """Runs the script `bounded_entries` on a file, in a thread."""
        arguments = 1, _FILE, what, name, ttl_s * 1000, *more
        try:
            return self._blocking.execute_command("EVALSHA", _BOUNDED_SHA, *arguments)
        except NoScriptError:  # a new server
            return self._blocking.execute_command("EVAL", BOUNDED_ENTRIES, *arguments)

    async def _range(self, name: bytes, start: int, stop: int, timeout_s: float) -> bytes:
        """The bytes `[start, stop)` of a key's value."""
        command = "GETRANGE", name, start, stop - 1
        with self._guarded():
            data = await _within(timeout_s, self._redis.execute_command(*command))
        if data == b"":
            raise _Absent
        if not isinstance(data, bytes) or len(data) != stop - start:
            raise CorruptEmbedding("an entry is shorter than it should be")
        return data

    @contextlib.contextmanager
    def _guarded(self) -> Generator[None]:
        """A command is sent within, if the breaker lets it through."""
        if not self._breaker.lets_through():
            self.counters["skipped"] += 1
            raise _Absent
        sent_at = time.monotonic()
        try:
            yield
        except Exception as error:
            self.counters["errors"] += 1
            # An authentication error is a ConnectionError, too.
            if isinstance(error, ResponseError) and not isinstance(error, RedisConnectionError):
                self._breaker.answered()
                self._warn(error)  # out of memory, no permission, no string
            else:
                self._breaker.failed(sent_at)
            raise _Absent from error
        self._breaker.answered()

    def _warn(self, error: Exception) -> None:
        """Once: the metric counts all."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("an entry in Redis is not used, or not written: %s", error)


def _as_bytes(argument: bytes | memoryview | str | int) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


async def _within(timeout_s: float, command: Awaitable[_Result]) -> _Result:
    """A command's reply, or TimeoutError. One that is late or cancelled is left to itself: it loses
    its connection (redis-py's own rule), so its reply is never taken for another's.
    """
    task = asyncio.ensure_future(command)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is retrieved
    try:
        for patience_s in (max(0.0, timeout_s), _GRACE_S):
            if not task.done():
                await asyncio.wait({task}, timeout=patience_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
