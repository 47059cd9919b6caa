"""Embeddings to Redis and back, through the services' own cache and a real redis-server; no device.

    python -m benchmarks.embedding_cache --mib 8,32 --repeats 20
    python -m benchmarks.embedding_cache --stack 512 --repeats 20

Prints for each size the median (and the 90th percentile) of a write and of a read, header and all
checks included, the longest time that the event loop stood still meanwhile, and the CPU time of
this process. Another image's embedding each time; the arena's memory has been used before.

`--stack` asks the demonstration stack on CPUs about images of that many pixels a side, restarts its
encoder and decoder, and asks again: how long one token takes when Redis has the embedding, and when
there is no Redis.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvloop

from services.common.embeddings.embedding import EmbeddingSpec, digest
from services.common.embeddings.embedding_cache import RedisCache
from services.common.security.seals import SealKeys
from tests.e2e.cluster import Cluster, png
from tests.redis_server import RedisServer

_FEATURES, _HIDDEN = 4, 2048  # of the 2B model
_TOKEN_BYTES = 2 * _FEATURES * _HIDDEN
_NUM_KEYS = 4
_TICK_S = 0.001


@dataclass(slots=True)
class Samples:
    """Of one kind of work, in seconds."""

    wall: list[float] = field(default_factory=list[float])
    stall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    async def take(self, work: Callable[[], Awaitable[object]]) -> None:
        """Does it once, and looks how long the event loop was kept from a timer meanwhile."""
        longest_s = 0.0

        async def tick() -> None:
            nonlocal longest_s
            while True:
                start = time.perf_counter()
                await asyncio.sleep(_TICK_S)
                longest_s = max(longest_s, time.perf_counter() - start - _TICK_S)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(2 * _TICK_S)
        longest_s, start, cpu = 0.0, time.perf_counter(), time.process_time()
        done = await work()
        self.wall.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu)
        await asyncio.sleep(2 * _TICK_S)
        ticking.cancel()
        self.stall.append(longest_s)
        assert done

    def row(self) -> str:
        wall = sorted(self.wall)
        return (
            f"{1e3 * statistics.median(wall):7.1f} ms (p90 {1e3 * wall[len(wall) * 9 // 10]:.1f})"
            f"  event loop {1e3 * statistics.median(self.stall):5.1f} ms"
            f"  CPU {1e3 * statistics.median(self.cpu):6.1f} ms"
        )


async def measure(mib: int, repeats: int, url: str, seals: SealKeys | None) -> None:
    """Prints the rows of one size."""
    spec = EmbeddingSpec("bfloat16", _FEATURES, (mib << 20) // _TOKEN_BYTES, _HIDDEN)
    values = np.random.default_rng(0).standard_normal(spec.size_bytes // 2, np.float32)
    body = memoryview(bytearray((values.view(np.uint32) >> 16).astype(np.uint16).tobytes()))
    into, tensor_digest = memoryview(bytearray(spec.size_bytes)), digest(body)
    cache = RedisCache(url, ttl_s=600, timeout_s=5.0, seals=seals)
    await cache.connect()

    async def read(key: bytes) -> bool:
        return await cache.read(key, spec, into) is not None

    writes, reads = Samples(), Samples()
    for turn in itertools.chain(range(-_NUM_KEYS, 0), range(repeats)):
        key = bytes([turn % _NUM_KEYS]) * 32
        kept = (writes, reads) if turn >= 0 else (Samples(), Samples())
        await kept[0].take(lambda key=key: cache.write(key, spec, tensor_digest, body))
        into[:] = bytes(spec.size_bytes)
        await kept[1].take(lambda key=key: read(key))
        assert into == body
    sealed = "sealed" if seals else "plain"
    for name, samples in (("write", writes), ("read", reads)):
        print(f"{mib:3d} MiB  {sealed:6s}  {name:5s}  {samples.row()}")
    await cache.close()


def measure_stack(side: int, repeats: int) -> None:
    """Prints a row with and one without Redis."""
    images = [png(seed, side, side) for seed in range(repeats)]
    for name in ("with Redis", "without"):
        services: dict[str, object] = {} if name == "with Redis" else {"redis_url": ""}
        with (
            TemporaryDirectory() as directory,
            Cluster(Path(directory), encoder=services, decoder=services) as cluster,
        ):
            new = sorted(_seconds(cluster, image) for image in images)
            time.sleep(1.0)  # written behind
            cluster.restart(*cluster.encoders, *cluster.decoders)
            cluster.ask("Are you warm?", png(repeats), max_tokens=1)
            again = sorted(_seconds(cluster, image) for image in images)
            encodes = cluster.num_encodes() - 1
        print(
            f"{name:10s}  new {1e3 * statistics.median(new):6.1f} ms  after a restart "
            f"{1e3 * statistics.median(again):6.1f} ms (least {1e3 * again[0]:.1f}, "
            f"p90 {1e3 * again[len(again) * 9 // 10]:.1f}; {encodes:.0f} encodes)"
        )


def _seconds(cluster: Cluster, image: bytes) -> float:
    start = time.perf_counter()
    cluster.ask("Describe the picture.", image, max_tokens=1)
    return time.perf_counter() - start


async def _main(sizes: list[int], repeats: int) -> None:
    with TemporaryDirectory() as directory, RedisServer() as server:
        keys = Path(directory) / "keys"
        keys.write_text("11" * 32)
        for mib, seals in itertools.product(sizes, (None, SealKeys(keys, b"model"))):
            await measure(mib, repeats, server.url, seals)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", default="8,32", help="sizes of an embedding, in MiB")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--stack", type=int, metavar="PIXELS", help="of an image's side")
    options = parser.parse_args()
    if options.stack:
        return measure_stack(options.stack, options.repeats)
    uvloop.run(_main([int(mib) for mib in options.mib.split(",")], options.repeats))


if __name__ == "__main__":
    main()
