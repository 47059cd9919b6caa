"""Images from the web: checked hosts, bounded bytes, and an error per cause."""

import asyncio
import contextlib
import socket
import ssl
from dataclasses import replace

import pytest
import uvloop

from services.common.errors import (
    InvalidImage,
    InvalidRequest,
    MediaFetchFailed,
    Overloaded,
    TriptychError,
    Unavailable,
)
from services.gateway.bounds import MEMORY_PER_FETCHED_BYTE
from services.gateway.media import web_media
from services.gateway.media.kinds import IMAGE
from services.gateway.media.web_media import WebMedia, is_public, parse_url
from services.gateway.tenancy.request_memory import MemoryBudget, RequestMemory
from tests.noise import PATIENCE_S
from tests.slots import slot_of


@contextlib.asynccontextmanager
async def origin(*answers: bytes, pause_s: float = 0.0, tls: ssl.SSLContext | None = None):
    """An HTTP server with fixed answers; keeps the requests it got."""
    requests: list[bytes] = []

    handlers: set[asyncio.Task] = set()

    async def serve(reader, writer):
        handlers.add(asyncio.current_task())
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError),
        ):
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            answer = answers[min(len(requests), len(answers)) - 1]
            step = len(answer) if not pause_s else 1
            for start in range(0, len(answer), step):
                writer.write(answer[start : start + step])
                await writer.drain()
                await asyncio.sleep(pause_s)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await asyncio.sleep(0)


def ok(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join(
        (b"HTTP/1.1 200 OK", *headers, b"Content-Length: %d" % len(body), b"", body)
    )


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


class Web(WebMedia):
    def __init__(self, max_bytes=1000, timeout_s=PATIENCE_S, allow_private=True, **options):
        super().__init__(allow_private=allow_private, **options)
        self.image = max_bytes, replace(IMAGE, fetch_s=timeout_s)

    async def fetch(self, url, memory=None, tenant="", is_background=False):
        slot = slot_of(tenant, memory, is_background=is_background)
        return await super().fetch(url, *self.image, slot)


class ToLoopback(Web):
    """Dials 127.0.0.1 in place of public addresses."""

    async def dial(self, addresses, port):
        return await super().dial(["127.0.0.1"], port)


class Names(web_media.SystemResolver):
    """Resolves every name to the same addresses.

    Attributes:
        looked_up: names that were resolved.
    """

    def __init__(self, addresses):
        super().__init__()
        self.addresses, self.looked_up = addresses, []

    async def resolve(self, host, port):
        self.looked_up.append(host)
        return list(self.addresses)


@contextlib.asynccontextmanager
async def web(addresses=("127.0.0.1",), **options):
    names = Names(addresses)
    kind = options.pop("kind", Web)
    with contextlib.closing(kind(**{"resolver": names, **options})) as media:
        yield media, names.looked_up


# Addresses and hosts

PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "168.63.129.16", "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.0.1", "198.18.0.1", "::1",
    "::", "fc00::1", "fd12::1", "fe80::1", "fe80::1%eth0", "::ffff:127.0.0.1", "::ffff:8.8.8.8",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0::1", "ff02::1",
    "fec0::1", "2001:db8::1", "2606:4700::1111%eth0", "nonsense", "",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_address_is_not_public(address):
    assert not is_public(address)


def test_public_addresses_are():
    assert all(map(is_public, ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450::1")))


BAD_URLS = [
    "http://", "http:///x", "http:/x", "http:x", "http://user@host/", "http://user:pw@host/",
    "http://@host/", "http://good\\@127.0.0.1/", "http://host\\x/", "http://ho st/", "http://h\tx/",
    "http://h\n/", " http://host/", "http://host:99999/", "http://host:x/",
    "http://host:0/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/",
    "http://0177.0.0.1/", "http://127.1/", "http://127.0.0.1./", "http://host./", "http://h..x/",
    "http://1.2.3.4.5/", "http://999.1.1.1/", "http://[::1/", "http://[zz]/", "http://-/",
    "http://%31%32%37.0.0.1/", "http://host%00/", "http://a,b/", "http://host/" + "x" * 9000,
    "http://127.0.0.0x1/",
]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_odd_url_is_refused(url):
    with pytest.raises(InvalidRequest):
        parse_url(url)


def test_plain_urls_are_accepted():
    for url in (
        "http://example.com", "https://a-b.example.com:8443/p?q=1#f", "http://93.184.216.34/x",
        "http://[2606:4700::1111]/x", "http://bücher.example/x", "HTTP://EXAMPLE.COM/",
        "http://example.com/a@b", "http://example.com/a b.png?c d",
    ):  # fmt: skip
        assert parse_url(url)


@pytest.mark.parametrize("address", PRIVATE)
async def test_private_hosts_are_never_dialled(address):
    async with origin(ok(b"secret")) as (port, requests):
        async with web([address], allow_private=False, ports=(port,)) as (media, looked_up):
            with pytest.raises(InvalidRequest):
                await media.fetch(f"http://innocent.example:{port}/")
            assert looked_up == ["innocent.example"]
        assert not requests


async def test_one_private_address_among_public_ones_refuses_the_host():
    async with web(["93.184.216.34", "127.0.0.1"], allow_private=False) as (media, _):
        with pytest.raises(InvalidRequest):
            await media.fetch("http://mixed.example/")


@pytest.mark.parametrize("port", [22, 25, 81, 6379, 8000, 8080, 8443, 65535])
async def test_other_ports_are_refused_before_a_look_up(port):
    async with web(["93.184.216.34"], allow_private=False) as (media, looked_up):
        for scheme in ("http", "https"):
            with pytest.raises(InvalidRequest):
                await media.fetch(f"{scheme}://example.com:{port}/")
        assert not looked_up


async def test_redirects_to_other_ports_are_refused():
    async with (
        origin(redirect("http://example.com:6379/")) as (port, _),
        web(["8.8.8.8"], kind=ToLoopback, allow_private=False, ports=(port,)) as (media, looked_up),
    ):
        with pytest.raises(InvalidRequest):
            await media.fetch(f"http://images.example:{port}/")
        assert looked_up == ["images.example"]


async def test_all_refused_hosts_get_one_text():
    """Which names and ports are of our network is not to be learnt from refusals."""
    said = set()
    for url, addresses in (
        ("http://internal.example/", ["10.0.0.1"]), ("http://wire.example/", ["168.63.129.16"]),
        ("http://example.com:6379/", ["93.184.216.34"]), ("http://127.1/", ["127.0.0.1"]),
        ("http://internal.example:6379/", ["10.0.0.1"]), ("http://[::1]/", ["::1"]),
    ):  # fmt: skip
        async with web(addresses, allow_private=False) as (media, _):
            with pytest.raises(InvalidRequest) as refusal:
                await media.fetch(url)
            said.add(refusal.value.message)
    assert len(said) == 1


async def test_default_resolver_refuses_loopback_by_any_name():
    async with origin(ok(b"secret")) as (port, requests):
        for host in ("localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"):
            media = Web(allow_private=False, ports=(port,))
            with contextlib.closing(media), pytest.raises((InvalidRequest, Unavailable)):
                await media.fetch(f"http://{host}:{port}/")
        assert not requests


# Fetching


async def test_body_is_fetched_and_the_host_header_kept():
    async with origin(ok(b"abc")) as (port, requests), web() as (media, looked_up):
        assert await media.fetch(f"http://images.example:{port}/a?b=c") == b"abc"
        assert looked_up == ["images.example"]
        assert requests[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
        assert f"Host: images.example:{port}".encode() in requests[0]
        assert b"identity" in requests[0]


async def test_redirects_are_followed_a_few_times():
    hops = (redirect("/b"), redirect("c", 307), ok(b"x"))
    async with origin(*hops) as (port, requests), web() as (media, _):
        assert await media.fetch(f"http://h.example:{port}/a/") == b"x"
        assert [r.split()[1] for r in requests] == [b"/a/", b"/b", b"/c"]
    async with origin(redirect("/again")) as (port, requests), web() as (media, _):
        with pytest.raises(MediaFetchFailed):
            await media.fetch(f"http://h.example:{port}/")
        assert len(requests) == 4


async def test_blanks_and_utf_8_in_urls_and_redirects_are_escaped():
    async with origin(redirect("/dir/bücher 2.png"), ok(b"x")) as (port, requests), web() as (m, _):
        assert await m.fetch(f"http://images.example:{port}/bild ü.png ") == b"x"
        paths = [request.split()[1] for request in requests]
        assert paths == [b"/bild%20%C3%BC.png", b"/dir/b%C3%BCcher%202.png"]


async def test_each_redirect_is_checked():
    """The first host is public, the redirect's is not."""
    hosts = {"outer.example": ["93.184.216.34"], "inner.example": ["10.0.0.1"]}

    class Hosts(web_media.SystemResolver):
        async def resolve(self, host, port):
            return hosts.get(host, [host])

    class Recording(Web):
        async def dial(self, addresses, _):
            dialled.extend(addresses)
            return await super().dial(["127.0.0.1"], port)

    for target in ("inner.example", "10.0.0.1", "[::ffff:10.0.0.1]"):
        async with origin(redirect(f"http://{target}/")) as (port, requests):
            media, dialled = Recording(allow_private=False, resolver=Hosts()), []
            with pytest.raises(InvalidRequest):
                await media.fetch("http://outer.example/")
            assert dialled == ["93.184.216.34"]
            assert len(requests) == 1
            media.close()


async def test_nothing_of_one_origin_is_carried_to_another(monkeypatch, tmp_path):
    """Neither cookies, nor what the environment says about proxies and passwords."""
    (tmp_path / ".netrc").write_text("default login me password secret\n")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    cookie = b"Set-Cookie: a=b; Domain=example"
    first = redirect("/next").replace(b"\r\n\r\n", b"\r\n%b\r\n\r\n" % cookie)
    async with origin(first, ok(b"x", cookie)) as (port, requests), web() as (media, _):
        for _ in range(2):
            assert await media.fetch(f"http://h.example:{port}/") == b"x"
        names = {line.split(b":")[0] for r in requests for line in r.split(b"\r\n")[1:] if line}
    assert names == {b"Host", b"Accept", b"Accept-Encoding", b"User-Agent", b"Connection"}


async def test_paths_and_queries_are_sent_as_they_were_written():
    """Their bytes may have been signed."""
    written = "/a%2Fb%41%7e(x)//c?x=%2F%3A%3D%2B+%20%41&sig=a%2fb=="
    async with origin(redirect(written), ok(b"x")) as (port, requests), web() as (media, _):
        assert await media.fetch(f"http://h.example:{port}{written}#f") == b"x"
        assert [r.split()[1].decode() for r in requests] == [written, written]


async def test_second_look_up_cannot_rebind():
    """The checked address is the dialled one."""
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])

    class Rebinding(web_media.SystemResolver):
        async def resolve(self, host, port):
            return next(answers)

    class Refused(Web):
        async def dial(self, addresses, port):
            dialled.extend(addresses)
            raise OSError

    media, dialled = Refused(allow_private=False, resolver=Rebinding()), []
    with pytest.raises(Unavailable):
        await media.fetch("http://rebind.example/")
    assert dialled == ["93.184.216.34"]
    media.close()


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://x/",
        "http://u@h/",
        "http://127.1/",
        "gopher://x",
        "\\\\x",
        "http:////[",
    ],
)
async def test_redirect_to_an_odd_url_is_refused(location):
    async with origin(redirect(location)) as (port, _), web() as (media, _):
        with pytest.raises(InvalidRequest):
            await media.fetch(f"http://h.example:{port}/")


STATUSES = {
    404: MediaFetchFailed, 403: MediaFetchFailed, 410: MediaFetchFailed, 204: MediaFetchFailed,
    300: MediaFetchFailed, 408: Unavailable, 429: Unavailable, 500: Unavailable, 503: Unavailable,
}  # fmt: skip


@pytest.mark.parametrize(("status", "kind"), STATUSES.items())
async def test_origin_status_decides_the_error(status, kind):
    answer = f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode()
    async with origin(answer) as (port, _), web() as (media, _):
        with pytest.raises(TriptychError) as failed:
            await media.fetch(f"http://h.example:{port}/")
        assert type(failed.value) is kind


async def test_bytes_are_counted_whatever_the_header_says():
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"64\r\n%s\r\n" % (b"x" * 100) * 20
    )
    for answer in (ok(b"x" * 1001), b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, chunked):
        async with origin(answer) as (port, _), web() as (media, _):
            with pytest.raises(InvalidImage):
                await media.fetch(f"http://h.example:{port}/")


async def test_compressed_and_empty_bodies_are_refused():
    for answer in (ok(b"x", b"Content-Encoding: gzip"), ok(b"")):
        async with origin(answer) as (port, _), web() as (media, _):
            with pytest.raises(MediaFetchFailed):
                await media.fetch(f"http://h.example:{port}/")


@pytest.mark.parametrize("name", [b"base64", b"utf-8", b"aws-chunked", b"none", b"Identity", b""])
async def test_an_encoding_that_is_no_compression_is_passed_over(name):
    """Stores answer with what an upload has declared."""
    async with origin(ok(b"x", b"Content-Encoding: " + name)) as (port, _), web() as (media, _):
        assert await media.fetch(f"http://h.example:{port}/") == b"x"


async def test_slow_drip_ends_at_the_deadline():
    slow = origin(ok(b"x" * 900), pause_s=0.1)  # 90 s
    async with slow as (port, _), web(timeout_s=0.2) as (media, _):
        start = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):
            await media.fetch(f"http://h.example:{port}/")
        assert asyncio.get_running_loop().time() - start < PATIENCE_S


async def test_a_host_is_reached_by_another_of_its_addresses():
    async with origin(ok(b"x")) as (port, _), web(("127.0.0.2", "127.0.0.1")) as (media, _):
        assert await media.fetch(f"http://images.example:{port}/") == b"x"


async def test_an_address_that_never_answers_costs_little_time(monkeypatch):
    monkeypatch.setattr(web_media, "_DIAL_S", PATIENCE_S)  # for all addresses
    async with origin(ok(b"x")) as (port, _), web(("127.0.0.2", "127.0.0.1")) as (media, _):
        with contextlib.ExitStack() as sockets, socket.socket() as full:
            full.bind(("127.0.0.2", port))
            full.listen(0)
            for _ in range(4):  # connections that fill its queue, so that it answers no more
                waiting = sockets.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.2", port))
            async with asyncio.timeout(PATIENCE_S / 2):
                assert await media.fetch(f"http://images.example:{port}/") == b"x"


@pytest.mark.parametrize("host", ["a" * 300, "xn--" + "9" * 300, "xn--a." * 50 + "example"])
async def test_a_name_that_is_too_long_has_no_address(host):
    with contextlib.closing(Web()) as media, pytest.raises(Unavailable):
        await media.fetch(f"http://{host}/")


async def test_a_refused_connection_is_retryable():
    async with origin(b"") as (port, _):
        pass
    async with web() as (media, _):
        with pytest.raises(Unavailable):
            await media.fetch(f"http://h.example:{port}/")
    async with origin(b"garbage\r\n\r\n") as (port, _), web() as (media, _):
        with pytest.raises(Unavailable):
            await media.fetch(f"http://h.example:{port}/")
    async with web([]) as (media, _):
        with pytest.raises(Unavailable):
            await media.fetch("http://h.example/")


# Time and memory


async def test_bytes_are_counted_while_they_arrive():
    memory = RequestMemory(MemoryBudget(5000))
    async with origin(ok(b"x" * 20_000)) as (port, _), web(max_bytes=1 << 20) as (media, _):
        with pytest.raises(Overloaded):
            await media.fetch(f"http://h.example:{port}/", memory)


async def test_a_body_that_drips_is_given_up():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nx"

    async def drip(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for byte in [head] + [b"x"] * 100_000:
                writer.write(byte)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = {"max_bytes": 1 << 20, "timeout_s": PATIENCE_S, "body_start_s": 0.1}
    async with web(**options) as (media, _):
        with pytest.raises(Unavailable, match="in time"):
            await media.fetch(f"http://h.example:{port}/")
    await ended.wait()
    server.close()


async def test_a_slow_host_leaves_connections_to_others():
    running = most = 0

    async def silent(reader, writer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(1 << 20)
        running -= 1
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with origin(ok(b"abc")) as (other, _), web(timeout_s=PATIENCE_S) as (media, _):
        fetches = [
            asyncio.create_task(media.fetch(f"http://slow.example:{port}/{n}")) for n in range(100)
        ]
        assert await media.fetch(f"http://quick.example:{other}/") == b"abc"
        while most < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await media.fetch(f"http://quick.example:{other}/") == b"abc"
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        assert not media.num_hosts
        while running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    server.close()
    assert most == 8


@pytest.mark.parametrize(
    ("slow_tenant", "is_background", "quick_tenant"),
    [("slow", False, "quick"), ("same", True, "same"), ("", True, "")],
    ids=["another tenant", "a batch of the same tenant", "a batch without a key"],
)
async def test_a_tenant_of_slow_hosts_leaves_connections_to_others(
    slow_tenant, is_background, quick_tenant
):
    running: set[asyncio.Task[None]] = set()

    async def silent(reader, writer):
        running.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(1 << 20)
        running.discard(asyncio.current_task())
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with origin(ok(b"abc")) as (other, _), web(timeout_s=PATIENCE_S) as (media, _):

        def slow(number: int) -> asyncio.Task[bytes]:
            url = f"http://slow{number}.example:{port}/"
            fetch = media.fetch(url, tenant=slow_tenant, is_background=is_background)
            return asyncio.create_task(fetch)

        fetches = [slow(number) for number in range(200)]
        while len(running) < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await media.fetch(f"http://quick.example:{other}/", tenant=quick_tenant) == b"abc"
        assert len(running) == 16
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        assert not media.num_tenants
        while running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    server.close()


def test_a_fast_origin_fills_no_memory_that_is_not_counted():
    """uvloop takes up to 8 MiB from a socket at a time, if it may."""
    body = bytes(64 << 20)

    async def serve(reader, writer):
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
            await writer.drain()

    async def most() -> tuple[int, int]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        waiting = total = 0
        readers: list[asyncio.StreamReader] = []

        class Dialling(Web):
            async def dial(self, addresses, port):
                found = await super().dial(addresses, port)
                readers.append(found[0])
                return found

        class Counting(RequestMemory):
            def add(self, num_bytes):
                nonlocal waiting, total
                total += num_bytes
                waiting = max(waiting, len(readers[0]._buffer))

        async with web(kind=Dialling, max_bytes=len(body)) as (media, _):
            await media.fetch(f"http://h.example:{port}/", Counting(MemoryBudget(0)))
        server.close()
        return waiting, total

    waiting, total = uvloop.run(most())
    assert total == MEMORY_PER_FETCHED_BYTE * len(body)
    assert waiting <= 512 << 10
