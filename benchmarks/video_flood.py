"""How much later is a tenant answered while another tenant sends videos that take long to read?

    python -m benchmarks.video_flood --kinds piled,undecodable,gif,ivf --attackers 12

It starts `triptych serve` with the demonstration model, or with what its options say: those unknown
here go to it. One tenant asks about a text, a new image and a new clip of two seconds, in turn;
another one sends videos from a process of its own, each of them once. Rounds without and with these
take turns, so that both see the same machine. A third tenant, which has a limit of pixels, asks
about clips meanwhile until it is refused: each clip counts once.

Wanted: clips take at most three times as long as alone, texts and images at most twice. A worker
that reads a video of the attack has a core of its own for that: two cores are too few for all of
the stack beside it.
"""

import argparse
import asyncio
import base64
import itertools
import json
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.client import Connection, Target
from benchmarks.flood import FLOODING, PIXELS, PIXELS_PER_MINUTE, QUIET, Stack, demo_stack
from benchmarks.workloads import chat_fields, data_url, random_image
from tests.attacks import videos
from tests.videos import make

_CONTEXT = multiprocessing.get_context("spawn")
_TIMEOUT_S = 120.0
_RAMP_S = 1.0
_CLIP = make("mp4", frames=48, size=(240, 320), rate=24)
# Videos by number, none of which equals another.
KINDS: dict[str, Callable[[int], bytes]] = {
    "piled": videos.piled,
    "undecodable": partial(videos.piled, frame_bytes=11),
    "gif": videos.gif,
    "ivf": videos.ivf,
}
BOUNDS = {"text": 2.0, "image": 2.0, "clip": 3.0}  # times the median alone


def video_part(file: bytes) -> dict[str, Any]:
    """A file as a request carries it."""
    url = "data:video/mp4;base64," + base64.b64encode(file).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def clip(number: int) -> bytes:
    """A clip that an encoder reads anew; its frames are those of all others."""
    free = b"%d" % number
    return _CLIP + (8 + len(free)).to_bytes(4, "big") + b"free" + free


def body(model: str, text: str, *parts: Mapping[str, Any]) -> bytes:
    """A streaming request with parts before its text, none of which is found in a cache."""
    fields = chat_fields(model, text, 1)
    fields["cache_salt"] = secrets.token_hex(8)
    fields["messages"][0]["content"][:0] = parts
    return json.dumps(fields).encode()


# --- the attack: a process of its own -------------------------------------------------------------


def run_attack(
    target: Target, model: str, kind: str, first: int, attackers: int, begun: Event, stop: Event,
    ended: "Queue[Counter[int]]",
) -> None:  # fmt: skip
    """Entry point: keeps a request of each attacker under way until told to stop; then puts how
    many ended with each status.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    numbers = itertools.count(first)

    async def run() -> Counter[int]:
        statuses = Counter[int]()

        async def attack() -> None:
            connection = Connection(target)
            while not stop.is_set():
                part = video_part(KINDS[kind](next(numbers)))
                sample = await connection.post(body(model, "what?", part), _TIMEOUT_S)
                statuses[sample.status] += 1
                begun.set()

        await asyncio.gather(*(attack() for _ in range(attackers)))
        return statuses

    ended.put(uvloop.run(run()))


@contextmanager
def attacked(stack: Stack, kind: str, first: int, attackers: int) -> Generator[Counter[int]]:
    """An attack for the duration of a `with`; afterwards the counter has its statuses."""
    begun, stop, results = _CONTEXT.Event(), _CONTEXT.Event(), _CONTEXT.Queue()
    arguments = (
        stack.targets[FLOODING], stack.model, kind, first, attackers, begun, stop, results,
    )  # fmt: skip
    process = _CONTEXT.Process(target=run_attack, args=arguments, daemon=True)
    process.start()
    statuses = Counter[int]()
    try:
        if not begun.wait(_TIMEOUT_S):
            raise SystemExit("the attack gets no answers")
        time.sleep(_RAMP_S)
        yield statuses
    finally:
        stop.set()
        statuses.update(results.get(timeout=_TIMEOUT_S))
        process.join(_TIMEOUT_S)


# --- the tenant beside it -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """Seconds of a tenant's answers, by what was asked about."""

    seconds: dict[str, list[float]]

    @classmethod
    def empty(cls) -> "Asked":
        """Nothing was asked yet."""
        return cls({name: [] for name in BOUNDS})


def ask(stack: Stack, asked: Asked, files: Iterator[bytes], seconds: float) -> None:
    """Asks in turn for so long, and adds the times. A request that fails ends the program."""
    pixels, numbers = np.random.default_rng(time.monotonic_ns()), itertools.count()

    async def run() -> None:
        connection, end = Connection(stack.targets[QUIET]), time.monotonic() + seconds
        while time.monotonic() < end:
            image = {"type": "image_url", "image_url": {"url": data_url(random_image(pixels, 256))}}
            parts = {"text": (), "image": (image,), "clip": (video_part(next(files)),)}
            for name, some in parts.items():
                text = f"{next(numbers)} what is it?"
                sample = await connection.post(body(stack.model, text, *some), _TIMEOUT_S)
                if sample.error:
                    raise SystemExit(f"a {name} beside the attack failed: {sample.error}")
                asked.seconds[name].append(sample.end - sample.start)
        connection.close()

    uvloop.run(run())


def counted_once(stack: Stack, file: bytes) -> tuple[int, int]:
    """Clips that the tenant with a limit of pixels got before it was refused, and how many its
    limit is for.
    """
    target = stack.targets[PIXELS]
    url = f"http://{target.host}:{target.port}{target.path}"
    lines = target.headers.decode().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    num_pixels = num_answers = 0
    fields = json.loads(body(stack.model, "what?", video_part(file))) | {"stream": False}
    del fields["stream_options"]
    while True:
        try:
            request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                usage = json.load(response)["usage"]
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            # Pixels or bytes, whichever are more.
            return num_answers, PIXELS_PER_MINUTE // max(num_pixels, len(file))
        (video,) = usage["prompt_tokens_details"]["videos"]
        height, width = video["size"]
        num_pixels = (video["frames"] + video["frames"] % 2) * height * width
        num_answers += 1


def report(kind: str, alone: Asked, beside: Asked, statuses: Counter[int]) -> bool:
    """Prints a line for each thing that was asked about; returns whether all bounds are kept."""
    kept = True
    ended = ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items()))
    for name, bound in BOUNDS.items():
        quiet, during = alone.seconds[name], beside.seconds[name]
        ratio = statistics.median(during) / statistics.median(quiet)
        kept = kept and ratio <= bound
        times = (
            statistics.median(quiet), max(quiet), statistics.median(during), max(during),
        )  # fmt: skip
        cells = " ".join(f"{1e3 * seconds:8.0f}" for seconds in times)
        counts = f"{len(quiet):4} {len(during):4}"
        held = "yes" if ratio <= bound else "NO"
        print(f"{kind:12} {name:6} {cells} {ratio:6.2f} {bound:5.1f}  {held:4} {counts}  {ended}")
        ended = ""
    sys.stdout.flush()
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments. Exit status: 1 if a bound is not kept."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--kinds", default=",".join(KINDS), help="of videos")
    add("--attackers", type=int, default=12, help="requests of the attack at a time")
    add("--seconds", type=float, default=15.0, help="of each round, alone and beside the attack")
    add("--rounds", type=int, default=2, help="of each kind")
    options, serve = parser.parse_known_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"no such videos: {', '.join(sorted(unknown))}")
    kept, numbers = True, itertools.count()
    files = map(clip, itertools.count())
    with (
        tempfile.TemporaryDirectory(prefix="triptych-videos-") as directory,
        demo_stack(Path(directory), serve) as stack,
    ):
        ask(stack, Asked.empty(), files, 1.0)  # what runs once is not counted
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print("milliseconds until a whole answer: median and most alone, median and most beside")
        for kind in kinds:
            alone, beside, statuses = Asked.empty(), Asked.empty(), Counter[int]()
            for _ in range(options.rounds):
                ask(stack, alone, files, options.seconds)
                first = 1_000_000 * next(numbers)
                with attacked(stack, kind, first, options.attackers) as ended:
                    ask(stack, beside, files, options.seconds)
                statuses += ended
            kept = report(kind, alone, beside, statuses) and kept
        with attacked(stack, kinds[0], 1_000_000 * next(numbers), options.attackers):
            answered, allowed = counted_once(stack, next(files))
        print(f"clips within a limit of {PIXELS_PER_MINUTE} pixels: {answered}, wanted {allowed}")
    return 0 if kept and answered == allowed else 1


if __name__ == "__main__":
    sys.exit(main())
