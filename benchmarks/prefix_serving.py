"""Prefix-aware choice of decoders, served: hits, first tokens and balance by rule.

    python -m benchmarks.prefix_serving --model DIR --load-format dummy --device cuda \
        --layout both --gateways 4

Each rule is a start of `triptych serve`, which unknown options go to; with several cards, or with
`--decoders N`, it has several decoders. Three loads as in `benchmarks.prefix_choice`, which
simulates them, but with shorter pauses: conversations of eight turns about an image, questions
behind one system prompt of 2,000 words, and both beside prompts that share nothing. Two rules:
`key` (rendezvous hashing of the first image or the first 256 tokens) and `sent` (what the gateway
has sent: the rule in use). An answer's text comes back as other words of its length, so that
prompts have the same tokens in each run; `most` is what one cache without bound would find of them.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import Connection, Sample, Target
from benchmarks.prefix_choice import RATES
from benchmarks.startup import serving
from benchmarks.worker import model_name
from benchmarks.workloads import WORDS, data_url, random_image

RULES = ("key", "sent")
_TURNS, _PAUSE_S, _TIMEOUT_S = 8, 2.0, 120.0
_METRICS = re.compile(r"metrics (http://\S+)")
# Run by each gateway before its own code: decoders are chosen by the key alone.
_BY_KEY = """
import sys
if "services.gateway" in sys.orig_argv:
    from services.gateway.clients import pods, sent_prompts
    sent_prompts.choose = lambda candidates, chain, key: pods.pick(candidates, key)
"""


@dataclass(slots=True)
class Load:
    """What became of one load.

    Attributes:
        samples: of its requests.
        shared: tokens of prompts that earlier ones began with, about.
    """

    samples: list[Sample] = field(default_factory=list[Sample])
    shared: float = 0.0


class Client:
    """Sends one load's requests.

    Args:
        target: the server.
        model: its name.
        seed: of texts, images and times.
        scale: of the number of words and tokens; 1: as in the simulation.
    """

    def __init__(self, target: Target, model: str, seed: int, scale: float) -> None:
        self._target, self._model, self._scale = target, model, scale
        self._random = random.Random(seed)
        self._images = np.random.default_rng(seed)
        self._edge = 1024 if scale == 1 else 128
        self._system = self._words(2000)
        self._has_asked = False
        self.load = Load()

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=max(4, round(count * self._scale))))

    async def conversation(self) -> None:
        """Eight turns about an image, with a pause before each."""
        image = data_url(random_image(self._images, self._edge))
        parts = [{"type": "image_url", "image_url": {"url": image}}]
        messages: list[dict[str, Any]] = []
        for turn in range(_TURNS):
            text = {"type": "text", "text": self._words(100)}
            messages.append({"role": "user", "content": [*parts, text] if turn == 0 else [text]})
            prompt_tokens = await self._ask(messages, 150)
            if turn < _TURNS - 1:
                self.load.shared += prompt_tokens
            messages.append({"role": "assistant", "content": self._words(150)})
            await asyncio.sleep(self._random.expovariate(1 / _PAUSE_S))

    async def question(self) -> None:
        """Behind the system prompt that all of them share."""
        text = self._words(200)
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": text}]
        prompt_tokens = await self._ask(messages, 128)
        if self._has_asked:
            length = len(self._system)
            self.load.shared += prompt_tokens * length / (length + len(text))
        self._has_asked = True

    async def lone(self) -> None:
        """A prompt that shares nothing."""
        await self._ask([{"role": "user", "content": self._words(1000)}], 128)

    async def _ask(self, messages: Sequence[dict[str, Any]], tokens: int) -> int:
        """Returns the prompt's tokens; 0 if the request failed."""
        body = {
            "model": self._model, "messages": messages, "temperature": 0, "ignore_eos": True,
            "max_tokens": max(4, round(tokens * self._scale)), "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = Connection(self._target)
        sample = await connection.post(json.dumps(body).encode(), _TIMEOUT_S)
        connection.close()
        self.load.samples.append(sample)
        return sample.prompt_tokens


async def run(client: Client, load: str, rate: float, seconds: float) -> None:
    """Starts conversations and requests at random times for so long, and waits for all.

    Args:
        client: to send them.
        load: its name.
        rate: that `RATES` are multiplied with, as by the number of decoders.
        seconds: of arrivals.
    """
    kinds = {"conversation": client.conversation, "question": client.question, "lone": client.lone}
    due = random.Random(7)

    async def arrive(
        kind: Callable[[], Awaitable[None]], each: float
    ) -> list[asyncio.Future[None]]:
        tasks: list[asyncio.Future[None]] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            tasks.append(asyncio.ensure_future(kind()))
            await asyncio.sleep(due.expovariate(each * rate))
        return tasks

    streams = [arrive(kinds[kind], each) for kind, each in RATES[load].items()]
    for tasks in await asyncio.gather(*streams):
        await asyncio.gather(*tasks)


@contextmanager
def serving_by(rule: str, model: Path, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`triptych serve` whose gateways keep to a rule: the URLs of its API and of its metrics."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        (Path(directory) / "sitecustomize.py").write_text(_BY_KEY if rule == "key" else "")
        path = os.pathsep.join((directory, *filter(None, sys.path)))
        with log.open("w") as errors, serving(model, options, errors, PYTHONPATH=path) as (url, _):
            found = _METRICS.search(log.read_text())
            assert found is not None
            yield url, found[1]


Counters = dict[str, Counter[str]]


def scrape(url: str) -> Counters:
    """Counters of decoders, by name and process."""
    found: Counters = {}
    with urllib.request.urlopen(url, timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                if sample.name.startswith("triptych_decoder_") and sample.name.endswith("_total"):
                    of_name = found.setdefault(sample.name, Counter())
                    of_name[sample.labels["process"]] += round(sample.value)
    return found


def row(load: str, rule: str, done: Load, before: Counters, after: Counters) -> dict[str, Any]:
    """The figures of one load."""

    def since(name: str) -> list[int]:
        return [after[name][p] - before.get(name, Counter())[p] for p in sorted(after[name])]

    requests = since("triptych_decoder_sequences_total")
    prompts = since("triptych_decoder_prompt_tokens_total")
    hits = since("triptych_decoder_prefix_cache_hit_tokens_total")
    whole = [sample for sample in done.samples if not sample.error]
    cuts = quantiles((1e3 * (sample.first - sample.start) for sample in whole), n=100)
    return {
        "load": load, "rule": rule, "requests": len(done.samples),
        "errors": len(done.samples) - len(whole),
        "found": round(sum(hits) / sum(prompts), 4),
        "most": round(done.shared / sum(sample.prompt_tokens for sample in whole), 4),
        "ttft_ms": [round(cuts[49], 1), round(cuts[98], 1)],
        "most_requests": round(max(requests) * len(requests) / sum(requests), 3),
        "computed": [p - h for p, h in zip(prompts, hits, strict=True)],
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; other options go to `triptych serve`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="checkpoint")
    add("--out", type=Path, help="JSON file, written after each row")
    add("--rules", default=",".join(RULES), help="in this order")
    add("--rate", type=float, default=2.0, help="of arrivals: about two thirds of so many H100")
    add("--seconds", type=float, default=30.0, help="of arrivals of each load")
    add("--scale", type=float, default=1.0, help="of words and tokens, for small models")
    options, rest = parser.parse_known_args(arguments)
    found: list[dict[str, Any]] = []
    for rule in options.rules.split(","):
        with serving_by(rule, options.model, rest) as (url, metrics):
            target = Target.from_url(url)
            for seed, load in enumerate(RATES):
                client = Client(target, model_name(target), seed, options.scale)
                before = scrape(metrics)
                asyncio.run(run(client, load, options.rate, options.seconds))
                found.append(row(load, rule, client.load, before, scrape(metrics)))
                print(json.dumps(found[-1]), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
