"""What answers of a given form cost, themselves and their neighbours: TPOT of a running server.

    python -m benchmarks.structured --url http://127.0.0.1:8000 [--metrics http://127.0.0.1:9102]

All streams start together and send one request after the other; each answer has the same number of
tokens, so that no prompt is computed while others decode, except between two rounds. A round of
free answers alternates with one that has constrained ones, and so on, so that slow changes of the
machine meet both. TPOT is the mean gap between a request's tokens; figures are medians over
requests. `--metrics`, of the decoder, adds how long masks took and how many missed their step.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import re
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any, cast

import uvloop

from benchmarks import live
from benchmarks.client import Connection, Sample, Target
from benchmarks.workloads import WORDS, chat_fields

_CONTEXT = multiprocessing.get_context("spawn")
_STREAMS_PER_CLIENT = 16
_TIMEOUT_S = 600.0
# A table with more records than an answer's tokens can hold.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["circle", "square", "triangle", "star"]},
            "size": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "position": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "kind", "size", "tags", "position"],
        "additionalProperties": False,
    },
}


def without_bounds(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """The schema without maxLength: a random model then ends hardly any of its strings."""
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema).items()
    return {name: without_bounds(value) for name, value in fields if name != "maxLength"}


SCHEMAS = {"bounded": SCHEMA, "unbounded": without_bounds(SCHEMA)}
Answer = tuple[bool, Sample]  # whether it was constrained


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of one round: free ones, then constrained ones."""

    name: str
    free: int
    constrained: int


# Pairs that are compared: without and with constrained streams.
PAIRS: Sequence[tuple[Load, Load]] = (
    (Load("64 free", 64, 0), Load("48 free + 16 constrained", 48, 16)),
    (Load("64 free", 64, 0), Load("64 constrained", 0, 64)),
    (Load("1 free", 1, 0), Load("1 constrained", 0, 1)),
)


def run_client(
    target: Target, streams: list[tuple[bool, list[bytes]]], barrier: Barrier,
    answers: "Queue[list[Answer]]",
) -> None:  # fmt: skip
    """Entry point of a process with some streams; each has its bodies, the first a warm-up."""

    async def stream(constrained: bool, bodies: list[bytes]) -> list[Answer]:
        connection = Connection(target)
        found = [(constrained, await connection.post(body, _TIMEOUT_S)) for body in bodies]
        connection.close()
        return found[1:]

    async def run() -> None:
        found = await asyncio.gather(*(stream(*each) for each in streams))
        answers.put([answer for each in found for answer in each])

    barrier.wait()
    uvloop.run(run())


def play(load: Load, target: Target, bodies: "Bodies", rounds: int) -> list[Answer]:
    """Runs a load: `rounds` answers of each stream, after one that does not count."""
    kinds = [False] * load.free + [True] * load.constrained
    random.Random(0).shuffle(kinds)
    streams = [(kind, [bodies.next(kind) for _ in range(rounds + 1)]) for kind in kinds]
    parts = [streams[i::n] for n in [-(-len(streams) // _STREAMS_PER_CLIENT)] for i in range(n)]
    barrier, answers = _CONTEXT.Barrier(len(parts)), _CONTEXT.Queue()
    clients = [
        _CONTEXT.Process(target=run_client, args=(target, part, barrier, answers), daemon=True)
        for part in parts
    ]
    for client in clients:
        client.start()
    found = [answer for _ in clients for answer in answers.get(timeout=_TIMEOUT_S)]
    for client in clients:
        client.join()
    return found


class Bodies:
    """Requests whose prompts are all different."""

    def __init__(self, model: str, options: argparse.Namespace) -> None:
        self.schema: object = None  # of constrained answers
        self._model = model
        self._options = options
        self._rng = random.Random(time.time_ns())

    def next(self, constrained: bool) -> bytes:
        """The next request."""
        text = " ".join(self._rng.choices(WORDS, k=self._options.words))
        fields = chat_fields(self._model, text, self._options.tokens)
        fields |= {"temperature": self._options.temperature, "seed": self._rng.getrandbits(32)}
        if constrained:
            form = {"name": "t", "schema": self.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        return json.dumps(fields).encode()


def tpots(answers: list[Answer], constrained: bool, tokens: int) -> list[float]:
    """Milliseconds per token of each answer of a kind; answers that were cut count as errors."""
    return [
        1e3 * (sample.last - sample.first) / (sample.completion_tokens - 1)
        for kind, sample in answers
        if kind == constrained and not sample.error and sample.completion_tokens == tokens
    ]


def compare(
    pair: tuple[Load, Load], target: Target, bodies: Bodies, options: argparse.Namespace
) -> int:
    """Plays a pair in turns and prints how they compare; the number of answers that failed."""
    free: list[float] = []
    beside: list[float] = []
    constrained: list[float] = []
    errors: list[str] = []
    for _ in range(options.repeats):
        for load in pair:
            answers = play(load, target, bodies, options.rounds)
            errors += [s.error for _, s in answers if s.error]
            wanted = options.tokens
            short = sum(not s.error and s.completion_tokens != wanted for _, s in answers)
            errors += ["fewer tokens than asked for"] * short
            (beside if load is pair[1] else free).extend(tpots(answers, False, wanted))
            constrained += tpots(answers, True, wanted)
    base = median(free) if free else float("nan")
    print(f"{pair[0].name:<28} TPOT {base:7.3f} ms   ({len(free)} answers)")
    for name, values in (("free", beside), ("constrained", constrained)):
        if values:
            change = 100 * (median(values) / base - 1)
            label = f"{pair[1].name}: {name}"
            print(f"{label:<44} {median(values):7.3f} ms   {change:+6.2f} %   ({len(values)})")
    for error in sorted(set(errors)):
        print(f"  {errors.count(error)} x {error}")
    return len(errors)


def mask_metrics(url: str) -> dict[str, float]:
    """The decoder's counts of masks."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    pattern = r"^decoder_(late_token_masks_total|token_mask_seconds_(?:sum|count)) (\S+)$"
    return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}


async def measure(options: argparse.Namespace, target: Target, model: str) -> int:
    """Plays all pairs; the number of answers that failed."""
    bodies, failed = Bodies(model, options), 0
    schemas = SCHEMAS if options.schema == "all" else {options.schema: SCHEMAS[options.schema]}
    for (name, bodies.schema), pair in itertools.product(schemas.items(), PAIRS):
        if options.only and options.only not in pair[1].name:
            continue
        print(f"strings of the schema: {name}")
        before = mask_metrics(options.metrics) if options.metrics else {}
        failed += await asyncio.to_thread(compare, pair, target, bodies, options)
        if options.metrics:
            after = mask_metrics(options.metrics)
            new = {name: value - before.get(name, 0.0) for name, value in after.items()}
            steps = max(1.0, new["token_mask_seconds_count"])
            print(
                f"  masks: {steps:.0f} steps, {1e6 * new['token_mask_seconds_sum'] / steps:.0f} µs "
                f"each, {new['late_token_masks_total']:.0f} masks missed their step"
            )
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = live.parser(__doc__ or "")
    parser.add_argument("--metrics", default="", help="URL of the decoder's metrics")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--words", type=int, default=64, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each stream and turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each load")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--schema", default="all", choices=["all", *SCHEMAS], help="its strings")
    parser.add_argument("--only", default="", help="pairs whose second load has this in its name")
    return live.run(measure, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
