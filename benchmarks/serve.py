"""Load generator for any OpenAI-compatible chat server: `python -m benchmarks.serve --url URL`.

Closed loop: each row keeps its number of requests in flight until all are answered. All streaming,
greedy, with a fixed number of output tokens. Latencies are seen by the client: TTFT runs from the
request's first byte to the first content, TPOT is the mean gap between tokens after it.
"""

import argparse
import math
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

from benchmarks.client import Sample, Target
from benchmarks.report import RowResult, print_table, write_json, write_plot
from benchmarks.worker import Job, run_worker, write_bodies
from benchmarks.workloads import ROWS, WORDS, Row, request_bodies, row_named, scaled
from triptych.client import AskError, Server

_CONTEXT = multiprocessing.get_context("spawn")
_CONNECTIONS_PER_WORKER = 64
Advance = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the selected rows. Exit status: 1 if a request failed, 2 if the server is not there."""
    options = _parser().parse_args(arguments)
    try:
        rows = [scaled(row, options.scale) for row in _select(options.rows)]
        words = _single_token_words(options.tokenizer) if options.tokenizer else WORDS
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
        server = Server(options.url, options.api_key)
        target = Target.from_url(server.url, server.key)
        model = options.model or server.first_model()
    except (AskError, ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 32)
    results: list[RowResult] = []
    try:
        for row in rows:
            bodies = request_bodies(row, model, seed, words, ignore_eos=not options.may_end_early)
            samples, wall_s = run_row(row, target, bodies, options.timeout_s)
            results.append(RowResult.from_samples(row, samples, wall_s))
    except KeyboardInterrupt:
        print("\nbench: stopped", file=sys.stderr)
        return 130
    meta = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": options.url,
        "model": model,
        "label": options.label,
        "seed": seed,
        "scale": options.scale,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    print_table(results, meta)
    if options.out:
        write_json(options.out / "serve.json", results, meta)
        write_plot(options.out / "serve.png", results, meta)
        print(f"written: {options.out / 'serve.json'}, {options.out / 'serve.png'}")
    return 1 if any(result.num_errors for result in results) else 0


def run_row(
    row: Row, target: Target, made: Iterable[bytes], timeout_s: float, max_s: float = math.inf
) -> tuple[list[Sample], float]:
    """Warm-up, then the measured requests.

    Args:
        row: how many of each, and how many at a time.
        target: the server.
        made: the bodies, in order.
        timeout_s: for one request.
        max_s: seconds after the first answer of the measured requests from which no further
            request is sent.

    Returns:
        One sample per request that was sent, and the seconds from the first request to the end of
        the last.
    """
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as directory:
        path = Path(directory) / "bodies"
        with _progress(f"{row.name}: preparing", row.num_warmup + row.num_requests) as advance:
            bodies: list[bytes] = []
            for body in made:
                bodies.append(body)
                advance()
        spans = write_bodies(path, bodies)
        job = Job(target, path, spans[: row.num_warmup], timeout_s)
        with _progress(f"{row.name}: warming up", row.num_warmup) as advance:
            _send(job, row.concurrency, advance)
        job = replace(job, spans=spans[row.num_warmup :])
        with _progress(f"{row.name}: measuring", row.num_requests) as advance:
            samples = _send(job, row.concurrency, advance, max_s)
    wall_s = max(s.end for s in samples) - min(s.start for s in samples)
    return samples, wall_s


def _send(job: Job, concurrency: int, advance: Advance, max_s: float = math.inf) -> list[Sample]:
    """Sends a job's requests from as many processes as the concurrency needs. After `max_s` seconds
    from the first answer on, no further request is sent.
    """
    concurrency = min(concurrency, len(job.spans))
    num_workers = -(-concurrency // _CONNECTIONS_PER_WORKER)
    next_index = _CONTEXT.Value("q", 0)
    results: Queue[Sample] = _CONTEXT.Queue()
    barrier = _CONTEXT.Barrier(num_workers)
    workers = [
        _CONTEXT.Process(
            target=run_worker,
            args=(job, len(range(i, concurrency, num_workers)), next_index, barrier, results),
            daemon=True,
        )
        for i in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    samples: list[Sample] = []
    num_sent, deadline = len(job.spans), math.inf
    try:
        while len(samples) < num_sent:
            try:
                samples.append(results.get(timeout=1.0))
                advance()
                if len(samples) == 1:
                    deadline = time.monotonic() + max_s
            except Empty:
                if not any(worker.is_alive() for worker in workers) and results.empty():
                    raise RuntimeError("the load workers died") from None
            if time.monotonic() >= deadline:
                deadline = math.inf
                with next_index.get_lock():
                    num_sent = min(num_sent, next_index.value)
                    next_index.value = len(job.spans)
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        results.close()
    return samples


@contextmanager
def _progress(label: str, total: int) -> Iterator[Advance]:
    """A progress bar on a terminal, a line at the end elsewhere."""
    start = time.monotonic()
    if sys.stderr.isatty():
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            bar = "#" * (30 * done // total)
            print(f"\r{label:<34} [{bar:<30}] {done}/{total}", end="", file=sys.stderr, flush=True)

        yield advance
        print(f"  {time.monotonic() - start:.1f} s", file=sys.stderr)
    else:
        yield lambda: None
        elapsed_s = time.monotonic() - start
        print(f"{label:<34} {total} requests, {elapsed_s:.1f} s", file=sys.stderr, flush=True)


def _select(names: str) -> list[Row]:
    return list(ROWS) if names == "all" else [row_named(name) for name in names.split(",")]


def _single_token_words(tokenizer_path: Path) -> list[str]:
    """The words that are one token each with this tokenizer, so that lengths are exact."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    words = [word for word in WORDS if len(tokenizer.encode(f" {word}").ids) == 1]
    if len(words) < 50:
        raise ValueError(f"{tokenizer_path}: only {len(words)} of the words are single tokens")
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="triptych bench",
        description="Measures a chat server under the load of named workloads.",
        epilog="rows: "
        + ", ".join(row.name for row in ROWS)
        + ", and text of any shape: 8x12000+64:48 keeps 8 prompts of 12,000 tokens in flight until"
        " 48 are answered with 64 tokens each",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server; default: %(default)s")
    add("--model", help="name in requests; default: the first that it lists")
    add("--rows", default="all", help="comma-separated names or shapes; default: all")
    add("--out", type=Path, metavar="DIR", help="for serve.json and serve.png")
    add("--label", default="", help="what is measured, for the report")
    add("--scale", type=float, default=1.0, help="below 1: smaller rows, for a smoke test")
    add("--seed", type=int, help="default: a new one, so that no cache knows it")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json: lengths are exact")
    add("--may-end-early", action="store_true", help="for servers that refuse ignore_eos")
    add("--api-key", help="default: OPENAI_API_KEY, if exported")
    add("--timeout-s", type=float, default=600.0, help="for one request; default: 600")
    return parser


if __name__ == "__main__":
    sys.exit(main())
