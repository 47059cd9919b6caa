"""What tenants' limits admit over several gateways, while Redis is there, lost and back.

    python -m benchmarks.limits --gateways 2,4,10

Each gateway is a process with the gateway's own limiter and clients that always ask for more than
the limit; a real redis-server is killed and started again. The table has the most that was used in
any window, and the mean over windows, in per cent of the limit, by phase. `--shape skewed`: most
clients are at the first gateway; `moving`: all are at one, and go to another when Redis is lost.
"""

import argparse
import asyncio
import multiprocessing
import random
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.queues import Queue

from services.common.errors import RateLimited
from services.gateway.tenancy.leases import Leases, Times
from services.gateway.tenancy.tenants import Limits, Tenant
from services.gateway.tenancy.usage import counting

_CONTEXT = multiprocessing.get_context("spawn")
PHASES = ("up", "down", "back")


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of a gateway do.

    Attributes:
        limit: tokens in a window, of the tenant.
        tokens: of a request, at most; it uses a tenth to all of it.
        clients: by phase.
        pause_s: a client's, after each request.
    """

    limit: int
    tokens: int
    clients: tuple[int, int, int]
    pause_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was served: when it was charged (monotonic), and the tokens it used."""

    at: float
    tokens: int


class Clients:
    """The clients of one gateway.

    Attributes:
        served: what has been served.
        waits_s: how long charges took that succeeded.
    """

    def __init__(self, leases: Leases, load: Load, seed: int) -> None:
        self._leases = leases
        self._tenant = Tenant("t", Limits(tokens_per_minute=load.limit), shares_caches=False)
        self._load = load
        self._random = random.Random(seed)
        self.served: list[Served] = []
        self.waits_s: list[float] = []

    async def flood(self, starts: Sequence[float]) -> None:
        """Asks through all phases.

        Args:
            starts: of each phase, and the end of the last one; monotonic.
        """
        await asyncio.gather(*(self._client(n, starts) for n in range(max(self._load.clients))))

    async def _client(self, number: int, starts: Sequence[float]) -> None:
        while (now := time.monotonic()) < starts[-1]:
            phase = max(0, bisect_right(starts, now) - 1)
            if now >= starts[0] and number < self._load.clients[phase]:
                with suppress(RateLimited):
                    await self._ask()
            await asyncio.sleep(self._load.pause_s * self._random.uniform(0.5, 1.5))

    async def _ask(self) -> None:
        tokens = self._random.randint(self._load.tokens // 2, self._load.tokens)
        used = self._random.randint(tokens // 10, tokens)
        start = time.monotonic()
        async with counting(self._leases, self._tenant) as usage:
            await usage.charge(tokens, 1, 0)
            at = time.monotonic()
            try:
                await asyncio.sleep(self._load.pause_s)
            finally:
                usage.correct(used)
            self.served.append(Served(at, used))
            self.waits_s.append(at - start)


def peak(served: Sequence[Served], window_s: float, start: float, end: float) -> int:
    """The most tokens of any window that ends between two times."""
    ordered = sorted(served, key=lambda s: s.at)
    total = most = first = 0
    for entry in ordered:
        total += entry.tokens
        while ordered[first].at <= entry.at - window_s:
            total -= ordered[first].tokens
            first += 1
        if start <= entry.at < end:
            most = max(most, total)
    return most


def mean(served: Sequence[Served], window_s: float, start: float, end: float) -> float:
    """Tokens per window between two times."""
    total = sum(entry.tokens for entry in served if start <= entry.at < end)
    return total * window_s / (end - start)


def clients_of(shape: str, gateway: int, clients: int) -> tuple[int, int, int]:
    """Clients of a gateway in each phase."""
    if shape == "skewed" and gateway:
        clients = max(1, clients // 8)
    if shape == "moving":
        return (
            clients if gateway == 0 else 0,
            clients if gateway == 1 else 0,
            clients if gateway == 1 else 0,
        )
    return (clients, clients, clients)


def _gateway(
    url: str, gateways: int, number: int, load: Load, starts: Sequence[float],
    times: Times, results: "Queue[tuple[list[Served], list[float]]]",
) -> None:  # fmt: skip
    async def run() -> None:
        leases = Leases(url, gateways, times)
        leases.start()
        clients = Clients(leases, load, number)
        await clients.flood(starts)
        await leases.close()
        results.put((clients.served, clients.waits_s))

    asyncio.run(run())


class _Redis:
    def __init__(self, port: int) -> None:
        self._command = [
            "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--loglevel", "warning", "--logfile", "/dev/null",
        ]  # fmt: skip
        self.url = f"redis://127.0.0.1:{port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def measure(options: argparse.Namespace, gateways: int, shape: str) -> list[str]:
    """One row of the table."""
    window_s: float = options.window
    scale = window_s / 60
    times = Times(window_s, 0.25 * scale, 3 * scale, 5 * scale, wait=0.05)
    redis = _Redis(options.port)
    redis.start()
    begin = time.monotonic() + 5 + gateways
    # The first window fills; each phase is measured whole.
    starts = [begin + window_s * options.phase * n for n in range(len(PHASES) + 1)]
    results: Queue[tuple[list[Served], list[float]]] = _CONTEXT.Queue()
    per_gateway = max(1, options.clients // gateways)
    processes = [
        _CONTEXT.Process(
            target=_gateway,
            args=(
                redis.url, gateways, number,
                Load(options.limit, options.tokens, clients_of(shape, number, per_gateway),
                     options.pause * scale),
                starts, times, results,
            ),
        )
        for number in range(gateways)
    ]  # fmt: skip
    for process in processes:
        process.start()
    try:
        time.sleep(max(0.0, starts[1] - time.monotonic()))
        redis.stop()
        time.sleep(max(0.0, starts[2] - time.monotonic()))
        redis.start()
        found = [results.get() for _ in processes]
    finally:
        redis.stop()
        for process in processes:
            process.join(10)
            process.kill()
    served = [entry for entries, _ in found for entry in entries]
    waits_s = sorted(wait for _, waits in found for wait in waits)
    cells: list[str] = []
    for number, (start, end) in enumerate(pairwise(starts)):
        first = start + (window_s if number == 0 else 0.0)
        cells.append(f"{100 * peak(served, window_s, start, end) / options.limit:.1f}")
        cells.append(f"{100 * mean(served, window_s, first, end) / options.limit:.1f}")
    longest = f"{1e3 * waits_s[-1]:.1f}" if waits_s else "-"
    waited = sum(wait > 1e-4 for wait in waits_s) / max(1, len(waits_s))
    return [str(gateways), shape, *cells, f"{100 * waited:.1f}", longest]


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--gateways", default="2,4,10")
    add("--shape", default="even,skewed,moving")
    add("--window", type=float, default=60.0, help="seconds; other times are scaled with it")
    add("--phase", type=int, default=2, help="windows in each phase, at least 2")
    add("--limit", type=int, default=1_000_000, help="tokens per window")
    add("--tokens", type=int, default=2000, help="of a request, at most")
    add("--clients", type=int, default=40, help="over all gateways")
    add("--pause", type=float, default=0.5, help="seconds of a client between requests")
    add("--port", type=int, default=7399)
    options = parser.parse_args()
    phases = "".join(f" {phase}: most % | mean % |" for phase in PHASES)
    print(f"| gateways | clients |{phases} waited % | longest wait ms |")
    print("|--:|---|" + "--:|" * (2 * len(PHASES) + 2))
    for shape in options.shape.split(","):
        for gateways in map(int, options.gateways.split(",")):
            print("| " + " | ".join(measure(options, gateways, shape)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
