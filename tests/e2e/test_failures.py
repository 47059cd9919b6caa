"""Whatever dies, each accepted request ends in one full answer, one error event or one status."""

import json
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster import Cluster, message, picture, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
QUESTION = "Describe the picture."


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, encoders=2, decoders=2) as cluster:
        yield cluster


def test_an_encoder_that_dies_costs_a_retry(cluster: Cluster) -> None:
    expected = {seed: cluster.ask(QUESTION, picture(seed)) for seed in (1, 2, 3, 4)}
    cluster.redis.flush()
    for service in (*cluster.decoders,):
        service.kill()
        service.start()
    wait_until(cluster.is_ready, 60, "decoders are back")
    cluster.encoders[0].freeze()  # requests that choose it hang inside it
    with ThreadPoolExecutor(4) as pool:
        asked = {seed: pool.submit(cluster.ask, QUESTION, picture(seed)) for seed in expected}
        time.sleep(0.5)
        cluster.encoders[0].kill()
        assert {seed: answer.result() for seed, answer in asked.items()} == expected


def test_without_encoders_images_are_refused_and_text_is_answered(cluster: Cluster) -> None:
    for encoder in cluster.encoders:
        encoder.kill()
    with pytest.raises(openai.APIStatusError) as refused:
        cluster.ask(QUESTION, picture(5))
    assert refused.value.status_code == 503
    assert cluster.ask("Who are you?")


def test_a_decoder_that_dies_mid_stream_is_an_error_not_an_end(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream = client.chat.completions.create(
            model="demo", messages=[message("Who are you?")], stream=True, max_tokens=400,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = iter(stream)
        next(chunks)
        next(chunks)
        for decoder in cluster.decoders:
            decoder.kill()
        with pytest.raises(openai.APIError):
            for _ in chunks:
                pass


def test_a_decoder_that_dies_before_the_first_token_costs_a_retry(cluster: Cluster) -> None:
    expected = {seed: cluster.ask(QUESTION, picture(seed)) for seed in range(6)}
    cluster.decoders[0].freeze()  # requests that choose it hang inside it
    with ThreadPoolExecutor(6) as pool:
        asked = {seed: pool.submit(cluster.ask, QUESTION, picture(seed)) for seed in expected}
        time.sleep(0.5)
        assert not all(answer.done() for answer in asked.values()), "nobody chose it"
        cluster.decoders[0].kill()
        assert {seed: answer.result() for seed, answer in asked.items()} == expected


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(
    cluster: Cluster, stream: bool
) -> None:
    body = json.dumps(
        {"model": "demo", "messages": [message("Who are you?", picture(7))], "stream": stream,
         "max_tokens": 1000, "ignore_eos": True}
    ).encode()  # fmt: skip
    host, port = cluster.gateway.address.split(":")
    clients = []
    for _ in range(4):
        client = socket.create_connection((host, int(port)))
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        clients.append(client)
    wait_until(lambda: cluster.used_blocks() > 0, 20, "the sequences run")
    for client in clients:
        client.close()
    wait_until(lambda: cluster.used_blocks() == 0, 1.5, "all blocks are free")


def test_sigterm_lets_running_streams_finish(cluster: Cluster) -> None:
    with cluster.client() as client:
        stream = client.chat.completions.create(
            model="demo", messages=[message("Who are you?")], stream=True, max_tokens=200,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        chunks = iter(stream)
        next(chunks)
        cluster.gateway.signal(signal.SIGTERM)
        with pytest.raises(OSError):
            for _ in range(50):
                urllib.request.urlopen(f"{cluster.url}/ready", timeout=2)
                time.sleep(0.02)
        ends = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert ends[-1] == "length"
