"""Fetches images and videos from the web, and protects the private network (server-side request
forgery).

The gateway itself resolves a host, once; every address must be public; the connection goes to a
checked address, while TLS and the Host header keep the name. Each redirect is a new URL under the
same rules. Bytes are counted as they arrive, and one deadline covers everything. Behind the first
piece of 256 KiB asyncio's streams stop reading, so no fast peer fills memory that is not counted.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import h11
import httpx2

from services.common.errors import InvalidRequest, MediaFetchFailed, Unavailable
from services.gateway.media.images import Hold
from services.gateway.media.kinds import Kind
from services.gateway.tenancy.tenants import ANONYMOUS, bound_tenant

Resolver = Callable[[str, int], Coroutine[Any, Any, list[str]]]
_MAX_URL_LENGTH = 8192
_MAX_REDIRECTS = 3
_MAX_ADDRESSES, _DIAL_S = 4, 10.0  # of a host, that are tried, and for how long together
_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES, _PIECE_BYTES = 100 << 10, 256 << 10
_MAX_FETCHES_PER_HOST, _MAX_FETCHES_PER_TENANT = 8, 16
# A body has this long to begin to arrive at the least rate, in bytes a second.
_BODY_START_S, _MIN_BODY_RATE = 3.0, 32 << 10
LOOKUP_TIMEOUT_S = 2.0
# A look-up keeps its thread after its caller has left; this is a tenant's limit of threads.
_LOOKUP_THREADS, _MAX_LOOKUPS, _MAX_LOOKUPS_PER_TENANT = 64, 256, 16
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRYABLE = (408, 429)
# Other names are none, as `base64` and `aws-chunked`, which stores keep of an upload.
_COMPRESSIONS = (b"gzip", b"x-gzip", b"deflate", b"compress", b"br", b"zstd")
_BAD_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]")
# Hosts that "end in a number" (WHATWG): 127.1, 0x7f000001, 2130706433, 0177.0.0.1.
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)

_PORTS = (80, 443)
# One text: what is refused tells nothing of the network behind the gateway.
_REFUSED_TEXT = "the URL's host is not served: public hosts alone, on ports 80 and 443"

# Not global by IANA's registries, or a cloud's own, or IPv6 forms that embed an IPv4 address.
_REFUSED = [
    ipaddress.ip_network(block)
    for block in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24",
        "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15",
        "168.63.129.16/32",  # Azure's host: DNS, DHCP and agents, in each virtual network
        "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23",
        "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10",
        "fec0::/10", "ff00::/8",
    )
]  # fmt: skip


def is_public(address: str) -> bool:
    """Whether a literal address is on the public internet; one with a scope never is."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    is_refused = any(parsed in block for block in _REFUSED if block.version == parsed.version)
    return parsed.is_global and "%" not in address and not is_refused


class SystemResolver:
    """All addresses of a host, from the system's resolver, in threads of its own: names that get no
    answer must not delay the look-up of a service. Equal names share a look-up.
    """

    def __init__(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "lookup")
        self._lookups: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        self._num_lookups: Counter[str] = Counter()  # unfinished, by tenant

    async def __call__(self, host: str, port: int) -> list[str]:
        """Raises OSError: it has none, or its servers do not answer in time."""
        lookup = self._lookups.get((host, port))
        if lookup is None:
            tenant = bound_tenant()
            limit = _MAX_LOOKUPS if tenant is ANONYMOUS else _MAX_LOOKUPS_PER_TENANT
            if len(self._lookups) >= _MAX_LOOKUPS or self._num_lookups[tenant.name] >= limit:
                raise OSError("too many names are being looked up")
            self._num_lookups[tenant.name] += 1
            loop = asyncio.get_running_loop()
            lookup = loop.run_in_executor(self._threads, _addresses, host, port)
            self._lookups[host, port] = lookup
            lookup.add_done_callback(lambda done: self._forget((host, port), tenant.name, done))
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(lookup)

    def _forget(
        self, name: tuple[str, int], tenant: str, done: "asyncio.Future[list[str]]"
    ) -> None:
        del self._lookups[name]
        self._num_lookups[tenant] -= 1
        if not done.cancelled():
            done.exception()  # retrieved, although no caller may wait any more

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Turns:
    """Bounds the fetches at a time of each name; the others of a name wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: dict[str, tuple[asyncio.Semaphore, int]] = {}  # with those inside or waiting

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[None]:
        turns, count = self._names.get(name) or (asyncio.Semaphore(self._limit), 0)
        self._names[name] = turns, count + 1
        try:
            async with turns:
                yield
        finally:
            count = self._names[name][1] - 1
            self._names[name] = turns, count
            if not count:
                del self._names[name]


class WebMedia:
    """Fetches http: and https: URLs.

    Args:
        allow_private: dial private and loopback addresses and any port, too.
        resolver: of host names; for tests.
    """

    def __init__(self, *, allow_private: bool, resolver: Resolver | None = None) -> None:
        self._allow_private = allow_private
        # One slow host, or one tenant of slow hosts, leaves connections to the others.
        self._hosts = _Turns(_MAX_FETCHES_PER_HOST)
        self._tenants = _Turns(_MAX_FETCHES_PER_TENANT)
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._resolver = SystemResolver()
        self._resolve: Resolver = resolver or self._resolver
        self._dial = asyncio.open_connection
        self._ssl = ssl.create_default_context()

    async def fetch(self, url: str, max_bytes: int, kind: Kind, hold: Hold, tenant: str) -> bytes:
        """The body behind a URL.

        Args:
            hold: counts bytes as they arrive; may refuse.
            tenant: which of several asks; empty: there is only one.

        Raises:
            InvalidRequest: the URL or its host is refused.
            InvalidImage, InvalidVideo: the body is larger than allowed.
            MediaFetchFailed: the origin answers without such media.
            Unavailable: the origin cannot be reached now, or not in time.
        """
        try:
            target = parse_url(url)
            turn = self._tenants.turn(tenant) if tenant else nullcontext()
            async with asyncio.timeout(kind.fetch_s), turn:
                for _ in range(_MAX_REDIRECTS + 1):
                    if not self._allow_private and target.port not in (None, *_PORTS):
                        raise InvalidRequest(_REFUSED_TEXT)
                    async with self._hosts.turn(target.raw_host.decode()):
                        answer = await self._get(target, max_bytes, kind, hold)
                    if isinstance(answer, bytes):
                        return answer
                    target = answer
        except TimeoutError:
            raise Unavailable("the URL did not answer in time") from None
        except (h11.ProtocolError, OSError):
            raise Unavailable("the URL could not be fetched") from None
        raise MediaFetchFailed("the URL redirects too often")

    def close(self) -> None:
        self._resolver.close()

    async def _get(
        self, url: httpx2.URL, max_bytes: int, kind: Kind, hold: Hold
    ) -> bytes | httpx2.URL:
        """One request: the body, or the URL of a redirect."""
        client = h11.Connection(h11.CLIENT, _MAX_HEAD_BYTES)
        headers = [
            (b"Host", url.netloc), (b"Accept", kind.accept),
            (b"Accept-Encoding", b"identity"), (b"User-Agent", b"triptych"),
            (b"Connection", b"close"),
        ]  # fmt: skip
        request = h11.Request(method="GET", target=url.raw_path, headers=headers)
        async with self._connections, self._connection(url) as (reader, writer):
            writer.write((client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b""))
            await writer.drain()
            while not isinstance(answer := await _next(client, reader), h11.Response):
                pass  # an interim response
            found = dict(answer.headers)
            if answer.status_code in _REDIRECTS:
                return _redirect(url, found.get(b"location", b""))
            if answer.status_code != 200:
                may_recover = answer.status_code >= 500 or answer.status_code in _RETRYABLE
                error = Unavailable if may_recover else MediaFetchFailed
                raise error(f"the URL answers with status {answer.status_code}")
            if found.get(b"content-encoding", b"").lower() in _COMPRESSIONS:
                raise MediaFetchFailed("the URL answers with a compressed body")
            body, start = bytearray(), asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(_BODY_START_S) as deadline:
                    while isinstance(piece := await _next(client, reader), h11.Data):
                        if len(body) + len(piece.data) > max_bytes:
                            raise kind.too_large(max_bytes)
                        hold(len(piece.data))
                        body += piece.data
                        deadline.reschedule(start + _BODY_START_S + len(body) / _MIN_BODY_RATE)
                if not body:
                    raise MediaFetchFailed("the URL answers with an empty body")
                return bytes(body)
            finally:
                body.clear()  # an error's traceback may keep the frame for a long time

    @asynccontextmanager
    async def _connection(
        self, url: httpx2.URL
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, is_secure = url.raw_host.decode(), url.scheme == "https"
        reader, writer = await self._connect(host, url.port or (443 if is_secure else 80))
        try:
            if is_secure:
                await writer.start_tls(self._ssl, server_hostname=host)
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Resolves the host, checks its addresses, and dials the first that takes the call. There
        is no second look-up.
        """
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise OSError("the host has no address") from error
        # One private address refuses the host: an image server has public addresses only.
        if not self._allow_private and not all(map(is_public, addresses)):
            raise InvalidRequest(_REFUSED_TEXT)
        dialled = addresses[:_MAX_ADDRESSES]
        for number, address in enumerate(dialled, 1):
            try:
                # A share for each: one that never answers (IPv6, often) leaves time for the others.
                async with asyncio.timeout(_DIAL_S / len(dialled)):
                    return await self._dial(address, port)
            except OSError:
                if number == len(dialled):
                    raise
        raise OSError("the host has no address")


async def _next(client: h11.Connection, reader: asyncio.StreamReader) -> object:
    """The next event of an answer. Others have their turns between two: a piece may hold 10,000."""
    await asyncio.sleep(0)
    while (event := client.next_event()) is h11.NEED_DATA:
        client.receive_data(await reader.read(_PIECE_BYTES))
    return event


def parse_url(url: str) -> httpx2.URL:
    """Parses a URL with the parser that also dials it, so that both read the same host.

    Raises:
        InvalidRequest: not plainly http(s)://host[:port]/..., or the host is a disguised number.
    """
    if len(url) > _MAX_URL_LENGTH or _BAD_CHARACTERS.search(url):
        raise InvalidRequest("the URL is malformed")
    try:
        parsed = httpx2.URL(url.rstrip(" "))  # which escapes other blanks
        host, _ = parsed.raw_host.decode("ascii"), parsed.netloc
    except (httpx2.InvalidURL, UnicodeError, ValueError, TypeError):
        raise InvalidRequest("the URL is malformed") from None
    if parsed.scheme not in ("http", "https") or not host or not parsed.is_absolute_url:
        raise InvalidRequest("the URL must be http://host/... or https://host/...")
    if parsed.userinfo or "@" in url.split("//", 1)[1].split("/", 1)[0]:
        raise InvalidRequest("the URL must not carry a user name")
    if parsed.port is not None and not 0 < parsed.port < 1 << 16:
        raise InvalidRequest("the URL's port is out of range")
    if ":" not in host and not _plain_host(host):
        raise InvalidRequest(_REFUSED_TEXT)
    return parsed


def _plain_host(host: str) -> bool:
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", host) or ".." in host:
        return False
    if _NUMBER.fullmatch(host.rsplit(".", 1)[-1]):
        try:
            return str(ipaddress.IPv4Address(host)) == host
        except ValueError:
            return False
    return True


def _redirect(url: httpx2.URL, location: bytes) -> httpx2.URL:
    if not location:
        raise MediaFetchFailed("the URL redirects without a location")
    try:
        text = location.decode()  # clients send on the bytes that a path is written in
    except UnicodeDecodeError:
        text = location.decode("latin-1")
    if _BAD_CHARACTERS.search(text):
        raise InvalidRequest("the URL redirects to a malformed URL")
    try:
        return parse_url(str(url.join(text)))
    except (httpx2.InvalidURL, ValueError):
        raise InvalidRequest("the URL redirects to a malformed URL") from None
