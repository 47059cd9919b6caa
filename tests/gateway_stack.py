"""The real gateway on a real port, with fake services, in a thread with its own event loop."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import httpx2

from services.gateway.app import Gateway, create_gateway
from services.gateway.batches.batch_runner import RunnerBounds
from services.gateway.bounds import Bounds
from services.gateway.clients.pods import PodTimes
from services.gateway.server import ConnectionTimeouts, GatewayServer
from services.gateway.settings import GatewaySettings
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.fakes import FakeDecoder, FakeEncoder
from tests.noise import PATIENCE_S
from tests.tiny_tokenizer import (
    added_ids,
    vocab_size,
    write_model_directory,
    write_text_model_directory,
)

MODEL = "tiny"
# On a busy machine a health check may take seconds: that is no reason to lose a fake's requests.
PATIENT_CHECKS = PodTimes(check_timeout_s=PATIENCE_S)


class LoopThread:
    """An event loop in a thread; gRPC's asyncio side lives in one loop per process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = PATIENCE_S) -> Any:
        """Runs a coroutine there and returns its result."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


def port_of(server: GatewayServer) -> int:
    """Of one that has started."""
    return server.servers[0].sockets[0].getsockname()[1]


class GatewayStack:
    """A gateway, its encoders and its decoders.

    Args:
        files: content of files of the model's directory that differ from the tiny model's, by name.
        decoder_task: task of the decoders. Defaults to the setting of the gateway.
        memory_bytes: memory of the gateway's pod. Defaults to the machine's.
        encode_timeout_s: seconds after which a slow encoder is replaced.
    """

    def __init__(
        self,
        thread: LoopThread,
        directory: Path,
        *,
        num_encoders: int = 1,
        num_decoders: int = 1,
        generation: dict[str, Any] | None = None,
        text_only: bool = False,
        files: Mapping[str, str] | None = None,
        decoder_task: str = "",
        timeouts: ConnectionTimeouts | None = None,
        memory_bytes: int | None = None,
        encode_timeout_s: float = PATIENCE_S,
        batch_bounds: RunnerBounds | None = None,
        **settings: object,
    ) -> None:
        self.thread = thread
        self._timeouts = timeouts
        self._memory_bytes = memory_bytes
        self._batch_bounds = batch_bounds
        self._encode_timeout_s = encode_timeout_s
        write = write_text_model_directory if text_only else write_model_directory
        self.model_directory = write(directory / MODEL, **(generation or {}))
        for name, content in (files or {}).items():
            (self.model_directory / name).write_text(content)
        self.tokenizer = ModelTokenizer.from_directory(self.model_directory)
        self.encoders = [FakeEncoder() for _ in range(num_encoders)]
        features: dict[str, Any] = {"num_features": 0} if text_only else {}
        if task := settings.get("task", decoder_task):
            features["task"] = task
        self.decoders = [
            FakeDecoder(vocab_size=vocab_size(), **features) for _ in range(num_decoders)
        ]
        for decoder in self.decoders:
            decoder.encoders = self.encoders
            decoder.default_end_token = added_ids()["<|im_end|>"]
            decoder.default_reply = self.tokenizer.encode_text("A red circle.")
            decoder.reset()
        names = {each.name for each in fields(Bounds)}
        self._bounds = {name: settings.pop(name) for name in names & settings.keys()}
        self._settings = settings
        thread.run(self._start())

    @property
    def encoder(self) -> FakeEncoder:
        return self.encoders[0]

    @property
    def decoder(self) -> FakeDecoder:
        return self.decoders[0]

    async def _start(self) -> None:
        fakes: Sequence[FakeEncoder | FakeDecoder] = (*self.encoders, *self.decoders)
        for fake in fakes:
            await fake.start()
        self.settings = GatewaySettings(
            **{
                "port": 0,
                "model": self.model_directory,
                "encoder_addresses": ",".join(e.address for e in self.encoders),
                "decoder_addresses": ",".join(d.address for d in self.decoders),
                **self._settings,
            }
        )
        self.bounds = replace(self.settings.bounds, **self._bounds)
        self.gateway: Gateway = create_gateway(
            self.settings, self.bounds, pod_times=PATIENT_CHECKS,
            memory_bytes=self._memory_bytes, batch_bounds=self._batch_bounds,
        )  # fmt: skip
        self.gateway.service.encode_timeout_s = self._encode_timeout_s
        self.server = GatewayServer(self.gateway, self.settings, timeouts=self._timeouts)
        self._serving = asyncio.create_task(self.server.serve())
        async with asyncio.timeout(PATIENCE_S):
            while not (self.server.started and self.all_healthy()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.port = port_of(self.server)
        self.url = f"http://127.0.0.1:{self.port}"

    def all_healthy(self) -> bool:
        service = self.gateway.service
        return len(service.encoders.healthy()) == len(self.encoders) and len(
            service.decoders.healthy()
        ) == len(self.decoders)

    def num_in_flight(self) -> int:
        """Number of calls and sequences at all encoders and decoders."""
        service = self.gateway.service
        return sum(pod.num_in_flight for pod in (*service.encoders.pods, *service.decoders.pods))

    def reset(self) -> None:
        """Resets the fakes and the timeout of encode calls, restarts stopped fakes at their
        address, and waits for the end of calls that earlier requests have left: the choice of an
        encoder or a decoder depends on what is in flight there.
        """
        self.gateway.service.encode_timeout_s = self._encode_timeout_s

        async def reset() -> None:
            fakes: Sequence[FakeEncoder | FakeDecoder] = (*self.encoders, *self.decoders)
            stopped = {fake.address for fake in fakes if fake.server is None}
            pools = self.gateway.service.encoders, self.gateway.service.decoders
            async with asyncio.timeout(PATIENCE_S):
                # One that comes back unmissed is taken for what it was before.
                while stopped & {pod.address for pool in pools for pod in pool.serving()}:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                for fake in fakes:
                    fake.reset()
                    if fake.server is None:
                        await fake.start(fake.address)
                while not self.all_healthy() or self.num_in_flight():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            # The next health check would say so, too: the fakes have forgotten their adapters.
            for pod in self.gateway.service.decoders.pods:
                pod.adapters = ()

        self.thread.run(reset())

    def lend(self) -> Iterator[Self]:
        """Yields the stack, reset, and then waits for the end of its requests: the body of a
        fixture that lends a stack to one test after another.
        """
        self.reset()
        yield self
        self.wait(lambda: self.gateway.admission.num_running == 0)

    def close(self) -> None:
        async def close() -> None:
            self.server.should_exit = True
            await self._serving
            for fake in (*self.encoders, *self.decoders):
                await fake.stop()

        self.thread.run(close())

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, **options)

    def chat(self, **fields: object) -> httpx2.Response:
        """Posts a chat request: a model and a greeting unless `fields` say otherwise."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}
        with self.client() as client:
            return client.post("/v1/chat/completions", json=body)

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    def on_loop(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return call()

        return self.thread.run(run())

    def wait(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> float:
        """Waits until `condition`; returns how long it took."""
        start = time.monotonic()
        while not self.on_loop(condition):
            assert time.monotonic() - start < timeout_s, "condition not met"
            time.sleep(0.005)
        return time.monotonic() - start
