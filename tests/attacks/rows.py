"""The rows of attacks: what is sent, how many at a time, and how each may end."""

import base64
import http.client
import json
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count

from tests.attacks import images
from tests.attacks.origin import DRIP, LARGE

MODEL = "demo"
ATTACKER, HONEST = "attacker", "honest"  # API keys
PATH = "/v1/chat/completions"
_TIMEOUT_S = 60.0
_CONNECT_PAUSE_S = 0.001
_PIECE_BYTES = 64 << 10
_MIB = 1 << 20
_READY_RATE, _READY_BYTE_RATE = 64, 256 << 20  # of bodies that are made ahead, each second
# Statuses; 0: the connection was closed, without an answer that could be read.
REFUSED = frozenset((0, 400, 413, 429, 503))
SERVED = REFUSED | {200}


@dataclass(frozen=True, slots=True)
class Target:
    """Where attacks go.

    Attributes:
        origin: host:port of the images' server, under any name of `origin`.
        seconds: how long an attack goes on; at least one round is sent.
    """

    host: str
    port: int
    origin_port: int
    seconds: float


Attack = Callable[[Target], Counter[int]]


@dataclass(frozen=True, slots=True)
class Row:
    """One attack.

    Attributes:
        section: of the issue's tables: 1 images, 2 memory, 3 time.
        statuses: with which its requests may end.
        by_url: the honest client's images are fetched meanwhile.
        by_hand: too long for every run of the tests.
    """

    name: str
    section: int
    attack: Attack
    statuses: frozenset[int] = REFUSED
    by_url: bool = False
    by_hand: bool = False


def post(target: Target, body: bytes) -> int:
    """The answer's status; 0: none could be read."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ATTACKER}"}
    try:
        # In pieces, because a process in the kernel gives way to no other.
        headers["Content-Length"] = str(len(body))
        pieces = (body[i : i + _PIECE_BYTES] for i in range(0, len(body), _PIECE_BYTES))
        connection.request("POST", PATH, pieces, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


class Posting:
    """An attack: requests, `at_once` at a time, until the time is over.

    Args:
        bodies: makes each by its number, which no other body has, in any attack.
        at_once: requests.
        is_constant: whether all bodies are the same.
    """

    def __init__(
        self, bodies: Callable[[int], bytes], at_once: int, *, is_constant: bool = False
    ) -> None:
        self._bodies = bodies
        self._at_once = at_once
        self._is_constant = is_constant
        self._numbers = count(1)
        self._ready: deque[bytes] = deque()

    def prepare(self, seconds: float) -> None:
        """Makes bodies ahead for an attack of so long, which makes what it needs beyond them."""
        limit, limit_bytes = seconds * _READY_RATE, seconds * _READY_BYTE_RATE
        num_bytes = sum(map(len, self._ready))
        while len(self._ready) < self._at_once or (
            len(self._ready) < limit and num_bytes < limit_bytes
        ):
            self._ready.append(self._bodies(next(self._numbers)))
            num_bytes += 0 if self._is_constant else len(self._ready[-1])

    def __call__(self, target: Target) -> Counter[int]:
        end = time.monotonic() + target.seconds

        def send(_: int) -> Counter[int]:
            found: Counter[int] = Counter()
            while True:
                found[post(target, self._next())] += 1
                if time.monotonic() >= end:
                    return found

        with ThreadPoolExecutor(self._at_once) as threads:
            return sum(threads.map(send, range(self._at_once)), Counter())

    def _next(self) -> bytes:
        try:
            return self._ready.popleft()
        except IndexError:
            return self._bodies(next(self._numbers))


Pieces = Callable[[Target, int], Iterator[bytes]]


def connecting(pieces: Pieces, number_of: int, period_s: float = 0.2) -> Attack:
    """Connections that are sent `pieces`, one each period, and then nothing, until they close."""

    def attack(target: Target) -> Counter[int]:
        end = time.monotonic() + target.seconds
        with ExitStack() as stack:
            opened: list[tuple[socket.socket, Iterator[bytes]]] = []
            for number in range(number_of):
                time.sleep(_CONNECT_PAUSE_S)
                address = (target.host, target.port)
                connection = socket.create_connection(address, timeout=_TIMEOUT_S)
                opened.append((stack.enter_context(connection), pieces(target, number)))
            while True:
                for connection, rest in opened:
                    with suppress(OSError):
                        connection.sendall(next(rest, b""))
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return Counter()
                time.sleep(min(period_s, left_s))

    return attack


def body(messages: str, **fields: str) -> bytes:
    parts = [f'"model": "{MODEL}"', f'"messages": {messages}', '"max_tokens": 1']
    return ("{" + ", ".join(parts + [f'"{k}": {v}' for k, v in fields.items()]) + "}").encode()


def with_urls(urls: Iterable[str]) -> bytes:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return body(json.dumps([{"role": "user", "content": content}]))


def with_images(files: Iterable[bytes]) -> bytes:
    return with_urls("data:image/png;base64," + base64.b64encode(f).decode() for f in files)


def _images(*makers: Callable[[int], bytes]) -> Callable[[int], bytes]:
    return lambda number: with_images([make(number) for make in makers])


def _video(maker: str) -> Callable[[int], bytes]:
    """Makes bodies with a video by a function of `tests.attacks.videos`."""

    def body(number: int) -> bytes:
        from tests.attacks import videos  # needs PyAV, which the gateway's environment lacks

        video = getattr(videos, maker)(number)
        url = "data:video/mp4;base64," + base64.b64encode(video).decode()
        part = {"type": "video_url", "video_url": {"url": url}}
        fields = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        return json.dumps(fields).encode()

    return body


HELLO = '[{"role": "user", "content": "hello"}]'


def many(item: str, size: int) -> str:
    return "[" + ",".join([item] * (size // (len(item) + 1))) + "]"


def json_bodies(size: int) -> dict[str, bytes]:
    """Bodies of about a size that parse into many times their bytes."""
    calls = '{{"role": "user", "content": "x", "tool_calls": {}}}'.format(many("[[[]]]", size))
    bias = "{" + ",".join(f'"{n}":1' for n in range(size // 11)) + "}"
    parts = many('{"type":"text","text":""}', size)
    return {
        "nested tool_calls": body(f"[{calls}]"),
        "logit_bias": body(HELLO, logit_bias=bias),
        "stop": body(HELLO, stop=many('"a"', size)),
        "messages": body(many('{"role":"user","content":"a"}', size)),
        "empty text parts": body(f'[{{"role": "user", "content": {parts}}}]'),
    }


def _json_row(name: str, size: int, at_once: int, *, by_hand: bool = False) -> Row:
    mib = round(size / _MIB)
    made = cache(lambda: json_bodies(size)[name])
    attack = Posting(lambda _: made(), at_once, is_constant=True)
    return Row(f"{name}, {mib} MiB", 2, attack, by_hand=by_hand)


def _unread(target: Target) -> Counter[int]:
    """Clients that never read their answers."""
    fields = {
        "model": MODEL, "messages": json.loads(HELLO), "stream": True, "max_tokens": 400, "n": 8,
        "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    request = head_and(json.dumps(fields).encode())
    with ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((target.host, target.port))
            connection.sendall(request)
        time.sleep(target.seconds)
    return Counter()


def head_and(body: bytes, size: int | None = None) -> bytes:
    """A whole request, or one whose body is to have `size` bytes."""
    size = len(body) if size is None else size
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ATTACKER}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + body


def _nothing(_: Target, number: int) -> Iterator[bytes]:
    return iter(())


def _head_only(_: Target, number: int) -> Iterator[bytes]:
    yield head_and(b"", 1_000_000)


def _slow_head(_: Target, number: int) -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\n"
    while True:
        yield b"X: y\r\n"


def _slow_body(_: Target, number: int) -> Iterator[bytes]:
    yield head_and(b"", 1_000_000)
    while True:
        yield b" " * 100


def _fetching(path: str, host: str) -> Pieces:
    """Requests of 16 image URLs each; `host` may have `{}`, for one that no other URL has."""

    def pieces(target: Target, number: int) -> Iterator[bytes]:
        hosts = [host.format(f"h{number}-{i}") for i in range(16)]
        yield head_and(with_urls(f"http://{h}:{target.origin_port}{path}" for h in hosts))

    return pieces


ROWS = [
    Row("WebP of 36 bytes and PNG, 88 Mpx each", 1,
        Posting(_images(lambda n: images.webp(images.OVER_SIDE, n),
                        lambda n: images.png(images.OVER_SIDE, n, bits=1, colour=0)), 4)),
    Row("two WebP of 25 Mpx in a request", 1,
        Posting(_images(lambda n: images.webp(images.WEBP_SIDE, 2 * n),
                        lambda n: images.webp(images.WEBP_SIDE, 2 * n + 1)), 2), SERVED),
    Row("PNG and GIF of 39.7 Mpx in a request", 1,
        Posting(_images(lambda n: images.png(images.SIDE, n),
                        lambda n: images.gif(images.SIDE, n)), 2), SERVED),
    Row("JPEG with 7,000 empty scans", 1,
        Posting(_images(lambda n: images.scans(7000, 1024, n)), 4), SERVED),
    Row("JPEG with 90 empty scans, 39.7 Mpx", 1,
        Posting(_images(lambda n: images.scans(90, images.SIDE, n)), 2), SERVED, by_hand=True),
    Row("11 PNG with 63 texts of 1 MiB", 1, Posting(_images(*[images.texts] * 11), 2), SERVED),
    Row("JPEG with Exif segments, 3 MiB", 1,
        Posting(_images(lambda n: images.segments(3 * _MIB, n)), 4)),
    Row("JPEG with Exif segments, 20 MiB", 1,
        Posting(_images(lambda n: images.segments(19 * _MIB, n)), 4)),
    _json_row("messages", 63 * _MIB, 2, by_hand=True),
    *[_json_row(name, 6 * _MIB, 4, by_hand=True) for name in json_bodies(8)],
    *[_json_row(name, 1_900_000, 2) for name in json_bodies(8)],
    Row("12 bodies of 45 MiB at once", 2,
        Posting(lambda n: with_images([images.segments(19 * _MIB, n), bytes(14 * _MIB)]), 12)),
    Row("256 images of 16 MiB, fetched", 2, connecting(_fetching(LARGE, "{}.images.test"), 16)),
    Row("clients that do not read", 2, _unread),
    Row("600 silent connections", 3, connecting(_nothing, 600)),
    Row("600 heads without a body", 3, connecting(_head_only, 600)),
    Row("200 heads that never end", 3, connecting(_slow_head, 200)),
    Row("200 bodies at 500 bytes a second", 3, connecting(_slow_body, 200)),
    Row("QuickTime of 1 MB, 250,000 frames at one place", 3, Posting(_video("piled"), 12)),
    Row("GIF of 6 MB, 250,000 frames", 3, Posting(_video("gif"), 4)),
    Row("256 names without an answer", 3, connecting(_fetching("/", "{}.silent.test"), 16),
        by_url=True),
    Row("256 images that drip, of one host", 3,
        connecting(_fetching(DRIP, "drip.images.test"), 16), by_url=True),
    Row("256 images that drip, of as many hosts", 3,
        connecting(_fetching(DRIP, "{}.images.test"), 16), by_url=True),
]  # fmt: skip
