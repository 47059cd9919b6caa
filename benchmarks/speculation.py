"""Tokens a step and milliseconds a token with and without drafts, of the engine alone.

    python -m benchmarks.speculation --model demo/model --text FILE
    python -m benchmarks.speculation --model DIR --load-format dummy --rates 0,0.7,1 --batches 1,16
    python -m benchmarks.speculation --shape 27b --mtp --rates 0,0.866 --batches 1,16,64

With `--text`, the drafts are those of the lookup in prompts that end within a repetition of the
text, which a trained model continues. Without, each draft is right with the stated probability: the
answers are known from a run without drafts, which is the first row of each batch. Where sums round
differently in other batches (bfloat16), an answer may leave the known one; the column of accepted
drafts says how many were right.

With `--mtp` the model's layer for multi-token prediction drafts, and its cost is paid. Random
weights draft nothing that is right, so acceptance is imposed: the answers are random tokens that
replace the sampled ones on their way to the engine, and the layer's drafts are replaced by tokens
of these answers, each right with the stated probability. With three drafts, 0.866 is an accepted
length of 3.2 tokens. The device goes by its own tokens, of which no draft is right, and its work
does not depend on that: states fold what the engine has accepted. `--shape` takes random weights
in a shape of `mtp_shapes`.
"""

import argparse
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.mtp_shapes import write_shape
from services.common.clock import Clock
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import AddSequence, SamplingParams
from services.decoder.engine.run.model_runner import ModelRunner
from services.decoder.engine.run.runner_factory import RunnerOptions, create_runner
from services.decoder.engine.runner import PendingStep
from services.decoder.engine.step import Step, StepOutput

_STEP_MS = 40.0


class StatedDrafts:
    """A `lookup.DraftSource` whose drafts are those of a known answer with a stated probability."""

    is_prediction = False

    def __init__(self, known: Seq[int], rate: float, seed: int) -> None:
        self._known, self._rate, self._random = known, rate, random.Random(seed)
        self._num_tokens = 0

    def read(self, token_ids: "array[int]") -> None:
        self._num_tokens = len(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        drafts = self._known[self._num_tokens : self._num_tokens + most]
        return [token if self._random.random() < self._rate else 0 for token in drafts]


class ImposedDrafts(StatedDrafts):
    """Stated drafts in place of those that the model's own layer has made, and as many."""

    _num_offered = 0

    def read(self, token_ids: "array[int]") -> None:
        self._num_offered = max(0, self._num_offered - len(token_ids) + self._num_tokens)
        super().read(token_ids)

    def offer(self, drafts: Iterable[int]) -> None:
        self._num_offered = sum(1 for draft in drafts if draft >= 0)

    def propose(self, most: int) -> list[int]:
        return super().propose(min(most, self._num_offered))


class StatedSources(NamedTuple):
    """Makes sources of drafts of a stated quality.

    Attributes:
        known: prompt and answer of each sequence.
        rate: probability that a draft is right.
        kind: kind of the sources.
    """

    known: dict[int, list[int]]
    rate: float
    kind: type[StatedDrafts] = StatedDrafts

    def of(self, message: AddSequence) -> StatedDrafts:
        """Returns the source of a sequence."""
        return self.kind(self.known[message.sequence_id], self.rate, message.sequence_id)


class Scripted:
    """A `PendingStep` whose sampled tokens are replaced by known ones when they are read.

    Args:
        pending: the launched step.
        tokens: `[B]`, the known token of each sample.
    """

    def __init__(self, pending: PendingStep, tokens: list[int]) -> None:
        self._pending, self._tokens = pending, np.array(tokens, np.int32)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the step's
        return getattr(self._pending, name)

    def result(self) -> StepOutput:
        """Waits for the step, and returns its output with the known tokens."""
        found = self._pending.result()
        return found._replace(token_ids=self._tokens[: len(found.token_ids), None])


class ScriptedRunner:
    """A `Runner` whose sequences get known answers, whatever the model samples.

    Args:
        runner: the model's runner.
        known: prompt and answer of each sequence. Other sequences keep their tokens.
    """

    def __init__(self, runner: ModelRunner, known: dict[int, list[int]]) -> None:
        self._runner, self._known = runner, known
        self._sequences: dict[int, int] = {}  # by row

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the runner's
        return getattr(self._runner, name)

    def execute(self, step: Step) -> Scripted:
        """Launches a step; see `Runner`."""
        compute = step.compute
        self._sequences.update({start.row: start.sequence_id for start in compute.row_starts})
        ends = (compute.starts + compute.lengths)[compute.samples].tolist()
        rows = compute.rows[compute.samples].tolist()
        # A step that was planned ahead, or drafts, may go beyond the end of an answer.
        known = (self._known[self._sequences[row]] for row in rows)
        tokens = [each[min(end, len(each) - 1)] for each, end in zip(known, ends, strict=True)]
        return Scripted(self._runner.execute(step), tokens)


class Run(NamedTuple):
    """The result of a run.

    Attributes:
        answers: tokens of each sequence.
        ms: milliseconds a token of a sequence.
        ttft_ms: milliseconds until the first token of a sequence, on average.
        num_steps: number of steps behind the last first token.
        num_drafts, num_accepted: numbers of drafts and of accepted drafts.
        num_chunks: number of verifications.
    """

    answers: dict[int, list[int]]
    ms: float
    ttft_ms: float
    num_steps: int
    num_drafts: int
    num_accepted: int
    num_chunks: int


def run(engine: Engine, prompts: Seq[Seq[int]], num_tokens: int, clock: Clock) -> Run:
    """Runs greedy sequences from beginning to end. Time counts from the last first token on."""
    answers: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for number, ids in enumerate(prompts):
        packed = np.array(ids, np.int32).tobytes()
        sampling = SamplingParams(max_tokens=num_tokens)
        engine.add(AddSequence(number, packed, b"", 0, [], sampling))
    began, before, first_steps, times = 0.0, 0, 0, list[float]()
    started, firsts = clock(), list[float]()
    while engine.has_work:
        done = engine.step()
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
    return Run(answers, ms, statistics.mean(firsts), num_steps, *totals)


def prompts_of(options: argparse.Namespace, vocab_size: int, count: int) -> list[list[int]]:
    """Returns the prompts: random tokens, or the text, cut at different places of its last half."""
    if options.text is None:
        draw = np.random.default_rng
        return [draw(n).integers(0, vocab_size, options.prompt).tolist() for n in range(count)]
    from services.gateway.tokenizer.tokenizer import ModelTokenizer

    ids = ModelTokenizer.from_directory(options.model).encode_text(options.text.read_text("utf-8"))
    step = max(1, len(ids) // (2 * count))
    return [ids[: len(ids) // 2 + number * step] for number in range(count)]


def measure(options: argparse.Namespace, runner: ModelRunner, count: int) -> None:
    """Prints the rows of one batch size."""
    info, overlap = runner.info, runner.info.on_gpu
    clock = time.process_time if options.cpu_time else time.perf_counter
    prompts = prompts_of(options, info.vocab_size, count)
    draw = np.random.default_rng(0)
    script = {
        n: [*ids, *draw.integers(1, info.vocab_size, options.tokens).tolist()]
        for n, ids in enumerate(prompts)
    }
    driven: Any = ScriptedRunner(runner, script) if options.mtp else runner

    def engine(max_drafts: int) -> Engine:
        cost = measured_cost(runner, 0.4, _STEP_MS, clock)
        return Engine(
            driven,
            overlap=overlap,
            step_ms=_STEP_MS,
            step_cost=cost,
            max_drafts=max_drafts,
            clock=clock,
        )

    run(engine(0), prompts, 8, clock)
    plain = run(engine(0), prompts, options.tokens, clock)
    _print(f"{count} without", plain, plain)
    for rate in [None] if options.text is not None else options.rates:
        drafting = engine(options.drafts)
        if rate is not None:
            known = {n: [*prompts[n], *answer] for n, answer in plain.answers.items()}
            kind = ImposedDrafts if options.mtp else StatedDrafts
            drafting.speculation.sources = StatedSources(known, rate, kind)
        found = run(drafting, prompts, options.tokens, clock)
        _print(f"{count} lookup" if rate is None else f"{count} rate {rate:g}", found, plain)


def _print(name: str, found: Run, plain: Run) -> None:
    num_tokens = sum(map(len, found.answers.values()))
    equal = sum(found.answers[n] == plain.answers[n] for n in plain.answers)
    share = found.num_accepted / max(1, found.num_drafts)
    print(
        f"{name:>16}: {found.ms:8.3f} ms a token, {plain.ms / found.ms:5.2f} x, "
        f"{1e3 * len(found.answers) / found.ms:7.0f} tokens a second, "
        f"first token {found.ttft_ms:7.1f} ms, "
        f"{num_tokens / len(found.answers) / max(1, found.num_steps):5.2f} tokens a step, "
        f"{found.num_drafts:6} drafts, {share:4.0%} accepted, "
        f"{1 + found.num_accepted / max(1, found.num_chunks):4.2f} tokens a verification, "
        f"{equal}/{len(plain.answers)} equal",
        flush=True,
    )


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description="Time of tokens with and without drafts.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path)
    source.add_argument("--shape", help="shape of mtp_shapes, with -fp8 behind it for FP8")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--mtp", action="store_true", help="the model's own layer drafts")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--text", type=Path, help="file with repetitions; else random prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, help="most drafts of a step: 8, or 3 with --mtp")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    help_text = "count CPU time of this process, on a machine that others use"
    parser.add_argument("--cpu-time", action="store_true", help=help_text)
    for name, kind, default in (("--rates", float, "0,0.7,1"), ("--batches", int, "1,16")):
        parser.add_argument(
            name, default=default, type=lambda text, kind=kind: [kind(n) for n in text.split(",")]
        )
    options = parser.parse_args()
    options.drafts = options.drafts or (3 if options.mtp else 8)
    if options.shape is not None:
        options.load_format = "dummy"
        options.model = write_shape(options.shape, Path(tempfile.mkdtemp()) / options.shape)
    runner = create_runner(
        RunnerOptions(
            model_directory=options.model,
            load_format=options.load_format,
            dtype=options.dtype,
            max_drafts=options.drafts,
            draft_head=options.mtp,
            max_num_sequences=options.max_num_seqs,
            max_batched_tokens=max(1024, options.max_num_seqs),
        )
    )
    for count in options.batches:
        measure(options, runner, count)


if __name__ == "__main__":
    main()
