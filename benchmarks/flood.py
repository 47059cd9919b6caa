"""How much later does a tenant's first token come while another tenant floods the stack?

    python -m benchmarks.flood --stack null
    python -m benchmarks.flood --stack demo --kinds short,n8,prompts,images,bodies,refused
    python -m benchmarks.flood --stack demo --model DIR --load-format dummy --device cuda

It starts a stack with a key file of three tenants. One asks a short question, gets its answer, and
asks the next; another floods, from a process of its own. Rounds without and with the flood take
turns, so that both see the same machine. `null` is a real gateway and a real decoder's front around
an engine that computes nothing; `demo` is `triptych serve` with the demonstration model, or what
its options say: those unknown here go to it.

Wanted: the 99th percentile of the time to the first token, flooded, is at most twice the quiet one
and a step of the engine. `--limits` shows that limits per minute are exact.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmarks import gateway
from benchmarks.client import Connection, Sample, Target
from benchmarks.workloads import WORDS, chat_fields, data_url, random_image

_CONTEXT = multiprocessing.get_context("spawn")
_TIMEOUT_S = 120.0
_START_S = 120.0
_RAMP_S = 0.5  # from the first answer to a flood until it counts
_PAUSE_S = 0.02
_SETTLE_S = 0.5  # after it
QUIET, FLOODING, PIXELS = "quiet", "flooding", "pixels"
PIXELS_PER_MINUTE = 10_000_000  # of the tenant `PIXELS`
_LIMITED = "limited"
_LIMITED_REQUESTS, _LIMITED_TOKENS = 600, 6000  # a minute
_NULL_TICK_S = 0.01
_METRIC = re.compile(r"^triptych_decoder_engine_steps_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Flood:
    """What a tenant sends too much of.

    Attributes:
        streams: requests under way, always.
        fields: of each request, beside its text.
        words: of each text.
        images, edge: of each request, and their size in pixels.
        body_bytes: of a file in each request that is no image.
        tenant: whose key is used.
    """

    streams: int
    fields: dict[str, Any]
    words: int = 4
    images: int = 0
    edge: int = 0
    body_bytes: int = 0
    tenant: str = FLOODING


KINDS = {
    "short": Flood(256, {"max_tokens": 8}),
    "n8": Flood(40, {"max_tokens": 64, "n": 8, "temperature": 1.0}),
    "prompts": Flood(32, {"max_tokens": 1}, words=2000),
    "images": Flood(32, {"max_tokens": 1}, images=4, edge=512),
    "bodies": Flood(8, {"max_tokens": 1}, body_bytes=24 << 20),
    "refused": Flood(256, {"max_tokens": 1}, tenant=_LIMITED),
}
_NEEDS_ENCODER = frozenset(("images",))


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack.

    Attributes:
        targets: where each tenant's requests go, with its key.
        model: of the requests.
        step_s: of the engine; 0: `metrics_url` counts its steps.
    """

    targets: dict[str, Target]
    model: str
    step_s: float
    metrics_url: str = ""

    def num_steps(self) -> float:
        """Of the engine, since it started."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            found = _METRIC.search(answer.read().decode())
        assert found is not None
        return float(found[1])


# --- the flood: a process of its own --------------------------------------------------------------


def run_flood(
    target: Target, model: str, flood: Flood, begun: Event, stop: Event,
    ended: "Queue[tuple[int, int]]",
) -> None:  # fmt: skip
    """Entry point: keeps `flood.streams` requests under way until told to stop; then puts how many
    were answered and refused.
    """
    # On machines of its own it would take no time of the services, and delay none that wakes up.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)

    async def run() -> list[Sample]:
        samples: list[Sample] = []
        bodies = _bodies(model, flood)

        async def keep_one_in_flight() -> None:
            connection = Connection(target)
            while True:
                samples.append(await connection.post(next(bodies), _TIMEOUT_S))
                begun.set()
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(keep_one_in_flight()) for _ in range(flood.streams)]
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return samples

    samples = uvloop.run(run())
    answered = sum(not sample.error for sample in samples)
    ended.put((answered, len(samples) - answered))


def _bodies(model: str, flood: Flood) -> Iterator[bytes]:
    """Requests without end. No two are equal, so that no cache has the answer."""
    rng = random.Random(len(flood.fields) + flood.words)
    pixels = np.random.default_rng(0)
    files = [random_image(pixels, flood.edge) for _ in range(8)] if flood.images else []
    if flood.body_bytes:
        files = [pixels.bytes(flood.body_bytes * 3 // 4)]
    urls = itertools.cycle([data_url(file) for file in files])
    for number in itertools.count():
        text = f"{number} " + " ".join(rng.choices(WORDS, k=flood.words))
        count = flood.images or min(1, flood.body_bytes)
        fields = chat_fields(model, text, 1, [next(urls) for _ in range(count)])
        # The same files are other images for each salt.
        yield json.dumps(
            fields | flood.fields | {"seed": number + 1, "cache_salt": str(number)}
        ).encode()


@contextmanager
def flooded(stack: Stack, flood: Flood) -> Generator[list[tuple[int, int]]]:
    """A flood for the duration of a `with`; afterwards the list has its answered and refused."""
    begun, stop, results = _CONTEXT.Event(), _CONTEXT.Event(), _CONTEXT.Queue()
    arguments = (stack.targets[flood.tenant], stack.model, flood, begun, stop, results)
    process = _CONTEXT.Process(target=run_flood, args=arguments, daemon=True)
    process.start()
    counts: list[tuple[int, int]] = []
    try:
        if not begun.wait(_TIMEOUT_S):
            raise SystemExit("the flood gets no answers")
        time.sleep(_RAMP_S)
        yield counts
    finally:
        stop.set()
        counts.append(results.get(timeout=_TIMEOUT_S))
        process.join(_TIMEOUT_S)
        time.sleep(_SETTLE_S)


# --- the quiet tenant -----------------------------------------------------------------------------


def first_tokens_s(stack: Stack, count: int, seeds: Iterator[int]) -> list[float]:
    """Seconds to the first token of requests, one after another."""

    async def run() -> list[float]:
        connection, found = Connection(stack.targets[QUIET]), []
        rng = random.Random(count)
        for _ in range(count):
            await asyncio.sleep(rng.uniform(0, _PAUSE_S))  # at no certain time of a step
            seed = next(seeds)
            fields = chat_fields(stack.model, f"{seed} what is it?", 2)
            sample = await connection.post(json.dumps(fields | {"seed": seed}).encode(), _TIMEOUT_S)
            if sample.error:
                raise SystemExit(f"a request of the quiet tenant failed: {sample.error}")
            found.append(sample.first - sample.start)
        connection.close()
        return found

    return uvloop.run(run())


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of flood, measured. Seconds, sorted."""

    kind: str
    quiet: list[float]
    flooded: list[float]
    step_s: float
    answered: int
    refused: int

    @property
    def bound_s(self) -> float:
        """Of the flooded 99th percentile."""
        return 2 * _quantile(self.quiet, 0.99) + self.step_s

    @property
    def holds(self) -> bool:
        """Whether it is kept."""
        return _quantile(self.flooded, 0.99) <= self.bound_s

    def __str__(self) -> str:
        times = (
            _quantile(self.quiet, 0.5), _quantile(self.quiet, 0.99),
            _quantile(self.flooded, 0.5), _quantile(self.flooded, 0.99), self.step_s, self.bound_s,
        )  # fmt: skip
        cells = " ".join(f"{1e3 * seconds:9.1f}" for seconds in times)
        held = "yes" if self.holds else "NO"
        return f"{self.kind:9} {cells}  {held:4} {self.answered:6} {self.refused:7}"


HEAD = (
    "times to the first token of the quiet tenant, ms\n"
    "flood     quiet p50       p99 flood p50       p99      step     bound  held"
    " answered refused"
)


def measure(stack: Stack, kind: str, requests: int, rounds: int) -> Row:
    """Quiet and flooded rounds in turn."""
    flood, seeds = KINDS[kind], itertools.count(1 << 30)
    quiet, during, answered, refused = [], [], 0, 0
    num_steps = busy_s = 0.0
    for _ in range(rounds):
        quiet += first_tokens_s(stack, requests // rounds, seeds)
        with flooded(stack, flood) as counts:
            start, steps = time.monotonic(), 0.0 if stack.step_s else stack.num_steps()
            found = first_tokens_s(stack, requests // rounds, seeds)
            slowest = sorted(range(len(found)), key=lambda index: -found[index])[:4]
            named = ", ".join(f"{1e3 * found[index]:.0f} (number {index})" for index in slowest)
            print(f"{kind}: slowest, ms: {named}", file=sys.stderr, flush=True)
            during += found
            busy_s += time.monotonic() - start
            num_steps += 0.0 if stack.step_s else stack.num_steps() - steps
        answered, refused = answered + counts[0][0], refused + counts[0][1]
    step_s = stack.step_s or busy_s / max(1.0, num_steps)
    return Row(kind, sorted(quiet), sorted(during), step_s, answered, refused)


def _quantile(ordered: Sequence[float], quantile: float) -> float:
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


# --- limits ---------------------------------------------------------------------------------------


def measure_limits(stack: Stack) -> list[str]:
    """A flood of one minute by a tenant with limits; what it got, and what it may have."""
    lines: list[str] = []
    for name, tenant, limit in (
        ("requests", _LIMITED, _LIMITED_REQUESTS), ("tokens", "tokens", _LIMITED_TOKENS),
    ):  # fmt: skip
        taken = uvloop.run(_taken(stack, replace(KINDS["refused"], tenant=tenant, streams=16)))
        used = taken[0] if name == "requests" else taken[1]
        lines.append(f"{name:8} in a minute: limit {limit}, had {used} ({used / limit:.1%})")
    return lines


async def _taken(stack: Stack, flood: Flood) -> tuple[int, int]:
    """Requests and tokens that the tenant got in its first minute."""
    bodies, samples = _bodies(stack.model, flood), list[Sample]()
    end = time.monotonic() + 59

    async def keep_one_in_flight() -> None:
        connection = Connection(stack.targets[flood.tenant])
        while time.monotonic() < end:
            samples.append(await connection.post(next(bodies), _TIMEOUT_S))
            await asyncio.sleep(0.01)
        connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(flood.streams):
            tasks.create_task(keep_one_in_flight())
    good = [sample for sample in samples if not sample.error]
    return len(good), sum(s.prompt_tokens + s.completion_tokens for s in good)


# --- stacks ---------------------------------------------------------------------------------------


def _write_keys(path: Path) -> dict[str, str]:
    """A key file; returns the tenants' keys."""
    keys = {
        name: secrets.token_urlsafe(16) for name in (QUIET, FLOODING, _LIMITED, "tokens", PIXELS)
    }
    entries = [
        {"id": name, "tenant": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in keys.items()
    ]
    tenants = {
        _LIMITED: {"requests_per_minute": _LIMITED_REQUESTS},
        "tokens": {"tokens_per_minute": _LIMITED_TOKENS},
        PIXELS: {"pixels_per_minute": PIXELS_PER_MINUTE},
    }
    path.write_text(json.dumps({"keys": entries, "tenants": tenants}))
    return keys


@contextmanager
def null_stack(directory: Path, tick_s: float = _NULL_TICK_S) -> Generator[Stack]:
    """One gateway, one decoder's front, and an engine that computes nothing."""
    keys = _write_keys(directory / "keys.json")
    load = gateway.Load(
        streams=1, rate=1 / tick_s, tokens=1, requests=1, words=1, clients=1, gateways=1
    )
    with ExitStack() as children:
        target, _ = gateway.start_stack(
            load, gateway.Link(), directory / "sent.json", children, keys[QUIET],
            GATEWAY_API_KEYS=f"file:{directory}/keys.json",
        )  # fmt: skip
        url = f"http://{target.host}:{target.port}"
        targets = {name: Target.from_url(url, key) for name, key in keys.items()}
        yield Stack(targets, "null", tick_s)


@contextmanager
def demo_stack(directory: Path, options: Sequence[str] = ()) -> Generator[Stack]:
    """`triptych serve`, without options with the demonstration model."""
    keys = _write_keys(directory / "keys.json")
    command = [sys.executable, "-m", "triptych", "serve", "--port", "0", *options]
    environment = os.environ | {"GATEWAY_API_KEYS": f"file:{directory}/keys.json"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r".*ready: (http://\S+) \(model (\S+)\)\n", process.stdout.readline())
        if found is None:
            raise SystemExit("the stack did not start")
        targets = {name: Target.from_url(found[1], key) for name, key in keys.items()}
        yield Stack(targets, found[2], 0.0, _decoder_metrics_url(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def _decoder_metrics_url(pid: int) -> str:
    for child in psutil.Process(pid).children():
        if child.cmdline()[-1] == "services.decoder":
            return f"http://127.0.0.1:{child.environ()['DECODER_METRICS_PORT']}/metrics"
    raise SystemExit("the stack has no decoder")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments. Exit status: 1 if a bound is not kept."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--stack", choices=("null", "demo"), default="null")
    add("--kinds", default=",".join(KINDS), help="of floods")
    add("--requests", type=int, default=200, help="of the quiet tenant, with and without a flood")
    add("--rounds", type=int, default=4, help="that these are spread over")
    add("--limits", action="store_true", help="how exact limits per minute are, instead")
    options, serve = parser.parse_known_args(arguments)
    kinds = [kind for kind in options.kinds.split(",") if kind]
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"no such flood: {', '.join(sorted(unknown))}")
    if options.stack == "null":
        kinds = [kind for kind in kinds if kind not in _NEEDS_ENCODER]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="triptych-flood-") as directory,
        null_stack(Path(directory))
        if options.stack == "null"
        else demo_stack(Path(directory), serve) as stack,
    ):
        if options.limits:
            print("\n".join(measure_limits(stack)))
            return 0
        print(HEAD, flush=True)
        for kind in kinds:
            rows.append(measure(stack, kind, options.requests, options.rounds))
            print(rows[-1], flush=True)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
