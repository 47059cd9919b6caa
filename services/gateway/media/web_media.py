"""Fetches images and videos from the web, and protects the private network against server-side
request forgery.

The gateway resolves a host itself, and only once. Every address of the host must be public. The
connection goes to a checked address, while TLS and the Host header keep the name. A redirect is a
new URL under the same rules. Bytes are counted as they arrive, and one deadline covers everything.
asyncio's streams stop reading after a piece of 256 KiB, so that a fast peer does not fill memory
that is not counted.
"""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext

import h11
import httpx2
from aiohappyeyeballs import start_connection  # pyright: ignore[reportUnknownVariableType]

from services.common.errors import InvalidRequest, MediaFetchFailed, Unavailable
from services.gateway.bounds import MEMORY_PER_FETCHED_BYTE
from services.gateway.media.kinds import Kind
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import ANONYMOUS, Tenant, bound_tenant

_MAX_URL_LENGTH = 8192
_MAX_REDIRECTS = 3
# Most addresses of a host that are dialled, the time after which the next address is dialled beside
# those that have not answered, and the time for all of them together.
_MAX_ADDRESSES, _NEXT_ADDRESS_S, _DIAL_S = 4, 0.25, 10.0
_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES, _PIECE_BYTES = 100 << 10, 256 << 10
_MAX_FETCHES_PER_HOST, _MAX_FETCHES_PER_TENANT = 8, 16
# Time after which a body has to arrive at the least rate, which is in bytes per second.
BODY_START_S, _MIN_BODY_RATE = 3.0, 32 << 10
LOOKUP_TIMEOUT_S = 2.0
# A look-up keeps its thread after its caller was cancelled, so look-ups are limited per tenant.
_LOOKUP_THREADS, _MAX_LOOKUPS, _MAX_LOOKUPS_PER_TENANT = 64, 256, 16
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRYABLE = (408, 429)
# Encodings that compress a body. Others do not change it: object stores return `base64` and
# `aws-chunked`, which describe the upload.
_COMPRESSIONS = (b"gzip", b"x-gzip", b"deflate", b"compress", b"br", b"zstd")
_BAD_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\\]")
# Last part of hosts that "end in a number" (WHATWG): 127.1, 0x7f000001, 2130706433, 0177.0.0.1.
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)

PUBLIC_PORTS = (80, 443)
# All refusals have one text, so that they reveal nothing about the network behind the gateway.
_REFUSED_TEXT = "the URL's host is refused: only public hosts on ports 80 and 443 are allowed"

# Networks that are not global by IANA's registries, that belong to a cloud, or whose IPv6 addresses
# embed an IPv4 address.
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
    """Returns whether a literal address is on the public internet. Scoped addresses are not."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    is_refused = any(parsed in block for block in _REFUSED if block.version == parsed.version)
    return parsed.is_global and "%" not in address and not is_refused


class SystemResolver:
    """Resolves host names with the system's resolver.

    The look-ups run in threads of their own, so that names without an answer do not delay the
    look-up of a service. Equal names share a look-up.

    Args:
        timeout_s: time in seconds that a caller waits for a look-up.
    """

    def __init__(self, timeout_s: float = LOOKUP_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, "lookup")
        self._lookups: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        # Unfinished look-ups, by the tenant's `queue_name`: batches do not use up the look-ups of
        # their tenant's requests.
        self._num_lookups: Counter[str] = Counter()

    @property
    def num_lookups(self) -> int:
        """Number of unfinished look-ups."""
        return len(self._lookups)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Returns all addresses of a host.

        Raises:
            OSError: the host has no address, or its name servers do not answer in time.
        """
        lookup = self._lookups.get((host, port))
        if lookup is None:
            tenant = bound_tenant()
            limit = _MAX_LOOKUPS if tenant is ANONYMOUS else _MAX_LOOKUPS_PER_TENANT
            if len(self._lookups) >= _MAX_LOOKUPS or self._num_lookups[tenant.queue_name] >= limit:
                raise OSError("too many names are being looked up")
            self._num_lookups[tenant.queue_name] += 1
            loop = asyncio.get_running_loop()
            lookup = loop.run_in_executor(self._threads, self.look_up, host, port)
            self._lookups[host, port] = lookup
            lookup.add_done_callback(lambda done: self._forget((host, port), tenant, done))
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(lookup)

    def _forget(
        self, name: tuple[str, int], tenant: Tenant, done: "asyncio.Future[list[str]]"
    ) -> None:
        del self._lookups[name]
        self._num_lookups[tenant.queue_name] -= 1
        if not done.cancelled():
            # asyncio reports an exception that is never retrieved. No caller may wait any more.
            done.exception()

    def look_up(self, host: str, port: int) -> list[str]:
        """Returns all addresses of a host. Blocks the calling thread.

        Raises:
            OSError: the host has no address.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        """Ends the threads without waiting for running look-ups."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _FetchLimit:
    """Limits the number of fetches at a time of each host, or of each tenant. Further fetches of a
    name wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Semaphore of each name, and the number of fetches that run or wait.
        self.names: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncGenerator[None]:
        semaphore, count = self.names.get(name) or (asyncio.Semaphore(self._limit), 0)
        self.names[name] = semaphore, count + 1
        try:
            async with semaphore:
                yield
        finally:
            count = self.names[name][1] - 1
            self.names[name] = semaphore, count
            if not count:
                del self.names[name]


class WebMedia:
    """Fetches http: and https: URLs.

    Args:
        allow_private: True if private and loopback addresses and all ports are dialled, too.
        ports: ports that are dialled if `allow_private` is false.
        resolver: resolver of host names. Defaults to the system's.
        tls: settings of TLS connections. Defaults to the system's certificate authorities.
        body_start_s: time in seconds after which a body has to arrive at the least rate.
    """

    def __init__(
        self,
        *,
        allow_private: bool,
        ports: Collection[int] = PUBLIC_PORTS,
        resolver: SystemResolver | None = None,
        tls: ssl.SSLContext | None = None,
        body_start_s: float = BODY_START_S,
    ) -> None:
        self._allow_private = allow_private
        self._ports = ports
        self._body_start_s = body_start_s
        # These limits leave connections to others if a host is slow, or all hosts of a tenant. The
        # batches of a tenant have a limit of their own, because the lines of a batch may have a
        # thousand images, and fetches of a tenant wait in the order of their arrival.
        self._hosts = _FetchLimit(_MAX_FETCHES_PER_HOST)
        self._tenants = _FetchLimit(_MAX_FETCHES_PER_TENANT)
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._resolver = resolver or SystemResolver()
        self._tls = tls or ssl.create_default_context()

    @property
    def num_hosts(self) -> int:
        """Number of hosts from which fetches run or wait."""
        return len(self._hosts.names)

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose fetches run or wait."""
        return len(self._tenants.names)

    async def fetch(self, url: str, max_bytes: int, kind: Kind, slot: Slot) -> bytes:
        """Returns the body behind a URL.

        Args:
            max_bytes: most bytes of the body.
            kind: kind of media that is expected behind the URL.
            slot: admission slot of the request. Its memory counts arriving bytes. Its tenant has a
                limit of fetches at a time, unless the request is one without a key. The lines of
                the tenant's batches have another.

        Raises:
            InvalidRequest: the URL or its host is refused.
            InvalidImage, InvalidVideo: the body is larger than allowed.
            MediaFetchFailed: the origin answers without such media.
            Overloaded: the gateway has no memory left for the body.
            Unavailable: the origin cannot be reached now, or not in time.
        """
        try:
            target = parse_url(url)
            tenant = slot.tenant.queue_name
            tenant_slot = self._tenants.slot(tenant) if tenant else nullcontext()
            async with asyncio.timeout(kind.fetch_s), tenant_slot:
                for _ in range(_MAX_REDIRECTS + 1):
                    if not self._allow_private and target.port not in (None, *self._ports):
                        raise InvalidRequest(_REFUSED_TEXT)
                    async with self._hosts.slot(target.raw_host.decode()):
                        answer = await self._get(target, max_bytes, kind, slot)
                    if isinstance(answer, bytes):
                        return answer
                    target = answer
        except TimeoutError:
            raise Unavailable("the URL did not answer in time") from None
        except (h11.ProtocolError, OSError):
            raise Unavailable("the URL could not be fetched") from None
        raise MediaFetchFailed("the URL redirects too often")

    async def dial(
        self, addresses: Sequence[str], port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a connection to the first of some checked addresses that answers.

        Further addresses are dialled before the first has failed (RFC 8305), because IPv6 addresses
        often do not answer.
        """
        infos = [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                socket.IPPROTO_TCP,
                "",
                (address, port),
            )
            for address in addresses
        ]
        async with asyncio.timeout(_DIAL_S):
            connected = await start_connection(infos, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        return await asyncio.open_connection(sock=connected)

    def close(self) -> None:
        """Ends the resolver's threads."""
        self._resolver.close()

    async def _get(
        self, url: httpx2.URL, max_bytes: int, kind: Kind, slot: Slot
    ) -> bytes | httpx2.URL:
        """Sends one request, and returns the body or the URL of a redirect."""
        client = h11.Connection(h11.CLIENT, _MAX_HEAD_BYTES)
        headers = [
            (b"Host", url.netloc),
            (b"Accept", kind.accept),
            (b"Accept-Encoding", b"identity"),
            (b"User-Agent", b"triptych"),
            (b"Connection", b"close"),
        ]
        request = h11.Request(method="GET", target=url.raw_path, headers=headers)
        async with self._connections, self._connection(url) as (reader, writer):
            writer.write((client.send(request) or b"") + (client.send(h11.EndOfMessage()) or b""))
            await writer.drain()
            while not isinstance(answer := await _next(client, reader), h11.Response):
                pass  # The response is an interim response.
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
                async with asyncio.timeout(self._body_start_s) as deadline:
                    while isinstance(piece := await _next(client, reader), h11.Data):
                        if len(body) + len(piece.data) > max_bytes:
                            raise kind.too_large(max_bytes)
                        slot.memory.add(len(piece.data) * MEMORY_PER_FETCHED_BYTE)
                        body += piece.data
                        deadline.reschedule(start + self._body_start_s + len(body) / _MIN_BODY_RATE)
                if not body:
                    raise MediaFetchFailed("the URL answers with an empty body")
                return bytes(body)
            finally:
                body.clear()  # The traceback of an error may keep this frame for a long time.

    @asynccontextmanager
    async def _connection(
        self, url: httpx2.URL
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, is_secure = url.raw_host.decode(), url.scheme == "https"
        reader, writer = await self._connect(host, url.port or (443 if is_secure else 80))
        try:
            if is_secure:
                await writer.start_tls(self._tls, server_hostname=host)
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Resolves the host, checks its addresses, and connects. There is no second look-up."""
        try:
            addresses = await self._resolver.resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise OSError("the host has no address") from error
        # One private address refuses the host, because image servers have only public addresses.
        if not self._allow_private and not all(map(is_public, addresses)):
            raise InvalidRequest(_REFUSED_TEXT)
        if not addresses:
            raise OSError("the host has no address")
        return await self.dial(addresses[:_MAX_ADDRESSES], port)


async def _next(client: h11.Connection, reader: asyncio.StreamReader) -> object:
    """Returns the next event of a response. Other tasks run between two events, because one piece
    of the body may contain 10,000 events.
    """
    await asyncio.sleep(0)
    while (event := client.next_event()) is h11.NEED_DATA:
        client.receive_data(await reader.read(_PIECE_BYTES))
    return event


def parse_url(url: str) -> httpx2.URL:
    """Parses a URL with the parser whose result is also dialled, so that both read the same host.

    Raises:
        InvalidRequest: the URL is not of the form http(s)://host[:port]/..., or its host is a
            disguised number.
    """
    if len(url) > _MAX_URL_LENGTH or _BAD_CHARACTERS.search(url):
        raise InvalidRequest("the URL is malformed")
    try:
        parsed = httpx2.URL(url.rstrip(" "))  # httpx2 escapes other blanks.
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
        text = location.decode()  # Clients send the bytes of a path unchanged.
    except UnicodeDecodeError:
        text = location.decode("latin-1")
    if _BAD_CHARACTERS.search(text):
        raise InvalidRequest("the URL redirects to a malformed URL")
    try:
        return parse_url(str(url.join(text)))
    except (httpx2.InvalidURL, ValueError):
        raise InvalidRequest("the URL redirects to a malformed URL") from None
