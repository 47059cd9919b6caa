"""Load on a server of a model for search: ours, or vLLM's with `--runner pooling`, by one protocol.

    python -m benchmarks.search images --url http://127.0.0.1:8000 --model NAME
    python -m benchmarks.search texts --tokens 500 ...
    python -m benchmarks.search pairs --tokens 200 ...

Prints one line of JSON: items a second, and the latency of single queries that are asked beside the
load, one each 50 ms. Every picture and text is new, so that no cache has it; `--repeat` asks the
same ones twice and reports the second time.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from itertools import count

import httpx2
import numpy as np

from benchmarks.workloads import WORDS, data_url, random_image

_SIDE = 512
_TIMEOUT_S = 600.0


class Load:
    """A stream of requests of one kind.

    Args:
        options: the parsed command line.
        client: HTTP client of the server.
    """

    def __init__(self, options: argparse.Namespace, client: httpx2.AsyncClient) -> None:
        self._options, self._client = options, client
        self._rng = np.random.default_rng(options.seed)

    def body(self) -> dict[str, object]:
        """Returns the body of the next request, which has `--batch` items if the kind has lists."""
        options, model = self._options, {"model": self._options.model}
        if options.kind == "images":
            part = {
                "type": "image_url",
                "image_url": {"url": data_url(random_image(self._rng, _SIDE))},
            }
            return {**model, "messages": [{"role": "user", "content": [part]}]}
        texts = [self._text(options.tokens) for _ in range(options.batch)]
        if options.kind == "texts":
            return {**model, "input": texts, "encoding_format": "base64"}
        return {**model, "query": self._text(12), "documents": texts}

    def query(self) -> dict[str, object]:
        """Returns the body of a single short query."""
        one = {"model": self._options.model}
        if self._options.kind == "pairs":
            return {**one, "query": self._text(12), "documents": [self._text(20)]}
        return {**one, "input": self._text(12)}

    async def ask(self, body: dict[str, object]) -> float:
        """Sends a request, and returns its time in seconds."""
        path = "/v1/rerank" if self._options.kind == "pairs" else "/v1/embeddings"
        started = time.perf_counter()
        answer = await self._client.post(path, json=body)
        answer.raise_for_status()
        return time.perf_counter() - started

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choice(WORDS, num_words).tolist())


async def _work(
    bodies: list[dict[str, object]],
    ask: Callable[[dict[str, object]], Awaitable[float]],
    at_once: int,
) -> float:
    """Sends all requests, some at a time, and returns the seconds that all took."""
    places = count()

    async def send() -> None:
        while (place := next(places)) < len(bodies):
            await ask(bodies[place])

    started = time.perf_counter()
    await asyncio.gather(*(send() for _ in range(at_once)))
    return time.perf_counter() - started


async def _queries(load: Load, period_s: float) -> list[float]:
    """Asks single queries at fixed times until it is cancelled, and returns the times of all.

    A query does not wait for the answers of earlier ones, so slow answers do not make it later.
    """
    tasks: list[asyncio.Task[float]] = []
    try:
        while True:
            tasks.append(asyncio.create_task(load.ask(load.query())))
            await asyncio.sleep(period_s)
    except asyncio.CancelledError:
        return await asyncio.gather(*tasks)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Runs the load and returns the figures."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(
        base_url=options.url, timeout=_TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        load = Load(options, client)
        warm_up = [load.body() for _ in range(options.at_once)]
        await _work(warm_up, load.ask, options.at_once)
        bodies = [load.body() for _ in range(options.requests)]
        if options.repeat:
            await _work(bodies, load.ask, options.at_once)
        alone_s = [await load.ask(load.query()) for _ in range(50)]
        queries = asyncio.create_task(_queries(load, 0.05))
        seconds = await _work(bodies, load.ask, options.at_once)
        queries.cancel()
        beside_s = await queries
    per_request = 1 if options.kind == "images" else options.batch
    return {
        "kind": options.kind,
        "items_per_s": round(len(bodies) * per_request / seconds, 1),
        "seconds": round(seconds, 2),
        "query_alone_p50_ms": round(float(np.median(alone_s)) * 1e3, 2),
        "query_beside_p50_ms": round(float(np.median(beside_s)) * 1e3, 1),
        "query_beside_p99_ms": round(float(np.quantile(beside_s, 0.99)) * 1e3, 1),
        "num_queries": len(beside_s),
    }


def main() -> int:
    """Parses the command line and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("images", "texts", "pairs"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="name of the served model")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=64, help="requests at a time")
    parser.add_argument("--batch", type=int, default=16, help="texts or documents of a request")
    parser.add_argument("--tokens", type=int, default=500, help="words of a text or document")
    parser.add_argument("--repeat", action="store_true", help="measure known inputs")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
