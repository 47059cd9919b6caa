"""Closed loops on the decoder's engine alone: no gRPC, no HTTP, no text.

    python -m benchmarks.engine_loops --model DIR --load-format dummy \
        --rows 8x12000+64:32,4x32000+64:8,256x1008+128:384 --sizes default,1408 --profile

A row `8x12000+64:32` keeps 8 requests in flight until 32 are answered; each has a prompt of 12,000
tokens and an answer of 64. With `--adapters`, `64x1000+128:192@0/3` computes the requests with the
adapters of slots 0 and 3 in turn, and `@all` with all adapters.

The model is loaded and its steps are calibrated once. Each combination of `--sizes` (tokens of a
step with prompts, `StepCost.efficient_tokens`) and `--bounds` (milliseconds of a step,
`DECODER_STEP_MS`) then runs all rows with a copy of the calibrated cost, so that no run learns
from the one before it. So the two sizes above are compared on one loaded model, within the noise of
one start; `--rounds 2` runs everything twice, in turn.

"Middle" is the time from a quarter to nine tenths of a row, without the start and the end of its
streams. Streams that begin together end together for a while, so that the requests a second of the
middle are coarse in a row of few requests for each stream; its tokens a second are less so. The
host's time of a step is its wall time without the wait for the device. With `--profile` a row is
run once more up to the first answers of all streams, and the kernels of the next steps are timed.
"""

import argparse
import copy
import itertools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from benchmarks.engine import Waiting, freeze_garbage, sequence
from benchmarks.kernel_times import KernelTimes
from benchmarks.report import Percentiles
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.runner import Runner
from services.decoder.engine.schedule.step_cost import StepCost
from services.decoder.engine_options import use_one_thread

_MIDDLE = 0.25, 0.9  # of a row's time
_ROW = re.compile(r"(\d+)x(\d+)\+(\d+):(\d+)(?:@([\d/]+|all))?")
_PROFILED_STEPS, _PROFILED_KERNELS = 20, 26


@dataclass(frozen=True, slots=True)
class Row:
    """A closed loop.

    Attributes:
        name: the row as the command line has it.
        streams: number of requests in flight.
        count: number of requests.
        prompt: number of tokens of a prompt.
        output: number of tokens of an answer.
        slots: slots of adapters, which the requests have in turn; -1 for the base model alone.
    """

    name: str
    streams: int
    count: int
    prompt: int
    output: int
    slots: tuple[int, ...] = (-1,)

    @classmethod
    def parse(cls, text: str, num_adapters: int = 0) -> Self:
        """Reads `STREAMSxPROMPT+OUTPUT:COUNT[@SLOT/SLOT]`.

        Raises:
            ValueError: the text has another form, a number is 0, or there is no such adapter.
        """
        found = _ROW.fullmatch(text)
        streams, prompt, output, count = map(int, found.groups()[:4]) if found else (0, 0, 0, 0)
        if found is None or not (streams and prompt and output and count):
            raise ValueError(f"{text}: not a row, such as 8x12000+64:32 or 8x12000+64:32@0/1")
        slots: tuple[int, ...] = (-1,)
        if found[5] is not None:
            every = range(num_adapters)
            slots = tuple(every if found[5] == "all" else map(int, found[5].split("/")))
            if not slots or max(slots) >= num_adapters:
                raise ValueError(f"{text}: there are {num_adapters} adapters (--adapters)")
        return cls(text, min(streams, count), count, prompt, output, slots)

    def requests(self, vocab: int) -> list[AddSequence]:
        """Makes the requests."""
        return [
            sequence(number, self.prompt, self.output, vocab, self.slots[number % len(self.slots)])
            for number in range(self.count)
        ]


@dataclass(slots=True)
class Loop:
    """A closed loop that runs. Times are in seconds, of one clock.

    Attributes:
        engine: the engine, which has no other sequences.
        row: the row.
        left: requests that were not sent, the next of which is the last.
        sent: time at which each request was sent, by sequence id.
        first: time of each request's first token.
        last: time of each request's newest token.
        gaps: longest time between two steps with tokens of each request.
        ends: times at which requests ended, in order.
        tokens: time and number of the tokens of each event.
        walls: seconds of each step.
        hosts: seconds of each step without those in which the host waited for the device.
    """

    engine: Engine
    row: Row
    left: list[AddSequence]
    sent: dict[int, float] = field(default_factory=dict[int, float])
    first: dict[int, float] = field(default_factory=dict[int, float])
    last: dict[int, float] = field(default_factory=dict[int, float])
    gaps: dict[int, float] = field(default_factory=dict[int, float])
    ends: list[float] = field(default_factory=list[float])
    tokens: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    walls: list[float] = field(default_factory=list[float])
    hosts: list[float] = field(default_factory=list[float])

    @classmethod
    def start(cls, engine: Engine, row: Row, vocab: int) -> Self:
        """Makes all requests, and then sends the first of each stream."""
        loop = cls(engine, row, row.requests(vocab)[::-1])
        for _ in range(row.streams):
            loop._send()
        return loop

    @property
    def is_running(self) -> bool:
        """True until all requests have ended."""
        return len(self.ends) < self.row.count

    def step(self, waiting: Waiting) -> None:
        """Runs a step of the engine, and sends a request for each that has ended."""
        begin, waited = time.perf_counter(), waiting.seconds
        done = self.engine.step()
        now = time.perf_counter()
        self.walls.append(now - begin)
        self.hosts.append(now - begin - (waiting.seconds - waited))
        for event in done.events if done else ():
            number = event.sequence_id
            if event.token_ids:
                self.tokens.append((now, len(event.token_ids)))
                if self.first.setdefault(number, now) < now:
                    gap = now - self.last[number]
                    self.gaps[number] = max(gap, self.gaps.get(number, 0.0))
                self.last[number] = now
            if event.end is not None:
                self.ends.append(now)
                if self.left:
                    self._send()

    def end(self) -> None:
        """Ends the requests in flight, and the steps that were launched ahead."""
        for number in self.sent:
            self.engine.abort(number)
        while self.engine.has_work:
            self.engine.step()

    def report(self) -> str:
        """Returns two lines of figures about a loop that has ended."""
        start, row = min(self.sent.values()), self.row
        wall = self.ends[-1] - start
        span = [start + share * wall for share in _MIDDLE]
        middle_s = span[1] - span[0]
        middle = sum(span[0] <= end <= span[1] for end in self.ends) / middle_s
        middle_tokens = sum(n for at, n in self.tokens if span[0] <= at <= span[1]) / middle_s
        first = Percentiles.of([self.first[number] - self.sent[number] for number in self.first])
        later = Percentiles.of(
            [(self.last[n] - self.first[n]) / max(1, row.output - 1) for n in self.first]
        )
        gaps = Percentiles.of(list(self.gaps.values()))
        walls, hosts = Percentiles.of(self.walls), Percentiles.of(self.hosts)
        return (
            f"{row.name}: {row.count / wall:.3f} req/s, "
            f"{sum(n for _, n in self.tokens) / wall:.0f} tok/s; middle {middle:.3f} req/s, "
            f"{middle_tokens:.0f} tok/s; ms: TTFT p50 {first.p50:.0f} p99 {first.p99:.0f}, "
            f"TPOT p50 {later.p50:.2f} p99 {later.p99:.2f}, "
            f"longest gap p50 {gaps.p50:.0f} p99 {gaps.p99:.0f}\n"
            f"  {len(self.walls)} steps, ms: wall p50 {walls.p50:.2f} p90 {walls.p90:.2f}, "
            f"host p50 {hosts.p50:.2f} p90 {hosts.p90:.2f}; "
            f"host {sum(self.hosts):.2f} of {wall:.2f} s"
        )

    def _send(self) -> None:
        message = self.left.pop()
        self.engine.add(message)
        self.sent[message.sequence_id] = time.perf_counter()


def engine_of(runner: Runner, cost: StepCost, tokens: int | None, bound_ms: float | None) -> Engine:
    """Returns an engine with a copy of a calibrated cost.

    Args:
        runner: the runner of a loaded model.
        cost: the calibrated cost, which is not changed.
        tokens: tokens of a step with prompts. None for the size that the calibration chose.
        bound_ms: milliseconds of a step, as if an operator had set them. None for the default.
    """
    cost = copy.deepcopy(cost)
    if tokens is not None:
        cost.efficient_tokens = tokens
    if bound_ms is not None:
        cost.may_stretch = False
    step_ms = cost.default_step_ms if bound_ms is None else bound_ms
    return Engine(runner, overlap=torch.cuda.is_available(), step_ms=step_ms, step_cost=cost)


def measure(engine: Engine, row: Row, vocab: int) -> Loop:
    """Runs a row."""
    with Waiting() as waiting:
        loop = Loop.start(engine, row, vocab)
        while loop.is_running:
            loop.step(waiting)
    loop.end()
    return loop


def profile(engine: Engine, row: Row, vocab: int, steps: int) -> None:
    """Prints the kernels of some steps in the middle of a row: from the moment on at which as many
    requests have ended as there are streams, or half of the requests, if that is fewer.
    """
    loop, waiting = Loop.start(engine, row, vocab), Waiting()
    before = min(row.streams, row.count // 2)
    while len(loop.ends) < before:
        loop.step(waiting)
    num_steps = len(loop.walls)
    with KernelTimes() as times:
        while loop.is_running and len(loop.walls) < num_steps + steps:
            loop.step(waiting)
    loop.end()
    times.print(f"{row.name} profile", len(loop.walls) - num_steps, _PROFILED_KERNELS)


def run(
    runner: Runner,
    cost: StepCost,
    rows: Sequence[Row],
    sizes: Sequence[int | None],
    bounds: Sequence[float | None],
    num_profiled: int = 0,
) -> None:
    """Prints the figures of all rows for each size and bound, see `engine_of`."""
    vocab = runner.info.vocab_size
    for tokens, bound_ms in itertools.product(sizes, bounds):
        shown = cost.default_step_ms if bound_ms is None else bound_ms
        size = f"{tokens} tokens" if tokens else _size(cost)
        print(f"steps of {size} within {shown:.1f} ms", flush=True)
        for row in rows:
            engine = engine_of(runner, cost, tokens, bound_ms)
            print(measure(engine, row, vocab).report(), flush=True)
            if num_profiled:
                engine = engine_of(runner, cost, tokens, bound_ms)
                profile(engine, row, vocab, num_profiled)


def _size(cost: StepCost) -> str:
    unlimited = cost.efficient_tokens == sys.maxsize
    return "any number of tokens" if unlimited else f"{cost.efficient_tokens} tokens"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory of a checkpoint")
    add("--load-format", default="auto", choices=["auto", "dummy"])
    add("--device", default="auto")
    add("--quantization", default="", help="format of weights, quantized while they are read")
    add("--fp8-cache", action="store_true", help="keys and values in e4m3")
    add("--kv-cache-bytes", type=int, help="default: what the card has left")
    add("--adapters", default="", metavar="DIR,DIR", help="adapters in the slots 0, 1, ...")
    add("--rows", required=True, help="STREAMSxPROMPT+OUTPUT:COUNT[@SLOT/SLOT or @all],...")
    add("--sizes", default="default", help="tokens of a step with prompts")
    add("--bounds", default="default", help="milliseconds of a step")
    add("--max-num-seqs", type=int, help="default: the most streams of a row")
    add("--rounds", type=int, default=1, help="times that everything is run")
    add("--profile", type=int, nargs="?", const=_PROFILED_STEPS, default=0, metavar="STEPS",
        help="time the kernels of so many steps of each row")  # fmt: skip
    options = parser.parse_args(arguments)
    adapters = tuple(Path(name) for name in options.adapters.split(",") if name)
    try:
        rows = [Row.parse(text, len(adapters)) for text in options.rows.split(",")]
    except ValueError as error:
        parser.error(str(error))
    sizes = [None if size == "default" else int(size) for size in options.sizes.split(",")]
    bounds = [None if bound == "default" else float(bound) for bound in options.bounds.split(",")]
    begin = time.perf_counter()
    runner = create_runner(
        RunnerOptions(
            model_directory=options.model,
            device=options.device,
            load_format=options.load_format,
            quantization=options.quantization,
            fp8_cache=options.fp8_cache,
            kv_cache_bytes=options.kv_cache_bytes,
            adapters=adapters,
            max_adapters=len(adapters),
            max_num_sequences=options.max_num_seqs or max(row.streams for row in rows),
            max_model_len=max(row.prompt + row.output for row in rows) + 16,
        )
    )
    freeze_garbage()
    use_one_thread("cuda" if torch.cuda.is_available() else "cpu")
    print(f"ready after {time.perf_counter() - begin:.1f} s; {runner.info}", flush=True)
    cost = measured_cost(runner, 1.0, None)
    print(f"calibrated: {_size(cost)} within {cost.default_step_ms:.1f} ms", flush=True)
    for _ in range(options.rounds):
        run(runner, cost, rows, sizes, bounds, options.profile)


if __name__ == "__main__":
    main()
