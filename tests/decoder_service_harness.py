"""The decoder's servicer and front over real gRPC; the device and the encoder are fakes."""

import asyncio
import contextlib
import errno
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from services.common.embeddings.arena import Arena
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.pb import decoder_pb2 as pb
from services.common.process import children
from services.common.tenancy.tenant_capacity import TenantCapacity
from services.common.transport.rpc import create_channel, create_server
from services.decoder.engine.messages import ImageSpan
from services.decoder.front.adapter_table import AdapterTable
from services.decoder.front.front import DecoderFront
from services.decoder.front.sequence_limit import max_sequences
from services.decoder.front.service import DecoderServicer
from services.decoder.images.embedding_fetch import EncoderFetcher
from services.decoder.images.embedding_source import EmbeddingSource
from services.decoder.images.encoders_tier import EncodersTier, Fetch
from services.decoder.input_listener import InputListener
from services.decoder.masks.messages import MaskSettings
from services.decoder.masks.processes import MaskProcesses
from services.decoder.masks.rows import SPARE_ROWS
from services.decoder.metrics import DecoderMetrics
from tests.fake_fetch import FakeFetchServicer, serve_fetch
from tests.fake_runner import VOCAB_SIZE, FakeRunner, add_message, expected_tokens, runner_info
from tests.in_process_engine import InProcessEngine
from tests.noise import PATIENCE_S
from tests.stubs import DecoderStub
from tests.tiny_tokenizer import added_ids

KEYS = [bytes([n]) * 32 for n in range(1, 9)]


class NoMasks(MaskProcesses):
    """Mask processes of a decoder whose sequences have no token masks. None is started."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        return ()

    def __init__(self) -> None:
        pass

    def start(self, listener: InputListener) -> None:
        pass

    def tokens_arrived(self, tokens: object) -> None:
        pass

    def remove(self, number: int) -> None:
        pass

    async def close(self) -> None:
        pass


class Launcher(children.Launcher):
    """Starts processes of masks, unless the machine has no descriptors left.

    Attributes:
        num_refusals: number of starts that fail from now on.
        num_stopped: number of processes that are stopped as they start, from now on.
        refused: modules that were not started.
    """

    def __init__(self) -> None:
        self.num_refusals = self.num_stopped = 0
        self.refused: list[str] = []

    async def start(
        self, module: str, settings: bytes, *descriptors: int
    ) -> asyncio.subprocess.Process:
        if self.num_refusals > 0:
            self.num_refusals -= 1
            self.refused.append(module)
            raise OSError(errno.EMFILE, "no descriptors left")
        process = await super().start(module, settings, *descriptors)
        if self.num_stopped > 0:
            self.num_stopped -= 1
            process.send_signal(signal.SIGSTOP)
        return process

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuses all starts for the duration of a `with`."""
        self.num_refusals = 1 << 30
        try:
            yield
        finally:
            self.num_refusals = 0


class Decoder:
    """The system under test and everything around it."""

    def __init__(
        self,
        *,
        arena_pages: int = 16,
        timeout_s: float = PATIENCE_S,
        model_directory: Path | None = None,
        num_processes: int = 1,
        max_work_s: float = 30.0,
        grammar_bytes: int = 1 << 30,
        max_queued_bytes: int | None = None,
        adapters: Mapping[str, Path] | None = None,
        **info: int,
    ) -> None:
        self.runner = FakeRunner(runner_info(**info))
        self.engine: Any = InProcessEngine(self.runner)
        self.registry = CollectorRegistry()
        self.metrics = metrics = DecoderMetrics(self.registry)
        self.arena = Arena(arena_pages * 4096)
        self.fetcher = EncoderFetcher()
        tiers: list[Tier[Fetch]] = [EncodersTier(self.fetcher, metrics)]
        store = EmbeddingStore(self.arena, tiers, metrics.hits, metrics.misses)
        self.source = EmbeddingSource(store, metrics, standstill_s=timeout_s)
        self.launcher = Launcher()
        masks = NoMasks()
        if model_directory is not None:
            vocab_size = self.engine.ready.vocab_size
            settings = MaskSettings(
                directory=str(model_directory),
                vocab_size=vocab_size,
                end_ids=(added_ids()["<|im_end|>"],),
                num_rows=max_sequences(self.engine.ready) + SPARE_ROWS,
                max_drafts=self.engine.ready.max_drafts,
                max_work_s=max_work_s,
                grammar_bytes=grammar_bytes,
            )
            masks = MaskProcesses(
                settings,
                self.engine.link,
                self.engine,
                metrics,
                count=num_processes,
                launcher=self.launcher,
                max_wait_s=PATIENCE_S,  # the compile process starts with the first grammar
            )
        capacity = TenantCapacity(max_sequences(self.engine.ready))
        given = adapters or {}
        self.front = DecoderFront(
            self.engine.ready,
            self.engine,
            self.source,
            masks,
            metrics,
            capacity,
            AdapterTable(given, len(given), self.engine),
            max_queued_bytes=max_queued_bytes,
        )
        self.masks: Any = masks
        self.encoder = FakeFetchServicer()
        self.encoder_address = ""
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Decoder":
        self.encoder_address = await self._exit.enter_async_context(serve_fetch(self.encoder))
        self._server = create_server()
        DecoderServicer(self.front).register(self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.running = asyncio.create_task(self.front.run())
        self.address = f"127.0.0.1:{port}"
        self.channel = create_channel(self.address)
        self.stub = DecoderStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.channel.close()
        await self._server.stop(None)
        await self.front.close()
        self.engine.close()
        await self._exit.aclose()

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def is_idle(self) -> bool:
        stats = self.engine.engine.stats()
        unreferenced = all(entry.references == 0 for entry in self.arena.entries)
        return not self.front.is_busy and stats.num_free_blocks == stats.num_blocks and unreferenced


class Gateway:
    """One Generate stream and what came over it."""

    def __init__(self, decoder: Decoder, *, takes_bare_tokens: bool = True) -> None:
        self._decoder = decoder
        self._takes_bare_tokens = takes_bare_tokens
        self.num_bare_tokens = 0
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[pb.TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[pb.PromptLogprobs]] = {}
        self.starts: dict[int, pb.Started] = {}
        self.ends: dict[int, Any] = {}  # `Finished` or `Failed`
        self.handed_over: list[int] = []
        self.num_messages = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Gateway":
        self.call = self._decoder.stub.Generate()
        if self._takes_bare_tokens:
            await self.call.write(pb.GenerateCommand(accept=pb.Accept(bare_tokens=True)))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def submit(self, submit: pb.Submit) -> None:
        await self.call.write(pb.GenerateCommand(submit=submit))

    async def send_batch(self, *commands: pb.GenerateCommand) -> None:
        batch = pb.CommandBatch(commands=commands)
        await self.call.write(pb.GenerateCommand(batch=batch))

    async def cancel(self, sequence_id: int) -> None:
        await self.call.write(pb.GenerateCommand(cancel=pb.Cancel(sequence_id=sequence_id)))

    async def end(self, sequence_id: int) -> Any:
        await self.until(lambda: sequence_id in self.ends)
        return self.ends[sequence_id]

    async def until(self, condition) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def closed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._reader

    async def _read(self) -> None:
        async for message in self.call:
            self.num_messages += 1
            for number, token_id in zip(message.sequence_ids, message.token_ids, strict=True):
                assert number in self.starts and number not in self.ends
                self.num_bare_tokens += 1
                self.tokens[number].append(token_id)
            for event in message.events:
                number = event.sequence_id
                assert number not in self.ends, "an event after the end"
                self.tokens.setdefault(number, []).extend(event.token_ids)
                self.logprobs.setdefault(number, []).extend(event.logprobs)
                self.prompt_logprobs.setdefault(number, []).extend(event.prompt_logprobs)
                if event.leaving:
                    self.handed_over.append(number)
                if event.HasField("started"):
                    assert number not in self.starts and event.token_ids, "not the first token"
                    self.starts[number] = event.started
                if (kind := event.WhichOneof("end")) is not None:
                    self.ends[number] = getattr(event, kind)
            self._changed.set()


def prompt_of(seed: int, length: int = 12) -> list[int]:
    return [(seed * 31 + i * 7) % VOCAB_SIZE for i in range(length)]


def submit_of(
    sequence_id: int,
    prompt: list[int],
    *images: pb.ImageRef,
    timeout_s: float = 0.0,
    **sampling: object,
) -> pb.Submit:
    fields = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8, "seed": 1, **sampling}
    return pb.Submit(
        sequence_id=sequence_id,
        request_id=f"request-{sequence_id}",
        prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
        images=images,
        sampling=pb.SamplingParams(**fields),
        timeout_s=timeout_s,
    )


def image_of(decoder: Decoder, number: int, offset: int = 3, num_tokens: int = 6) -> pb.ImageRef:
    decoder.encoder.sizes[KEYS[number]] = num_tokens
    return pb.ImageRef(
        image_key=KEYS[number],
        offset=offset,
        num_tokens=num_tokens,
        encoder_address=decoder.encoder_address,
    )


def alone(prompt: list[int], *spans: ImageSpan, max_tokens: int = 8) -> list[int]:
    message = add_message(1, prompt, images=spans, max_tokens=max_tokens, seed=1)
    return expected_tokens(message, 256)[0]


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of things that have no event
            await asyncio.sleep(0.001)
