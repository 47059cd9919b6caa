"""Requests of all kinds while everything fails: does each end as it should?

    python -m benchmarks.chaos --seed 1 --seconds 300 --output chaos-1.json
    python -m benchmarks.chaos --add chaos-*.json

Starts gateways, encoders, decoders and Redis of its own, on loopback, with the demonstration model
on the CPU; asks every question alone; then asks many at once while a schedule drawn from the seed
kills, freezes and replaces processes, and breaks the network between them.
"""

import argparse
import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.chaos import faults, report
from benchmarks.chaos.census import Census, dead_arenas, idle_descriptors, left_in_work
from benchmarks.chaos.clients import Client, ask_alone
from benchmarks.chaos.history import History
from benchmarks.chaos.questions import questions
from benchmarks.chaos.stack import Stack

_ROOT = Path(__file__).resolve().parents[2]
# Idle, a process may have this many more descriptors than another of its kind had at the start:
# connections to clients, to restarted peers, and kept ones.
_DESCRIPTOR_SLACK = 24
_LONG_S = 300.0
_UNMAP_S = 70.0  # a decoder unmaps an encoder's arena that it has not used for a minute


async def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run; its result as JSON."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    history = History()
    stack = Stack(directory, history.ends)
    try:
        await stack.start()
        return await _run(options, stack, history)
    finally:
        await stack.stop()


async def _run(options: argparse.Namespace, stack: Stack, history: History) -> dict[str, Any]:
    catalogue = questions(options.seed, options.questions)
    known = await ask_alone(stack, catalogue)
    before = idle_descriptors(stack)
    wanted = options.faults.split(",")
    kinds = [kind for kind in faults.KINDS if any(part in kind.name for part in wanted)]
    stopping, quiet = asyncio.Event(), asyncio.Event()
    schedule = faults.Schedule(
        stack, history, options.seed, rest_s=options.rest, kinds=kinds, pairs=options.pairs
    )
    census = Census(stack)
    started = time.monotonic()
    looking = asyncio.create_task(census.keep_looking(history.asks))
    showing = asyncio.create_task(_show(history, started))
    clients = [
        asyncio.create_task(
            Client(stack, catalogue, known, history, f"{options.seed}/{i}").keep_asking(
                stopping, options.think
            )
        )
        for i in range(options.clients)
    ]
    breaking = asyncio.create_task(schedule.run(quiet))
    await asyncio.wait((breaking,), timeout=options.seconds)
    quiet.set()
    await breaking
    await asyncio.sleep(options.rest)
    stopping.set()
    await asyncio.gather(*clients)
    seconds = time.monotonic() - started
    for task in (looking, showing):
        task.cancel()
    left = await left_in_work(stack)
    left += [
        f"{name}: {number} descriptors, {before.get(name)} before"
        for name, number in idle_descriptors(stack).items()
        if number > before.get(name, 0) + _DESCRIPTOR_SLACK
    ]
    if options.seconds >= _LONG_S:
        await asyncio.sleep(max(0.0, _UNMAP_S - history.seconds_without_end("encoder")))
        left += dead_arenas(stack)
    left += await stack.stop_gently() + stack.left
    return {
        "seeds": [options.seed],
        "commits": [_commit()],
        "seconds": seconds,
        **history.report(),
        "failures": [f"seed {options.seed}: {line}" for line in history.failures()],
        "left": left,
        "slowest": history.slowest(),
        "growth": [dataclasses.asdict(each) for each in census.growth()],
        "windows": [dataclasses.asdict(window) for window in history.windows],
    }


async def _show(history: History, started: float) -> None:
    while True:
        await asyncio.sleep(10)
        last = history.windows[-1] if history.windows else None
        print(
            f"{time.monotonic() - started:5.0f} s, {len(history.asks)} requests, "
            f"{len(history.windows)} faults{f', {last.kind} {last.detail}' if last else ''}",
            file=sys.stderr,
            flush=True,
        )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if anything was wrong or left."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of requests and faults")
    add("--seconds", type=float, default=300, help="of faults")
    add("--clients", type=int, default=24, help="that ask one request after the other")
    add("--think", type=float, default=0.0, help="mean seconds between a client's requests")
    add("--questions", type=int, default=300, help="different ones")
    add("--rest", type=float, default=4.0, help="mean seconds between two faults")
    add("--pairs", type=float, default=0.12, help="share of faults with another one beside them")
    add("--faults", default="", help="only those whose name contains one of these")
    add("--output", type=Path, help="the result as JSON")
    add("--logs", type=Path, help="where logs of the services stay")
    add("--add", type=Path, nargs="+", help="results to add up instead of a run")
    options = parser.parse_args(arguments)
    if options.add:
        result = report.add_up([json.loads(path.read_text()) for path in options.add])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            directory = options.logs or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            result = uvloop.run(run(options, directory))
    if options.output:
        options.output.write_text(json.dumps(result))
    print(report.text(result))
    return 1 if result["failures"] or result["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
