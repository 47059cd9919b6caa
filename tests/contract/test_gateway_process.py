"""`python -m services.gateway` as a process: start, keys, SIGTERM."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from tests.cases import first
from tests.fakes import FakeDecoder, FakeEncoder
from tests.gateway_fixtures import asking
from tests.gateway_stack import MODEL
from tests.noise import PATIENCE_S, least
from tests.ports import free_port
from tests.tiny_tokenizer import vocab_size, write_model_directory
from triptych.probes import gateway_ready

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def fakes(loop_thread):
    """New ones for each test, which counts what they were sent."""
    encoder, decoder = FakeEncoder(), FakeDecoder(vocab_size=vocab_size())
    for fake in (encoder, decoder):
        loop_thread.run(fake.start())
    yield encoder, decoder
    for fake in (encoder, decoder):
        loop_thread.run(fake.stop())


@contextmanager
def gateway(fakes, directory, **settings):
    encoder, decoder = fakes
    port = free_port()
    environment = {
        "PATH": os.environ["PATH"],
        "GATEWAY_MODEL": str(write_model_directory(directory / MODEL)),
        "GATEWAY_ENCODER_ADDRESSES": encoder.address,
        "GATEWAY_DECODER_ADDRESSES": f"dns:///localhost:{decoder.address.split(':')[1]}",
        "GATEWAY_PORT": str(port),
        "GATEWAY_METRICS_PORT": "0",
        **settings,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.gateway"], env=environment, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        url = f"http://{settings.get('GATEWAY_HOST', '127.0.0.1')}:{port}".replace("::1", "[::1]")
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as client:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                assert time.monotonic() < deadline
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.02)
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_sigterm_ends_running_streams_and_refuses_new_requests(fakes, tmp_path):
    _, decoder = fakes
    # The grace period cuts no stream however busy the machine is, and clients that have kept their
    # connections are served for five seconds.
    with gateway(fakes, tmp_path, GATEWAY_SHUTDOWN_GRACE_S="600") as (process, client):
        decoder.reply, decoder.delay_s = [40] * 400, 0.5
        texts = []

        def stream():
            with httpx2.Client(base_url=client.base_url, timeout=PATIENCE_S) as other:
                texts.append(other.post("/v1/chat/completions", json={**BODY, "stream": True}).text)

        threads = [threading.Thread(target=stream) for _ in range(5)]
        for thread in threads:
            thread.start()
        while len(decoder.submits) < 5:
            time.sleep(0.01)
        address = str(client.base_url.host), int(client.base_url.port or 0)
        new = socket.create_connection(address, timeout=PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        while (ready := client.get("/ready")).status_code == 200:
            pass
        assert ready.status_code == 503
        assert client.get("/health").status_code == 200
        assert ready.headers["connection"] == "close"
        # A client that had kept its connection is served once more, and told to go.
        late = client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1})
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
        deadline = time.monotonic() + PATIENCE_S
        short = {**BODY, "max_tokens": 1}
        while (refused := client.post("/v1/chat/completions", json=short)).status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)  # each is a line of a log that nobody reads yet
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        with new:  # its first request is answered, too
            new.sendall(b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert new.recv(64).startswith(b"HTTP/1.1 503 ")
        decoder.delay_s = 0.0  # the streams were there all the time
        for thread in threads:
            thread.join()
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert process.wait(PATIENCE_S) == 0


def test_sigterm_ends_at_the_grace(fakes, tmp_path):
    _, decoder = fakes

    def seconds() -> float:
        with gateway(fakes, tmp_path, GATEWAY_SHUTDOWN_GRACE_S="0.3") as (process, client):
            decoder.reply, decoder.delay_s = [40] * 1000, 0.1
            body = {**BODY, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                next(answer.iter_bytes())
                taken = seconds_to_end(process, signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while decoder.running and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not decoder.running
        return taken

    assert least(seconds, 15) < 15


@pytest.mark.thorough
@pytest.mark.parametrize("grace_s", first(1, ["60", "0.3"]))
def test_requests_that_outlast_the_grace_or_a_second_signal_end_with_an_error(
    fakes, tmp_path, grace_s
):
    _, decoder = fakes
    with gateway(fakes, tmp_path, GATEWAY_SHUTDOWN_GRACE_S=grace_s) as (process, client):
        decoder.reply, decoder.delay_s = [40] * 1000, 0.1
        answers, begun = {}, threading.Event()

        def ask() -> None:
            with httpx2.Client(base_url=client.base_url, timeout=PATIENCE_S) as other:
                answers["whole"] = other.post("/v1/chat/completions", json=BODY)

        def read() -> None:
            with (
                httpx2.Client(base_url=client.base_url, timeout=PATIENCE_S) as other,
                other.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as got,
            ):
                texts = got.iter_text()
                first = next(texts)
                begun.set()
                answers["stream"] = first + "".join(texts)

        threads = [threading.Thread(target=work) for work in (ask, read)]
        for thread in threads:
            thread.start()
        while len(decoder.submits) < 2:
            time.sleep(0.01)
        assert begun.wait(PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        if grace_s == "60":
            while client.get("/ready").status_code == 200:
                pass
            process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        last = json.loads(answers["stream"].split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "unavailable"
        assert "[DONE]" not in answers["stream"]
        assert answers["whole"].status_code == 503
        assert answers["whole"].headers["retry-after"] == "1"
        assert answers["whole"].json()["error"]["code"] == "unavailable"
        assert process.wait(PATIENCE_S) == 0


def test_a_body_that_still_arrives_as_the_gateway_ends_is_a_503(fakes, tmp_path):
    with gateway(fakes, tmp_path, GATEWAY_SHUTDOWN_GRACE_S="2") as (process, client):
        place = client.base_url.host, client.base_url.port
        with socket.create_connection(place, PATIENCE_S) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999"
            connection.sendall(f"{head}\r\n\r\n{{".encode())
            assert client.get("/health").status_code == 200  # it has read that
            process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert process.wait(PATIENCE_S) == 0
    assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"


def test_a_view_that_outlasts_the_grace_is_a_503(fakes, tmp_path):
    settings = {"GATEWAY_SHUTDOWN_GRACE_S": "0.3", "GATEWAY_ALLOWED_MEDIA": "private"}
    with (
        socket.create_server(("127.0.0.1", 0)) as origin,  # which does not answer
        gateway(fakes, tmp_path, **settings) as (process, client),
        ThreadPoolExecutor(1) as threads,
    ):
        port = origin.getsockname()[1]
        body = {"messages": asking(f"http://127.0.0.1:{port}/image.png")}
        asked = threads.submit(client.post, "/tokenize", json=body)
        with origin.accept()[0]:
            process.send_signal(signal.SIGTERM)
            answer = asked.result()
        assert process.wait(PATIENCE_S) == 0
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "unavailable"


@pytest.mark.thorough
@pytest.mark.parametrize("signum", first(1, [signal.SIGTERM, signal.SIGINT]))
def test_idle_gateway_ends_at_once(fakes, tmp_path, signum):
    def seconds() -> float:
        with gateway(fakes, tmp_path) as (process, _):
            return seconds_to_end(process, signum)

    assert least(seconds, 10) < 10


def seconds_to_end(process, signum: int) -> float:
    start = time.monotonic()
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 0
    return time.monotonic() - start


def test_gateway_on_an_ipv6_address_is_found_ready(fakes, tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with gateway(fakes, tmp_path, GATEWAY_HOST="::1") as (_, client):
        assert asyncio.run(gateway_ready("::1", client.base_url.port or 0))


def test_more_clients_than_descriptors_at_first_are_answered(fakes, tmp_path):
    """Beyond the soft limit connections were closed without an answer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/dev/fd")) + 64  # this process' own stay open
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            _, client = stack.enter_context(gateway(fakes, tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        place = client.base_url.host, client.base_url.port
        for _ in range(few):
            connection = stack.enter_context(socket.create_connection(place, PATIENCE_S))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_api_keys_guard_all_but_probes_and_page(fakes, tmp_path):
    fakes[1].reply, fakes[1].delay_s = [40] * 5, 0.0
    with gateway(fakes, tmp_path, GATEWAY_API_KEYS="first,second") as (_, client):
        for path in ("/", "/health", "/ready"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/nope"):
            response = client.get(path)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for given in ("", "first", "Bearer", "Bearer fir", "Bearer first,second", "Basic first"):
            headers = {"authorization": given}
            assert (
                client.post("/v1/chat/completions", json=BODY, headers=headers).status_code == 401
            )
        for key in ("first", "second"):
            headers = {"authorization": f"Bearer {key}"}
            assert (
                client.post("/v1/chat/completions", json=BODY, headers=headers).status_code == 200
            )
