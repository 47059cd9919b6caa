"""A client that leaves, stops reading or closes its sending side, at any moment of an answer: the
request has exactly one end, and nothing of it runs or is held afterwards.
"""

import json
import logging
import random
import socket
import struct
import time

import pytest

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
        most = 2 if manner == "next and close" else 1
        assert (0 if manner == "within the body" else 1) <= len(ends) <= most, manner
        if manner == "half":
            assert b" 200 OK\r\n" in answer and ends[0] not in ("cancelled", "internal_error")
