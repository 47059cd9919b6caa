"""First tokens of requests beside a batch: `python -m benchmarks.beside_batch --url URL`.

Requests arrive at random times, alone and beside a batch of many lines, in phases that take turns
and have the same times of arrival. Printed are the times to the first token of both kinds of
phases, their ratio at the 99th percentile, and how many lines of the batch ran.
"""

import argparse
import asyncio
import json
import random
import time
import urllib.request
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from benchmarks.client import Connection, Target
from benchmarks.worker import model_name
from benchmarks.workloads import WORDS, chat_body

_TIMEOUT_S = 600.0
_PATH = "/v1/chat/completions"


class Batches:
    """The server's batches, of one file."""

    def __init__(self, url: str, model: str, num_lines: int) -> None:
        self._url = url.rstrip("/")
        lines = [
            {"custom_id": str(i), "method": "POST", "url": _PATH, "body": self._body(model, i)}
            for i in range(num_lines)
        ]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        edge, name = "triptych", "Content-Disposition: form-data; name"
        head = (
            f'--{edge}\r\n{name}="purpose"\r\n\r\nbatch\r\n'
            f'--{edge}\r\n{name}="file"; filename="lines.jsonl"\r\n\r\n'
        )
        kind = f"multipart/form-data; boundary={edge}"
        body = head.encode() + data + f"\r\n--{edge}--\r\n".encode()
        self._file = self._call("/v1/files", body, kind)["id"]

    def start(self) -> str:
        """Creates a batch, waits until lines of it run, and returns its id."""
        fields = {"input_file_id": self._file, "endpoint": _PATH, "completion_window": "24h"}
        batch = self._call("/v1/batches", json.dumps(fields).encode())["id"]
        while not self.completed(batch):
            time.sleep(0.2)
        return batch

    def completed(self, batch: str) -> int:
        """Returns the number of lines that have an answer."""
        return self._call(f"/v1/batches/{batch}")["request_counts"]["completed"]

    def stop(self, batch: str) -> None:
        """Cancels a batch and waits for its end."""
        self._call(f"/v1/batches/{batch}/cancel", b"{}")
        while self._call(f"/v1/batches/{batch}")["status"] == "cancelling":
            time.sleep(0.2)

    def _call(self, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:  # noqa: ANN401
        request = urllib.request.Request(self._url + path, body, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)

    def _body(self, model: str, index: int) -> dict[str, object]:
        text = " ".join(random.Random(index).choices(WORDS, k=100))
        message = {"role": "user", "content": text}
        return {"model": model, "messages": [message], "max_tokens": 32, "ignore_eos": True}


async def phase(
    target: Target,
    model: str,
    rate: float,
    seconds: float,
    seed: int,
    arrival_seed: int,
    *,
    num_words: int = 200,
    num_tokens: int = 8,
) -> list[float]:
    """Sends requests for some seconds. Returns their milliseconds to the first token.

    Args:
        target: the server.
        model: name of the model in requests.
        rate: requests a second.
        seconds: length of the phase.
        seed: seed of the prompts.
        arrival_seed: seed of the times between requests.
        num_words: number of words of each prompt.
        num_tokens: number of tokens of each answer.
    """
    rng, times, tasks = random.Random(seed), list[float](), list[asyncio.Task[None]]()
    arrivals = random.Random(arrival_seed)

    async def ask(text: str) -> None:
        connection = Connection(target)
        sample = await connection.post(chat_body(model, text, num_tokens, []), _TIMEOUT_S)
        connection.close()
        if sample.error:
            raise SystemExit(f"a request failed: {sample.error}")
        times.append(1e3 * (sample.first - sample.start))

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tasks.append(asyncio.create_task(ask(" ".join(rng.choices(WORDS, k=num_words)))))
        await asyncio.sleep(arrivals.expovariate(rate))
    await asyncio.gather(*tasks)
    return times


class Mean(NamedTuple):
    """Sum of seconds to the first token in the decoder, and number of requests."""

    seconds: float = 0.0
    number: float = 0.0

    def plus(self, begun: "Mean", ended: "Mean") -> "Mean":
        """Returns this sum and what was added between two readings."""
        seconds = self.seconds + ended.seconds - begun.seconds
        return Mean(seconds, self.number + ended.number - begun.number)

    @property
    def ms(self) -> float:
        return 1e3 * self.seconds / max(1.0, self.number)


def first_tokens(url: str) -> Mean:
    """Reads a decoder's histogram of first tokens, without those of lines.

    Args:
        url: address of its metrics. Empty if they are not read.
    """
    if not url:
        return Mean()
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines()]
    names = [f"triptych_decoder_ttft_seconds_{part}" for part in ("sum", "count")]
    return Mean(*(sum(float(x[1]) for x in lines if x[0].split("{")[0] == n) for n in names))


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--url", required=True, help="address of a server")
    add("--rate", type=float, default=2.0, help="requests a second")
    add("--seconds", type=float, default=60.0, help="length of a phase")
    add("--rounds", type=int, default=3, help="phases of each kind")
    add("--words", type=int, default=200, help="words of a request's prompt")
    add("--tokens", type=int, default=8, help="tokens of a request's answer")
    add("--lines", type=int, default=10_000, help="lines of the batch")
    add("--decoder", default="", help="URL of metrics with the decoder's: its mean first token")
    options = parser.parse_args()
    target = Target.from_url(options.url, "")
    model = model_name(target)
    batches = Batches(options.url, model, options.lines)
    times: dict[str, list[float]] = {"alone": [], "beside the batch": []}
    in_decoder = {name: Mean() for name in times}
    num_lines = 0
    for number in range(options.rounds):
        for name, found in times.items():
            batch = batches.start() if name != "alone" else ""
            before = batches.completed(batch) if batch else 0
            seed = 2 * number + bool(batch)  # no prompt is sent twice
            begun = first_tokens(options.decoder)
            found += asyncio.run(
                phase(
                    target, model, options.rate, options.seconds, seed, number,
                    num_words=options.words, num_tokens=options.tokens,
                )
            )  # fmt: skip
            in_decoder[name] = in_decoder[name].plus(begun, first_tokens(options.decoder))
            if batch:
                num_lines += batches.completed(batch) - before
                batches.stop(batch)
    last = {name: quantiles(found, n=100, method="inclusive")[-1] for name, found in times.items()}
    for name, found in times.items():
        p90 = quantiles(found, n=10, method="inclusive")[-1]
        print(
            f"{name}: median {median(found):.1f}, p90 {p90:.1f}, p99 {last[name]:.1f} ms,"
            f" {len(found)} requests"
        )
        if options.decoder:
            print(f"  in the decoder: mean {in_decoder[name].ms:.1f} of {fmean(found):.1f} ms")
    ratio = last["beside the batch"] / last["alone"]
    print(f"p99: {ratio:.2f} x; {num_lines / options.rounds / options.seconds:.1f} lines/s")


if __name__ == "__main__":
    main()
