"""The kinds of faults, and a seeded schedule of them."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import redis.asyncio as redis

from benchmarks.chaos.history import History, Window
from benchmarks.chaos.proxy import Fault, Proxy, Selector, anyone
from benchmarks.chaos.stack import Kind, Pod, Stack

# Two silent health checks: each after a second and with two seconds of patience.
_HEALTH_S = 6.5
# An engine that hangs is noticed by its front.
_ENGINE_S = 10.0
_KEEPALIVE_S = 15.0
Inject = Callable[[Stack, random.Random], Awaitable[str]]  # until the cause is gone; says what


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One kind.

    Attributes:
        name: in reports and on the command line.
        inject: does it and undoes it.
        detection_s: the most that the stack may need to notice it.
        may_refuse: a 503 is a right outcome although this fault is the only one.
        may_break: so is an error event.
        weight: how often, among the others.
    """

    name: str
    inject: Inject
    detection_s: float = 0.0
    may_refuse: bool = False
    may_break: bool = False
    weight: float = 1.0


def _pod(stack: Stack, rng: random.Random, kind: Kind) -> Pod:
    return rng.choice(stack.of(kind))


def _kill(kind: Kind, part: str) -> Inject:
    async def inject(stack: Stack, rng: random.Random) -> str:
        pod = _pod(stack, rng, kind)
        _signal(pod, part, signal.SIGKILL)
        await asyncio.to_thread(pod.service.wait)
        return pod.name

    return inject


def _freeze(kind: Kind, part: str, longest_s: float) -> Inject:
    async def inject(stack: Stack, rng: random.Random) -> str:
        pod, seconds = _pod(stack, rng, kind), rng.uniform(0.2, longest_s)
        _signal(pod, part, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            if pod.service.is_running():
                _signal(pod, part, signal.SIGCONT)
        return f"{pod.name} for {seconds:.1f} s"

    return inject


def _signal(pod: Pod, part: str, number: int) -> None:
    match part:
        case "all":
            pod.service.signal(number)
        case "front":
            pod.service.signal_front(number)
        case _:
            with suppress(OSError, ValueError):  # it may have been ended meanwhile
                os.kill(pod.service.engine_pid(), number)


def _terminate(kind: Kind) -> Inject:
    async def inject(stack: Stack, rng: random.Random) -> str:
        pod, lag_s = _pod(stack, rng, kind), rng.choice((0.0, 1.0))
        status = await stack.replace(pod, lag_s=lag_s)
        if status:
            stack.left.append(f"{pod.name}: status {status} after SIGTERM")
        return f"{pod.name}, known for another {lag_s:.0f} s"

    return inject


def _network(
    client: str, server: str, fault: Callable[[random.Random], Fault], longest_s: float
) -> Inject:
    """A fault between clients of one kind and one server of the other."""

    async def inject(stack: Stack, rng: random.Random) -> str:
        made, seconds = fault(rng), rng.uniform(0.1, longest_s)
        proxy, selects, name = _link(stack, rng, client, server)
        num_hit = proxy.break_down(made, selects)
        try:
            await asyncio.sleep(seconds)
        finally:
            proxy.heal()
        if not num_hit and client == "gateway":  # which always has a connection
            stack.left.append(f"a fault between {name} hit no connection")
        return f"{name} ({num_hit} connections) for {seconds:.1f} s, {made}"

    return inject


def _link(
    stack: Stack, rng: random.Random, client: str, server: str
) -> tuple[Proxy, Selector, str]:
    if server == "redis":
        return stack.redis_proxies[client], anyone, f"{client}s and Redis"
    pod = _pod(stack, rng, "decoder" if server == "decoder" else "encoder")
    kind: Kind = "gateway" if client == "gateway" else "decoder"
    slot = rng.choice((None, 0, 1))
    assert pod.proxy is not None
    source = f"{kind}s" if slot is None else f"{kind}-{slot}"
    return pod.proxy, stack.selector(kind, slot), f"{source} and {pod.name}"


def _partition(_rng: random.Random) -> Fault:
    return Fault(hold=True)


def _delay(rng: random.Random) -> Fault:
    return Fault(delay_s=rng.uniform(0.01, 0.15))


def _reset(_rng: random.Random) -> Fault:
    return Fault(refuse=True)


def _truncate(rng: random.Random) -> Fault:
    return Fault(cut_after=rng.randrange(4000))


def _garble(_rng: random.Random) -> Fault:
    return Fault(garble=True)


async def _kill_redis(stack: Stack, rng: random.Random) -> str:
    seconds = rng.uniform(0, 4)
    stack.redis.stop()
    await asyncio.sleep(seconds)
    stack.redis.start()
    return f"for {seconds:.1f} s"


async def _freeze_redis(stack: Stack, rng: random.Random) -> str:
    seconds = rng.uniform(0.5, 5)
    stack.redis.freeze()
    try:
        await asyncio.sleep(seconds)
    finally:
        stack.redis.thaw()
    return f"for {seconds:.1f} s"


async def _flush_redis(stack: Stack, _rng: random.Random) -> str:
    async with redis.Redis.from_url(stack.redis.url) as client:
        await client.flushall()
    return ""


async def _spoil_redis(stack: Stack, rng: random.Random) -> str:
    """Every entry becomes something else: random, cut, flipped, another's, of another type."""
    num_spoiled, last = 0, b""
    async with redis.Redis.from_url(stack.redis.url) as client:
        async for key in client.scan_iter(match="triptych:embedding:*", count=100):
            try:
                data = cast("bytes | None", await client.get(key))
            except redis.ResponseError:  # spoiled already
                continue
            if not data:
                continue
            spoiled = bytearray(data)
            match rng.randrange(5):
                case 0:
                    spoiled = bytearray(rng.randbytes(len(data)))
                case 1:
                    spoiled = spoiled[: rng.randrange(len(data))]
                case 2:
                    spoiled[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 3:
                    spoiled = bytearray(last or data)
                case _:
                    await client.delete(key)
                    await client.lpush(key, "not a string")
                    continue
            last = data
            await client.set(key, bytes(spoiled))
            num_spoiled += 1
    return f"{num_spoiled} entries"


async def _fill_redis(stack: Stack, rng: random.Random) -> str:
    """Evicts everything, and leaves no room but by eviction."""
    async with redis.Redis.from_url(stack.redis.url) as client:
        for number in range(80):
            await client.set(f"junk:{number}", rng.randbytes(1 << 20))
    return "80 MB"


def _kinds() -> list[FaultKind]:
    found: list[FaultKind] = [
        FaultKind("SIGKILL gateway", _kill("gateway", "all"), weight=2),
        FaultKind("SIGSTOP gateway", _freeze("gateway", "all", 8), 8.0, weight=2),
        FaultKind("SIGTERM gateway", _terminate("gateway"), may_refuse=True, weight=2),
    ]
    engines: tuple[Kind, ...] = ("encoder", "decoder")
    for kind in engines:
        found += [
            FaultKind(f"SIGKILL {kind}", _kill(kind, "all"), weight=2),
            FaultKind(f"SIGKILL {kind} front", _kill(kind, "front")),
            FaultKind(f"SIGKILL {kind} engine", _kill(kind, "engine")),
            FaultKind(f"SIGSTOP {kind}", _freeze(kind, "all", 9), _HEALTH_S, weight=2),
            FaultKind(f"SIGSTOP {kind} front", _freeze(kind, "front", 9), _HEALTH_S),
            FaultKind(f"SIGSTOP {kind} engine", _freeze(kind, "engine", 14), _ENGINE_S, weight=2),
            FaultKind(f"SIGTERM {kind}", _terminate(kind), weight=3),
        ]
    links = (("gateway", "decoder"), ("gateway", "encoder"), ("decoder", "encoder"))
    ways = (
        ("partition", _partition, 9.0, _HEALTH_S, 1.5),
        ("delay", _delay, 4.0, 0.6, 0.7),
        ("reset", _reset, 1.5, 0.5, 1.0),
        ("truncation", _truncate, 1.0, 0.5, 1.0),
    )
    for client, server in (*links, ("encoder", "redis"), ("decoder", "redis")):
        for name, fault, longest_s, detection_s, weight in ways:
            detection = _KEEPALIVE_S if (client, name) == ("decoder", "partition") else detection_s
            found.append(
                FaultKind(
                    f"{name} {client}-{server}",
                    _network(client, server, fault, longest_s),
                    0.2 if server == "redis" else detection,
                    weight=weight * (0.4 if server == "redis" else 1),
                )
            )
        if server == "redis":
            garble = _network(client, server, _garble, 3.0)
            found.append(FaultKind(f"garbage {client}-{server}", garble, 0.2, weight=0.5))
    found += [
        FaultKind("Redis killed", _kill_redis, 0.2),
        FaultKind("Redis frozen", _freeze_redis, 0.2),
        FaultKind("Redis flushed", _flush_redis, 0.2, weight=0.5),
        FaultKind("Redis spoiled", _spoil_redis, 0.2),
        FaultKind("Redis full", _fill_redis, 0.2, weight=0.5),
    ]
    return found


KINDS: Sequence[FaultKind] = _kinds()


class Schedule:
    """One fault after another, sometimes two at once, until told to stop.

    Args:
        rest_s: mean time between all being whole and the next fault.
        kinds: to choose from.
        pairs: share of faults with a second one beside them.
    """

    def __init__(
        self,
        stack: Stack,
        history: History,
        seed: int,
        *,
        rest_s: float,
        kinds: Sequence[FaultKind] = KINDS,
        pairs: float = 0.12,
    ) -> None:
        self._stack, self._history = stack, history
        self._rng = random.Random(f"faults/{seed}")
        self._rest_s, self._kinds, self._pairs = rest_s, kinds, pairs

    async def run(self, stopping: asyncio.Event) -> None:
        weights = [kind.weight for kind in self._kinds]
        while not stopping.is_set():
            await _wait(stopping, self._rng.uniform(0.5, 1.5) * self._rest_s)
            if stopping.is_set():
                return
            count = 2 if self._rng.random() < self._pairs else 1
            chosen = self._rng.choices(self._kinds, weights, k=count)
            windows = await asyncio.gather(
                *(self._inject(kind, index) for index, kind in enumerate(chosen))
            )
            try:
                whole = await self._stack.until_whole()
            except TimeoutError as error:
                names = " and ".join(f"{window.kind} {window.detail}" for window in windows)
                self._stack.left.append(f"{names}: {error}")
                whole = time.monotonic()
            for window in windows:
                window.whole = max(whole, window.start)

    async def _inject(self, kind: FaultKind, index: int) -> Window:
        rng = random.Random(f"{self._rng.getrandbits(64)}")
        if index:
            await asyncio.sleep(rng.uniform(0, 3))
        window = Window(
            kind.name, "", kind.detection_s, time.monotonic(),
            may_refuse=kind.may_refuse, may_break=kind.may_break,
        )  # fmt: skip
        self._history.windows.append(window)
        try:
            window.detail = await kind.inject(self._stack, rng)
        except (OSError, TimeoutError, redis.RedisError, RuntimeError) as error:
            self._stack.left.append(f"{kind.name} itself failed: {error!r}")
        return window


async def _wait(stopping: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        pass
