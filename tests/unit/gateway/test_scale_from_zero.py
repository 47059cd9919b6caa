"""A gateway whose services are scaled to zero answers with 503, and serves once they come."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from services.gateway.app import create_gateway
from services.gateway.clients.pods import PodTimes
from services.gateway.server import GatewayServer
from services.gateway.settings import GatewaySettings
from tests.fakes import FakeDecoder, FakeEncoder
from tests.gateway_fixtures import asking, image_url
from tests.gateway_stack import LoopThread, port_of
from tests.noise import PATIENCE_S
from tests.ports import free_port
from tests.tiny_tokenizer import vocab_size, write_model_directory

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


class Lonely:
    """A gateway without services."""

    def __init__(self, thread: LoopThread, directory: Path, patience_s: float) -> None:
        self._thread = thread
        self.encoder_port, self.decoder_port = free_port(), free_port()
        settings = GatewaySettings(
            port=0,
            model=write_model_directory(directory / "tiny"),
            encoder_addresses=f"127.0.0.1:{self.encoder_port}",
            decoder_addresses=f"dns:///localhost:{self.decoder_port}",
            log_level="ERROR",
        )
        self.started_at = time.monotonic()

        async def start() -> None:
            times = PodTimes(resolve_s=0.1, absent_s=patience_s)
            self.gateway = create_gateway(settings, pod_times=times)
            self.server = GatewayServer(self.gateway, settings)
            self._serving = asyncio.create_task(self.server.serve())
            async with asyncio.timeout(PATIENCE_S):
                while not self.server.started:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        thread.run(start())
        self.client = httpx2.Client(
            base_url=f"http://127.0.0.1:{port_of(self.server)}", timeout=PATIENCE_S
        )

    def ready(self) -> tuple[int, str]:
        answer = self.client.get("/ready")
        return answer.status_code, answer.json()["status"]

    def ask(self, **fields: object) -> httpx2.Response:
        return self.client.post("/v1/chat/completions", json={**HELLO, **fields})

    def wait(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        async def close() -> None:
            self.server.should_exit = True
            await self._serving

        self.client.close()
        self._thread.run(close())


@pytest.fixture
def lonely(loop_thread, tmp_path) -> Iterator[Lonely]:
    gateway = Lonely(loop_thread, tmp_path, patience_s=0.3)
    yield gateway
    gateway.close()


def test_it_is_ready_after_a_while_and_serves_when_they_come(lonely, loop_thread):
    found = lonely.ready()
    if time.monotonic() - lonely.started_at < 0.3:
        assert found == (503, "waiting for an encoder and a decoder")
    lonely.wait(lambda: lonely.ready()[0] == 200)
    assert lonely.ready()[1] == "waiting for an encoder and a decoder"
    refused = lonely.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    registry = lonely.gateway.metrics.registry  # what an autoscaler sees
    assert (
        registry.get_sample_value("triptych_gateway_requests_total", {"outcome": "unavailable"})
        == 1
    )
    assert lonely.client.post("/tokenize", json={"prompt": "x"}).status_code == 503
    assert lonely.client.get("/v1/models").status_code == 200

    decoder = FakeDecoder(vocab_size=vocab_size())
    loop_thread.run(decoder.start(f"127.0.0.1:{lonely.decoder_port}"))
    lonely.wait(lambda: lonely.ask().status_code == 200)  # text needs no encoder
    assert lonely.ready() == (200, "waiting for an encoder and a decoder")
    image = lonely.ask(messages=asking(image_url()))
    assert (image.status_code, image.headers["retry-after"]) == (503, "1")

    encoder = FakeEncoder()
    loop_thread.run(encoder.start(f"127.0.0.1:{lonely.encoder_port}"))
    lonely.wait(lambda: lonely.ask(messages=asking(image_url())).status_code == 200)
    lonely.wait(lambda: lonely.ready() == (200, "ready"))

    for fake in (decoder, encoder):
        loop_thread.run(fake.stop())
    lonely.wait(lambda: lonely.ask().status_code == 503)
    assert lonely.ready()[0] == 200
    assert lonely.ask().headers["retry-after"] == "1"
