"""Embeddings from an encoder's front to a decoder's, in two processes of this machine; no device.

    python -m benchmarks.transport --mib 16,4 --repeats 30

Prints the median of each way, end to end (the call, the copy, every check), beside the floor: one
copy of the bytes by one thread. "stored": the encoder holds the embedding. "fresh": Encode and
Fetch of a new image are sent together, and an engine that takes no time makes it; its digest is
computed while the bytes are sent. "features": the engine takes as long as a tower and finishes
feature after feature; the time is what follows its end. CPU is of both processes, Encode included.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import uvloop

from services.common.embeddings.arena import Arena
from services.common.embeddings.embedding import EmbeddingSpec
from services.common.embeddings.store import EmbeddingStore, Tier
from services.common.geometry import Geometry, Unit
from services.common.images.image_key import image_key
from services.common.pb import encoder_pb2 as pb
from services.common.process.process_memory import raise_malloc_trim_threshold
from services.common.process.service_process import create_service_server
from services.common.security.credentials import Credentials, TokenFile, watch_certificates
from services.common.security.rpc_credentials import PeerCheck
from services.common.transport.rpc import create_channel
from services.decoder.images.embedding_fetch import EncoderFetcher
from services.decoder.images.known_encoders import KnownEncoders
from services.encoder.decoding.clips.clip_pool import ClipPool
from services.encoder.engine.messages import (
    EncodeImage,
    EngineMessage,
    FeatureDone,
    FrontMessage,
    ImageDone,
    PlaceImage,
)
from services.encoder.front.admission import Admission
from services.encoder.front.client_embeddings import ClientEmbeddings
from services.encoder.front.embeddings import Embeddings
from services.encoder.front.engine_client import EngineClient
from services.encoder.front.probe_queue import ProbeQueue
from services.encoder.front.service import EncoderServicer
from services.encoder.front.source_store import SourceStore, Work
from services.encoder.front.tower_tier import TowerTier
from services.encoder.front.uploaded_files import UploadedFiles
from services.encoder.front.video_store import VideoStore
from services.encoder.metrics import EncoderMetrics
from tests.stubs import EncoderStub

_FEATURES, _HIDDEN = 4, 2048  # of the 2B model
_TOKEN_BYTES = 2 * _FEATURES * _HIDDEN
_NUM_SLOTS = 8  # embeddings each arena holds
_WARM_UP = 2 * _NUM_SLOTS
# Of an image of 1024 x 1024 on an H200; the features come after 6, 12, 18 and 24 of its 24 blocks.
_TOWER_S = 0.0088
_PREFIX = b"p" * 32
_SLOW = b"slow"  # an image that takes as long


class InstantEngine:
    """Reports each image as done at once; the arena holds finite values already."""

    def __init__(self) -> None:
        self._done: asyncio.Queue[EngineMessage] = asyncio.Queue()
        self._slow: set[int] = set()
        self._towers: set[asyncio.Task[None]] = set()

    async def receive(self) -> EngineMessage:
        return await self._done.get()

    def send(self, *messages: FrontMessage) -> None:
        for message in messages:
            if isinstance(message, EncodeImage) and message.source.image == _SLOW:
                self._slow.add(message.job_id)
            elif isinstance(message, PlaceImage):
                if message.job_id in self._slow:
                    self._slow.discard(message.job_id)
                    tower = asyncio.create_task(self._run_tower(message.job_id))
                    self._towers.add(tower)
                    tower.add_done_callback(self._towers.discard)
                else:
                    self._done.put_nowait(ImageDone(message.job_id))

    async def _run_tower(self, job_id: int) -> None:
        start = time.monotonic()
        for part in range(1, _FEATURES + 1):
            await asyncio.sleep(start + _TOWER_S * part / _FEATURES - time.monotonic())
            done = part == _FEATURES
            self._done.put_nowait(ImageDone(job_id) if done else FeatureDone([job_id], part))


@dataclass(frozen=True, slots=True)
class Link:
    """How encoder and decoder meet.

    Attributes:
        listen: the encoder's address; port 0: any free one.
        credentials: of both.
    """

    listen: str
    credentials: Credentials


async def serve(num_tokens: int, link: Link) -> None:
    """The encoder's process: prints its port and serves until it is killed."""
    arena = Arena(_NUM_SLOTS * num_tokens * _TOKEN_BYTES)
    values = np.random.default_rng(0).standard_normal(arena.size_bytes // 2, np.float32)
    np.frombuffer(arena.memory, np.uint16)[:] = values.view(np.uint32) >> 16
    like, metrics = EmbeddingSpec("bfloat16", 4, 0, 2048), EncoderMetrics()
    client = EngineClient(cast(Any, InstantEngine()), metrics)
    geometry = Geometry(0, 16, 1, 1, 1 << 30)
    sources = SourceStore(256 << 20)
    tiers: list[Tier[Work]] = [TowerTier(client, Admission(1 << 20), metrics, sources)]
    store = EmbeddingStore(arena, tiers, metrics.hits, metrics.misses)
    embeddings = Embeddings(like=like, geometry=geometry, store=store, sources=sources)
    running = asyncio.create_task(client.run())
    description = pb.DescribeEncoderResponse(key_prefix=_PREFIX, max_image_patches=1 << 20)
    servicer = EncoderServicer(
        description,
        embeddings,
        metrics,
        VideoStore(ProbeQueue(ClipPool(1, memory_bytes=0), 1), max_bytes=1 << 20),
        ClientEmbeddings(embeddings),
        UploadedFiles(None),
        takes_videos=False,
        max_read_bytes=256 << 20,
    )
    check = PeerCheck(link.credentials, "encoder", ("decoder",), metrics.registry)
    server, _ = await create_service_server(servicer, check=check if link.credentials else None)
    port = check.add_port(server, link.listen)
    await server.start()
    print(port, flush=True)
    await running


@dataclass(slots=True)
class Reader:
    """The decoder's side: one way of fetching, into slots that have been used before."""

    address: str
    stub: EncoderStub
    arena: Arena
    num_tokens: int
    fetcher: EncoderFetcher
    numbers: "itertools.count[int]"
    ready: list[bytes] = field(default_factory=list[bytes])

    async def encode(self, request: pb.EncodeRequest) -> None:
        """Has the encoder make an embedding."""
        await self.stub.Encode(request)

    async def fetch(self, key: bytes) -> None:
        """Fetches and releases it."""
        spec = EmbeddingSpec("bfloat16", _FEATURES, self.num_tokens, _HIDDEN)
        entry = self.arena.try_reserve(key, spec)
        assert entry is not None
        await self.fetcher.fetch(self.address, key, spec, self.arena.view(entry))
        self.arena.commit(entry)
        self.arena.release(entry)

    def new(self, image: bytes = b"image") -> pb.EncodeRequest:
        """Of an embedding that no cache has."""
        unit, salt = Unit((1, 1, self.num_tokens)), b"%d" % next(self.numbers)
        return pb.EncodeRequest(
            image_key=image_key(_PREFIX, image, unit=unit, salt=salt),
            image=image,
            grid=pb.Grid(t=1, h=1, w=self.num_tokens),
            cache_salt=salt,
        )

    async def stored(self) -> float:
        """Seconds for an embedding that the encoder holds; another one each time."""
        if not self.ready:
            requests = [self.new() for _ in range(_NUM_SLOTS)]
            self.ready = [request.image_key for request in requests]
            for request in requests:
                await self.encode(request)
            await asyncio.sleep(0.05)  # digested
            for _ in range(20):  # wakes the core, whose first transfer would be slow
                await self.stub.Describe(pb.DescribeEncoderRequest())
        key = self.ready.pop(0)
        return await timed(lambda: self.fetch(key))

    async def fresh(self) -> float:
        """Seconds from the request for a new embedding to its arrival."""
        request = self.new()

        async def both() -> None:
            await asyncio.gather(self.encode(request), self.fetch(request.image_key))

        return await timed(both)

    async def features(self) -> float:
        """Seconds from the end of the tower to the arrival of the embedding, the call included."""
        request = self.new(_SLOW)

        async def both() -> None:
            await asyncio.gather(self.encode(request), self.fetch(request.image_key))

        return await timed(both) - _TOWER_S


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    """Seconds it took."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def copy_floor_s(size_bytes: int, repeats: int) -> float:
    """One thread's copy between two buffers that have been used before."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


async def measure(mib: int, repeats: int, link: Link) -> None:
    """Prints the rows of one size."""
    num_tokens = (mib << 20) // _TOKEN_BYTES
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.transport", "--serve", str(num_tokens), *sys.argv[1:],
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        unix = link.listen.startswith("unix:")
        address = link.listen if unix else f"127.0.0.1:{port}"
        known = KnownEncoders([address])
        channel = create_channel(address, link.credentials, peer="encoder")
        encoder = psutil.Process(process.pid)
        arena, keys = Arena(_NUM_SLOTS * num_tokens * _TOKEN_BYTES), itertools.count(1)
        floor_s = copy_floor_s(mib << 20, repeats)
        for path in ("shm", "grpc"):
            fetcher = EncoderFetcher(
                shared_memory=path == "shm", credentials=link.credentials, known=known
            )
            stub = EncoderStub(channel)
            reader = Reader(address, stub, arena, num_tokens, fetcher, keys)
            kinds = (
                ("stored", reader.stored),
                ("fresh", reader.fresh),
                ("features", reader.features),
            )
            for kind, once in kinds:
                found: list[tuple[float, float]] = []
                for _ in range(_WARM_UP + repeats):
                    before = _cpu_s(encoder)
                    found.append((await once(), _cpu_s(encoder) - before))
                times = sorted(seconds for seconds, _ in found[_WARM_UP:])
                cpu_s = statistics.mean(cpu for _, cpu in found[_WARM_UP:])
                median_s = statistics.median(times)
                print(
                    f"{mib:4d} MiB  {path:4s}  {kind:8s}  {1e3 * median_s:7.2f} ms"
                    f"  (least {1e3 * times[0]:.2f}, p90 {1e3 * times[len(times) * 9 // 10]:.2f})"
                    f"  CPU {1e3 * cpu_s:.2f} ms"
                    f"  floor {1e3 * floor_s:.2f} ms  ratio {median_s / floor_s:.1f}"
                )
            await fetcher.close()
        await channel.close()
    finally:
        process.kill()
        await process.wait()


def _cpu_s(encoder: psutil.Process) -> float:
    """Of both processes."""
    theirs = encoder.cpu_times()
    return time.process_time() + theirs.user + theirs.system


async def _main(sizes: list[int], repeats: int, link: Link) -> None:
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    for mib in sizes:
        await measure(mib, repeats, link)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", default="16,4", help="sizes of an embedding, in MiB")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tls", type=Path, metavar="DIR", help="a certificate of both services")
    parser.add_argument("--token", type=Path, metavar="FILE", help="a token of both services")
    parser.add_argument("--unix", metavar="PATH", help="a Unix socket between the services")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    raise_malloc_trim_threshold()  # as the services do
    link = Link(
        f"unix:{options.unix}" if options.unix else "127.0.0.1:0",
        Credentials(
            None if options.tls is None else watch_certificates(options.tls),
            None if options.token is None else TokenFile(options.token),
        ),
    )
    if options.serve:
        uvloop.run(serve(options.serve, link))
    else:
        uvloop.run(_main([int(mib) for mib in options.mib.split(",")], options.repeats, link))


if __name__ == "__main__":
    main()
