"""Tokens a step and milliseconds a token with and without drafts, of the engine alone.

    python -m benchmarks.speculation --model demo/model --text FILE
    python -m benchmarks.speculation --model DIR --load-format dummy --rates 0,0.7,1 --batches 1,16
    python -m benchmarks.speculation --shapes 27b,8b --rates 0.866,0 --batches 1,16

With `--text`, the drafts are those of the lookup in prompts that end within a repetition of the
text, which a trained model continues. Without, each draft is right with the stated probability: the
answers are known from a run without drafts, which is the first row of each batch. Where sums round
differently in other batches (bfloat16), an answer may leave the known one; the column of accepted
drafts says how many were right.

`--shapes` takes random weights in shapes of `mtp_shapes`, whose layer for multi-token prediction
drafts, so that its cost is paid. Random weights draft nothing that is right, so acceptance is
imposed: the answers are random tokens that replace the sampled ones on their way to the engine, and
the layer's drafts are replaced by tokens of these answers, each right with the stated probability.
With three drafts, 0.853 is an accepted length of 3.2 tokens. The device goes by its own tokens, of
which no draft is right, and its work does not depend on that: states fold what the engine has
accepted. `27b:1/64` measures one request and then 64 in place of `--batches`. Without
`--max-num-seqs`, there are rows for all drafts of the largest batch.

`--profile` adds the times of kernels in steps without drafts and with those of the first rate.

The shapes `8b` and `tiny-8b` have no such layer. Their rows are answers of 400 tokens to one
request each, which quote the prompt of 1,024 tokens, are JSON, or are predicted by the client, see
`known_answers.repeating_text`. The drafts are those of the engine's own lookup.

Several shapes start at the same time in processes of their own, see `side_by_side`, and share a
card, so that their KV pools have the size of `--kv-gib`.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.adapters import write_model
from benchmarks.kernel_times import KernelTimes
from benchmarks.known_answers import (
    ImposedDrafts,
    ScriptedRunner,
    StatedDrafts,
    StatedSources,
    repeating_text,
)
from benchmarks.mtp_shapes import write_shape
from benchmarks.side_by_side import StageLines, run_side_by_side
from benchmarks.text_shapes import TEXT_SHAPES
from services.common.clock import Clock
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.schedule.step_cost import StepCost

_STEP_MS = 40.0
_PROFILED_TOKENS = 48  # most tokens of an answer while kernels are timed
_MOST_ROWS = 256
_TEXTS = "quote", "json", "prediction"
_TEXT_PROMPT, _TEXT_TOKENS = 1024, 400  # tokens of their prompts and answers
_PLAIN_SHAPES = {
    "8b": TEXT_SHAPES["8b"],
    "tiny-8b": replace(
        TEXT_SHAPES["8b"], hidden_size=256, intermediate_size=512, num_layers=2, num_heads=4,
        num_kv_heads=2, vocab_size=2048,
    ),
}  # fmt: skip


class Run(NamedTuple):
    """The result of a run.

    Attributes:
        answers: tokens of each sequence.
        ms: milliseconds a token of a sequence.
        ttft_ms: milliseconds until the first token of a sequence, on average.
        num_steps: number of steps behind the last first token.
        num_drafts, num_accepted: numbers of drafts and of accepted drafts.
        num_chunks: number of verifications.
        steps: number of sequences that got tokens, number of their tokens, and milliseconds since
            the tokens before them, of each step behind the last first token.
    """

    answers: dict[int, list[int]]
    ms: float
    ttft_ms: float
    num_steps: int
    num_drafts: int
    num_accepted: int
    num_chunks: int
    steps: list[tuple[int, int, float]]


def run(
    engine: Engine,
    prompts: Seq[Seq[int]],
    num_tokens: int,
    clock: Clock,
    prediction: Seq[int] = (),
) -> Run:
    """Runs greedy sequences from beginning to end. Time counts from the last first token on."""
    answers: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    predicted = np.array(prediction, np.int32).tobytes()
    for number, ids in enumerate(prompts):
        packed = np.array(ids, np.int32).tobytes()
        sampling = SamplingParams(max_tokens=num_tokens)
        engine.add(AddSequence(number, packed, b"", 0, [], sampling, prediction=predicted))
    began, before, first_steps, times = 0.0, 0, 0, list[float]()
    started, firsts = clock(), list[float]()
    steps, last = list[tuple[int, int, float]](), started
    while engine.has_work:
        done = engine.step()
        counts = [len(event.token_ids) for event in done.events] if done is not None else []
        if sum(counts):
            now = clock()
            if began:
                steps.append((len(counts), sum(counts), 1e3 * (now - last)))
            last = now
        for event in done.events if done is not None else ():
            if not answers[event.sequence_id] and event.token_ids:
                firsts.append(1e3 * (clock() - started))
            answers[event.sequence_id] += event.token_ids
            if event.end is not None:
                times.append(clock())
        if not began and all(answers.values()):
            began, first_steps = clock(), engine.stats().num_steps
            before = sum(map(len, answers.values()))
    after = sum(map(len, answers.values()))
    ms = 1e3 * (statistics.mean(times) - began) * len(prompts) / max(1, after - before)
    found = engine.stats().drafts
    totals = (0, 0, 0)
    if found is not None:
        totals = found.num_drafts, found.num_accepted, found.num_chunks
    num_steps = engine.stats().num_steps - first_steps
    return Run(answers, ms, statistics.mean(firsts), num_steps, *totals, steps)


def prompts_of(options: argparse.Namespace, vocab_size: int, count: int) -> list[list[int]]:
    """Returns the prompts: random tokens, or the text, cut at different places of its last half."""
    if options.text is None:
        draw = np.random.default_rng
        return [draw(n).integers(0, vocab_size, options.prompt).tolist() for n in range(count)]
    from services.gateway.tokenizer.tokenizer import ModelTokenizer

    ids = ModelTokenizer.from_directory(options.model).encode_text(options.text.read_text("utf-8"))
    step = max(1, len(ids) // (2 * count))
    return [ids[: len(ids) // 2 + number * step] for number in range(count)]


class Measurement:
    """Measures rows of one model.

    Args:
        options: the command line.
        name: name of the model, with which each row begins. Empty if there is one model alone.
        runner: the model's runner.
    """

    def __init__(self, options: argparse.Namespace, name: str, runner: ModelRunner) -> None:
        self._options, self._name, self._runner = options, name, runner
        self._clock = time.process_time if options.cpu_time else time.perf_counter
        self._cost: StepCost | None = None

    def measure(self) -> None:
        """Prints all rows of the model."""
        if self._name in _PLAIN_SHAPES:
            self.measure_texts()
            return
        for count in self._options.batches:
            self.measure_batch(count)

    def measure_texts(self) -> None:
        """Prints the rows of one request whose answer repeats something, and one without drafts,
        which does not depend on the text.
        """
        plain: Run | None = None
        for kind in _TEXTS:
            text = repeating_text(kind, _TEXT_PROMPT, _TEXT_TOKENS, self._runner.info.vocab_size)
            driven, prompts = (
                ScriptedRunner(self._runner, {0: text.prompt + text.answer}),
                [text.prompt],
            )
            if plain is None:
                run(self._engine(driven, 0), prompts, 8, self._clock)
                plain = run(self._engine(driven, 0), prompts, _TEXT_TOKENS, self._clock)
                self._print("1 without", plain, plain)
            drafting = self._engine(driven, self._options.drafts)
            found = run(drafting, prompts, _TEXT_TOKENS, self._clock, text.prediction)
            self._print(f"1 {kind}", found, plain._replace(answers={0: text.answer}))

    def measure_batch(self, count: int) -> None:
        """Prints the rows of one batch size."""
        options, info, clock = self._options, self._runner.info, self._clock
        prompts = prompts_of(options, info.vocab_size, count)
        draw = np.random.default_rng(0)
        script = {
            n: [*ids, *draw.integers(1, info.vocab_size, options.tokens).tolist()]
            for n, ids in enumerate(prompts)
        }
        driven: Any = self._runner
        if info.has_draft_head:
            driven = ScriptedRunner(self._runner, script)
        run(self._engine(driven, 0), prompts, 8, clock)
        plain = run(self._engine(driven, 0), prompts, options.tokens, clock)
        self._print(f"{count} without", plain, plain)
        rates = [None] if options.text is not None else options.rates

        def drafting(rate: float | None) -> Engine:
            engine = self._engine(driven, options.drafts)
            if rate is not None:
                known = {n: [*prompts[n], *answer] for n, answer in plain.answers.items()}
                kind = ImposedDrafts if info.has_draft_head else StatedDrafts
                engine.speculation.sources = StatedSources(known, rate, kind)
            return engine

        for rate in rates:
            found = run(drafting(rate), prompts, options.tokens, clock)
            self._print(_row(count, rate), found, plain)
        if options.profile and count == options.batches[0]:
            for row, engine in (
                (f"{count} without", self._engine(driven, 0)),
                (_row(count, rates[0]), drafting(rates[0])),
            ):
                with KernelTimes() as times:
                    found = run(engine, prompts, min(options.tokens, _PROFILED_TOKENS), clock)
                times.print(f"{self._name} {row}:", engine.stats().num_steps)

    def _engine(self, runner: Any, max_drafts: int) -> Engine:  # noqa: ANN401 - a `Runner`
        """Returns a new engine, which knows what was measured of steps once."""
        if self._cost is None:
            self._cost = measured_cost(self._runner, 0.4, _STEP_MS, self._clock)
        return Engine(
            runner,
            overlap=self._runner.info.on_gpu,
            step_ms=_STEP_MS,
            step_cost=copy.deepcopy(self._cost),
            max_drafts=max_drafts,
            clock=self._clock,
        )

    def _print(self, row: str, found: Run, plain: Run) -> None:
        num_tokens = sum(map(len, found.answers.values()))
        equal = sum(found.answers[n] == plain.answers[n] for n in plain.answers)
        share = found.num_accepted / max(1, found.num_drafts)
        print(
            f"{self._name} {row:>16}: {found.ms:8.3f} ms a token, {plain.ms / found.ms:5.2f} x, "
            f"{1e3 * len(found.answers) / found.ms:7.0f} tokens a second, "
            f"first token {found.ttft_ms:7.1f} ms, "
            f"{num_tokens / len(found.answers) / max(1, found.num_steps):5.2f} tokens a step, "
            f"{found.num_drafts:6} drafts, {share:4.0%} accepted, "
            f"{1 + found.num_accepted / max(1, found.num_chunks):4.2f} tokens a verification, "
            f"{equal}/{len(plain.answers)} equal",
            flush=True,
        )
        if self._options.steps:
            print(f"{self._name} {row:>16}: {histogram(found.steps)}", flush=True)


def _row(count: int, rate: float | None) -> str:
    return f"{count} lookup" if rate is None else f"{count} rate {rate:g}"


def histogram(steps: Seq[tuple[int, int, float]]) -> str:
    """Returns how many steps had each number of sequences and of tokens for each of them, with
    their median times, and the first steps in their order: tokens over sequences.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    for count, num_tokens, ms in steps:
        groups.setdefault((count, round(num_tokens / count)), []).append(ms)
    found = [
        f"{len(times)} steps of {count} x {tokens} in {statistics.median(times):.2f} ms"
        for (count, tokens), times in sorted(groups.items())
    ]
    first = " ".join(f"{num_tokens}/{count}" for count, num_tokens, _ in steps[:12])
    return f"{', '.join(found)}; first {first}"


def start(options: argparse.Namespace, shape: str) -> Measurement:
    """Loads a model, and prints the stages of its start.

    Args:
        options: the command line.
        shape: name of the shape, with batches behind a colon if they are not `options.batches`.
            Empty for `options.model`.
    """
    shape, _, batches = shape.partition(":")
    name = shape or options.model.name
    lines = StageLines(name)
    lines.install()
    options, directory = copy.copy(options), options.model
    with_head = bool(shape) and shape not in _PLAIN_SHAPES
    if shape:
        directory = Path(tempfile.mkdtemp()) / shape
        if with_head:
            write_shape(shape, directory)
        else:
            write_model(directory, _PLAIN_SHAPES[shape])
    options.drafts = options.drafts or (3 if with_head else 15)
    if batches:
        options.batches = [int(count) for count in batches.split("/")]
    if options.max_num_seqs is None:
        most = 1 if shape in _PLAIN_SHAPES else max(options.batches)
        options.max_num_seqs = min(_MOST_ROWS, most * (1 + options.drafts))
    runner = create_runner(
        RunnerOptions(
            model_directory=directory,
            load_format="dummy" if shape else options.load_format,
            dtype=options.dtype,
            kv_cache_bytes=None if options.kv_gib is None else int(options.kv_gib * (1 << 30)),
            max_drafts=options.drafts,
            draft_head=with_head,
            max_num_sequences=options.max_num_seqs,
            max_batched_tokens=max(options.step_tokens, options.max_num_seqs),
            kernels=options.kernels,
        )
    )
    lines.print_line("ready")
    return Measurement(options, name, runner)


def serve(argument: tuple[argparse.Namespace, str], connection: Connection) -> None:
    """Loads a model, and measures it as soon as `run_side_by_side` allows it."""
    measurement = start(*argument)
    connection.send(None)
    connection.recv()
    measurement.measure()


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="Time of tokens with and without drafts.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument(
        "--shapes",
        default="",
        help="shapes of mtp_shapes, with -fp8 behind them for FP8, or 8b, with commas between them",
    )
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="", help="overrides of the dispatch table")
    parser.add_argument("--text", type=Path, help="file with repetitions; else random prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, help="most drafts of a step: 15, or 3 of a layer")
    help_text = "number of rows; else as many as the largest batch has tokens and drafts"
    parser.add_argument("--max-num-seqs", type=int, help=help_text)
    parser.add_argument("--step-tokens", type=int, default=1024, help="most tokens of a step")
    parser.add_argument("--kv-gib", type=float, help="size of the KV pool, 2 for several shapes")
    help_text = "seconds for which models that are ready wait for others before they are measured"
    parser.add_argument("--patience", type=float, default=600, help=help_text)
    help_text = "print how many steps yielded how many tokens, and their times"
    parser.add_argument("--steps", action="store_true", help=help_text)
    help_text = "print the times of kernels in steps of the first batch"
    parser.add_argument("--profile", action="store_true", help=help_text)
    help_text = "count CPU time of this process, on a machine that others use"
    parser.add_argument("--cpu-time", action="store_true", help=help_text)
    for name, kind, default in (("--rates", float, "0,0.7,1"), ("--batches", int, "1,16")):
        parser.add_argument(
            name, default=default, type=lambda text, kind=kind: [kind(n) for n in text.split(",")]
        )
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    if len(shapes) == 1:
        start(options, shapes[0]).measure()
        return
    if options.kv_gib is None:
        options.kv_gib = 2.0
    run_side_by_side(serve, {name: (options, name) for name in shapes}, options.patience)


if __name__ == "__main__":
    main()
