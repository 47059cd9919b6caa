"""Embeddings in Redis. The encoder writes them and the decoder reads them.

Redis is an accelerator. No method raises an exception because of Redis, and the delay that Redis
may cause is bounded: the first failed or late command opens a `Breaker`, after which Redis
is skipped except for an occasional trial. Nothing that is read is trusted. An entry whose
header, key, digest or seal does not match is counted as a miss, and the first such entry is logged.
The encoder then computes the embedding and overwrites the entry.
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

from services.common.embeddings.breaker import Breaker
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

# Largest size of a value, which is the default of Redis' proto-max-bulk-len.
MAX_VALUE_BYTES = 512 << 20
# An entry is a header, a seal and the tensor.
_BODY_OFFSET = STORED_HEADER_BYTES + SEAL_BYTES
_ENTRY = b"triptych:embedding:"
# A client's file is its size in 8 bytes and its bytes. Decoders may not read these keys.
_FILE = b"triptych:file:"
_SIZE_BYTES = 8
# Shares of Redis' memory: that of all files, so that embeddings keep the rest; that of one tenant's
# files; and that of one file, which takes twice its size while it arrives, in addition to the files
# that it replaces.
_FILES_SHARE, _TENANT_SHARE, _FILE_SHARE = 3 / 8, 1 / 4, 1 / 32
_MEMORY_WITHOUT_LIMIT = 1 << 30  # assumed where Redis has no `maxmemory`
_ALLOCATED = 5, 4  # jemalloc rounds the size of a value up by at most a quarter
# Number of bytes that the shortest file counts as. It bounds how many files one long file can evict
# to some thousand: Redis executes nothing else meanwhile.
_LEAST_FILE_BYTES = 64 << 10
_BOUNDED_SHA = hashlib.sha1(BOUNDED_ENTRIES.encode(), usedforsecurity=False).hexdigest()
# Bytes that one command reads. The event loop parses the reply and copies it into the arena.
_RANGE_BYTES = 1 << 20
# Bytes per second below which reading from Redis is given up: it would save no time.
_MIN_READ_RATE = 100 << 20
_MAX_CONNECTIONS = 8
_CONNECT_TIMEOUT_S = 1.0
_WRITE_TIMEOUT_S = 2.0
# Time to read a reply that already lies in the socket, because the event loop itself was late.
_GRACE_S = 0.002
_EVENTS = "hits", "misses", "corrupt", "forged", "errors", "skipped", "writes"

_Result = TypeVar("_Result")


class _Absent(Exception):
    """Raised if there is no entry, or if Redis does not answer, which has been counted already."""


class _Forged(CorruptEmbedding):
    """Raised if an entry was sealed with none of our keys."""


def _without_timeout(url: str) -> tuple[str, float | None]:
    """Splits `socket_timeout` from a URL. Returns the rest of the URL, and the option or None."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    timeout = options.pop("socket_timeout", None)
    if timeout is None:
        return url, None
    return parts._replace(query=urlencode(options)).geturl(), float(timeout)


class RedisCache(Collector):
    """The entries of one Redis, used by one event loop. It must be closed with `close`.

    Args:
        url: `redis://`, `rediss://` or `unix://` URL. Its option `?socket_timeout=` takes
            precedence over `timeout_s`.
        ttl_s: time to live of the entries that are written.
        timeout_s: longest time that reading a header or one range of a body may take.
        password_file: file with the password of the URL's user, which is read at each connection.
            None if the URL has the password.
        seals: keys that seal what is written and open what is read. None if entries have no seals.
        service: prefix of the metric `<service>_redis_events_total`, which exports `counters`.

    Attributes:
        counters: number of events by name.
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
        # The connections have no time limits of their own: `_within` bounds the time of waiting for
        # a connection, connecting and answering together.
        self._redis: Any = Redis.from_pool(
            cast("Any", BlockingConnectionPool).from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                max_connections=_MAX_CONNECTIONS,
                timeout=None,
                socket_timeout=None,
                socket_connect_timeout=None,
                socket_read_size=_RANGE_BYTES,
                **options,
            )
        )
        # A thread sends values, because over TLS the event loop would be blocked for 1 ms per MiB.
        # hiredis does not pack them: it copies them twice and holds the interpreter lock meanwhile.
        self._blocking: Any = cast("Any", BlockingRedis).from_url(
            url,
            protocol=2,
            retry=BlockingRetry(NoBackoff(), 0),
            socket_timeout=_WRITE_TIMEOUT_S,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            command_packer=PythonRespSerializer(6000, _as_bytes),
            **options,
        )

    @property
    def available(self) -> bool:
        """Returns whether Redis answered the last command."""
        return not self._breaker.is_open

    def collect(self) -> Iterable[CounterMetricFamily]:
        text = f"Redis lookups, writes and failures, by event: {', '.join(_EVENTS)}."
        family = CounterMetricFamily(
            f"triptych_{self._service}_redis_events", text, labels=["event"]
        )
        for event, count in self.counters.items():
            family.add_metric([event], count)
        yield family

    async def connect(self) -> None:
        """Connects before the first request. It is called once, at the start of a service."""
        try:
            await _within(_CONNECT_TIMEOUT_S, self._redis.execute_command("PING"))
        except Exception as error:
            log.warning("Redis does not answer; it is skipped until it does: %s", error)

    async def has(self, key: bytes, spec: EmbeddingSpec) -> bool:
        """Returns whether there is an entry, judged by its header alone."""
        return await self._found(self._head(key, spec)) is not None

    async def read(self, key: bytes, spec: EmbeddingSpec, into: memoryview) -> bytes | None:
        """Reads a tensor and checks it.

        Args:
            into: contiguous memory of `spec.size_bytes` bytes.

        Returns:
            The digest of the tensor, which is now in `into` as it was stored; all its values are
            finite. None for a miss, after which the content of `into` is undefined.
        """
        return await self._found(self._read(key, spec, into))

    async def write(
        self, key: bytes, spec: EmbeddingSpec, digest: bytes, data: bytes | memoryview
    ) -> bool:
        """Stores an entry, if possible. It may take seconds, so no request waits for it.

        Returns:
            Whether the entry was stored.
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
        """Returns the bytes that `write_file` has stored, unchecked. None if there is no such file,
        if it has more than `max_bytes`, or if Redis does not answer.
        """
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
        """Stores a client's file within the limit of its tenant, if possible.

        Args:
            name: name of the form `<tenant>/<file>`.
            data: bytes of the file.
            ttl_s: time to live.

        Returns:
            Whether the file was stored. Older files of its tenant, or of the tenant with the most
            bytes, may have been evicted for it.
        """
        value = len(data).to_bytes(_SIZE_BYTES, "little") + data
        try:
            with self._guarded():
                loop = asyncio.get_running_loop()
                writing = loop.run_in_executor(None, self._set_file, name, value, ttl_s)
                await finished([writing])  # also if the caller is cancelled: one file at a time
                return writing.result()
        except _Absent:
            return False

    async def delete_file(self, name: bytes) -> bool | None:
        """Deletes a file that `write_file` has stored.

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
        """Counts a lookup as hit or miss and counts corrupt entries. Returns None for a miss."""
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
        """Reads an entry's header and seal. The seal is not checked yet."""
        head = await self._range(_ENTRY + key, 0, _BODY_OFFSET, self._timeout_s)
        if unpack_header(head[:STORED_HEADER_BYTES], key)[0] != spec:
            raise CorruptEmbedding("an entry has another shape than expected")
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
        """Checks digest, values and seal of an entry, in a thread. That takes 0.04 ms per MiB, and
        0.15 ms per MiB and thread for a seal.

        Returns:
            The digest of the body.
        """
        header, seal = head[:STORED_HEADER_BYTES], head[STORED_HEADER_BYTES:]
        spec, digest = unpack_header(header, key)
        if digest_of(body) != digest or not all_finite(body, spec.dtype):
            raise CorruptEmbedding("a body does not match its digest")
        if self._seals is not None and not self._seals.opens(header, body, seal):
            raise _Forged("an entry is not sealed with a key of ours")
        return digest

    def _set(self, name: bytes, header: bytes, body: bytes | memoryview) -> None:
        """Copies, seals and sends an entry, in a thread and without the interpreter lock."""
        entry = np.empty(_BODY_OFFSET + len(body), np.uint8)
        entry[_BODY_OFFSET:] = np.frombuffer(body, np.uint8)
        seal = self._seals.seal(header, entry[_BODY_OFFSET:].data) if self._seals else NO_SEAL
        entry[:_BODY_OFFSET] = np.frombuffer(header + seal, np.uint8)
        self._blocking.set(name, entry.data, ex=self._ttl_s)

    def _set_file(self, name: bytes, value: bytes, ttl_s: int) -> bool:
        """Evicts older files, sends a file, and returns whether it was stored. Runs in a thread."""
        memory: int = self._blocking.info("memory").get("maxmemory") or _MEMORY_WITHOUT_LIMIT
        if len(value) > memory * _FILE_SHARE:
            return False
        size = (len(value) + len(name)) * _ALLOCATED[0] // _ALLOCATED[1] + OVERHEAD_BYTES
        limits = int(memory * _TENANT_SHARE), int(memory * _FILES_SHARE)
        put = "put", name, ttl_s, max(size, _LEAST_FILE_BYTES), *limits
        if not self._run_bounded(*put):
            return False
        self._blocking.set(_FILE + name, value, ex=ttl_s)
        return bool(self._run_bounded(*put))

    def _run_bounded(self, operation: str, name: bytes, ttl_s: int, *more: int) -> int:
        """Runs the script `bounded_entries` on a file, in a thread."""
        arguments = 1, _FILE, operation, name, ttl_s * 1000, *more
        try:
            return self._blocking.execute_command("EVALSHA", _BOUNDED_SHA, *arguments)
        except NoScriptError:  # the server does not know the script yet
            return self._blocking.execute_command("EVAL", BOUNDED_ENTRIES, *arguments)

    async def _range(self, name: bytes, start: int, stop: int, timeout_s: float) -> bytes:
        """Reads the bytes `[start, stop)` of a key's value."""
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
        """Sends a command within the block, if the breaker lets it through, and counts its failure.

        Raises:
            _Absent: the command was not sent, or has failed.
        """
        if not self._breaker.lets_through(time.monotonic()):
            self.counters["skipped"] += 1
            raise _Absent
        sent_at = time.monotonic()
        try:
            yield
        except Exception as error:
            self.counters["errors"] += 1
            # An AuthenticationError is a ConnectionError, too, and opens the breaker.
            if isinstance(error, ResponseError) and not isinstance(error, RedisConnectionError):
                self._breaker.answered(time.monotonic())
                self._warn(error)  # out of memory, no permission, or the value is not a string
            else:
                self._breaker.failed(sent_at, time.monotonic())
            raise _Absent from error
        self._breaker.answered(time.monotonic())

    def _warn(self, error: Exception) -> None:
        """Logs the first such error. The metric counts all of them."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("an entry in Redis is not used or not written: %s", error)


def _as_bytes(argument: bytes | memoryview | str | int) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


async def _within(timeout_s: float, command: Awaitable[_Result]) -> _Result:
    """Returns a command's reply.

    redis-py closes the connection of a command that is late or cancelled, so that the reply is
    never taken for the reply of another command.

    Raises:
        TimeoutError: the reply is late.
    """
    task = asyncio.ensure_future(command)
    task.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # retrieves the exception
    try:
        for patience_s in (max(0.0, timeout_s), _GRACE_S):
            if not task.done():
                await asyncio.wait({task}, timeout=patience_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
