"""How many tokens of prompts are found in prefix caches, by the rule that chooses the decoder?

    python -m benchmarks.prefix_choice [--decoders 4] [--gateways 1] [--out FILE.csv]

Requests, gateways and decoders in simulated time. `sent_prompts.choose` is the real one; a decoder
is a queue, a cache of blocks that forgets the least recently used, and steps of a time like that of
Qwen3-VL-8B on an H100. Four loads: conversations of eight turns about an image, questions behind
one system prompt of 2,000 tokens, both beside prompts that share nothing, and such prompts beside
new clips of a minute, whose embeddings come 1.2 s later. Three rules: `key` (rendezvous hashing of
the image or the first 256 tokens), `sent` (what the gateway has sent: the rule in use), and `ideal`
(the same with all that the decoders hold and have to do). For clips, `together` is the rule in use
without the difference between tokens that can be computed and tokens whose embeddings are still to
come. `most` is what one cache without bound would find.
"""

import argparse
import csv
import heapq
import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import numpy as np
from blake3 import blake3

from services.common.pb import decoder_pb2 as pb
from services.gateway.clients.pods import pick
from services.gateway.clients.sent_prompts import (
    CONTEXT_COST,
    ROW_COST,
    Coming,
    PromptChain,
    Sent,
    SentPrompts,
    choose,
)

RULES = ("key", "sent", "ideal", "together")
# Arrivals of each kind a second and decoder, by load: about two thirds of what a decoder can do.
RATES = {
    "conversations": {"conversation": 0.42},
    "system prompt": {"question": 9.0},
    "mixture": {"conversation": 0.2, "question": 4.0, "lone": 4.0},
    "clips": {"lone": 10.0, "clip": 0.8},
}
# Tokens of a clip of 60 s and 720p, and the seconds until all of its embeddings are encoded
# (benchmarks/LOG.md, 8B).
_CLIP_TOKENS, _CLIP_S = 11_800, 1.2
_SYSTEM = 2000
_BLOCK = 64
# Qwen3-VL-8B on an H100, bf16: seconds of a step, and room for KV.
_STEP_S, _FIXED_S, _TOKEN_S, _KV_TOKEN_S, _PAIR_S = 5.2e-3, 0.6e-3, 22.5e-6, 49e-9, 1.3e-9
_KV_TOKENS, _STEP_TOKENS = 330_000, 1500
_WINDOW_S = (60.0, 180.0)  # requests that arrive then are counted


@dataclass(eq=False, slots=True)
class Request:
    """One request, and the next turn behind it."""

    arrival: float
    ids: list[int]
    image: pb.ImageRef | None
    num_answer: int
    following: Callable[["Request", float], "Request | None"] = lambda _, __: None
    chain: PromptChain = field(init=False)
    sent: Sent | None = None
    delay_s: float = 0.0  # until its embeddings are encoded
    gateway: int = 0
    num_found: int = 0
    num_computed: int = 0
    ttft: float = 0.0

    def __post_init__(self) -> None:
        self.chain = self._chain(self.ids)

    def whole(self) -> PromptChain:
        """The chain of prompt and answer."""
        return self._chain([*self.ids, *self.answer()])

    def answer(self) -> list[int]:
        """Token ids of the answer."""
        return [hash((self.arrival, index)) % 100_000 for index in range(self.num_answer)]

    def _chain(self, ids: list[int]) -> PromptChain:
        images = [self.image] if self.image else []
        return PromptChain(np.array(ids, np.int32), images, b"")

    @property
    def key(self) -> bytes:
        """As requests were assigned to decoders before."""
        if self.image:
            return self.image.image_key
        return blake3(np.array(self.ids[:256], np.int32).tobytes()).digest()


class Decoder:
    """A queue, a cache, and steps."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.rows: list[tuple[int, int, Request]] = []  # (step of its end, number, request)
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.step = self.context = self.num_held = 0
        self.busy_s = 0.0
        self.is_busy = False
        self._numbers = itertools.count()
        self._chunks: list[tuple[Request, int]] = []

    def num_found(self, chain: PromptChain) -> int:
        """Tokens of the prompt's beginning in the cache."""
        found = 0
        for link, end in chain.links:
            if link not in self.blocks:
                break
            found = end
        return found

    def num_sharing(self, chain: PromptChain) -> int:
        """As `SentPrompts.num_sharing`."""
        found = self.num_found(chain)
        links = {link for link, end in chain.links if end == found}
        running = (*self.prefilling, *self.waiting, *(row[2] for row in self.rows))
        return sum(any(link in links for link, _ in r.chain.links) for r in running)

    def work(self, *, waits: bool = False) -> float:
        """As `SentPrompts.work`, of all gateways and as it is, without what is still to come."""
        left = sum(r.chain.num_tokens - r.num_computed for r in self.prefilling)
        left += sum(r.chain.num_tokens - self.num_found(r.chain) for r in self.waiting)
        running = len(self.rows) + len(self.prefilling) + len(self.waiting)
        return left + ROW_COST * running + CONTEXT_COST * (self.context + left)

    def begin(self) -> float:
        """Plans a step; its seconds, or 0 if there is nothing to do."""
        self._chunks, budget = [], _STEP_TOKENS - len(self.rows)
        while self.waiting and self.num_held + self.waiting[0].chain.num_tokens < 0.95 * _KV_TOKENS:
            request = self.waiting.popleft()
            request.num_found = request.num_computed = self.num_found(request.chain)
            self.num_held += request.chain.num_tokens + request.num_answer
            self.prefilling.append(request)
        seconds = self.context * _KV_TOKEN_S
        for request in self.prefilling:
            length = min(budget, request.chain.num_tokens - request.num_computed)
            if length:
                self._chunks.append((request, length))
                seconds += length * (request.num_computed + length / 2) * _PAIR_S
                budget -= length
        tokens = len(self.rows) + sum(length for _, length in self._chunks)
        if not tokens:
            return 0.0
        return seconds + max(_STEP_S, _FIXED_S + tokens * _TOKEN_S)

    def end(self, now: float) -> tuple[list[Request], list[Request]]:
        """Ends the step: the requests that have their first token, and those that have ended."""
        self.step += 1
        self.context += len(self.rows)
        started: list[Request] = []
        for request, length in self._chunks:
            request.num_computed += length
            if request.num_computed == request.chain.num_tokens:
                self.prefilling.remove(request)
                request.ttft = now - request.arrival
                started.append(request)
                self._keep(request.chain)
                self.context += request.chain.num_tokens
                end = self.step + request.num_answer - 1
                heapq.heappush(self.rows, (end, next(self._numbers), request))
        ended: list[Request] = []
        while self.rows and self.rows[0][0] <= self.step:
            request = heapq.heappop(self.rows)[2]
            self.context -= request.chain.num_tokens + request.num_answer - 1
            self.num_held -= request.chain.num_tokens + request.num_answer
            self._keep(request.whole())
            ended.append(request)
        return started, ended

    def _keep(self, chain: PromptChain) -> None:
        for link, _ in reversed(chain.links):
            self.blocks[link] = None
            self.blocks.move_to_end(link)
        while len(self.blocks) * _BLOCK > _KV_TOKENS:
            self.blocks.popitem(last=False)


@dataclass(slots=True)
class Pod:
    """A decoder as one gateway sees it."""

    address: str
    decoder: Decoder
    prompts: SentPrompts = field(default_factory=lambda: SentPrompts(_KV_TOKENS))
    num_in_flight: int = 0


@dataclass(slots=True)
class Exact:
    """A pod of which everything is known."""

    pod: Pod
    address: str
    num_in_flight: int
    prompts: Any  # a Decoder: it answers as SentPrompts does


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a load under a rule; shares of the prompts' tokens."""

    load: str
    rule: str
    found: float
    most: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    clips_ms: tuple[float, float] | None  # the same of clips, which the others leave out
    most_requests: float  # of a decoder, by the mean
    busiest: float  # the same, of the time with work


def run(load: str, rule: str, num_decoders: int, num_gateways: int, seed: int) -> Result:
    """Simulates one load under one rule."""
    decoders = [Decoder() for _ in range(num_decoders)]
    gateways = [
        [Pod(f"10.0.0.{i}:50052", decoder) for i, decoder in enumerate(decoders)]
        for _ in range(num_gateways)
    ]
    random = Random(seed)
    events: list[tuple[float, int, Request | Decoder]] = []
    numbers = itertools.count()

    def at(time: float, what: Request | Decoder) -> None:
        heapq.heappush(events, (time, next(numbers), what))

    for request in arrivals(load, num_decoders, Random(seed)):
        at(request.arrival, request)
    pod_of: dict[Request, Pod] = {}
    ended: list[Request] = []
    requests_of = dict.fromkeys(range(num_decoders), 0)
    everything: set[bytes] = set()
    most = 0

    def begin(decoder: Decoder, now: float) -> None:
        seconds = decoder.begin()
        decoder.is_busy = seconds > 0
        if seconds:
            decoder.busy_s += seconds
            at(now + seconds, decoder)

    while events:
        now, _, what = heapq.heappop(events)
        if isinstance(what, Request):
            if what in pod_of:  # All of its embeddings have come.
                what.chain.coming.num_tokens = 0
                pod_of[what].decoder.waiting.append(what)
                if not pod_of[what].decoder.is_busy:
                    begin(pod_of[what].decoder, now)
                continue
            what.gateway = random.randrange(num_gateways)
            if what.delay_s and rule != "together":
                what.chain.coming = Coming(_CLIP_TOKENS)
            pod = pod_of[what] = _choose(gateways[what.gateway], what, rule)
            pod.num_in_flight += 1
            what.sent = pod.prompts.send(what.chain)
            if _counts(what):
                requests_of[decoders.index(pod.decoder)] += 1
                most += max(
                    (end for link, end in what.chain.links if link in everything), default=0
                )
            everything.update(link for link, _ in what.chain.links)
            if what.delay_s:
                at(now + what.delay_s, what)
                continue
            pod.decoder.waiting.append(what)
            if not pod.decoder.is_busy:
                begin(pod.decoder, now)
            continue
        for request in (done := what.end(now))[0]:
            assert request.sent is not None
            pod_of[request].prompts.started(request.sent, request.num_found)
        for request in done[1]:
            assert request.sent is not None
            pod = pod_of.pop(request)
            pod.prompts.ended(request.sent)
            pod.num_in_flight -= 1
            everything.update(link for link, _ in request.whole().links)
            ended.append(request)
            following = request.following(request, now)
            if following is not None and following.arrival < _WINDOW_S[1]:
                at(following.arrival, following)
        begin(what, now)
    return _result(load, rule, ended, most, decoders, [*requests_of.values()])


def _result(
    load: str, rule: str, ended: list[Request], most: int, decoders: list[Decoder],
    num_requests: list[int],
) -> Result:  # fmt: skip
    """The figures of a load that has run."""
    counted = [request for request in ended if _counts(request)]
    tokens = sum(request.chain.num_tokens for request in counted)
    cuts = quantiles((request.ttft for request in counted if not request.delay_s), n=100)
    clips = [request.ttft for request in counted if request.delay_s]
    of_clips = quantiles(clips, n=100) if clips else []
    busy = [decoder.busy_s for decoder in decoders]
    return Result(
        load, rule, sum(r.num_found for r in counted) / tokens, most / tokens,
        1e3 * cuts[49], 1e3 * cuts[98],
        (1e3 * of_clips[49], 1e3 * of_clips[98]) if of_clips else None,
        max(num_requests) * len(decoders) / len(counted),
        max(busy) * len(decoders) / sum(busy),
    )  # fmt: skip


def _counts(request: Request) -> bool:
    return _WINDOW_S[0] <= request.arrival < _WINDOW_S[1]


def _choose(pods: Sequence[Pod], request: Request, rule: str) -> Pod:
    if rule == "key":
        return pick(pods, request.key)
    if rule in ("sent", "together"):
        return choose(pods, request.chain, request.key)
    exact = [Exact(pod, pod.address, pod.num_in_flight, pod.decoder) for pod in pods]
    return choose(exact, request.chain, request.key).pod


def arrivals(load: str, num_decoders: int, random: Random) -> Iterator[Request]:
    """First turns and lone requests, by time."""
    kinds = {"conversation": _conversation, "question": _question, "lone": _lone, "clip": _clip}
    streams = [
        _poisson(kinds[kind], rate * num_decoders, random) for kind, rate in RATES[load].items()
    ]
    return heapq.merge(*streams, key=lambda request: request.arrival)


def _poisson(
    kind: Callable[[float, Random], Request], rate: float, random: Random
) -> Iterator[Request]:
    time = 0.0
    while (time := time + random.expovariate(rate)) < _WINDOW_S[1]:
        yield kind(time, random)


def _words(count: int, random: Random) -> list[int]:
    return [random.randrange(100_000) for _ in range(count)]


def _lone(time: float, random: Random) -> Request:
    return Request(time, _words(1000, random), None, 128)


def _question(time: float, random: Random) -> Request:
    return Request(time, [*range(_SYSTEM), *_words(200, random)], None, 128)


def _clip(time: float, random: Random) -> Request:
    return Request(time, _words(_CLIP_TOKENS + 100, random), None, 128, delay_s=_CLIP_S)


def _conversation(time: float, random: Random) -> Request:
    """Eight turns: an image of 1,024 tokens, then 100 tokens of each question and 150 of each
    answer, with some seconds between.
    """
    image = pb.ImageRef(
        image_key=random.randbytes(16), offset=40, num_tokens=1024, encoder_address="10.0.1.1:50051"
    )

    def following(turn: Request, now: float, number: int = 2) -> Request | None:
        if number > 8:
            return None
        ids = [*turn.ids, *turn.answer(), *_words(100, random)]
        pause = random.expovariate(1 / 8)
        return Request(now + pause, ids, image, 150, lambda r, t: following(r, t, number + 1))

    ids = [*range(40), *[7] * 1024, *_words(100, random)]
    return Request(time, ids, image, 150, following)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each load and rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--decoders", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=1, help="each knows what it sent itself")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a CSV file")
    options = parser.parse_args(arguments)
    rows: list[list[str]] = []
    header = ["load", "rule", "found %", "most %", "TTFT p50 ms", "p99 ms", "clips p50", "p99",
              "requests", "busy"]  # fmt: skip
    print("".join(f"{title:<15}" for title in header))
    for load, rule in itertools.product(RATES, RULES):
        if rule == ("ideal" if load == "clips" else "together"):
            continue
        if sys.stderr.isatty():
            print(f"\r{load}, {rule} ...", end="", file=sys.stderr)
        found = run(load, rule, options.decoders, options.gateways, options.seed)
        rows.append(
            [load, rule, f"{100 * found.found:.1f}", f"{100 * found.most:.1f}",
             f"{found.ttft_p50_ms:.0f}", f"{found.ttft_p99_ms:.0f}",
             *(f"{value:.0f}" for value in found.clips_ms or ()),
             *("-" for _ in range(0 if found.clips_ms else 2)),
             f"{found.most_requests:.2f}", f"{found.busiest:.2f}"]
        )  # fmt: skip
        print("\r" + "".join(f"{cell:<15}" for cell in rows[-1]))
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
