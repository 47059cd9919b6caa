"""The command line of benchmarks that measure a running server."""

import argparse
import sys
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.client import Target
from benchmarks.worker import model_name

Measure = Callable[[argparse.Namespace, Target, str], Awaitable[int]]


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser with a server's URL and its model; `doc` is the benchmark's module docstring."""
    made = argparse.ArgumentParser(
        description=doc.split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    made.add_argument("--model", default=None, help="in requests; default: the first it lists")
    return made


def run(measure: Measure, options: argparse.Namespace) -> int:
    """Runs `measure`. Exit status: 1 if it counts errors, 2 if the server does not answer."""

    async def measured() -> int:
        return await measure(options, target, model)

    try:
        target = Target.from_url(options.url)
        model = options.model or model_name(target)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if uvloop.run(measured()) else 0
