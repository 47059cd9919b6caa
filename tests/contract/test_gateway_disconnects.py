"""A client that leaves, stops reading or closes its sending side, at any moment of an answer: the
request has exactly one end, and nothing of it runs or is held afterwards.
"""

import json
import logging
import random
import socket
import struct
import time

import h11
import pytest

from tests.fakes import forever, once
from tests.gateway_stack import MODEL
from tests.noise import PATIENCE_S

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SURFACES = {
    "/v1/chat/completions": {**CHAT, "n": 2},
    "/v1/completions": {"prompt": ["hello", "hi"], "n": 2},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {**CHAT, "max_tokens": 60},
}
MANNERS = ("reset", "close", "half", "half and close", "next and close", "within the body")
ROUNDS = 3


@pytest.fixture
def ends():
    """Outcomes in the audit log."""
    found: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("triptych.audit")
    handler.emit = lambda record: found.append(record.fields["outcome"])
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


def leave(stack, request: bytes, manner: str, rng: random.Random, ends: list[str]) -> bytes:
    """Sends a request, and leaves in that manner; returns what was read of the answer."""
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.settimeout(PATIENCE_S)
        stack.wait(lambda: stack.server.server_state.connections)
        size = rng.randrange(len(request)) if manner == "within the body" else len(request)
        connection.sendall(request[:size])
        if manner == "next and close":
            connection.sendall(request[: rng.randrange(1, len(request))])
        if size == len(request):
            stack.wait(lambda: stack.gateway.admission.num_running or ends)
        time.sleep(rng.random() * 0.15)
        if manner.startswith("half"):
            connection.shutdown(socket.SHUT_WR)
        if manner == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        read = b""
        while manner == "half" and (piece := connection.recv(1 << 16)):
            read += piece
        return read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SURFACES)
def test_a_request_that_is_left_ends_once_and_leaves_nothing(stack, path, stream, ends):
    admission, decoder = stack.gateway.admission, stack.decoder
    decoder.reply = stack.tokenizer.encode_text("more and more " * 20)[:50]
    decoder.delay_s = 0.002
    body = json.dumps({"model": MODEL, "stream": stream, **SURFACES[path]}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    rng = random.Random(f"{path}{stream}")
    for manner in MANNERS * ROUNDS:
        ends.clear()
        answer = leave(stack, request, manner, rng, ends)
        stack.wait(lambda: not stack.server.server_state.connections)
        stack.wait(lambda: not (admission.num_running or admission.held_bytes or decoder.running))
        if manner != "within the body":
            stack.wait(lambda: ends)
        most = 2 if manner == "next and close" else 1
        assert (0 if manner == "within the body" else 1) <= len(ends) <= most, manner
        if manner == "half":
            assert b" 200 OK\r\n" in answer and ends[0] not in ("cancelled", "internal_error")


def asked_and_half_closed(stack) -> socket.socket:
    """A connection whose client has sent a request and closed its sending side."""
    body = json.dumps({"model": MODEL, **CHAT}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    connection = socket.create_connection(("127.0.0.1", stack.port))
    connection.settimeout(PATIENCE_S)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    stack.wait(lambda: stack.gateway.admission.num_running)
    connection.shutdown(socket.SHUT_WR)
    return connection


def read_probes(connection: socket.socket, number: int) -> bytes:
    """What the gateway sends until it has probed the client so many times."""
    read = b""
    while read.count(b".") < number:  # that of "HTTP/1.1" is the first probe's
        piece = connection.recv(1 << 16)
        assert piece, read
        read += piece
    return read


@pytest.mark.parametrize("num_probes", [1, 2, 4])
def test_a_client_that_half_closes_and_leaves_later_ends_its_request(stack, ends, num_probes):
    stack.decoder.before = forever
    with asked_and_half_closed(stack) as connection:
        read_probes(connection, num_probes)
        assert not ends
    stack.wait(lambda: not (stack.gateway.admission.num_running or stack.decoder.running))
    stack.wait(lambda: ends)
    assert ends == ["cancelled"]


def test_probes_are_one_interim_response_before_the_answer(stack):
    released = []
    stack.decoder.before = once(lambda: released)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    with asked_and_half_closed(stack) as connection:
        client.receive_data(read_probes(connection, 3))
        assert client.next_event() is h11.NEED_DATA
        released.append(True)
        events = []
        while not events or not isinstance(events[-1], h11.ConnectionClosed):
            event = client.next_event()
            if event is h11.NEED_DATA:
                client.receive_data(connection.recv(1 << 16))
            elif event is h11.PAUSED:
                break
            else:
                events.append(event)
    kinds = [type(event) for event in events if not isinstance(event, h11.Data)]
    assert kinds[:3] == [h11.InformationalResponse, h11.Response, h11.EndOfMessage]
    assert [event.status_code for event in events[:2]] == [100, 200]
    answer = b"".join(event.data for event in events if isinstance(event, h11.Data))
    assert json.loads(answer)["choices"][0]["finish_reason"] == "stop"
