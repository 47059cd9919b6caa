"""Pages of text read by a model for documents: pages a second, and how long a page takes.

    python -m benchmarks.pages --url URL --size 1800x2400 --tokens 2000 --at-once 96
    python -m benchmarks.pages --url URL --size 1800x2400 --tokens 2000 --at-once 96 --steady 60

Every page is another one, made before the clock starts: black words on white, as a JPEG. Each
answer has exactly `--tokens` tokens. The server may be ours or another with the same API.

Without `--steady` all requests of the beginning are sent together, and the figures have the start
and the end of the run in them. With `--steady SECONDS` the first requests begin staggered over a
round, which is about the time that a page takes (`--round`). A settling time follows, and then a
window of so many seconds, whose pages are counted. The halves of the window are printed, too: if
they differ, the state was not steady. Requests in flight at the end of the window are cancelled.
"""

import argparse
import asyncio
import io
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

from PIL import Image, ImageDraw

from benchmarks.client import Sample, Target
from benchmarks.report import Percentiles, RowResult
from benchmarks.serve import run_row
from benchmarks.step_frontier import ask
from benchmarks.worker import model_name
from benchmarks.workloads import WORDS, Row, chat_body, data_url

_QUESTION = "Convert this page to markdown."
_TIMEOUT_S = 600.0
_MARGIN, _LINE = 40, 26  # pixels
_PIXELS_A_WORD = 50
# Of a steady run: seconds of a round for each token of a page, the settling time in rounds, and
# the pages that are made for each page that is expected.
_ROUND_S_A_TOKEN, _SETTLE, _SPARE = 1 / 60, 0.35, 1.3


def page(width: int, height: int, seed: int) -> str:
    """Draws a page and returns its URL."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for top in range(_MARGIN, height - _MARGIN, _LINE):
        words = rng.choices(WORDS, k=max(1, width // _PIXELS_A_WORD))
        draw.text((_MARGIN, top), " ".join(words), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return data_url(buffer.getvalue())


def bodies(model: str, row: Row, height: int, seed: int) -> Iterator[bytes]:
    """Makes the requests of a row, those of its warm-up first."""
    count = row.num_warmup + row.num_requests
    seeds = range(seed, seed + count)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        made = pool.map(page, [row.image_edge] * count, [height] * count, seeds, chunksize=4)
        for url in made:
            yield chat_body(model, _QUESTION, row.output_tokens, [url])


async def staggered_loop(
    target: Target, bodies: Iterable[bytes], streams: int, round_s: float, last_s: float
) -> list[Sample]:
    """Keeps so many requests in flight, the first of which begin one by one.

    Args:
        target: the server.
        bodies: bodies of the requests, in order.
        streams: number of requests in flight.
        round_s: seconds over which the first requests begin.
        last_s: seconds after which requests in flight are cancelled.

    Returns:
        The answers that have ended, in the order of their ends.
    """
    left, answers = iter(bodies), list[Sample]()

    async def stream(number: int) -> None:
        await asyncio.sleep(number * round_s / streams)
        for body in left:
            answers.append(await ask(target, body, _TIMEOUT_S))

    try:
        async with asyncio.timeout(last_s):
            await asyncio.gather(*(stream(number) for number in range(streams)))
    except TimeoutError:
        pass
    return answers


def window(name: str, answers: Sequence[Sample], start: float, end: float) -> str:
    """Returns a line about the pages whose answers ended between two times of the monotonic clock.

    Args:
        name: beginning of the line.
        answers: answers of the run. Those with an error are left out.
        start: time at which the window begins.
        end: time at which the window ends.
    """
    whole = [a for a in answers if start <= a.end <= end and not a.error]
    if not whole:
        return f"{name}: no page ended in {end - start:.0f} s"
    first, later, gap = (
        Percentiles.of(seconds)
        for seconds in (
            [answer.ttft_s for answer in whole],
            [answer.tpot_s for answer in whole],
            [answer.gap_s for answer in whole],
        )
    )
    return (
        f"{name}: {len(whole)} pages in {end - start:.0f} s, {len(whole) / (end - start):.3f} "
        f"pages/s, mean {mean(a.end - a.start for a in whole):.2f} s, "
        f"TTFT p50 {first.p50:.0f} p99 {first.p99:.0f} ms, TPOT p50 {later.p50:.2f} ms, "
        f"longest gap p50 {gap.p50:.0f} p99 {gap.p99:.0f} ms, "
        f"{mean(a.prompt_tokens for a in whole):.0f} tokens in, "
        f"{mean(a.completion_tokens for a in whole):.0f} out"
    )


def measure_steady(
    target: Target, made: Iterable[bytes], streams: int, round_s: float, steady_s: float
) -> int:
    """Prints the window and its halves. Returns the exit status: 1 if a request failed or if there
    were too few pages.
    """
    bodies = list(made)
    lead_s = (1 + _SETTLE) * round_s
    begun = time.monotonic()
    last_s = lead_s + steady_s
    answers = asyncio.run(staggered_loop(target, bodies, streams, round_s, last_s))
    start, end = begun + lead_s, begun + last_s
    middle = (start + end) / 2
    for name, *span in (
        ("window", start, end), ("first half", start, middle), ("second half", middle, end)
    ):  # fmt: skip
        print(window(name, answers, *span))
    errors = [answer.error for answer in answers if answer.error]
    for error, times in Counter(errors).items():
        print(f"{times} x {error}", file=sys.stderr)
    if ran_out := len(answers) + streams > len(bodies):
        print("there were too few pages for the window; raise --pages", file=sys.stderr)
    return 1 if errors or ran_out else 0


def measure_all(row: Row, size: str, target: Target, made: Iterable[bytes]) -> int:
    """Prints a line about all pages. Returns the exit status: 1 if a request failed."""
    samples, wall_s = run_row(row, target, made, _TIMEOUT_S)
    result = RowResult.from_samples(row, samples, wall_s)
    seconds = [sample.end - sample.start for sample in samples if not sample.error]
    for error, times in result.errors.items():
        print(f"{times} x {error}", file=sys.stderr)
    if seconds:
        print(
            f"{len(seconds)} pages of {size}, {row.concurrency} at once: "
            f"{result.requests_per_s:.2f} pages/s, {result.tokens_per_s:.0f} tokens/s, "
            f"mean {mean(seconds):.1f} s, TTFT p50 {result.ttft_ms.p50:.0f} ms, "
            f"TPOT p50 {result.tpot_ms.p50:.2f} ms, {result.prompt_tokens:.0f} tokens in, "
            f"{result.completion_tokens:.0f} out"
        )
    return 1 if result.num_errors else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints a line. Exit status: 1 if a request failed, 2 without a server."""
    parser = argparse.ArgumentParser(description="Pages read by a model for documents.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server")
    add("--model", help="name in requests; default: the first that it lists")
    add("--size", default="1240x1754", help="width and height of a page in pixels")
    add("--tokens", type=int, default=600, help="tokens of each answer")
    add("--pages", type=int, help="number of pages; default: 192, with --steady enough of them")
    add("--at-once", type=int, default=64, help="requests at a time")
    add("--seed", type=int, help="default: a new one, so that no cache knows the pages")
    add("--steady", type=float, metavar="SECONDS", help="length of a window in a steady state")
    add("--round", type=float, metavar="SECONDS", help="of a page; default: 1/60 for each token")
    options = parser.parse_args(arguments)
    width, height = map(int, options.size.split("x"))
    try:
        target = Target.from_url(options.url)
        model = options.model or model_name(target)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    at_once, pages = options.at_once, options.pages or 192
    round_s = options.round or options.tokens * _ROUND_S_A_TOKEN
    if options.steady and not options.pages:
        rounds = 1 + _SETTLE + options.steady / round_s
        pages = math.ceil(at_once * (1 + _SPARE * rounds))
    row = Row("pages", at_once, pages, 6, options.tokens, width, 1)
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 32)
    made = bodies(model, row, height, seed)
    if options.steady:
        return measure_steady(target, made, at_once, round_s, options.steady)
    return measure_all(row, options.size, target, made)


if __name__ == "__main__":
    sys.exit(main())
