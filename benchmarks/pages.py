"""Pages of text read by a model for documents: pages a second, and how long a page takes.

    python -m benchmarks.pages --url URL --size 1800x2400 --tokens 2000 --at-once 96

Every page is another one: black words on white, as a JPEG. Each answer has exactly `--tokens`
tokens. The server may be ours or another with the same API.
"""

import argparse
import io
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

from PIL import Image, ImageDraw

from benchmarks.client import Target
from benchmarks.report import RowResult
from benchmarks.serve import run_row
from benchmarks.worker import model_name
from benchmarks.workloads import WORDS, Row, chat_body, data_url

_QUESTION = "Convert this page to markdown."
_TIMEOUT_S = 600.0
_MARGIN, _LINE = 40, 26  # pixels
_PIXELS_A_WORD = 50


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints a line. Exit status: 1 if a request failed, 2 without a server."""
    parser = argparse.ArgumentParser(description="Pages read by a model for documents.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server")
    add("--model", help="name in requests; default: the first that it lists")
    add("--size", default="1240x1754", help="width and height of a page in pixels")
    add("--tokens", type=int, default=600, help="tokens of each answer")
    add("--pages", type=int, default=192, help="number of pages")
    add("--at-once", type=int, default=64, help="requests at a time")
    add("--seed", type=int, help="default: a new one, so that no cache knows the pages")
    options = parser.parse_args(arguments)
    width, height = map(int, options.size.split("x"))
    try:
        target = Target.from_url(options.url)
        model = options.model or model_name(target)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    row = Row("pages", options.at_once, options.pages, 6, options.tokens, width, 1)
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 32)
    samples, wall_s = run_row(row, target, bodies(model, row, height, seed), _TIMEOUT_S)
    result = RowResult.from_samples(row, samples, wall_s)
    seconds = [sample.end - sample.start for sample in samples if not sample.error]
    for error, times in result.errors.items():
        print(f"{times} x {error}", file=sys.stderr)
    if seconds:
        print(
            f"{len(seconds)} pages of {options.size}, {options.at_once} at once: "
            f"{result.requests_per_s:.2f} pages/s, {result.tokens_per_s:.0f} tokens/s, "
            f"mean {mean(seconds):.1f} s, TTFT p50 {result.ttft_ms.p50:.0f} ms, "
            f"TPOT p50 {result.tpot_ms.p50:.2f} ms, {result.prompt_tokens:.0f} tokens in, "
            f"{result.completion_tokens:.0f} out"
        )
    return 1 if result.num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
