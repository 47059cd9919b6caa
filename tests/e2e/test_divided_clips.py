"""One clip over real encoders: equal bits from one, two and four, also when one is killed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest

from services.common.errors import EmbeddingUnavailable
from services.common.pb import decoder_pb2
from services.common.pb.encoder_pb2 import FetchRequest
from services.common.transport.rpc import create_channel
from services.gateway.clients.pods import PodTimes
from tests.contract.test_gateway_video import asking, data_url, video
from tests.e2e.test_encoder_process import Encoder, run_encoder
from tests.gateway_fixtures import loop_thread
from tests.gateway_stack import MODEL, GatewayStack, LoopThread
from tests.noise import PATIENCE_S
from tests.stubs import EncoderStub

__all__ = ["loop_thread"]
pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]
NUM_UNITS = 24


class Encoders:
    """Real encoders, of which a test kills some.

    Attributes:
        directory: checkpoint that they serve.
        clip: a clip that is long enough for four.
    """

    def __init__(self, thread: LoopThread, directory: Path, clip: bytes) -> None:
        self.thread, self.directory, self.clip = thread, directory, clip
        self._exits = AsyncExitStack()
        self.running: dict[str, Encoder] = {}

    def start(self) -> None:
        """Starts one more."""

        async def start() -> None:
            encoder = await self._exits.enter_async_context(
                run_encoder(self.directory, cache_bytes=64 << 20)
            )
            (args,) = [
                value
                for value in _environment(encoder.process.pid)
                if value.startswith("ENCODER_ADDRESS=")
            ]
            self.running[args.partition("=")[2]] = encoder

        self.thread.run(start())

    def num_encoded(self, address: str) -> float:
        return self.thread.run(self.running[address].num_encoded())

    def kill(self, address: str) -> None:
        """Kills a front. Its engine ends with it."""
        self.running.pop(address).process.kill()

    def close(self) -> None:
        self.thread.run(self._exits.aclose())


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


class Stack(GatewayStack):
    """A gateway of real encoders, and a decoder that fetches each embedding once.

    Attributes:
        bits: embeddings by image key, as `Fetch` gave them.
        fetched_from: address of the encoder of each.
    """

    def __init__(self, encoders: Encoders, addresses: list[str], directory: Path) -> None:
        self.bits: dict[bytes, bytes] = {}
        self.fetched_from: dict[bytes, str] = {}
        self.kill_at = 0  # units before the encoder of the last unit is killed; 0: it is not
        self._own, self._addresses = encoders, addresses
        super().__init__(
            encoders.thread, directory, num_encoders=0, model=encoders.directory,
            encoder_addresses=",".join(addresses), log_level="ERROR",
        )  # fmt: skip

    async def _start(self) -> None:
        for decoder in self.decoders:
            decoder.description.hidden = 64
            decoder.before = self._fetch_all
        await super()._start()
        # A health check that a busy machine delays must not take an encoder away.
        dialer = self.gateway.service.encoders._dialer
        dialer.times = PodTimes(check_timeout_s=2 * PATIENCE_S)

    def all_healthy(self) -> bool:
        service = self.gateway.service
        return len(service.encoders.healthy()) == len(self._addresses) and bool(
            service.decoders.healthy()
        )

    async def _fetch_all(self, submit: decoder_pb2.Submit) -> None:
        for image in submit.images:
            if image.image_key in self.bits:
                continue  # as in a decoder's arena
            if self.kill_at and len(self.bits) >= self.kill_at:
                self._own.kill(submit.images[-1].encoder_address)
                self.kill_at = 0
            try:
                self.bits[image.image_key] = await _fetch(image)
                self.fetched_from[image.image_key] = image.encoder_address
            except grpc.aio.AioRpcError:
                self.decoder.fail_encoder_address = image.encoder_address
                raise EmbeddingUnavailable("the encoder is gone") from None


async def _fetch(image: decoder_pb2.ImageRef) -> bytes:
    channel = create_channel(image.encoder_address)
    try:
        call = EncoderStub(channel).Fetch(
            FetchRequest(image_key=image.image_key), timeout=PATIENCE_S
        )
        found = bytearray()
        async for part in call:
            if part.HasField("chunk"):
                end = part.chunk.offset + len(part.chunk.data)
                found.extend(bytes(max(0, end - len(found))))
                found[part.chunk.offset : end] = part.chunk.data
        return bytes(found)
    finally:
        await channel.close()


def bits_of(stack: Stack, salt: str) -> list[bytes]:
    """Asks about the clip. Returns the embeddings in the order of the prompt."""
    stack.bits.clear()
    part = {**video(data_url(stack._own.clip)), "num_frames": 2 * NUM_UNITS}
    answer = stack.chat(messages=asking(part), cache_salt=salt)
    assert answer.status_code == 200, answer.text
    found = [stack.bits[image.image_key] for image in stack.decoder.submits[-1].images]
    assert len(found) == NUM_UNITS and len(set(found)) > NUM_UNITS // 2
    return found


@pytest.fixture(scope="module")
def encoders(
    loop_thread: LoopThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encoders]:
    from tests.e2e.tiny_video import make_qwen3_vl
    from tests.videos import make

    directory = tmp_path_factory.mktemp("divided") / MODEL
    make_qwen3_vl(directory)
    clip = make("mp4", frames=240, size=(1080, 1920), rate=24, options={"g": "24"})
    found = Encoders(loop_thread, directory, clip)
    try:
        for _ in range(4):
            found.start()
        yield found
    finally:
        found.close()


def test_bits_are_equal_whichever_encoders_there_are(encoders: Encoders, tmp_path: Path) -> None:
    addresses = list(encoders.running)
    before = {address: encoders.num_encoded(address) for address in addresses}
    found: dict[str, list[bytes]] = {}
    for count in (1, 2, 4):
        stack = Stack(encoders, addresses[:count], tmp_path / str(count))
        try:
            found[str(count)] = bits_of(stack, f"of {count}")
            assert len(set(stack.fetched_from.values())) == count
        finally:
            stack.close()
        now = {address: encoders.num_encoded(address) for address in addresses}
        assert sum(now.values()) - sum(before.values()) == NUM_UNITS  # each once
        before = now
    # One encoder is frozen before it is sent anything, and killed when it has been sent something;
    # then one is killed when a decoder has fetched units of others.
    for name in ("frozen", "killed"):
        stack = Stack(encoders, list(encoders.running), tmp_path / name)
        before = {address: encoders.num_encoded(address) for address in encoders.running}
        try:
            with ThreadPoolExecutor(1) as pool:
                if name == "killed":
                    stack.kill_at = 5
                    found[name] = bits_of(stack, name)
                else:
                    lost = next(iter(encoders.running))
                    (pod,) = (p for p in stack.gateway.service.encoders.pods if p.address == lost)
                    os.kill(encoders.running[lost].process.pid, signal.SIGSTOP)
                    asked = pool.submit(bits_of, stack, name)
                    stack.wait(lambda pod=pod: pod.num_in_flight > 0)
                    encoders.kill(lost)
                    found[name] = asked.result()
            now = {address: encoders.num_encoded(address) for address in encoders.running}
            assert len(now) == len(before) - 1
            assert {image.encoder_address for image in stack.decoder.submits[-1].images} <= set(now)
            # Each unit once by those that are left; of the killed encoder's none was fetched.
            assert sum(now.values()) - sum(before[address] for address in now) == NUM_UNITS
        finally:
            stack.close()
    for name, bits in found.items():
        assert bits == found["1"], name
