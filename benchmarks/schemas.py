"""Schemas of strangers and answers of a random model: does every answer validate, and what does it
cost?

    python -m benchmarks.schemas --tokenizer tokenizer.json --schemas DIR --schemas DIR

Reads the files of JSON-Schema-Test-Suite (`tests/draft2020-12`) and JSONSchemaBench
(`maskbench/data`), takes `--count` of their schemas by chance, and for each: compiles it, or notes
why it is refused; samples answers from the tokens that the masks allow; validates each finished one
with `jsonschema`; and feeds it the instances that come with the schema, of which the valid ones
should be accepted. Times are CPU times of one thread. `--library xgrammar` does the same with the
other library, which is no dependency and has to be installed. A schema whose compilation takes more
than `--cpu-s` of CPU time, which takes too long in all, or which ends the process, is counted and
left behind. `--outcomes FILE` keeps each outcome as a line of JSON; a run continues where the last
one ended, and `--at-most` examines that many more.
"""

import argparse
import asyncio
import importlib
import json
import math
import multiprocessing
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
import numpy.typing as npt
from jsonschema.validators import validator_for
from tokenizers import Tokenizer

from services.common.errors import InvalidGrammar
from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.matcher import Matcher, MatcherFailed
from services.decoder.masks.rows import PROBE_WORDS

_START_S = 60.0
_CONTEXT = multiprocessing.get_context("spawn")
# The random model likes these, so that its strings and lists end.
_CLOSING = (*'"}],:0123456789aeE.-', '"}', '"]', '",', "}}", "true", "null")


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and instances with whether they are valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


@dataclass(slots=True)
class Outcome:
    """What one schema showed. Times are seconds of CPU.

    Attributes:
        refused: why it is not supported; empty if it is.
        valid, invalid, cut: answers that validated, that did not, that were not finished.
        accepted, rejected: valid instances, by whether the grammar takes them.
        leaked, held: invalid instances, by whether the grammar takes them.
    """

    name: str
    refused: str = ""
    compile_s: float = 0.0
    masks_s: list[float] = field(default_factory=list[float])
    valid: int = 0
    invalid: int = 0
    cut: int = 0
    accepted: int = 0
    rejected: int = 0
    leaked: int = 0
    held: int = 0
    example: str = ""


class Answering(Protocol):
    """A matcher of either library."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens allowed next."""
        ...

    def take(self, token_id: int) -> bool:
        """Whether the token is of the grammar."""
        ...


class Library(Protocol):
    """One of the two."""

    def start(self, schema: str) -> Answering:
        """Raises InvalidGrammar."""
        ...


class OfDecoder:
    """What the decoder does: llguidance, with the decoder's options."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_id: int) -> None:
        self._end_ids = (end_id,)
        self._grammars = Grammars(tokenizer.parent, vocab_size, self._end_ids)
        self.compile_s = 0.0
        self.start('{"type": "string"}')  # reads the vocabulary

    def start(self, schema: str) -> "DecoderMatcher":
        grammar = Grammar(GrammarSource("json_schema", schema), stop_ids=self._end_ids)
        return DecoderMatcher(self._grammars, asyncio.run(self._new(grammar)))

    async def _new(self, grammar: Grammar) -> Matcher:
        started = time.process_time()
        matcher = await self._grammars.matcher(TokenConstraints(grammar))
        self.compile_s = time.process_time() - started
        return matcher


class DecoderMatcher:
    """The decoder's matcher."""

    def __init__(self, grammars: Grammars, matcher: Matcher) -> None:
        self._grammars = grammars
        self._matcher = matcher
        self._mask = np.empty(grammars.num_words + PROBE_WORDS, np.int32)
        self.mask_s = 0.0

    def mask(self) -> npt.NDArray[np.bool_]:
        started = time.thread_time()
        self._matcher.fill(self._mask)
        self.mask_s = time.thread_time() - started
        mask = self._mask[:-PROBE_WORDS]
        return np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)

    def take(self, token_id: int) -> bool:
        try:
            self._matcher.consume([token_id])
        except MatcherFailed:
            return False
        return True


class OfXGrammar:
    """xgrammar with any whitespace, its default; a bound makes most compilations take seconds."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_id: int) -> None:
        self._xgrammar: Any = importlib.import_module("xgrammar")
        vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=True)
        encoded = [""] * vocab_size
        for token, token_id in vocabulary.items():
            encoded[token_id] = token
        info = self._xgrammar.TokenizerInfo(
            encoded, self._xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size,
            stop_token_ids=[end_id],
        )  # fmt: skip
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocab_size = vocab_size
        self._last: tuple[str, Any] = "", None
        self.compile_s = 0.0

    def start(self, schema: str) -> "XGrammarMatcher":
        if schema == self._last[0]:
            return XGrammarMatcher(self._xgrammar.GrammarMatcher(self._last[1]), self._vocab_size)
        started = time.process_time()
        try:
            compiled = self._compiler.compile_json_schema(
                schema, any_whitespace=True, strict_mode=False
            )
        except Exception as error:
            raise InvalidGrammar(str(error)[-300:]) from None
        self.compile_s = time.process_time() - started
        self._last = schema, compiled
        return XGrammarMatcher(self._xgrammar.GrammarMatcher(compiled), self._vocab_size)


class XGrammarMatcher:
    """xgrammar's matcher."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:  # noqa: ANN401 - of that library
        self._matcher = matcher
        self._mask = np.full((1, -(-vocab_size // 32)), -1, np.int32)
        self.mask_s = 0.0

    def mask(self) -> npt.NDArray[np.bool_]:
        started = time.thread_time()
        self._mask.fill(-1)
        self._matcher.fill_next_token_bitmask(self._mask)
        self.mask_s = time.thread_time() - started
        return np.unpackbits(self._mask.view(np.uint8), bitorder="little").view(np.bool_)

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


LIBRARIES = {"llguidance": OfDecoder, "xgrammar": OfXGrammar}


class Examiner:
    """Examines cases, in a process that a library may end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._tokenizer = Tokenizer.from_file(str(options.tokenizer))
        self._end_id = self._tokenizer.token_to_id(options.end)
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._library = LIBRARIES[options.library](options.tokenizer, size, self._end_id)
        closing = [self._tokenizer.token_to_id(text) for text in _CLOSING]
        self._closing = np.array([self._end_id, *(i for i in closing if i is not None)])

    def examine(self, case: Case) -> Outcome:
        """Everything about one schema."""
        outcome, text = Outcome(case.name), json.dumps(case.schema)
        try:
            with cpu_limit(self._options.cpu_s):
                self._library.start(text)
        except InvalidGrammar as error:
            outcome.refused = error.message
            return outcome
        outcome.compile_s = self._library.compile_s
        for number in range(self._options.answers):
            answer = self._answer(self._library.start(text), outcome, f"{case.name}/{number}")
            if answer is None:
                outcome.cut += 1
                continue
            problem = _problem(case.schema, answer)
            outcome.valid += not problem
            outcome.invalid += bool(problem)
            if problem:
                outcome.example = f"{answer[:200]!r}: {problem}"
        for instance, is_valid in case.instances[:10]:
            taken = self._takes(self._library.start(text), json.dumps(instance, ensure_ascii=False))
            outcome.accepted += is_valid and taken
            outcome.rejected += is_valid and not taken
            outcome.leaked += not is_valid and taken
            if taken and not is_valid:
                outcome.example = f"takes the invalid {str(instance)[:100]}"
            outcome.held += not is_valid and not taken
        return outcome

    def _answer(self, matcher: Any, outcome: Outcome, seed: str) -> bytes | None:  # noqa: ANN401
        chooser = np.random.default_rng(list(seed.encode()))
        ids: list[int] = []
        while len(ids) < self._options.tokens:
            allowed = matcher.mask()
            outcome.masks_s.append(matcher.mask_s)
            closing = self._closing[allowed[self._closing]]
            if len(closing) and chooser.random() < 0.7:
                token_id = int(chooser.choice(closing))
            else:
                token_id = int(chooser.choice(np.flatnonzero(allowed)))
            if token_id == self._end_id:
                return self._tokenizer.decode(ids, skip_special_tokens=False).encode()
            if not matcher.take(token_id):
                raise AssertionError("a token that the mask allows was not taken")
            ids.append(token_id)
        return None

    def _takes(self, matcher: Any, text: str) -> bool:  # noqa: ANN401
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not all(matcher.take(token_id) for token_id in ids):
            return False
        return bool(matcher.mask()[self._end_id])


def _problem(schema: Any, answer: bytes) -> str:  # noqa: ANN401 - any JSON
    """Why the answer does not validate; empty if it does."""
    # In decimal, 0.3 is a multiple of 0.1; numbers of thousands of digits are too long for that.
    for number in (Decimal, float):
        exact = json.loads(json.dumps(schema), parse_float=number)
        kind = validator_for(exact, jsonschema.Draft202012Validator)
        try:
            instance = json.loads(answer, parse_float=number)
            kind(exact, format_checker=kind.FORMAT_CHECKER).validate(instance)
        except ArithmeticError:
            continue
        except (jsonschema.ValidationError, ValueError) as error:
            return str(error).splitlines()[0][:200]
        break
    return ""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """SIGXCPU ends the process if it takes more CPU time, to the next second; 0: no limit.

    Compilations in C++ or Rust do not listen to anything else.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds:
        until = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def run_examiner(options: argparse.Namespace, pipe: "Connection[Outcome, Case]") -> None:
    """Entry point of the process: a case in, its outcome out."""
    examiner = Examiner(options)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(examiner.examine(case))
        except Exception as error:
            kind = type(error).__name__
            pipe.send(Outcome(case.name, refused=f"FAILED: {kind}: {str(error)[:200]}"))


def examine_all(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Outcome]:
    """The outcomes of all cases; a process that hangs or dies is replaced."""
    process: Any = None
    started = False  # whether it has read the vocabulary
    ours: Any = None
    for case in cases:
        if process is None:
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=run_examiner, args=(options, theirs), daemon=True)
            process.start()
            started = False
            theirs.close()
        ours.send(case)
        try:
            if ours.poll(options.timeout_s if started else _START_S):
                started = True
                yield ours.recv()
                continue
            problem = f"FAILED: took more than {options.timeout_s:g} s"
        except (EOFError, OSError):
            process.join(_START_S)
            problem = "FAILED: the process ended"
            if process.exitcode == -signal.SIGXCPU:
                problem = f"FAILED: compilation took more than {options.cpu_s:g} s of CPU"
        process.kill()
        process.join()
        process = None
        yield Outcome(case.name, refused=problem)
    if process is not None:
        ours.close()
        process.join()


def read_cases(directories: Sequence[Path]) -> list[Case]:
    """All schemas below the directories, each once; of either suite's files."""
    found: dict[str, Case] = {}
    for directory in directories:
        for path in sorted(directory.rglob("*.json")):
            content = json.loads(path.read_text())
            groups = content if isinstance(content, list) else [content]
            for number, group in enumerate(groups):
                if not (isinstance(group, dict) and "schema" in group and "tests" in group):
                    continue
                instances = [(t["data"], t["valid"]) for t in group["tests"] if "data" in t]
                if isinstance(group["schema"], dict):
                    name = f"{path.parent.name}/{path.stem}/{number}"
                    found.setdefault(
                        json.dumps(group["schema"]), Case(name, group["schema"], instances)
                    )
    return list(found.values())


def read_outcomes(path: Path) -> list[Outcome]:
    """Those of earlier runs."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def report(outcomes: Sequence[Outcome], label: str) -> int:
    """Prints the figures; the number of answers that did not validate."""
    good = [o for o in outcomes if not o.refused]
    failed = [o for o in outcomes if o.refused.startswith("FAILED")]
    print(f"{label}: {len(outcomes)} schemas, {len(good)} compiled, "
          f"{len(outcomes) - len(good) - len(failed)} refused, {len(failed)} failed")  # fmt: skip
    for name in ("valid", "invalid", "cut", "accepted", "rejected", "held", "leaked"):
        print(f"  {name}: {sum(getattr(o, name) for o in good)}", end="")
    print(f"\n  schemas with an invalid answer: {sum(o.invalid > 0 for o in good)}")
    for what, values in (
        ("compile ms", [1e3 * o.compile_s for o in good]),
        ("mask µs", [1e6 * s for o in good for s in o.masks_s]),
    ):
        p50, p90, p99, most = np.percentile(values, (50, 90, 99, 100)) if values else [0] * 4
        print(f"  {what}: p50 {p50:.2f}, p90 {p90:.2f}, p99 {p99:.2f}, most {most:.1f}")
    reasons = Counter(_kind_of(o.refused) for o in outcomes if o.refused)
    for reason, count in reasons.most_common(25):
        print(f"  {count:5d} x {reason}")
    for outcome in failed:
        print(f"  {outcome.name}: {outcome.refused}")
    for outcome in [o for o in good if o.example][:20]:
        print(f"  {outcome.name}: {outcome.example}")
    return sum(o.invalid for o in good)


def _kind_of(reason: str) -> str:
    last = reason.removeprefix("the schema is not valid or not supported: ")
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'|`[^`]*`", "…", last))[:110]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Exit status 1: an answer does not validate."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json")
    add("--end", default="<|im_end|>", help="the token that ends an answer")
    add("--schemas", type=Path, action="append", required=True, metavar="DIR")
    add("--library", choices=sorted(LIBRARIES), default="llguidance")
    add("--count", type=int, default=1000, help="of schemas, evenly from the directories")
    add("--answers", type=int, default=3, help="of each schema")
    add("--tokens", type=int, default=300, help="at most, of each answer")
    add("--timeout-s", type=float, default=20.0, help="for all that is done with one schema")
    add("--cpu-s", type=float, default=8.0, help="of CPU time for a compilation; 0: no limit")
    add("--outcomes", type=Path, metavar="FILE", help="kept, and continued if it exists")
    add("--at-most", type=int, metavar="N", help="of the schemas that have no outcome yet")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    cases: list[Case] = []
    for index, directory in enumerate(options.schemas):
        some = read_cases([directory])
        random.Random(options.seed).shuffle(some)
        left = len(options.schemas) - index
        cases += some[: (options.count - len(cases)) // left]
    outcomes = read_outcomes(options.outcomes) if options.outcomes else []
    seen = {outcome.name for outcome in outcomes}
    new = [case for case in cases if case.name not in seen][: options.at_most]
    for outcome in examine_all(new, options):
        outcomes.append(outcome)
        if options.outcomes:
            with options.outcomes.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    return 1 if report(outcomes, options.library) else 0


if __name__ == "__main__":
    sys.exit(main())
