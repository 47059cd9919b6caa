"""Requests of all kinds at once, some with mistakes, some given up: does each end as it should?

    python -m benchmarks.soak --url http://127.0.0.1:8000 --seconds 60

Texts and images of many sizes, known and new, with all ways of sampling and several choices. A
request ends as it should with as many tokens as it asked for, with a 400 if it has a mistake, or
with a 503. Afterwards no work may be left, and questions that were asked alone before the others
get the same answers again.
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import live
from benchmarks.client import Connection, Sample, Target, TimedConnection
from benchmarks.workloads import WORDS, chat_fields, data_url, random_image

_TIMEOUT_S = 120.0
_LAST_S = 10.0  # within which what was given up must have ended, too
_NUM_KNOWN = 8
# (how often, one of these): a request has some of each line.
_SAMPLING: Sequence[tuple[float, Sequence[dict[str, Any]]]] = (
    (1.0, [{"temperature": t} for t in (0, 0, 0.7, 1.0, 2.0)]),
    (0.5, [{"top_p": p} for p in (0.1, 0.8, 0.95, 1)]),
    (0.5, [{"top_k": k} for k in (-1, 1, 20, 1000)]),
    (0.2, [{"min_p": p} for p in (0.05, 1)]),
    (0.3, [{"presence_penalty": p} for p in (1.5, -2)]),
    (0.2, [{"frequency_penalty": p} for p in (0.5, -1)]),
    (0.2, [{"repetition_penalty": p} for p in (1.1, 0.8)]),
    (0.1, [{"logit_bias": {"5": 100}}, {"logit_bias": {"6": -100}}]),
    (0.1, [{"logprobs": True}, {"logprobs": True, "top_logprobs": 20}]),
    (0.1, [{"n": n} for n in (2, 8)]),
    (0.1, [{"cache_salt": salt} for salt in ("a", "b")]),
)
_MISTAKES: Sequence[dict[str, Any]] = (
    {"temperature": 3}, {"tools": [{"type": "function"}]}, {"max_tokens": 0}, {"n": 0},
    {"top_p": 0},
)  # fmt: skip
_MUST_BE_ZERO = (
    "triptych_gateway_requests_running", "triptych_encoder_queue_images",
    "triptych_decoder_sequences_running", "triptych_decoder_sequences_waiting",
    "triptych_decoder_kv_blocks_used",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most that a request has of each."""

    words: int
    tokens: int
    edge: int
    images: int


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and how it must end.

    Attributes:
        status: 200, or that of its mistake.
        tokens: of all choices together.
        patience_s: after which it is given up.
    """

    body: bytes
    status: int
    tokens: int
    patience_s: float


class Requests:
    """Random requests, determined by the seed. `known`: images that many requests have."""

    def __init__(self, model: str, sizes: Sizes, known: Sequence[bytes], seed: int) -> None:
        self._model = model
        self._sizes = sizes
        self._known = known
        self._rng = random.Random(seed)

    def next(self) -> Request:
        """Makes a request; a large image takes 50 ms."""
        rng, sizes = self._rng, self._sizes
        images = self._images() if rng.random() < 0.5 else []
        is_broken = bool(images) and rng.random() < 0.03
        if is_broken:
            images[0] = images[0][: len(images[0]) // 2]
        text = " ".join(rng.choices(WORDS, k=_up_to(rng, sizes.words)))
        urls = [data_url(each) for each in images]
        fields = chat_fields(self._model, text, _up_to(rng, sizes.tokens), urls)
        for share, kinds in _SAMPLING:
            if rng.random() < share:
                fields |= rng.choice(kinds)
        if rng.random() < 0.1:
            fields["min_tokens"] = rng.randrange(fields["max_tokens"] + 1)
        fields["seed"] = rng.getrandbits(32)
        tokens = fields["max_tokens"] * fields.get("n", 1)
        has_mistake = rng.random() < 0.05
        if has_mistake:
            fields |= rng.choice(_MISTAKES)
        is_lawful = not has_mistake and not is_broken
        leaves = is_lawful and rng.random() < 0.2
        return Request(
            json.dumps(fields).encode(),
            200 if is_lawful else 400,
            tokens,
            rng.uniform(0, 1.5) if leaves else _TIMEOUT_S,
        )

    def _images(self) -> list[bytes]:
        rng = self._rng
        count = _up_to(rng, self._sizes.images)
        return [
            rng.choice(self._known) if rng.random() < 0.4 else image(rng, self._sizes.edge)
            for _ in range(count)
        ]


def image(rng: random.Random, edge: int) -> bytes:
    """A JPEG of up to `edge` pixels a side."""
    width, height = (rng.randint(min(16, edge), edge) for _ in range(2))
    return random_image(np.random.default_rng(rng.getrandbits(32)), width, height)


def _up_to(rng: random.Random, most: int) -> int:
    """A random number from 1 to `most`, of each order of magnitude equally often."""
    return max(1, round(most ** rng.random()))


@dataclass(slots=True)
class Record:
    """How the requests have ended.

    Attributes:
        wrong: a line for each that ended otherwise than it should.
    """

    ends: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0

    def add(self, request: Request, sample: Sample) -> None:
        error = sample.error
        if error == "the answer had no content":  # bytes that are no text yet, or no text at all
            error = ""
        if request.patience_s < _TIMEOUT_S and error.startswith("TimeoutError"):
            self.ends["given up"] += 1
            return
        self.slowest_s = max(self.slowest_s, sample.end - sample.start)
        if error.startswith("HTTP 503"):
            self.ends["refused: 503"] += 1
        elif request.status != 200:
            self.ends[f"mistakes: {request.status}"] += 1
            if not error.startswith(f"HTTP {request.status}"):
                self.wrong.append(f"expected {request.status}, got: {error or 'an answer'}")
        else:
            self.ends["answered"] += 1
            if error or sample.completion_tokens != request.tokens:
                got = error or f"{sample.completion_tokens} tokens"
                self.wrong.append(f"asked for {request.tokens} tokens, got: {got}")


async def keep_asking(target: Target, requests: Requests, record: Record, until: float) -> None:
    """One client."""
    connection = Connection(target)
    while time.monotonic() < until:
        request = await asyncio.to_thread(requests.next)
        record.add(request, await connection.post(request.body, request.patience_s))
    connection.close()


async def ask_alone(target: Target, model: str, record: Record) -> list[str]:
    """Answers to some questions, one after the other, that no cache knows anything of."""
    rng = random.Random(1)
    urls = [data_url(image(rng, 512)) for _ in range(3)]
    answers: list[str] = []
    for sampling, shown in (
        ({"temperature": 0}, []),
        ({"temperature": 0}, urls[:1]),
        ({"temperature": 1, "seed": 3, "top_k": 20, "presence_penalty": 1.5}, urls[1:]),
    ):
        connection = TimedConnection(target)
        salt = {"cache_salt": uuid.uuid4().hex}
        fields = chat_fields(model, "What do you see?", 32, shown) | salt | sampling
        sample = await connection.post(json.dumps(fields).encode(), _TIMEOUT_S)
        connection.close()
        if sample.error:
            record.wrong.append(f"asked alone, got: {sample.error}")
        answers.append("".join(text for _, text in connection.arrivals))
    return answers


def left_in_work(urls: Sequence[str]) -> list[str]:
    """Gauges of these metrics that are not zero, nor become so within ten seconds."""
    deadline = time.monotonic() + _LAST_S
    while (left := _gauges_in_work(urls)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _gauges_in_work(urls: Sequence[str]) -> list[str]:
    left: list[str] = []
    for url in urls:
        with urllib.request.urlopen(url, timeout=_LAST_S) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if name in _MUST_BE_ZERO and float(value):
                    left.append(f"{line} ({url})")
    return left


async def soak(options: argparse.Namespace, target: Target, model: str) -> int:
    """Runs and prints; how much was wrong."""
    sizes = Sizes(options.words, options.tokens, options.edge, options.images)
    record = Record()
    before = await ask_alone(target, model, record)
    rng = random.Random(0)
    known = [image(rng, sizes.edge) for _ in range(_NUM_KNOWN)]
    start = time.monotonic()
    until = start + options.seconds
    clients = [
        keep_asking(target, Requests(model, sizes, known, seed), record, until)
        for seed in range(options.clients)
    ]
    progress = asyncio.create_task(_show(record, start, options.seconds))
    await asyncio.gather(*clients)
    progress.cancel()
    print(f"\r{time.monotonic() - start:.1f} s, the slowest request {record.slowest_s:.1f} s")
    for end, count in record.ends.most_common():
        print(f"{count:8} {end}")
    left = left_in_work(options.metrics)
    after = await ask_alone(target, model, record)
    changed = [f"{a!r} was {b!r}" for a, b in zip(after, before, strict=True) if a != b]
    problems = (("wrong", record.wrong), ("left in work", left), ("changed answers", changed))
    for name, lines in problems:
        print(f"{name}: {len(lines) or 'none'}")
        for line in lines[:10]:
            print(f"  {line[:300]}")
    return sum(len(lines) for _, lines in problems)


async def _show(record: Record, start: float, seconds: float) -> None:
    while True:
        count, now = record.ends.total(), time.monotonic() - start
        print(f"\r{now:5.0f} of {seconds:.0f} s, {count} requests", end="", file=sys.stderr)
        await asyncio.sleep(0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; 1 when something was wrong, 2 when the server is not there."""
    parser = live.parser(__doc__ or "")
    add = parser.add_argument
    add("--metrics", nargs="*", default=[], help="URLs of the services' metrics")
    add("--seconds", type=float, default=60, help="of asking")
    add("--clients", type=int, default=64, help="that ask one request after the other")
    add("--words", type=int, default=3000, help="most of a text")
    add("--tokens", type=int, default=400, help="most of an answer")
    add("--edge", type=int, default=2000, help="most pixels of an image's side")
    add("--images", type=int, default=8, help="most of a request")
    return live.run(soak, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
