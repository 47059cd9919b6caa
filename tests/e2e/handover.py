"""Decoders are killed in mid-stream; each answer must be that of an undisturbed run.

`python -m tests.e2e.handover --kills 200` is the long run; a test makes a few. Answers are
compared whole: text, finish reasons, log-probabilities, usage. Prints the gaps that clients saw.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tests.e2e.cluster import Cluster, Service, message, png, wait_until
from tests.noise import PATIENCE_S

_LOGPROB_TOLERANCE = 1e-3
MAX_TOKENS = 160
SCHEMA = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"type": "string"}, "minItems": 40}},
    "required": ["colours"],
    "additionalProperties": False,
}


def request_of(seed: int, max_tokens: int, model: str) -> dict[str, Any]:
    """Greedy and sampled, text and image, penalties, stop strings, structured output in turn."""
    long = {"ignore_eos": True, "max_tokens": max_tokens}
    question = f"Describe what you see, number {seed}."
    kinds: list[dict[str, Any]] = [
        {"messages": [message(question)], "temperature": 0, **long},
        {
            "messages": [message(question)], "temperature": 1.2, "top_p": 0.95, "n": 2,
            "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.4,
            "repetition_penalty": 1.1, "presence_penalty": 0.2, **long,
        },
        {
            "messages": [message(question, png(seed))], "temperature": 0.7, "top_k": 40,
            "min_tokens": max_tokens // 2, "logit_bias": {"300": 2.0}, **long,
        },
        {
            "messages": [message(question)], "temperature": 1.0, "max_tokens": max_tokens,
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "colours", "schema": SCHEMA}
            },
        },
        {
            "messages": [message(question, png(seed + 1))], "temperature": 1.0,
            "stop": ["zzzz", "qqqq", "!?"], **long,
        },
    ]  # fmt: skip
    return {
        "model": model, "seed": seed, "stream": True, "include_stage_times": True,
        "stream_options": {"include_usage": True}, **kinds[seed % len(kinds)],
    }  # fmt: skip


@dataclass
class Answer:
    """What came over one stream."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    completion_tokens: int = 0
    handover_ms: float | None = None
    error: str = ""

    def differs_from(self, other: "Answer") -> str:
        """What differs first; empty: nothing that a client could tell."""
        if self.error:
            return f"it broke: {self.error}"
        for name in ("texts", "reasons", "tokens", "completion_tokens"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {_first_difference(getattr(self, name), getattr(other, name))}"
        for choice, found in self.logprobs.items():
            if not np.allclose(found, other.logprobs[choice], atol=_LOGPROB_TOLERANCE):
                return f"log-probabilities of choice {choice}"
        return ""


class Asker:
    """Streams answers and counts the chunks of those under way.

    Args:
        url: of a gateway, chosen for each answer.
        max_tokens: of an answer.
        model: its name.
    """

    def __init__(
        self, url: Callable[[], str], max_tokens: int = MAX_TOKENS, model: str = "demo"
    ) -> None:
        self._url = url
        self._max_tokens = max_tokens
        self._model = model
        self.num_chunks: dict[int, int] = {}

    def ask_alone(self, seeds: Sequence[int]) -> dict[int, Answer]:
        """Undisturbed answers, one after the other."""
        answers = {seed: self.ask(seed) for seed in seeds}
        for seed, answer in answers.items():
            assert not answer.error, (seed, answer.error)
        return answers

    def ask(self, seed: int) -> Answer:
        answer, done = Answer(), False
        self.num_chunks[seed] = 0
        timeout = httpx2.Timeout(PATIENCE_S)
        try:
            with httpx2.stream(
                "POST",
                f"{self._url()}/v1/chat/completions",
                json=request_of(seed, self._max_tokens, self._model),
                timeout=timeout,
            ) as response:
                if response.status_code != 200:
                    response.read()
                    answer.error = f"{response.status_code} {response.text}"
                    return answer
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        self.num_chunks[seed] += 1
                        _take(answer, json.loads(line.removeprefix("data: ")))
        except httpx2.TransportError as error:
            answer.error = repr(error)
        if not done and not answer.error:
            answer.error = "no [DONE]"
        return answer


def _first_difference(found: object, wanted: object) -> str:
    ours, theirs = repr(found), repr(wanted)
    pairs = enumerate(zip(ours, theirs, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    start = max(0, at - 60)
    return f"at {at} of {len(ours)}: {ours[start : at + 60]} is not {theirs[start : at + 60]}"


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    for choice in chunk["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["delta"].get("content", "")
        for entry in (choice["logprobs"] or {"content": []})["content"]:
            answer.tokens.setdefault(index, []).append(entry["token"])
            answer.logprobs.setdefault(index, []).append(entry["logprob"])
        if choice["finish_reason"]:
            answer.reasons[index] = choice["finish_reason"]
    if chunk.get("usage"):
        answer.completion_tokens = chunk["usage"]["completion_tokens"]
        answer.handover_ms = chunk["stage_times_ms"].get("handover")


@dataclass
class Result:
    """Of all kills.

    Attributes:
        gaps_ms: from a decoder's loss to the next token, of each answer that was handed over.
    """

    num_kills: int = 0
    num_answers: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        gaps = ""
        if self.gaps_ms:
            p50, p99 = np.percentile(self.gaps_ms, [50, 99])
            gaps = f"; added gap p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {max(self.gaps_ms):.0f} ms"
        return (
            f"{self.num_kills} kills, {self.num_answers} answers, {len(self.gaps_ms)} handed over, "
            f"{len(self.mistakes)} wrong or broken{gaps}"
        )


def run(
    cluster: Cluster,
    num_kills: int,
    seeds: Sequence[int],
    *,
    at_once: int = 4,
    undisturbed: Mapping[int, Answer] | None = None,
    max_tokens: int = MAX_TOKENS,
    report: Callable[[Result], None] = lambda _: None,
) -> Result:
    """Kills a decoder in mid-stream, again and again. With three decoders or more, the others
    serve while one starts again. A kill that came when all answers of the decoder had ended does
    not count.
    """
    asker, result, rng = Asker(lambda: cluster.url, max_tokens), Result(), random.Random(7)
    undisturbed = undisturbed or asker.ask_alone(seeds)
    starting: list[threading.Thread] = []
    with ThreadPoolExecutor(at_once) as pool:
        while result.num_kills < num_kills:
            wait_until(lambda: _num_healthy(cluster) >= 2, PATIENCE_S, "two decoders are healthy")
            chosen = rng.sample(list(seeds), at_once)
            asker.num_chunks.clear()
            asked = {seed: pool.submit(asker.ask, seed) for seed in chosen}
            wanted = rng.randrange(3, max_tokens * 3 // 8)
            while not all(a.done() for a in asked.values()) and (
                max(asker.num_chunks.get(seed, 0) for seed in chosen) < wanted
            ):
                time.sleep(0.002)
            running = {d: d.metric("triptych_decoder_sequences_running") for d in alive(cluster)}
            victim = max(running, key=lambda d: running[d])
            if running[victim]:
                victim.kill()
                starting = [t for t in starting if t.is_alive()]
                starting.append(threading.Thread(target=victim.start))
                starting[-1].start()
            num_gaps = len(result.gaps_ms)
            for seed, future in asked.items():
                answer = future.result()
                result.num_answers += 1
                if answer.handover_ms is not None:
                    result.gaps_ms.append(answer.handover_ms)
                if difference := answer.differs_from(undisturbed[seed]):
                    result.mistakes.append(f"seed {seed}: {difference}")
            result.num_kills += len(result.gaps_ms) > num_gaps
            report(result)
    for thread in starting:
        thread.join()
    return result


def alive(cluster: Cluster) -> list[Service]:
    """Decoders that answer."""
    return [d for d in cluster.decoders if d.is_running() and d.answers()]


def _num_healthy(cluster: Cluster) -> float:
    return cluster.gateway.metric("triptych_gateway_healthy_pods", service="decoder")


def _report(result: Result) -> None:
    print(f"{time.strftime('%H:%M:%S')} {result}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--decoders", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=40)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(Path(directory), decoders=arguments.decoders) as cluster,
    ):
        result = run(cluster, arguments.kills, range(arguments.seeds), report=_report)
    for mistake in result.mistakes[:20]:
        print(mistake)
    print(result)
    return 1 if result.mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
