"""Whatever dies, each accepted request ends in one full answer, one error event or one status."""

import itertools
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress

import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.attacks.images import webp
from tests.e2e.cluster import Cluster, Service, message, png, wait_until
from tests.noise import PATIENCE_S, least

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
QUESTION = "Describe the picture."


@pytest.fixture
def cluster(pods: Cluster) -> Cluster:
    """Whole before each test. Each test has images of its own."""
    pods.restore()
    return pods


@pytest.fixture
def worn(pods: Cluster) -> Cluster:
    """What the tests before have left: for those that come last, and end what is left."""
    decoders = any(decoder.is_running() for decoder in pods.decoders)
    if not (decoders and pods.gateway.is_running()):
        pods.restore()
    return pods


class Usage:
    """Which of some services works, by one of its counters from now on."""

    def __init__(self, services: Sequence[Service], counter: str) -> None:
        self._counter = counter
        self._before = {service: service.metric(counter) for service in services}

    def busiest(self) -> Service:
        return max(self._before, key=lambda s: s.metric(self._counter) - self._before[s])


def decoding_cpu_s(encoder: Service) -> float:
    """CPU seconds of the processes that decode its images, and of the kernel for them, which needs
    most on some machines.
    """
    workers = psutil.Process(encoder.engine_pid()).children(recursive=True)
    return sum(times.user + times.system for times in (w.cpu_times() for w in workers))


def streamed(client: openai.OpenAI, max_tokens: int) -> Iterator[ChatCompletionChunk]:
    """An answer of `max_tokens` tokens."""
    return iter(
        client.chat.completions.create(
            model="demo",
            messages=[message("Who are you?")],
            stream=True,
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True},
        )
    )


def is_ready(cluster: Cluster) -> bool:
    try:
        with urllib.request.urlopen(f"{cluster.url}/ready", timeout=PATIENCE_S):
            return True
    except OSError:
        return False


def test_sigterm_lets_running_streams_finish(cluster: Cluster) -> None:
    with cluster.client() as client:
        chunks = streamed(client, 200)
        next(chunks)
        cluster.gateway.signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(cluster), PATIENCE_S, "the gateway drains")
        ends = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert ends[-1] == "length"
    assert cluster.gateway.wait() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(
    cluster: Cluster, stream: bool
) -> None:
    body = json.dumps(
        {"model": "demo", "messages": [message("Who are you?", png(30))], "stream": stream,
         "max_tokens": 1000, "ignore_eos": True}
    ).encode()  # fmt: skip
    host, port = cluster.gateway.address.split(":")

    def seconds() -> float:
        with ExitStack() as clients:
            for _ in range(4):
                client = clients.enter_context(socket.create_connection((host, int(port))))
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
            wait_until(lambda: cluster.used_blocks() > 0, PATIENCE_S, "the sequences run")
        return wait_until(lambda: cluster.used_blocks() == 0, PATIENCE_S, "all blocks are free")

    assert least(seconds, 1.0) <= 1.0


def test_an_encoder_that_dies_costs_a_retry(cluster: Cluster) -> None:
    encodes = Usage(cluster.encoders, "triptych_encoder_images_encoded_total")
    expected = {seed: cluster.ask(QUESTION, png(seed)) for seed in range(40, 52)}
    encoder = encodes.busiest()
    encoder.freeze()  # requests that choose it hang inside it
    asked: dict[int, Future[str]] = {}
    with ThreadPoolExecutor(len(expected)) as pool:
        for salt in itertools.count():  # no cache has it; of 4,000 one has all images elsewhere
            new = {"cache_salt": f"new {salt}"}
            asked = {
                seed: pool.submit(cluster.ask, QUESTION, png(seed), extra_body=new)
                for seed in expected
            }
            if wait(asked.values(), 0.5).not_done:
                break
        encoder.kill()
        assert {seed: answer.result() for seed, answer in asked.items()} == expected


def test_an_image_that_was_in_work_when_two_engines_ended_is_refused(cluster: Cluster) -> None:
    image = webp(6000, 1)  # takes 0.4 to more than 1 s of CPU time; no other test has it
    before = {encoder: decoding_cpu_s(encoder) for encoder in cluster.encoders}

    def at_work() -> list[Service]:
        """The encoders that decode it."""
        return [e for e, cpu_s in before.items() if e.is_running() and works_since(e, cpu_s)]

    def works_since(encoder: Service, cpu_s: float) -> bool:
        with suppress(psutil.Error, ValueError):  # ValueError: its engine has ended
            return decoding_cpu_s(encoder) > cpu_s + 0.1
        return False

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.ask, QUESTION, image)
        for _ in range(2):
            wait_until(lambda: bool(at_work()), PATIENCE_S, "it is decoded")
            (encoder,) = at_work()
            del before[encoder]
            os.kill(encoder.engine_pid(), signal.SIGSEGV)
        with pytest.raises(openai.BadRequestError) as refused:
            asked.result()
        assert refused.value.code == "invalid_image"
    cluster.restore()
    assert cluster.ask(QUESTION, png(12))


def test_a_decoder_that_dies_before_the_first_token_costs_a_retry(cluster: Cluster) -> None:
    sequences = Usage(cluster.decoders, "triptych_decoder_sequences_total")
    expected = {seed: cluster.ask(QUESTION, png(seed)) for seed in range(20, 26)}
    decoder = sequences.busiest()
    decoder.freeze()  # requests that choose it hang inside it
    with ThreadPoolExecutor(6) as pool:
        asked = {seed: pool.submit(cluster.ask, QUESTION, png(seed)) for seed in expected}
        assert wait(asked.values(), 0.5).not_done, "no request uses it"
        decoder.kill()
        assert {seed: answer.result() for seed, answer in asked.items()} == expected


def test_without_encoders_images_are_refused_and_text_is_answered(worn: Cluster) -> None:
    for encoder in worn.encoders:
        encoder.stop()
    with pytest.raises(openai.APIStatusError) as refused:
        worn.ask(QUESTION, png(11))
    assert refused.value.status_code == 503
    assert worn.ask("Who are you?")


def test_a_decoder_that_dies_mid_stream_is_an_error_not_an_end(worn: Cluster) -> None:
    with worn.client() as client:
        chunks = streamed(client, 400)
        next(chunks)
        next(chunks)
        for decoder in worn.decoders:
            decoder.stop()
        with pytest.raises(openai.APIError):
            for _ in chunks:
                pass
