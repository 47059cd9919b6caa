"""What one request, or many idle connections, may cost a gateway: memory, time, others' turns."""

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest

from services.common.threads import num_threads
from services.gateway.forms.json_body import MAX_JSON_BYTES
from services.gateway.media.kinds import IMAGE
from services.gateway.media.web_media import WebMedia
from services.gateway.server import ConnectionTimeouts
from services.gateway.tenancy.request_memory import MemoryBudget, RequestMemory
from tests.gateway_fixtures import asking
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S, least
from tests.slots import slot_of
from tests.tiny_tokenizer import tokenizer_json_with_long_token

HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def _small_stack(loop_thread, tmp_path_factory):
    """A gateway whose requests may hold 2 MiB."""
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("small"), memory_bytes=9 << 20, log_level="ERROR"
    )
    assert stack.gateway.admission.memory.max_bytes <= 2 << 20
    yield stack
    stack.close()


@pytest.fixture
def small_stack(_small_stack):
    _small_stack.reset()
    return _small_stack


@pytest.fixture(scope="module")
def impatient_stack(loop_thread, tmp_path_factory):
    """A gateway at which bodies have to begin soon."""
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp("impatient"), body_start_s=0.2, log_level="ERROR"
    )
    yield stack
    stack.close()


def post(stack, body: bytes) -> httpx2.Response:
    headers = {"content-type": "application/json"}
    with stack.client() as client:
        return client.post("/v1/chat/completions", content=body, headers=headers)


def body_of(messages: str = json.dumps([HELLO]), **fields: str) -> bytes:
    parts = [f'"model": "{MODEL}"', f'"messages": {messages}']
    return ("{" + ", ".join(parts + [f'"{k}": {v}' for k, v in fields.items()]) + "}").encode()


def many(item: str, size: int, start: str = "[", end: str = "]") -> str:
    return start + ",".join([item] * (size // (len(item) + 1))) + end


def calls(size: int) -> str:
    return '{{"role": "user", "content": "x", "tool_calls": {}}}'.format(many("[[[]]]", size))


def parts(size: int) -> str:
    return many('{"type":"text","text":""}', size)


def bias(size: int) -> str:
    return "{" + ",".join(f'"{n}":1' for n in range(size // 11)) + "}"


# By its size, a body that parses into many times its bytes.
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "tool_calls": lambda size: body_of(f"[{calls(size)}]"),
    "logit_bias": lambda size: body_of(logit_bias=bias(size)),
    "stop": lambda size: body_of(stop=many('"a"', size)),
    "messages": lambda size: body_of(many('{"role":"user","content":"a"}', size)),
    "parts": lambda size: body_of(f'[{{"role": "user", "content": {parts(size)}}}]'),
    "hints": lambda size: body_of(metadata=many("{}", size)),
    "wide text": lambda size: body_of(
        '[{"role": "user", "content": "data:%s\\ud83d\\ude00"}]' % ("a" * size)
    ),
    "data strings": lambda size: body_of(stop=many('"data:"', size)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_json_beside_images_is_bounded(stack, name):
    response = post(stack, HOSTILE[name](3 * MAX_JSON_BYTES))
    assert response.status_code == 413, response.text[:200]
    assert response.json()["error"]["code"] == "payload_too_large"
    # What is within the bound is served or refused as well, and `/health` does not wait for it.
    small = HOSTILE[name](MAX_JSON_BYTES * 9 // 10)

    def longest() -> float:
        with ThreadPoolExecutor(1) as threads, stack.client() as client:
            sent = threads.submit(post, stack, small)
            taken = [0.0]
            while not sent.done():
                start = time.monotonic()
                assert client.get("/health").status_code == 200
                taken.append(time.monotonic() - start)
            assert sent.result().status_code in (200, 400, 413)
            return max(taken)

    assert least(longest, 0.5) <= 0.5


def test_images_do_not_count_as_json(stack):
    url = "data:image/png;base64," + base64.b64encode(bytes(700_000)).decode()
    response = post(stack, json.dumps({"model": MODEL, "messages": asking(*[url] * 4)}).encode())
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_image")
    escaped = json.dumps({"model": MODEL, "messages": asking(*[url] * 4)}).replace("/", "\\/")
    assert post(stack, escaped.encode()).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": [HELLO], "logprobs": True}),
        ("completions", {"prompt": ["a", "b"], "logprobs": 0}),
        ("responses", {"input": "x", "include": ["message.output_text.logprobs"]}),
    ],
)
def test_an_answer_that_is_collected_counts_as_memory(small_stack, path, fields):
    stack = small_stack
    stack.decoder.reply = stack.tokenizer.encode_text("hello") * 1000
    for max_tokens, status in ((9, 200), (1000, 503)):
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        with stack.client() as client:
            response = client.post(f"/v1/{path}", json={**fields, limit: max_tokens})
        assert response.status_code == status, response.text[:200]
    assert response.json()["error"]["code"] == "overloaded"
    stack.wait(lambda: stack.gateway.admission.held_bytes == 0)


def test_a_stream_whose_end_has_the_whole_answer_counts_as_memory(small_stack):
    stack = small_stack
    stack.decoder.reply = stack.tokenizer.encode_text("hello") * 1000
    body = {"input": "x", "include": ["message.output_text.logprobs"], "stream": True}
    with stack.client() as client:
        for max_tokens, end in ((9, "response.incomplete"), (1000, "response.failed")):
            text = client.post("/v1/responses", json={**body, "max_output_tokens": max_tokens}).text
            last = json.loads(text.rstrip().rpartition("\ndata: ")[2])
            assert last["type"] == end, last
    assert last["response"]["error"]["code"] == "server_error"
    assert '"code":"overloaded"' in text
    stack.wait(lambda: stack.gateway.admission.held_bytes == 0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"echo": True, "logprobs": 5, "max_tokens": 0}),
        ("completions", {"prompt_logprobs": 5}),
        ("chat/completions", {"prompt_logprobs": 5}),
    ],
)
def test_logprobs_of_prompts_count_as_memory(small_stack, path, fields):
    stack = small_stack
    for length, status in ((9, 200), (2000, 503)):
        prompts = {"prompt": [[5] * length] * 2}
        if path == "chat/completions":
            prompts = {"messages": [{**HELLO, "content": "ab " * length}]}
        with stack.client() as client:
            response = client.post(f"/v1/{path}", json={**prompts, **fields})
        assert response.status_code == status, response.text[:200]
    assert response.json()["error"]["code"] == "overloaded"
    stack.wait(lambda: stack.gateway.admission.held_bytes == 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["x"] * 128, "bad_words": ["ab cd ef gh " * 21] * 32},
        {"prompt": [[5] * 1000] * 128, "echo": True, "logprobs": 1, "max_tokens": 0},
    ],
    ids=["bad words", "logprobs of prompts"],
)
def test_many_prompts_leave_other_requests_their_turn(stack, fields):
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            last, before = time.process_time(), last
            longest = max(longest, last - before)

    def answer() -> float:
        nonlocal longest
        longest = 0.0
        watching = asyncio.run_coroutine_threadsafe(watch(), stack.thread.loop)
        with stack.client() as client:
            assert client.post("/v1/completions", json=fields).status_code == 200
        watching.cancel()
        return longest

    assert least(answer, 0.4) <= 0.4  # one prompt behind the other, 1.5 s


def silent(
    stack, count: int, sent: bytes = b"", length: bytes = b"Content-Length: 1000000"
) -> list[socket.socket]:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\n" + length + b"\r\n\r\n"
    found = []
    for _ in range(count):
        found.append(socket.create_connection(("127.0.0.1", stack.port), timeout=PATIENCE_S))
        found[-1].sendall(head + sent)
    return found


def test_connections_that_send_nothing_refuse_nobody(stack):
    connections = silent(stack, 600)
    try:
        assert stack.chat(max_tokens=1).status_code == 200
        stack.wait(lambda: stack.gateway.admission.num_running == 0)
    finally:
        for connection in connections:
            connection.close()


CHUNKED = b"Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("length", "sent"),
    [(b"Content-Length: 1000000", b""), (b"Content-Length: 1000000", b"x" * 1000)]
    + [(CHUNKED, sent) for sent in (b"", b"9\r\n", b"1\r\nx\r\n", b"9;a", b"0\r\nA: b")],
)
def test_a_body_must_begin_soon_and_arrive_at_some_rate(impatient_stack, length, sent):
    start = time.monotonic()
    (connection,) = silent(impatient_stack, 1, sent, length)
    with connection:
        assert b" 504 " in connection.recv(65536)
    assert time.monotonic() - start < PATIENCE_S / 2


@contextmanager
def unread(stack, **fields):
    """A client of eight long answers that has a small buffer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", stack.port))
        body = json.dumps(
            {"model": MODEL, "messages": [HELLO], "max_tokens": 1900, "ignore_eos": True,
             "logprobs": True, "top_logprobs": 20, "n": 8, **fields}
        ).encode()  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}\r\n"
        )
        connection.sendall(head.encode() + b"\r\n" + body)
        yield connection


def test_a_client_that_does_not_read_ends_its_request(stack):
    stack.decoder.reply = [40] * 100_000
    with unread(stack, stream=True) as connection:
        stack.wait(lambda: len(stack.decoder.cancelled) == 8)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        text = bytearray()
        while not text.endswith(b"\r\n0\r\n\r\n"):
            text += connection.recv(1 << 20)
    assert b"read too slowly" in text
    assert stack.chat(max_tokens=1).status_code == 200


def test_a_whole_answer_keeps_its_slot_and_its_bytes_until_it_is_read(stack):
    stack.decoder.reply, stack.decoder.tokens_per_event = [40] * 100_000, 100
    admission = stack.gateway.admission
    stack.wait(lambda: not admission.held_bytes)  # the request before has ended
    with unread(stack) as connection:
        head, _, body = connection.recv(4096).partition(b"\r\n\r\n")
        time.sleep(0.1)
        assert admission.num_running == 1
        assert admission.held_bytes > 8 << 20
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        size = int(head.partition(b"content-length: ")[2].split()[0])
        while len(body) < size:
            body += connection.recv(1 << 20)
        stack.wait(lambda: not (admission.num_running or admission.held_bytes))
    assert len(json.loads(body)["choices"]) == 8


def test_a_kept_answer_keeps_its_slot_and_its_bytes_until_it_is_read(loop_thread, tmp_path):
    tokenizer, long = tokenizer_json_with_long_token(10_000)
    stack = GatewayStack(loop_thread, tmp_path, files={"tokenizer.json": tokenizer})
    stack.decoder.reply, stack.decoder.tokens_per_event = [long] * 1000, 100
    with stack.client() as client:
        kept = client.post("/v1/responses", json={"model": MODEL, "input": "hello"}).json()["id"]
    admission = stack.gateway.admission
    stack.wait(lambda: not admission.held_bytes)
    with socket.create_connection(("127.0.0.1", stack.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"GET /v1/responses/{kept} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert admission.num_running == 1
        assert admission.held_bytes > 10_000 * 1000
    stack.wait(lambda: not (admission.num_running or admission.held_bytes))
    stack.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_ends_whose_client_never_reads(loop_thread, tmp_path, stream):
    timeouts = ConnectionTimeouts(unread_s=3)
    stack = GatewayStack(loop_thread, tmp_path, text_only=True, num_encoders=0, timeouts=timeouts)
    stack.decoder.reply, stack.decoder.tokens_per_event = [40] * 100_000, 100
    admission, connections = stack.gateway.admission, stack.server.server_state.connections
    with unread(stack, stream=stream) as connection:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        # A slow machine sees it end before its answer fills the kernel's buffers.
        stack.wait(lambda: all(c.transport.get_write_buffer_size() > 64 << 10 for c in connections))
        stack.on_loop(admission.end_all)
        stack.wait(lambda: not admission.num_running)
        stack.wait(lambda: not connections)
    stack.close()


async def test_work_on_images_leaves_with_its_caller(stack):
    loader = stack.gateway.service.images.loader
    release, begun = threading.Event(), []

    def slow(url: str, _: int) -> bytes:
        begun.append(url)
        release.wait(PATIENCE_S)
        return b""

    tasks = [asyncio.create_task(loader._threads.run(slow, str(n), 0)) for n in range(40)]
    while len(begun) < num_threads():  # noqa: ASYNC110 - then none has work that waits
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    num_begun = len(begun)
    release.set()
    assert await loader._threads.run(lambda: b"next") == b"next"
    assert len(begun) == num_begun < 40


async def test_an_origins_small_pieces_leave_others_their_turns():
    """64 KiB of chunks of a byte took the event loop half a second."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    turn, found = 0, set[int]()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + b"1\r\nx\r\n" * 500 + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    class Turns(RequestMemory):
        def add(self, num_bytes: int) -> None:
            found.add(turn)

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    media, waiting = WebMedia(allow_private=True), asyncio.create_task(others())
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as origin:
        port = origin.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/"
        await media.fetch(url, 1000, IMAGE, slot_of(memory=Turns(MemoryBudget(0))))
    waiting.cancel()
    media.close()
    assert len(found) == 500
