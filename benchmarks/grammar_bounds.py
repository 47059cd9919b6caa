"""The largest grammar of each kind within the bounds, compiled, and the smallest beyond.

    python -m benchmarks.grammar_bounds --tokenizer tokenizer.json

Each is compiled as a decoder does it, with the first mask, in a fork with the slow lane's limits of
CPU time, memory and stack. A row that dies fails the command.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from services.common.errors import InvalidGrammar
from services.common.grammar.grammar_bounds import check_grammar
from services.decoder.masks.compile_worker import Compiler
from services.decoder.masks.compiler import Vocabulary
from services.decoder.masks.grammar import GrammarSource


class Bound(NamedTuple):
    """A bound: texts by a size.

    Attributes:
        name: of the row.
        kind: of the grammar.
        text: by size.
        most: the largest size within the bound.
    """

    name: str
    kind: str
    text: Callable[[int], str]
    most: int


def chain(links: int, wrap: Callable[[Any], Any]) -> str:
    """A schema with references one behind the other."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(links - 1)}
    last = {f"d{links - 1}": {"type": "integer"}}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, **last}})


def cycle(links: int) -> str:
    """A schema of objects that refer to each other in a ring."""
    ring = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{(i + 1) % links}"}}}
        for i in range(links)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": ring})


def rules(links: int, head: str, name: str, form: str) -> str:
    """Rules one behind the other."""
    lines = [form.format(head, f"{name}0")]
    lines += [form.format(f"{name}{i}", f"{name}{i + 1}") for i in range(links - 1)]
    return "\n".join([*lines, form.format(f"{name}{links - 1}", '"a"')])


def _properties(count: int, *, required: bool) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    found: dict[str, Any] = {"type": "object", "properties": {n: {"type": "null"} for n in names}}
    return {**found, "additionalProperties": False, **({"required": names} if required else {})}


def _many(count: int) -> str:
    objects = [min(1000, count - first) for first in range(0, count, 1000)]
    return json.dumps({"anyOf": [_properties(size, required=True) for size in objects]})


def _nested(levels: int) -> str:
    def wrap(reference: Any) -> Any:  # noqa: ANN401 - any JSON
        for _ in range(49):
            reference = {"type": "array", "items": reference}
        return reference

    return chain(levels, wrap)


def _one(**fields: object) -> str:
    return json.dumps(fields)


BOUNDS = [
    Bound("$ref alone", "json_schema", lambda n: chain(n, lambda r: r), 64),
    Bound("$ref in items", "json_schema",
          lambda n: chain(n, lambda r: {"type": "array", "items": r}), 64),
    Bound("$ref in properties", "json_schema",
          lambda n: chain(n, lambda r: {"type": "object", "properties": {"a": r}}), 64),
    Bound("$ref in patternProperties", "json_schema",
          lambda n: chain(n, lambda r: {"type": "object", "patternProperties": {"^a": r}}), 64),
    Bound("$ref in anyOf", "json_schema",
          lambda n: chain(n, lambda r: {"anyOf": [r, {"type": "null"}]}), 64),
    Bound("$ref in allOf", "json_schema", lambda n: chain(n, lambda r: {"allOf": [r]}), 64),
    Bound("$ref 50 levels down", "json_schema", _nested, 11),
    Bound("cycle of $ref in properties", "json_schema", cycle, 170),
    Bound("optional properties", "json_schema",
          lambda n: json.dumps(_properties(n, required=False)), 1000),
    Bound("properties in all", "json_schema", _many, 5000),
    Bound("patternProperties", "json_schema",
          lambda n: _one(type="object", patternProperties={f"^a{i}_": {} for i in range(n)}), 64),
    Bound("bytes of a constant", "json_schema",
          lambda n: _one(const=("abcdefgh%d" * 9000)[:n - 2]), 65536),
    Bound("values of an enumeration", "json_schema",
          lambda n: _one(enum=[[i] for i in range(n)]), 5000),
    Bound("characters of patterns", "json_schema",
          lambda n: _one(type="string", pattern=("\\w+" * n)[: n]), 32766),
    Bound("repeats of a pattern", "json_schema",
          lambda n: _one(type="string", pattern=f"^(ab{{{n // 100}}}){{100}}$"), 100_000),
    Bound("minItems of minItems", "json_schema",
          lambda n: _one(type="array", minItems=n // 100, items={
              "type": "array", "minItems": 100, "items": {"type": "integer"}}), 100_000),
    Bound("lists with minItems and maxItems", "json_schema",
          lambda n: _one(anyOf=[{"type": "array", "minItems": i, "maxItems": 9999 - i}
                                for i in range(n)]), 500),
    Bound("multipleOf", "json_schema", lambda n: _one(type="integer", multipleOf=n), 19_997),
    Bound("choices", "choice", lambda n: json.dumps([f"v{i}" for i in range(n)]), 5000),
    Bound("regular expression", "regex", lambda n: ("\\w+" * n)[:n], 32766),
    Bound("repeats", "regex", lambda n: f"a{{{n}}}", 100_000),
    Bound("repeats of repeats", "regex", lambda n: f"(a{{{n // 100}}}){{100}}", 100_000),
    Bound("Lark rules in a chain", "grammar", lambda n: rules(n, "start", "r", "{}: {}"), 64),
    Bound("Lark terminals in a chain", "grammar", lambda n: rules(n, "start", "R", "{}: {}"), 64),
    Bound("GBNF rules in a chain", "grammar", lambda n: rules(n, "root", "r", "{} ::= {}"), 64),
    Bound("Lark rules", "grammar", lambda n: "\n".join(
        ["start: " + " | ".join(f"r{i}" for i in range(n - 2)),
         *(f'r{i}: "a{i}"' for i in range(n - 2))]), 4000),
    Bound("bytes of a Lark string", "grammar",
          lambda n: f'start: "{("abcdefgh%d" * 9000)[: n - 2]}"', 65536),
    Bound("intersections", "grammar", lambda n: "start: A\nA: " + " & ".join(
        f"/.*a{i}.*/" for i in range(n + 1)), 8),
    Bound("repeats of rules", "grammar",
          lambda n: f'start: r{{0,{n // 100}}}\nr: s{{100}}\ns: "a" | "b" s', 100_000),
    Bound("schemas in Lark", "grammar", lambda n: "\n".join(
        ["start: " + " | ".join(f"r{i}" for i in range(n)),
         *(f'r{i}: %json {{"const":{i}}}' for i in range(n))]), 1000),
    Bound("characters of GBNF", "grammar",
          lambda n: ("root ::= r" + " r" * n)[: n - 10].rstrip() + ' \nr ::= "a"', 65_530),
]  # fmt: skip


def measure(bound: Bound, compiler: Compiler) -> tuple[str, bool]:
    """Returns a row of the table, and whether the grammar was compiled."""
    text = bound.text(bound.most)
    started = time.thread_time()
    check_grammar(bound.kind, text)
    check_ms = (time.thread_time() - started) * 1e3
    beyond = bound.most + 1
    while not _is_refused(bound.kind, bound.text(beyond)):
        beyond += 1
    verdict = compiler.compile(GrammarSource(bound.kind, text))
    return (
        f"| {bound.name} | {bound.most} | {beyond} | {len(text)} | {check_ms:.1f} |"
        f" {verdict.cpu_s:.3f} | {verdict.error}",
        not verdict.error,
    )


def _is_refused(kind: str, text: str) -> bool:
    try:
        check_grammar(kind, text)
    except InvalidGrammar:
        return True
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    size = Tokenizer.from_file(str(options.tokenizer)).get_vocab_size()
    compiler = Compiler(Vocabulary.read(options.tokenizer.parent, size, (size - 1,)))
    print("| bound | largest | refused | chars | check, ms | compile, s | error")
    print("|---|--:|--:|--:|--:|--:|---")
    is_right = True
    for bound in BOUNDS:
        row, is_well = measure(bound, compiler)
        print(row if is_well else f"{row} <- not within", flush=True)
        is_right = is_right and is_well
    compiler.close()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
