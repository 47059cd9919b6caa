"""What a burst of large images does to answers that are being written.

    python -m benchmarks.burst --url http://127.0.0.1:8000

Text streams run all the time. First they run alone; then a number of new images, each in a request
of its own, are sent at the same time, and the streams are watched until the last of these is
answered. A gap is the time between two events of one stream.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from benchmarks import live
from benchmarks.client import Connection, Sample, Target, TimedConnection
from benchmarks.workloads import WORDS, chat_body, data_url, random_image

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Streams:
    """Text streams, each followed by the next, until `stopped` is set."""

    target: Target
    model: str
    num_words: int
    output_tokens: int
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # end, s
    errors: list[str] = field(default_factory=list[str])
    stopped: bool = False

    async def run(self, number: int) -> None:
        """One stream."""
        stream = TimedConnection(self.target)
        words = random.Random(number)
        while not self.stopped:
            stream.arrivals = []
            text = " ".join(words.choices(WORDS, k=self.num_words))
            body = chat_body(self.model, text, self.output_tokens)
            sample = await stream.post(body, _TIMEOUT_S)
            if sample.error:
                self.errors.append(sample.error)
                break
            times = [now for now, _ in stream.arrivals]
            self.gaps += [(later, later - sooner) for sooner, later in pairwise(times)]
        stream.close()

    def between(self, start: float, stop: float) -> list[float]:
        """The gaps that ended in that time, sorted."""
        return sorted(gap for end, gap in self.gaps if start <= end < stop)


def make_images(count: int, edge: int, seed: int) -> list[bytes]:
    """New JPEGs; a second of work for four of 4096 x 4096."""
    with ThreadPoolExecutor() as pool:
        rngs = [np.random.default_rng([seed, number]) for number in range(count)]
        images: list[bytes] = []
        for image in pool.map(random_image, rngs, [edge] * count):
            images.append(image)
            print(f"\rimages made: {len(images)}/{count}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return images


async def measure(options: argparse.Namespace, target: Target, model: str) -> int:
    """Runs and prints; the number of requests that failed."""
    bodies = [
        chat_body(model, "What is there?", options.tokens, [data_url(image)])
        for image in make_images(options.images, options.edge, time.time_ns())
    ]
    streams = Streams(target, model, options.words, options.stream_tokens)
    tasks = [asyncio.create_task(streams.run(number)) for number in range(options.streams)]
    await asyncio.sleep(options.settle_s)
    calm = time.monotonic()
    await asyncio.sleep(options.calm_s)
    begin = time.monotonic()
    samples = await asyncio.gather(*(_once(target, body) for body in bodies))
    end = time.monotonic()
    streams.stopped = True
    await asyncio.gather(*tasks)
    report(streams, samples, (calm, begin, end))
    return len(streams.errors) + sum(bool(sample.error) for sample in samples)


async def _once(target: Target, body: bytes) -> Sample:
    connection = Connection(target)
    try:
        return await connection.post(body, _TIMEOUT_S)
    finally:
        connection.close()


def report(streams: Streams, samples: Sequence[Sample], times: tuple[float, float, float]) -> None:
    """Prints the gaps before and during the burst, and the burst itself."""
    calm, begin, end = times
    before, during = streams.between(calm, begin), streams.between(begin, end)
    good = [sample for sample in samples if not sample.error]
    print(f"burst: {len(good)} of {len(samples)} images answered in {end - begin:.1f} s")
    for error in sorted({sample.error for sample in samples if sample.error} | {*streams.errors}):
        print(f"  error: {error}")
    if good:
        firsts = sorted(sample.first - sample.start for sample in good)
        print(f"  first token after {firsts[0]:.2f} to {firsts[-1]:.2f} s")
    if not before or not during:
        print("no gaps to compare: the streams were too short or too slow")
        return
    for name, gaps in (("alone", before), ("during the burst", during)):
        p99 = gaps[int(0.99 * (len(gaps) - 1))]
        print(
            f"gap {name:16} mean {1e3 * statistics.fmean(gaps):7.2f} ms"
            f"  p50 {1e3 * statistics.median(gaps):7.2f}  p99 {1e3 * p99:7.2f}"
            f"  most {1e3 * gaps[-1]:7.2f}  ({len(gaps)} gaps)"
        )
    print(f"mean gap, times: {statistics.fmean(during) / statistics.fmean(before):.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the arguments; 1 when a request failed, 2 when the server is not there."""
    parser = live.parser(__doc__ or "")
    add = parser.add_argument
    add("--images", type=int, default=64, help="of the burst")
    add("--edge", type=int, default=4096, help="width and height of an image")
    add("--tokens", type=int, default=4, help="of an answer about an image")
    add("--streams", type=int, default=8, help="of text")
    add("--stream-tokens", type=int, default=512, help="of an answer of a stream")
    add("--words", type=int, default=100, help="of a stream's prompt")
    add("--settle-s", type=float, default=2.0, help="before anything is measured")
    add("--calm-s", type=float, default=5.0, help="of the streams alone")
    return live.run(measure, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
