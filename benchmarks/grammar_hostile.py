"""What hostile grammars cost other callers: new schemas, running streams, processes and memory.

    python -m benchmarks.grammar_hostile --seconds 30 --attackers 12 [--grammar dies] [--keys]
    python -m benchmarks.grammar_hostile --hold 256

Starts `triptych serve` with the demonstration model on this machine. An honest client asks for an
answer under a schema that nobody has sent before, again and again, while structured answers are
being streamed; alone, beside attackers, and alone again. Each attacker sends a new hostile grammar
as soon as the last one has failed. With `--keys` the attackers are another tenant. Wanted: a new
schema takes at most twice its time alone and is no 503, no process that fills masks ends, and no
stream stands still for more than 0.3 s.

`--hold` asks for as many answers at a time, each under another one of the largest grammars, again
and again where that is a 503, and prints by how much the processes that fill masks have grown.
Wanted: 1 GiB at most.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.client import Connection, Target, TimedConnection

_CONTEXT = multiprocessing.get_context("spawn")
_TIMEOUT_S = 120.0
_RAMP_S = 3.0  # until all attackers send
_MASKS = "services.decoder.masks.main"
_NUM_STREAMS = 3
_MAX_RATIO, _MAX_GAP_S = 2.0, 0.3
_MAX_HELD_BYTES = (1 << 30) + (64 << 20)  # with the compilations in work
HONEST, HOSTILE = "honest", "hostile"


class Stack(NamedTuple):
    """A running stack.

    Attributes:
        pid: process id of `triptych serve`.
        keys: key of each tenant; empty strings if the gateway has no keys.
    """

    url: str
    model: str
    pid: int
    keys: dict[str, str]

    def mask_processes(self) -> set[int]:
        """Returns the ids of the processes that fill masks."""
        found: set[int] = set()
        for process in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if _MASKS in process.cmdline():
                    found.add(process.pid)
        return found


class Measured(NamedTuple):
    """What the honest client saw.

    Attributes:
        times: seconds of each new schema's answer.
        statuses: how its requests ended.
        gap_s: longest time without a token in any of the streams.
        first_gap_s: longest time to a stream's first token.
    """

    times: list[float]
    statuses: Counter[str]
    gap_s: float
    num_tokens: int

    def row(self) -> dict[str, Any]:
        """The figures, to be printed."""
        p50, p99 = np.percentile(self.times or [float("nan")], (50, 99))
        return {
            "new schema, s: p50": round(float(p50), 3), "p99": round(float(p99), 3),
            "ended": dict(self.statuses), "longest gap, s": round(self.gap_s, 3),
            "tokens": self.num_tokens,
        }  # fmt: skip


def dies(number: int) -> str:
    """A grammar of 1.5 KB within all bounds, whose compilation takes more than it may."""
    parts = " | ".join(" ".join(["s"] * count) for count in range(2, 38))
    return f'start: s\ns: {parts} | /[a-z ]/ | "a{number}" |\n'


def slow(number: int) -> str:
    """A grammar that compiles, in 0.3 s."""
    rules = [f"s{n}: {' '.join([f's{(n + 1) % 39}'] * 8)} | /[a-z ]/ | " for n in range(39)]
    return "\n".join(["start: s0", *rules, f'other: "a{number}"'])


def masks(number: int) -> str:
    """A grammar that compiles at once, and whose masks take longer with each token."""
    return f'start: s\ns: s s | s s s | s s s s | t\nt: t t | /[a-z ]/ | "1{number}"\n'


def largest(number: int) -> str:
    """An expression of Unicode classes. A fork that compiles it takes nearly as much memory as it
    may.
    """
    return f"start: /w{number}" + 2300 * r"[\w\d]é+" + "/"


def nested(number: int) -> dict[str, Any]:
    """A schema that compiles in 0.1 s, and whose mask within `a` takes half a second: a parser's
    row has an item for each alternative, and each new item is compared with all of the row.
    """
    node = {"$ref": "#/$defs/n"}
    lists = [{"type": "array", "items": node, "maxItems": most} for most in range(1, 400)]
    return {
        "type": "object", "properties": {"a": node}, "required": ["a"],
        "additionalProperties": False,
        "$defs": {"n": {"anyOf": [*lists, {"const": number}]}},
    }  # fmt: skip


def multiples(number: int) -> dict[str, Any]:
    """A schema of 60 bytes whose compilation takes more than it may."""
    return {"type": "integer", "multipleOf": 99_991 + number % 100_000, "minimum": number}


GRAMMARS = {"dies": dies, "slow": slow, "masks": masks}
SCHEMAS = {"nested": nested, "multiples": multiples}


def hostile(kind: str, number: int) -> dict[str, Any]:
    """Returns the `structured_outputs` of a hostile request."""
    if kind in SCHEMAS:
        return {"json": SCHEMAS[kind](number)}
    return {"grammar": GRAMMARS[kind](number)}


def body(model: str, max_tokens: int, **fields: Any) -> bytes:  # noqa: ANN401 - any JSON
    """A streaming request."""
    messages = [{"role": "user", "content": "What can you do?"}]
    common = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True}
    return json.dumps(common | fields).encode()


def schema(number: int) -> dict[str, Any]:
    """A small schema; each number's is another one."""
    properties = {f"kind_{number}": {"enum": ["small", "large"]}, "count": {"type": "boolean"}}
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


_LONG = {"type": "array", "minItems": 300, "items": {"type": "string", "maxLength": 12}}


async def measure(stack: Stack, seconds: float, numbers: Iterator[int]) -> Measured:
    """Asks under new schemas, one after the other, beside streams."""
    target = Target.from_url(stack.url, stack.keys[HONEST])
    end = time.monotonic() + seconds
    found = Measured([], Counter(), 0.0, 0)

    async def ask() -> None:
        connection = Connection(target)
        while time.monotonic() < end:
            structured = {"json": schema(next(numbers))}
            asked = body(stack.model, 48, structured_outputs=structured, temperature=0)
            sample = await connection.post(asked, _TIMEOUT_S)
            found.statuses[sample.error or "200"] += 1
            if not sample.error:
                found.times.append(sample.end - sample.start)
            await asyncio.sleep(0.1)
        connection.close()

    async def stream(connection: TimedConnection) -> None:
        while time.monotonic() < end:
            asked = body(stack.model, 400, structured_outputs={"json": _LONG}, temperature=1)
            sample = await connection.post(asked, _TIMEOUT_S)
            found.statuses[f"stream: {sample.error}" if sample.error else "stream: 200"] += 1
            connection.arrivals.append((sample.end, ""))

    connections = [TimedConnection(target) for _ in range(_NUM_STREAMS)]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask())
        for connection in connections:
            tasks.create_task(stream(connection))
    gap_s, num_tokens = 0.0, 0
    for connection in connections:
        connection.close()
        for (before, text), (after, next_text) in itertools.pairwise(connection.arrivals):
            num_tokens += 1
            if text and next_text:  # of one answer
                gap_s = max(gap_s, after - before)
    return found._replace(gap_s=gap_s, num_tokens=num_tokens)


def attack(
    stack: Stack, kind: str, attackers: int, stop: Event, ended: "Queue[Counter[str]]"
) -> None:
    """Sends hostile grammars until it is told to stop."""
    counts: Counter[str] = Counter()
    numbers = itertools.count(int(time.time() * 1000))

    async def send() -> None:
        connection = Connection(Target.from_url(stack.url, stack.keys[HOSTILE]))
        while not stop.is_set():
            structured = hostile(kind, next(numbers))
            asked = body(stack.model, 200, structured_outputs=structured, temperature=1)
            sample = await connection.post(asked, _TIMEOUT_S)
            counts[sample.error or str(sample.status)] += 1
            if sample.error:  # as many as are refused at once
                await asyncio.sleep(0.01)

    async def send_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(attackers):
                tasks.create_task(send())

    asyncio.run(send_all())
    ended.put(counts)


def flood(stack: Stack, options: argparse.Namespace) -> bool:
    """Measures alone and beside attackers, prints both, and returns whether all is as wanted."""
    numbers = itertools.count()
    asyncio.run(measure(stack, 3.0, numbers))  # what runs once is not counted
    alone_s = options.alone_seconds or options.seconds
    alone = asyncio.run(measure(stack, alone_s, numbers))
    print(json.dumps({"alone": alone.row()}), flush=True)
    before, stop = stack.mask_processes(), _CONTEXT.Event()
    ended: Queue[Counter[str]] = _CONTEXT.Queue()
    arguments = stack, options.grammar, options.attackers, stop, ended
    attacker = _CONTEXT.Process(target=attack, args=arguments, daemon=True)
    attacker.start()
    time.sleep(_RAMP_S)
    beside = asyncio.run(measure(stack, options.seconds, numbers))
    num_ended = len(before - stack.mask_processes())
    stop.set()
    counts = ended.get(timeout=_TIMEOUT_S)
    attacker.join()
    print(json.dumps({"beside": beside.row(), "attackers": counts.most_common(5)}), flush=True)
    again = asyncio.run(measure(stack, alone_s, numbers))
    print(json.dumps({"alone again": again.row()}), flush=True)
    ratio = float(np.median(beside.times or [np.inf]) / np.median(alone.times + again.times))
    print(json.dumps({"ratio of p50": round(ratio, 2), "mask processes ended": num_ended}))
    bad = [status for status in beside.statuses if "200" not in status]
    return ratio <= _MAX_RATIO and beside.gap_s <= _MAX_GAP_S and not num_ended and not bad


async def hold(stack: Stack, count: int, seconds: float) -> tuple[int, Counter[str]]:
    """Asks under as many large grammars at a time; returns by how many bytes the processes that
    fill masks have grown at most, and how the requests ended.
    """
    target = Target.from_url(stack.url, stack.keys[HONEST])
    first = body(stack.model, 8, structured_outputs={"regex": "a{3}"})
    await Connection(target).post(first, _TIMEOUT_S)  # the vocabulary is read
    processes = [psutil.Process(pid) for pid in stack.mask_processes()]
    before, most = _resident(processes), 0
    end, ended = time.monotonic() + seconds, Counter[str]()

    async def ask(number: int) -> None:
        structured, connection = {"grammar": largest(number)}, Connection(target)
        asked = body(stack.model, 1500, structured_outputs=structured, temperature=1)
        while time.monotonic() < end:
            sample = await connection.post(asked, _TIMEOUT_S)
            ended[sample.error or "200"] += 1
            if not sample.error:
                break
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(ask(number)) for number in range(count)]
    while not all(task.done() for task in tasks):
        most = max(most, _resident(processes) - before)
        await asyncio.sleep(0.05)
    return most, ended


def _resident(processes: Sequence[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


@contextmanager
def serve(directory: Path, options: Sequence[str], *, keys: bool) -> Generator[Stack]:
    """`triptych serve`, without options with the demonstration model."""
    environment, tenants = dict(os.environ), {HONEST: "", HOSTILE: ""}
    if keys:
        tenants = {name: secrets.token_urlsafe(16) for name in tenants}
        entries = [
            {"id": name, "tenant": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
            for name, key in tenants.items()
        ]
        (directory / "keys.json").write_text(json.dumps({"keys": entries, "tenants": {}}))
        environment["GATEWAY_API_KEYS"] = f"file:{directory}/keys.json"
    command = [sys.executable, "-m", "triptych", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r".*ready: (http://\S+) \(model (\S+)\)\n", process.stdout.readline())
        if found is None:
            raise SystemExit("the stack did not start")
        yield Stack(found[1], found[2], process.pid, tenants)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; returns 1 if something is not as wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--seconds", type=float, default=30.0, help="beside the attackers")
    add("--alone-seconds", type=float, help="alone, before and after; default: as beside them")
    add("--attackers", type=int, default=12)
    add("--grammar", choices=sorted((*GRAMMARS, *SCHEMAS)), default="dies")
    add("--keys", action="store_true", help="the attackers are another tenant")
    add("--hold", type=int, default=0, metavar="N", help="answers under large grammars, instead")
    options, others = parser.parse_known_args(arguments)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="triptych-hostile-") as directory,
        serve(Path(directory), others, keys=options.keys) as stack,
    ):
        if not options.hold:
            return 0 if flood(stack, options) else 1
        most, ended = asyncio.run(hold(stack, options.hold, options.seconds))
        print(json.dumps({"grown, MiB": most >> 20, "ended": dict(ended)}))
        return 0 if most <= _MAX_HELD_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
