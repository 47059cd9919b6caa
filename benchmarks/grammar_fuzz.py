"""Random schemas, grammars and expressions against what compiles them and fills their masks.

    python -m benchmarks.grammar_fuzz --cases 100000 --workers 2 [--bypass]

Each case is deep, wide, cyclic or huge, made from its number alone. A worker does what a decoder
does: its compile process says whether the grammar can be compiled; if so, the worker compiles it
and fills masks along a random text. A worker that dies counts as a mask process that has died, with
the case it had; the next one goes on behind it. `--bypass` leaves out the bounds on texts, so that
the compile process gets everything. Prints counts, the longest times in seconds of CPU (`again_s`
is the second compilation, in the worker), and the most memory, each with its case.
"""

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import InvalidGrammar
from services.common.families import read_spec
from services.common.grammar.grammar_bounds import check_grammar
from services.common.process.work_limits import resident_bytes
from services.decoder.masks.compile_worker import Compiler
from services.decoder.masks.compiler import Vocabulary
from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Grammars
from services.decoder.masks.matcher import Matcher

_MODEL = Path(__file__).parents[1] / "demo" / "model"
_PR_SET_PDEATHSIG = 1
_HANG_S = 30.0  # of a case, in seconds, on a machine that is also busy with other work
_TOKENS = 24  # of a text under an accepted grammar
_SIZES = (1, 2, 3, 8, 30, 63, 64, 65, 300, 1000, 3000, 9000)
_FORMATS = ("date", "uuid", "ipv4", "email", "nonsense")

Json = Any


def case(number: int) -> GrammarSource:
    """The grammar of a number."""
    rng = random.Random(number)
    make = rng.choice((_chain, _chain, _wide, _tree, _tree, _lark, _gbnf, _regex, _choice, _noise))
    return make(rng)


def _schema(root: Json) -> GrammarSource:
    return GrammarSource("json_schema", json.dumps(root))


def _chain(rng: random.Random) -> GrammarSource:
    """Definitions that refer to the next one, or back."""
    count, form = rng.choice(_SIZES), rng.randrange(6)
    end = rng.choice((count, rng.randrange(count), 0))  # where the last one leads: on, or around
    wrap: Callable[[Json], Json] = (
        lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]},
        lambda ref: {"type": "array", "items": ref},
        lambda ref: {"allOf": [ref]},
        lambda ref: {"anyOf": [ref, {"type": "null"}]},
        lambda ref: ref,
        lambda ref: {"type": "object", "additionalProperties": ref},
    )[form]
    defs = {f"d{n}": wrap({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    defs[f"d{count}"] = {"type": "null"} if end == count else {"$ref": f"#/$defs/d{end}"}
    return _schema({"$defs": defs, "$ref": "#/$defs/d0"})


def _wide(rng: random.Random) -> GrammarSource:
    count = rng.choice(_SIZES)
    kind = rng.randrange(4)
    if kind == 0:
        properties = {f"p{n}": {"type": rng.choice(("string", "integer"))} for n in range(count)}
        required = list(properties)[: rng.choice((0, count))]
        return _schema({"type": "object", "properties": properties, "required": required})
    if kind == 1:
        return _schema({"enum": [rng.randbytes(rng.randrange(1, 40)).hex() for _ in range(count)]})
    if kind == 2:
        return _schema({"const": "x" * (count * rng.choice((1, 8, 28)))})
    return _schema({"anyOf": [{"type": "string", "maxLength": n} for n in range(count)]})


def _tree(rng: random.Random, levels: int = 7) -> GrammarSource:
    """Any keywords, any depth."""

    def node(left: int) -> Json:
        kind = rng.randrange(9)
        if left == 0 or kind == 0:
            return rng.choice(
                ({"type": "string"}, {"type": "integer"}, {"const": 7}, True, {"type": "null"})
            )
        if kind == 1:
            low = rng.choice((0, 1, 50, 10_000))
            return {"type": "string", "minLength": low, "maxLength": low * rng.choice((1, 2, 100))}
        if kind == 2:
            return {"type": "string", "pattern": _expression(rng, 3)}
        if kind == 3:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        if kind == 4:
            low = rng.choice((0, 2, 40, 5_000))
            return {"type": "array", "items": node(left - 1), "minItems": low, "maxItems": 2 * low}
        if kind == 5:
            word = rng.choice(("anyOf", "allOf", "oneOf"))
            return {word: [node(left - 1) for _ in range(rng.randrange(1, 4))]}
        if kind == 6:
            return {"type": "number", "minimum": rng.uniform(-1e9, 0), "multipleOf": 0.01}
        if kind == 7:
            return {"$ref": rng.choice(("#", "#/properties/a", "#/nowhere", "https://x/y"))}
        names = [f"{letter}" for letter in "abcdef"[: rng.randrange(1, 6)]]
        found: dict[str, Json] = {
            "type": "object", "properties": {name: node(left - 1) for name in names},
            "required": names[: rng.randrange(len(names) + 1)],
        }  # fmt: skip
        if rng.random() < 0.3:
            found["additionalProperties"] = rng.choice((False, node(left - 1)))
        if rng.random() < 0.1:
            found["patternProperties"] = {_expression(rng, 2): node(left - 1)}
        return found

    return _schema(node(rng.randrange(1, levels)))


def _expression(rng: random.Random, levels: int) -> str:
    kind = rng.randrange(7)
    if levels == 0 or kind == 0:
        return rng.choice(("a", "b", r"\d", r"[^x]", ".", r"\w", "é", r"[a-z0-9_]"))
    inner = _expression(rng, levels - 1)
    if kind == 1:
        low = rng.choice((0, 1, 5, 100, 1000, 60_000))
        return f"({inner}){{{low},{low * rng.choice((1, 2))}}}"
    if kind == 2:
        return f"({inner}){rng.choice('*+?')}"
    if kind == 3:
        return f"({inner}|{_expression(rng, levels - 1)})"
    return inner + _expression(rng, levels - 1)


def _regex(rng: random.Random) -> GrammarSource:
    text = _expression(rng, rng.randrange(1, 9)) * rng.choice((1, 1, 1, 20, 2000))
    return GrammarSource("regex", text[:300_000])


def _choice(rng: random.Random) -> GrammarSource:
    words = [rng.randbytes(rng.randrange(20)).hex() for _ in range(rng.choice(_SIZES))]
    return GrammarSource("choice", json.dumps(words))


def _rules(rng: random.Random, first: str, assign: str, terminal: str) -> GrammarSource:
    count, order = rng.choice(_SIZES), rng.randrange(3)

    def body(number: int) -> str:
        to = number + 1 if order == 0 else rng.randrange(count + 1)
        more = rng.choice(("", f' "x"{rng.choice(("", "*", "+", "?"))}', f" | r{number + 1}"))
        return f"r{to}{more}" if order < 2 else f'"a" r{min(to, number + 1)}{more}'

    lines = [f"{first}{assign} r0", *(f"r{n}{assign} {body(n)}" for n in range(count))]
    return GrammarSource("grammar", "\n".join([*lines, f"r{count}{assign} {terminal}"]))


def _lark(rng: random.Random) -> GrammarSource:
    if rng.random() < 0.3:  # terminals
        low = rng.choice((1, 2, 3, 50))
        return GrammarSource(
            "grammar", f'start: R{{{low},{low + 1}}}\nR: "z" "z"{rng.choice("*+?")}\n'
        )
    terminal = rng.choice(('"a"', f"/{_expression(rng, 3)}/".replace("//", "/x/"), "<[5]>"))
    return _rules(rng, "start", ":", terminal)


def _gbnf(rng: random.Random) -> GrammarSource:
    return _rules(rng, "root", " ::=", rng.choice(('"a"', "[a-z]+", "[^x]{3}")))


def _noise(rng: random.Random) -> GrammarSource:
    """A grammar with bytes that are wrong."""
    whole = rng.choice((_chain, _tree, _lark, _gbnf, _regex))(rng)
    text = list(whole.text[:20_000])
    for _ in range(rng.randrange(1, 6)):
        text.insert(
            rng.randrange(len(text) + 1), chr(rng.choice((0, 34, 40, 91, 92, 123, 0x1F600)))
        )
    return GrammarSource(whole.kind, "".join(text))


class _Follower:
    """What a mask process does with an accepted grammar."""

    def __init__(self, directory: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self._grammars = Grammars(directory, vocab_size, end_ids)
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._loop = asyncio.new_event_loop()

    def follow(self, source: GrammarSource, rng: random.Random) -> tuple[str, dict[str, float]]:
        """Fills masks along a text. Returns how it ended, and the most that it took."""
        constraints = TokenConstraints(Grammar(source))
        begin, before = _cpu_s(), resident_bytes()
        matcher = self._loop.run_until_complete(self._grammars.matcher(constraints))
        took = {"again_s": _cpu_s() - begin, "mask_s": 0.0, "masks_s": 0.0}
        outcome = self._fill(matcher, rng, took)
        took["grown_mib"] = float((resident_bytes() - before) >> 20)
        self._grammars.trim()
        return outcome, took

    def _fill(self, matcher: Matcher, rng: random.Random, took: dict[str, float]) -> str:
        row = np.zeros(self._grammars.num_mask_words, np.int32)
        new: list[int] = []
        for _ in range(_TOKENS):
            begin = _cpu_s()
            found = self._grammars.fill(matcher, new, row)
            took["mask_s"] = max(took["mask_s"], used_s := _cpu_s() - begin)
            took["masks_s"] += used_s
            if found is not True:
                return "masks failed" if found is not False else "free"
            allowed = np.flatnonzero(
                np.unpackbits(row.view(np.uint8), count=self._vocab_size, bitorder="little")
            )
            if not len(allowed):
                return "nothing allowed"
            new = [int(rng.choice(allowed))]
            if new[0] in self._end_ids:
                return "complete"
        return "went on"


def _work(
    model: Path, first: int, step: int, last: int, until: float, bypass: bool, to: Connection
) -> None:
    """Sends each case's number before it begins, and what came of it after it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    spec = read_spec(model)
    end_ids = spec.eos_token_ids
    vocabulary = Vocabulary.read(model, spec.text.vocab_size, end_ids)
    compiler = Compiler(vocabulary)
    follower = _Follower(model, spec.text.vocab_size, end_ids)
    for number in range(first, last, step):
        if time.time() > until:
            break
        to.send(("begin", number, {}))
        task = case(number)
        if not bypass and _is_beyond(task):
            to.send(("beyond the bounds", number, {}))
            continue
        verdict = compiler.compile(task)
        outcome, took = "refused", {"compile_s": verdict.cpu_s}
        if verdict.died:
            outcome = "died"
        elif not verdict.error:
            outcome, following = follower.follow(task, random.Random(number))
            outcome, took = f"accepted, {outcome}", took | following
        to.send((outcome, number, took))
    compiler.close()
    to.send(("end", last, {}))


def _is_beyond(task: GrammarSource) -> bool:
    try:
        check_grammar(task.kind, task.text)
    except InvalidGrammar:
        return True
    return False


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(
    model: Path, cases: int, workers: int, *, bypass: bool, first: int = 0, seconds: float = 1e9
) -> dict[str, Any]:
    """Counts by outcome, the longest times, and the cases at which a mask process died."""
    until = time.time() + seconds
    context = multiprocessing.get_context("spawn")
    counts: Counter[str] = Counter()
    deaths: list[int] = []
    most: dict[str, tuple[float, int]] = {}
    pending = [(first + place, first + cases) for place in range(workers)]
    running: dict[Connection, tuple[Any, int, int]] = {}  # process, its case, its last case
    begun: dict[Connection, float] = {}

    def start(number: int, last: int) -> None:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(model, number, workers, last, until, bypass, theirs)
        )
        process.start()
        theirs.close()
        running[mine] = process, number, last

    for number, last in pending:
        start(number, last)
    while running:
        for worker, at in begun.items():  # as the front does
            if time.monotonic() - at > _HANG_S and worker in running:
                running[worker][0].kill()
        for found in multiprocessing.connection.wait(list(running), 1.0):
            assert isinstance(found, Connection)
            process, number, last = running[found]
            try:
                outcome, number, took = found.recv()
            except EOFError:
                del running[found]
                begun.pop(found, None)
                process.join()
                if process.exitcode:
                    deaths.append(number)
                    counts["mask process died"] += 1
                    start(number + workers, last)
                continue
            running[found] = process, number, last
            begun[found] = time.monotonic()
            if outcome not in ("begin", "end"):
                counts[outcome] += 1
                for name, value in took.items():
                    most[name] = max(most.get(name, (0.0, -1)), (value, number))
    return {"counts": dict(counts.most_common()), "most": most, "deaths": deaths}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases and prints the result as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--model", type=Path, default=_MODEL, help="whose tokenizer")
    add("--cases", type=int, default=1000)
    add("--first", type=int, default=0, help="number of the first case")
    add("--workers", type=int, default=2)
    add("--seconds", type=float, default=1e9, help="begin no case later")
    add("--bypass", action="store_true", help="without the bounds on texts")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    result = run(
        options.model, options.cases, options.workers, bypass=options.bypass, first=options.first,
        seconds=options.seconds,
    )  # fmt: skip
    print(json.dumps(result | {"seconds": round(time.monotonic() - begin, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
