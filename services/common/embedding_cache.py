"""Embeddings in Redis. The encoder writes them, the decoder reads them.

Redis is an accelerator: no method raises because of it, and the delay it may cause is bounded.
A header or a lock takes at most `timeout_s`; the first command that fails or is late opens a
breaker, after which Redis is skipped at no cost until a background ping succeeds. Nothing read is
trusted: what does not match its header, its key, its digest or its seal is counted as a miss,
logged once, and deleted by a service that may write.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError
from redis.retry import Retry as BlockingRetry

from services.common.embedding import (
    STORED_HEADER_BYTES,
    CorruptEmbedding,
    EmbeddingSpec,
    all_finite,
    pack_header,
    unpack_header,
)
from services.common.embedding import digest as digest_of
from services.common.seals import NO_SEAL, SEAL_BYTES, SealKey, SealKeys
from services.common.threads import finished

log = logging.getLogger(__name__)

# A value's largest size (proto-max-bulk-len's default).
MAX_VALUE_BYTES = 512 << 20
# An entry: its header, its seal, the tensor.
_BODY_OFFSET = STORED_HEADER_BYTES + SEAL_BYTES
_ENTRY = b"triptych:embedding:"
_LOCK = b"triptych:lock:"
_RANGE_BYTES = 1 << 20
# Slower than this, Redis is no accelerator: bytes per second of a body.
_MIN_READ_RATE = 100 << 20
_WRITE_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 1.0
# Commands under way at once, which is connections: a burst shares them rather than opening more.
_MAX_SMALL = 8
_MAX_READS = 4
_MAX_WRITES = 2
_FIRST_PROBE_S = 0.05
_LAST_PROBE_S = 1.0

_Reply = TypeVar("_Reply")


@dataclass(slots=True)
class CacheCounters:
    """What happened since the start; a service exports them as metrics.

    Attributes:
        hits: headers found.
        misses: headers not found, and bodies that were evicted, late or corrupt.
        corrupt: entries that were not what they were said to be.
        forged: entries without a seal of ours.
        errors: commands that failed or timed out.
        skipped: commands not sent, because the breaker was open or too many were under way.
        writes: entries stored.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    forged: int = 0
    errors: int = 0
    skipped: int = 0
    writes: int = 0


class CacheCollector(Collector):
    """Exports a cache's counters as `<service>_redis_events_total{event=...}`."""

    def __init__(self, service: str, counters: CacheCounters) -> None:
        self._name = f"{service}_redis_events"
        self._counters = counters

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(
            self._name,
            "Redis lookups, writes and failures, by event: hits, misses, corrupt, forged, errors, "
            "skipped, writes.",
            labels=["event"],
        )
        for event in CacheCounters.__slots__:
            family.add_metric([event], getattr(self._counters, event))
        yield family


class _Failed(Exception):
    """The command has no answer; it is counted already."""


class _Forged(CorruptEmbedding):
    """None of our keys has sealed the entry, or its body is another one's."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """The header of an entry in Redis.

    Attributes:
        spec: as stored: the caller compares it with what it expects.
        digest: of the tensor.
        seal: of the entry.
        key: opened the seal; None: entries are not sealed.
    """

    spec: EmbeddingSpec
    digest: bytes
    seal: bytes = NO_SEAL
    key: SealKey | None = None

    def check_body(self, data: memoryview) -> None:
        """Takes 0.04 ms per MiB, and 0.15 ms per MiB and thread to check a seal.

        Raises:
            CorruptEmbedding: `data` does not begin with the tensor that was stored, all finite.
        """
        body = data[: self.spec.size_bytes]
        if digest_of(body) != self.digest or not all_finite(body, self.spec.dtype):
            raise CorruptEmbedding("a body does not match its digest")
        if self.key is not None and not self.key.matches(body, self.seal):
            raise _Forged("a body is not the one that was sealed")


class RedisCache:
    """The entries of one Redis, for one event loop. Close it with `close`.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        ttl_s: how long an entry lives.
        timeout_s: the most that a header, a lock or one range of a body may take.
        seals: seal what is written and open what is read; None: entries are not sealed.
        read_only: delete nothing, not even what is corrupt: this service's user may not.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int,
        timeout_s: float,
        seals: SealKeys | None = None,
        read_only: bool = False,
    ) -> None:
        self.counters = CacheCounters()
        self._seals = seals
        self._read_only = read_only
        self._has_warned = False
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        # Without a socket timeout of its own: `_bounded` bounds connecting and answering together.
        self._redis = _client(Redis, Retry, url, (None, None), socket_read_size=_RANGE_BYTES)
        # Sending a large value would block the event loop: a thread does it, without the
        # interpreter lock.
        timeouts_s = (_CONNECT_TIMEOUT_S, _WRITE_TIMEOUT_S)
        self._blocking = _client(BlockingRedis, BlockingRetry, url, timeouts_s)
        self._writers = ThreadPoolExecutor(_MAX_WRITES, "redis-write")
        self._small = asyncio.Semaphore(_MAX_SMALL)
        self._reads = asyncio.Semaphore(_MAX_READS)
        self._probe: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[Any]] = set()

    @property
    def available(self) -> bool:
        """Whether commands are sent at all: the breaker is closed."""
        return self._probe is None

    async def header(self, key: bytes) -> StoredEntry | None:
        """The header of a stored entry; None: not there, not an entry, or Redis is away."""
        try:
            data = await self._command(
                self._timeout_s, "GETRANGE", _ENTRY + key, 0, _BODY_OFFSET - 1
            )
            found = self._opened(data, key) if data else None
        except _Failed:
            found = None
        except NoPermissionError as error:
            self.counters.errors += 1
            self._warn(error)
            found = None
        except (CorruptEmbedding, ResponseError, TypeError) as error:
            await self._refuse(key, error)
            found = None
        if found is None:
            self.counters.misses += 1
        else:
            self.counters.hits += 1
        return found

    async def read(self, key: bytes, stored: StoredEntry, into: memoryview) -> bool:
        """Reads a body into `into` (`stored.spec.size_bytes` bytes, contiguous) and checks it.

        Returns:
            Whether `into` now holds exactly what was stored, all finite. If not, it holds anything.
        """
        size_bytes = stored.spec.size_bytes
        deadline = _now() + self._timeout_s + size_bytes / _MIN_READ_RATE
        try:
            async with self._permit(self._reads, deadline):
                whole = await self._read_ranges(key, into[:size_bytes], deadline)
            if whole:
                await asyncio.to_thread(stored.check_body, into)
        except _Failed:
            whole = False
        except (CorruptEmbedding, ResponseError, TypeError) as error:
            await self._refuse(key, error)
            whole = False
        if not whole:
            self.counters.misses += 1
        return whole

    async def write(
        self, key: bytes, spec: EmbeddingSpec, digest: bytes, data: bytes | memoryview
    ) -> bool:
        """Stores an entry, best effort; not on a request's path (it may take seconds).

        Returns:
            Whether it was stored.
        """
        if _BODY_OFFSET + spec.size_bytes > MAX_VALUE_BYTES:
            return False
        sealing = None if self._seals is None else self._seals.newest

        def send() -> Awaitable[None]:
            arguments = _ENTRY + key, pack_header(key, spec, digest), data, sealing
            loop = asyncio.get_running_loop()
            return finished([loop.run_in_executor(self._writers, self._set, *arguments)])

        try:
            await self._guarded(send)
        except _Failed:
            return False
        except ResponseError:  # out of memory, read-only, no permission
            self.counters.errors += 1
            return False
        self.counters.writes += 1
        return True

    async def try_lock(self, key: bytes, owner: bytes, ttl_s: float) -> bool:
        """Takes the lock on computing an entry, among all pods.

        Returns:
            False: another owner has the lock. True: it is ours, or Redis does not answer; then two
            pods may do the same work and store the same result.
        """
        try:
            answer = await self._command(
                self._timeout_s, "SET", _LOCK + key, owner, "NX", "PX", max(1, int(ttl_s * 1e3))
            )
        except _Failed:
            return True
        except ResponseError:
            self.counters.errors += 1
            return True
        return answer is not None

    async def unlock(self, key: bytes, owner: bytes) -> None:
        """Gives the lock back if it is still `owner`'s.

        GET and DEL are two commands, so that the server needs no scripting: a lock that expires
        between them costs another pod one redundant encode.
        """
        with contextlib.suppress(_Failed, ResponseError):
            if await self._command(self._timeout_s, "GET", _LOCK + key) == owner:
                await self._command(self._timeout_s, "DEL", _LOCK + key)

    async def delete(self, key: bytes) -> None:
        """Deletes an entry, best effort."""
        with contextlib.suppress(_Failed, ResponseError):
            await self._command(self._timeout_s, "UNLINK", _ENTRY + key)

    async def connect(self) -> None:
        """Connects before the first request; called once, at a service's start."""
        if not await self.ping(_CONNECT_TIMEOUT_S):
            log.warning("Redis does not answer; it is skipped until it does")

    async def ping(self, timeout_s: float | None = None) -> bool:
        """Whether Redis answers now; never opens or closes the breaker."""
        try:
            await self._bounded(("PING",), timeout_s or self._timeout_s)
        except Exception:
            return False
        return True

    async def close(self) -> None:
        """Ends the background work and the connections."""
        tasks = [*self._abandoned, *([self._probe] if self._probe else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._writers.shutdown)
        self._blocking.close()
        await self._redis.aclose()

    def _set(
        self, name: bytes, header: bytes, body: bytes | memoryview, sealing: SealKey | None
    ) -> None:
        """Seals and SETs, in a thread and without a copy of the body; raises redis-py's errors.
        Each MiB may take `_WRITE_TIMEOUT_S`.
        """
        view = memoryview(body)
        header += sealing.seal(header, view) if sealing else NO_SEAL
        size = len(header) + len(view)
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
        ttl = b"%d" % self._ttl_s
        connection = self._blocking.connection_pool.get_connection()
        try:
            connection.send_packed_command(
                [
                    begin + header,
                    *(view[at : at + _RANGE_BYTES] for at in range(0, len(view), _RANGE_BYTES)),
                    b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl),
                ]
            )
            connection.read_response()
        finally:
            # One that failed has been disconnected.
            self._blocking.connection_pool.release(connection)

    async def _read_ranges(self, key: bytes, into: memoryview, deadline: float) -> bool:
        """False: the entry was evicted. One copy: from the reply's bytes into `into`."""
        per_range_s = self._timeout_s + _RANGE_BYTES / _MIN_READ_RATE
        for start in range(0, len(into), _RANGE_BYTES):
            stop = min(start + _RANGE_BYTES, len(into))
            left_s = min(per_range_s, deadline - _now())
            first = _BODY_OFFSET + start
            data = await self._send(
                left_s, "GETRANGE", _ENTRY + key, first, first + stop - start - 1
            )
            if not data:
                return False
            if len(data) != stop - start:
                raise CorruptEmbedding("the body is shorter than its header says")
            into[start:stop] = data
        return True

    def _opened(self, data: bytes, key: bytes) -> StoredEntry:
        """Raises CorruptEmbedding: not an entry of this key, or not sealed by us."""
        header, seal = data[:STORED_HEADER_BYTES], data[STORED_HEADER_BYTES:]
        spec, digest = unpack_header(header, key)
        if len(seal) != SEAL_BYTES:
            raise CorruptEmbedding("truncated seal")
        if self._seals is None:
            return StoredEntry(spec, digest)
        opening = self._seals.find(header, seal)
        if opening is None:
            raise _Forged("not sealed with a key of ours")
        return StoredEntry(spec, digest, seal, opening)

    async def _refuse(self, key: bytes, error: Exception) -> None:
        """Counts an entry that is not one of ours, and deletes it if this service may."""
        if isinstance(error, _Forged):
            self.counters.forged += 1
        else:
            self.counters.corrupt += 1
        self._warn(error)
        if not self._read_only:
            await self.delete(key)

    def _warn(self, error: Exception) -> None:
        """Once: the metric counts all."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("an entry in Redis is not used: %s", error)

    async def _command(self, timeout_s: float, *command: Any) -> Any:  # noqa: ANN401 - a reply
        """Sends one small command once a permit is free; raises as `_send`."""
        deadline = _now() + timeout_s
        async with self._permit(self._small, deadline):
            return await self._send(deadline - _now(), *command)

    @contextlib.asynccontextmanager
    async def _permit(self, permits: asyncio.Semaphore, deadline: float) -> AsyncGenerator[None]:
        """Raises `_Failed` if no permit is free in time; that does not open the breaker."""
        if not self.available:
            self.counters.skipped += 1
            raise _Failed
        try:
            async with asyncio.timeout_at(deadline):
                await permits.acquire()
        except TimeoutError as error:
            self.counters.skipped += 1
            raise _Failed from error
        try:
            yield
        finally:
            permits.release()

    async def _send(self, timeout_s: float, *command: Any) -> Any:  # noqa: ANN401 - a reply
        """Sends one command; raises as `_guarded`."""
        return await self._guarded(lambda: self._bounded(command, timeout_s))

    async def _guarded(self, send: Callable[[], Awaitable[_Reply]]) -> _Reply:
        """Sends something while the breaker is closed.

        Raises:
            _Failed: no answer; the breaker is open now.
            ResponseError: Redis answered with an error to this command.
        """
        if not self.available:
            self.counters.skipped += 1
            raise _Failed
        try:
            return await send()
        except Exception as error:
            # An authentication error is a ConnectionError, too, and opens the breaker.
            if isinstance(error, ResponseError) and not isinstance(error, RedisConnectionError):
                raise
            self.counters.errors += 1
            self._open_breaker()
            raise _Failed from error

    async def _bounded(self, command: tuple[Any, ...], timeout_s: float) -> Any:  # noqa: ANN401
        """Runs one command; a late or cancelled one loses its connection with it (redis-py's own
        rule), so that its reply can never be taken for another's.
        """
        sent: Coroutine[Any, Any, Any] = self._redis.execute_command(*command)
        task = asyncio.create_task(sent)
        self._abandoned.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait({task}, timeout=max(timeout_s, 0.0))
            # If this event loop was late, the reply is in the socket's buffer: let it be read.
            turns = 0
            while not task.done() and turns < 10:
                turns += 1
                await asyncio.sleep(0)
            if not task.done():
                raise TimeoutError
            return task.result()
        finally:
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: asyncio would report an abandoned command's error

    def _open_breaker(self) -> None:
        if self._probe is None:
            self._probe = asyncio.create_task(self._close_when_answered())

    async def _close_when_answered(self) -> None:
        pause_s = _FIRST_PROBE_S
        while True:
            await asyncio.sleep(pause_s)
            if await self.ping():
                break
            pause_s = min(2 * pause_s, _LAST_PROBE_S)
        self._probe = None


def _client(
    kind: Any,  # noqa: ANN401 - redis-py's types are partly unknown
    retry: Any,  # noqa: ANN401
    url: str,
    timeouts_s: tuple[float | None, float | None],
    **options: int,
) -> Any:  # noqa: ANN401
    """redis-py's client of that kind, without retries; timeouts to connect and to answer."""
    connect_s, answer_s = timeouts_s
    return kind.from_url(
        url,
        protocol=2,
        retry=retry(NoBackoff(), 0),
        socket_connect_timeout=connect_s,
        socket_timeout=answer_s,
        **options,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


__all__ = ["MAX_VALUE_BYTES", "CacheCollector", "CacheCounters", "RedisCache", "StoredEntry"]
