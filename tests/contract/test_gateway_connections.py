"""Connections that are half open, half closed, or never say anything."""

import json
import socket
import time
from collections.abc import Iterator

import pytest

from services.gateway.server import ConnectionTimeouts
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S, least

HEAD_S = 2.0  # in which this process sends a head


@pytest.fixture(scope="module")
def hasty(loop_thread, tmp_path_factory) -> Iterator[GatewayStack]:
    """A gateway that waits two seconds for the head of a request."""
    stack = GatewayStack(
        loop_thread,
        tmp_path_factory.mktemp("hasty"),
        text_only=True,
        num_encoders=0,
        timeouts=ConnectionTimeouts(head_s=HEAD_S),
    )
    yield stack
    stack.close()


def connect(stack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.port), PATIENCE_S)


def request(**fields) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    body = json.dumps({"model": MODEL, "messages": messages, **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_half_closed_client_gets_its_answer(stack, stream, delay_s):
    stack.decoder.delay_s = delay_s
    with connect(stack) as connection:
        connection.sendall(request(stream=stream))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert b"HTTP/1.1 200" in answer
    assert answer.count(b"circle") == 1
    if stream:
        assert b"data: [DONE]" in answer


def test_half_closed_client_of_http_1_0_gets_its_answer_alone(stack):
    stack.decoder.delay_s = 0.05
    with connect(stack) as connection:
        connection.sendall(request().replace(b" HTTP/1.1", b" HTTP/1.0", 1))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"circle") == 1


def test_half_closed_body_gets_nothing(stack):
    with connect(stack) as connection:
        connection.sendall(request()[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert b" 200 " not in read_all(connection)
    assert not stack.decoder.submits


def test_client_that_closes_while_it_waits_is_noticed(stack):
    stack.decoder.reply = [40] * 1000
    stack.decoder.delay_s = 0.02

    def seconds() -> float:
        connection = connect(stack)
        connection.sendall(request())
        stack.wait(lambda: len(stack.decoder.running) == 1)
        connection.close()
        return stack.wait(lambda: not stack.decoder.running)

    assert least(seconds, 1) < 1


@pytest.mark.parametrize("drip", [b"", b"GET /health HT"], ids=["silent", "endless"])
def test_late_head_ends_the_connection(hasty, drip):
    start = time.monotonic()
    with connect(hasty) as connection:
        connection.sendall(drip)
        assert b" 408 " in read_all(connection)
        assert time.monotonic() - start > 0.9 * HEAD_S


def test_late_second_head_ends_the_connection(hasty):
    with connect(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in connection.recv(4096)
        time.sleep(1.5 * HEAD_S)  # kept alive while it is silent
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        data = read_all(connection)
        assert b" 200 " in data
        assert b" 408 " in data


def test_slow_body_is_no_late_head(hasty):
    with connect(hasty) as connection:
        data = request()
        connection.sendall(data[:-5])
        time.sleep(1.5 * HEAD_S)
        connection.sendall(data[-5:])
        assert b" 200 " in connection.recv(4096)
