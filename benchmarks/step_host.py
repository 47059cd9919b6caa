"""The host's time for a decode step of the real engine, by part, in microseconds.

    python -m benchmarks.step_host --model DIR --load-format dummy --rows 64

Medians over many steps of unchanged rows, but for a block that a row needs now and then. On a GPU
"launch" is what `ModelRunner.execute` takes beside staging; on a CPU it would be the model's own
time, and is left out.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import add
from services.decoder.engine.engine import Engine
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.schedule.batch import Batch
from services.decoder.engine.schedule.scheduler import Scheduler

_PARTS = {
    "schedule": (Scheduler, "schedule"),
    "to_step": (Batch, "to_step"),
    "stage": (ModelRunner, "_stage"),
    "execute": (ModelRunner, "execute"),
}


def timed(original: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    """`original`, which appends the seconds of each call to `taken`."""

    def call(*arguments: object) -> object:
        begin = time.perf_counter()
        found = original(*arguments)
        taken.append(time.perf_counter() - begin)
        return found

    return call


def measure(runner: ModelRunner, rows: int, steps: int, prompt: int) -> dict[str, float]:
    """Median microseconds of each part of a step of `rows` decodes."""
    engine = Engine(runner, overlap=torch.cuda.is_available())
    for number in range(rows):
        add(engine, number, prompt, steps + 4 * rows, runner.info.vocab_size)
    started = 0
    while started < rows:
        if (done := engine.step()) is not None:
            started += sum(event.start is not None for event in done.events)
    taken: dict[str, list[float]] = defaultdict(list)
    originals = {name: getattr(owner, method) for name, (owner, method) in _PARTS.items()}
    try:
        for name, (owner, method) in _PARTS.items():
            setattr(owner, method, timed(originals[name], taken[name]))
        for _ in range(steps):
            engine.step()
    finally:
        for name, (owner, method) in _PARTS.items():
            setattr(owner, method, originals[name])
    for number in range(rows):
        engine.abort(number)
    while engine.has_work:
        engine.step()
    execute = taken.pop("execute")
    if torch.cuda.is_available():
        pairs = zip(execute, taken["stage"], strict=True)
        taken["launch"] = [whole - stage for whole, stage in pairs]
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}


def main() -> None:
    """Runs the benchmark and prints its parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of a checkpoint")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    arguments = parser.parse_args()
    options = RunnerOptions(
        model_directory=arguments.model,
        load_format=arguments.load_format,
        device="cuda" if torch.cuda.is_available() else "cpu",
        max_num_sequences=arguments.rows,
        max_model_len=arguments.prompt + arguments.steps + 8 * arguments.rows,
        kv_cache_bytes=None if torch.cuda.is_available() else 256 << 20,
    )
    found = measure(create_runner(options, None), arguments.rows, arguments.steps, arguments.prompt)
    for name, micros in found.items():
        print(f"{name:>10}: {micros:7.1f} us")
    print(f"{'sum':>10}: {sum(found.values()):7.1f} us")


if __name__ == "__main__":
    main()
