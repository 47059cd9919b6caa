"""Odd and hostile HTTP/1.1 at the socket: framing, pipelining, interim responses, old versions."""

import json
import socket

import pytest

from tests.contract.test_gateway_connections import connect, hasty, read_all, request
from tests.fakes import forever
from tests.gateway_stack import MODEL

__all__ = ["hasty"]

HOST = b"Host: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
POST = b"POST /tokenize HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt": "hi"}'
CHUNK = b"10\r\n" + BODY + b"\r\n"
END = b"0\r\n\r\n"
CLOSING = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

# What a proxy in front may read as another request than we do, or what HTTP forbids.
REFUSED = {
    "bare CR in a value": GET + b"A: b\rC: d\r\n\r\n",
    "bare CR in the request line": b"GET /health HTTP/1.1\rHost: localhost\r\n\r\n",
    "two CR": GET + b"A: b\r\r\n\r\n",
    "NUL in a value": GET + b"A: b\0c\r\n\r\n",
    "control character in a value": GET + b"A: b\x01c\r\n\r\n",
    "NUL in a name": GET + b"A\0: b\r\n\r\n",
    "blank before the colon": GET + b"A : b\r\n\r\n",
    "no name": GET + b": b\r\n\r\n",
    "no colon": GET + b"Abc\r\n\r\n",
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": GET + b"Host: example.com\r\n\r\n",
    "the same Host twice": GET + HOST + b"\r\n",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + END,
    "length and chunks, offering HTTP/2": POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + END,
    "two lengths": POST + b"Content-Length: 16\r\nContent-Length: 15\r\n\r\n" + BODY,
    "the same length twice": POST + b"Content-Length: 16\r\nContent-Length: 16\r\n\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 16, 16\r\n\r\n" + BODY,
    "length with a sign": POST + b"Content-Length: +16\r\n\r\n" + BODY,
    "negative length": POST + b"Content-Length: -16\r\n\r\n" + BODY,
    "hexadecimal length": POST + b"Content-Length: 0x10\r\n\r\n" + BODY,
    "blank in the length": POST + b"Content-Length: 1 6\r\n\r\n" + BODY,
    "no length": POST + b"Content-Length:\r\n\r\n" + BODY,
    "length beyond 64 bits": POST + b"Content-Length: 18446744073709551632\r\n\r\n" + BODY,
    "no chunks": POST + b"Transfer-Encoding: identity\r\n\r\n",
    "gzip, chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNK + END,
    "chunked, gzip": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + CHUNK + END,
    "chunked twice": POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNK + END,
    "two codings": POST
    + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n"
    + END,
    "xchunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNK + END,
    "quoted chunked": POST + b'Transfer-Encoding: "chunked"\r\n\r\n' + CHUNK + END,
    "chunked behind a vertical tab": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + END,
    "bare LF behind a size": CHUNKED + b"10\n" + BODY + b"\r\n" + END,
    "bare LF behind a chunk": CHUNKED + b"10\r\n" + BODY + b"\n" + END,
    "bare LF in an extension": CHUNKED + b"10;a\n" + BODY + b"\r\n" + END,
    "bare CR in an extension": CHUNKED + b"10;a\rb\r\n" + BODY + b"\r\n" + END,
    "bare LF behind the last size": CHUNKED + CHUNK + b"0\n\r\n",
    "bare LF behind the trailers": CHUNKED + CHUNK + b"0\r\n\n",
    "nothing behind a chunk": CHUNKED + b"10\r\n" + BODY + END,
    "something behind a chunk": CHUNKED + b"10\r\n" + BODY + b"XX" + END,
    "size with a sign": CHUNKED + b"+10\r\n" + BODY + b"\r\n" + END,
    "negative size": CHUNKED + b"-10\r\n" + BODY + b"\r\n" + END,
    "0x": CHUNKED + b"0x10\r\n" + BODY + b"\r\n" + END,
    "no size": CHUNKED + b"\r\n" + BODY + b"\r\n" + END,
    "size beyond 64 bits": CHUNKED + b"10000000000000010\r\n" + BODY + b"\r\n" + END,
    "length in a trailer": CHUNKED + CHUNK + b"0\r\nContent-Length: 5\r\n\r\n",
    "trailer with a bare LF": CHUNKED + CHUNK + b"0\r\nA: b\nC: d\r\n\r\n",
    "long trailer": CHUNKED + CHUNK + b"0\r\nA: " + b"b" * (800 << 10),
    "long extension": CHUNKED + b"10;" + b"b" * (800 << 10),
    "HTTP/2.0": b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/1.2": b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "CONNECT": b"CONNECT localhost:443 HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT, offering a protocol": b"CONNECT localhost:443 HTTP/1.1\r\n"
    + HOST
    + b"Connection: Upgrade\r\nUpgrade: x\r\n\r\n",
    "CONNECT with a path": b"CONNECT /health HTTP/1.1\r\n" + HOST + b"\r\n",
    "a path that is none": b"GET health HTTP/1.1\r\n" + HOST + b"\r\n",
    "Latin-1 in the path": b"GET /health\xfc HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "16,000 headers": GET + b"a:\r\n" * 17_000 + b"\r\n",
}
SERVED = {
    "a blank line in front": b"\r\n" + GET + b"\r\n",
    "blanks around a length": POST + b"Content-Length: \t 16 \t\r\n\r\n" + BODY,
    "chunks in capitals": POST + b"Transfer-Encoding: CHUNKED\r\n\r\n" + CHUNK + END,
    "extensions of chunks": CHUNKED + b'8;a;b="c;d"\r\n' + BODY[:8] + b"\r\n8\r\n" + BODY[8:]
    + b"\r\n0;e\r\n\r\n",
    "trailers": CHUNKED + CHUNK + b"0\r\nA: b\r\nHost: example.com\r\n\r\n",
    "Latin-1 in a value": GET + b"A: \xfc\r\n\r\n",
    "a whole URL": b"GET http://localhost/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "WebSocket": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    "2,000 headers": GET + b"a:\r\n" * 2000 + b"\r\n",
}  # fmt: skip


def exchange_with(stack, *pieces: bytes) -> bytes:
    """What is answered until the gateway closes the connection."""
    with connect(stack) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            return read_all(connection)
        except ConnectionError:  # it closes before it has read everything
            return b"HTTP/1.1 400 "


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_ambiguous_framing_is_refused_and_ends_the_connection(stack, data):
    answer = exchange_with(stack, data, CLOSING)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b" 200 " in exchange_with(stack, CLOSING)


@pytest.mark.parametrize("data", SERVED.values(), ids=SERVED.keys())
def test_odd_framing_that_has_one_meaning_is_served(stack, data):
    answer = exchange_with(stack, data, CLOSING)
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1 ") == 2


def test_a_trailer_is_no_header(stack):
    answer = exchange_with(stack, CHUNKED + CHUNK + b"0\r\nX-Request-Id: mine\r\n\r\n", CLOSING)
    assert answer.count(b" 200 ") == 2 and b"mine" not in answer


def test_a_chunk_of_nearly_endless_size_is_counted(stack):
    """Its bytes are refused by their count, not by what the size says."""
    with connect(stack) as connection:
        connection.sendall(CHUNKED + b"FFFFFFFFFFFFFFF0\r\n" + BODY * (5 << 20))
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_requests_in_one_piece_are_answered_in_their_order(stack):
    answer = exchange_with(stack, CHUNKED + CHUNK + END + request() + GET + b"\r\n" + CLOSING)
    assert answer.count(b"HTTP/1.1 200 ") == 4
    assert answer.index(b'"count"') < answer.index(b"circle") < answer.rindex(b'"status"')


def test_a_client_of_several_requests_that_leaves_cancels_the_first(stack):
    stack.decoder.before = forever
    with connect(stack) as connection:
        connection.sendall(request() + request())
        stack.wait(lambda: stack.decoder.running)
    stack.wait(lambda: not (stack.decoder.running or stack.gateway.admission.num_running))
    assert len(stack.decoder.submits) == 1


def test_a_wrong_request_does_not_cut_the_answer_in_front(stack):
    stack.decoder.delay_s = 0.05
    answer = exchange_with(stack, request(stream=True), b"wrong\r\n\r\n")
    assert answer.index(b"data: [DONE]") < answer.index(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 2


def test_a_half_closed_client_gets_the_answers_to_all_its_requests(stack):
    stack.decoder.delay_s = 0.02
    with connect(stack) as connection:
        connection.sendall(request() + request(stream=True))
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b" 200 OK\r\n") == answer.count(b"circle") == 2


def test_blank_lines_do_not_keep_a_connection(hasty):
    with connect(hasty) as connection:
        connection.sendall(GET + b"\r\n")
        assert b" 200 " in connection.recv(4096)
        connection.sendall(b"\r\n")
        assert b" 408 " in read_all(connection)


def test_a_client_is_asked_for_its_body_when_it_wants_to_be(stack):
    head = b"Expect: 100-continue\r\nContent-Length: 16\r\n\r\n"
    with connect(stack) as connection:
        connection.sendall(POST + head)
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(BODY)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")
        connection.sendall(POST + b"Content-Type: text/html\r\n" + head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 415 ")


def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_its_connection(stack):
    for keep in (b"\r\n", b"\r\nConnection: keep-alive\r\n"):
        asked = request(stream=True).replace(b" HTTP/1.1\r\n", b" HTTP/1.0" + keep, 1)
        head, _, body = exchange_with(stack, asked).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


def test_a_body_is_no_request_although_another_protocol_was_offered(stack):
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    head = b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(CLOSING)
    assert len(body) < len(CLOSING)
    for padded in (body.ljust(len(CLOSING)), CLOSING):
        with connect(stack) as connection:
            connection.sendall(POST + head)
            connection.sendall(padded)
            status = b" 200 " if padded.startswith(body) else b" 400 "
            assert status in connection.recv(65536)
            connection.sendall(CLOSING)
            assert read_all(connection).count(b"HTTP/1.1 ") == 1
