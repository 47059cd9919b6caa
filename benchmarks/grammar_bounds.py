"""The largest grammar of each kind that may be compiled, and why a larger one may not.

    python -m benchmarks.grammar_bounds --tokenizer tokenizer.json

Each is compiled as a decoder does it, with the first mask, in a fork with the slow lane's limits of
CPU time, memory and stack; sizes grow by a half. The largest that is compiled is compiled again in
this process, as in a mask process.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from services.common.grammar.grammar_bounds import MAX_GRAMMAR_CHARS
from services.common.process.work_limits import resident_bytes
from services.decoder.masks.compile_worker import Compiler
from services.decoder.masks.compiler import Vocabulary, compile_grammar
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import Verdict

_MAX_SIZE = 10_000_000  # of texts that hardly grow with their size, such as counted repeats


class Kind(NamedTuple):
    """Texts by a size.

    Attributes:
        name: name of the row.
        name_of: kind of the grammar.
        text: text by size.
        first: first size that is tried.
    """

    name: str
    name_of: str
    text: Callable[[int], str]
    first: int


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


KINDS = [
    Kind("$ref alone", "json_schema", lambda n: chain(n, lambda r: r), 64),
    Kind("$ref in items", "json_schema",
          lambda n: chain(n, lambda r: {"type": "array", "items": r}), 64),
    Kind("$ref in properties", "json_schema",
          lambda n: chain(n, lambda r: {"type": "object", "properties": {"a": r}}), 64),
    Kind("$ref in patternProperties", "json_schema",
          lambda n: chain(n, lambda r: {"type": "object", "patternProperties": {"^a": r}}), 64),
    Kind("$ref in anyOf", "json_schema",
          lambda n: chain(n, lambda r: {"anyOf": [r, {"type": "null"}]}), 64),
    Kind("$ref in allOf", "json_schema", lambda n: chain(n, lambda r: {"allOf": [r]}), 64),
    Kind("$ref 50 levels down", "json_schema", _nested, 11),
    Kind("cycle of $ref in properties", "json_schema", cycle, 170),
    Kind("optional properties", "json_schema",
          lambda n: json.dumps(_properties(n, required=False)), 1000),
    Kind("properties in all", "json_schema", _many, 5000),
    Kind("patternProperties", "json_schema",
          lambda n: _one(type="object", patternProperties={f"^a{i}_": {} for i in range(n)}), 64),
    Kind("bytes of a constant", "json_schema",
          lambda n: _one(const=("abcdefgh%d" * 9000)[:n - 2]), 65536),
    Kind("values of an enumeration", "json_schema",
          lambda n: _one(enum=[[i] for i in range(n)]), 5000),
    Kind("characters of patterns", "json_schema",
          lambda n: _one(type="string", pattern=("\\w+" * n)[: n]), 32766),
    Kind("repeats of a pattern", "json_schema",
          lambda n: _one(type="string", pattern=f"^(ab{{{n // 100}}}){{100}}$"), 100_000),
    Kind("minItems of minItems", "json_schema",
          lambda n: _one(type="array", minItems=n // 100, items={
              "type": "array", "minItems": 100, "items": {"type": "integer"}}), 100_000),
    Kind("lists with minItems and maxItems", "json_schema",
          lambda n: _one(anyOf=[{"type": "array", "minItems": i, "maxItems": 9999 - i}
                                for i in range(n)]), 500),
    Kind("multipleOf", "json_schema", lambda n: _one(type="integer", multipleOf=n), 19_997),
    Kind("choices", "choice", lambda n: json.dumps([f"v{i}" for i in range(n)]), 5000),
    Kind("regular expression", "regex", lambda n: ("\\w+" * n)[:n], 32766),
    Kind("repeats", "regex", lambda n: f"a{{{n}}}", 100_000),
    Kind("repeats of repeats", "regex", lambda n: f"(a{{{n // 100}}}){{100}}", 100_000),
    Kind("Lark rules in a chain", "grammar", lambda n: rules(n, "start", "r", "{}: {}"), 64),
    Kind("Lark terminals in a chain", "grammar", lambda n: rules(n, "start", "R", "{}: {}"), 64),
    Kind("GBNF rules in a chain", "grammar", lambda n: rules(n, "root", "r", "{} ::= {}"), 64),
    Kind("Lark rules", "grammar", lambda n: "\n".join(
        ["start: " + " | ".join(f"r{i}" for i in range(n - 2)),
         *(f'r{i}: "a{i}"' for i in range(n - 2))]), 4000),
    Kind("bytes of a Lark string", "grammar",
          lambda n: f'start: "{("abcdefgh%d" * 9000)[: n - 2]}"', 65536),
    Kind("intersections", "grammar", lambda n: "start: A\nA: " + " & ".join(
        f"/.*a{i}.*/" for i in range(n + 1)), 8),
    Kind("repeats of rules", "grammar",
          lambda n: f'start: r{{0,{n // 100}}}\nr: s{{100}}\ns: "a" | "b" s', 100_000),
    Kind("schemas in Lark", "grammar", lambda n: "\n".join(
        ["start: " + " | ".join(f"r{i}" for i in range(n)),
         *(f'r{i}: %json {{"const":{i}}}' for i in range(n))]), 1000),
    Kind("characters of GBNF", "grammar",
          lambda n: ("root ::= r" + " r" * n)[: n - 10].rstrip() + ' \nr ::= "a"', 65_530),
]  # fmt: skip


def measure(kind: Kind, compiler: Compiler, vocabulary: Vocabulary) -> str:
    """Returns a row: the largest text that is compiled, and why a larger one is not."""
    most, verdict, refused = 0, Verdict("", 0.0), ""
    size = kind.first
    while len(text := kind.text(size)) <= MAX_GRAMMAR_CHARS and size <= _MAX_SIZE:
        found = compiler.compile(GrammarSource(kind.name_of, text))
        if found.error:
            refused = found.error
            break
        most, verdict = size, found
        size += max(1, size // 2)
    if not most:
        return f"| {kind.name} | below {kind.first} | | | | | {refused} |"
    text = kind.text(most)
    began, before = time.thread_time(), resident_bytes()
    compiled = compile_grammar(vocabulary, GrammarSource(kind.name_of, text))
    again_s, kept = time.thread_time() - began, (resident_bytes() - before) >> 20
    del compiled
    return (
        f"| {kind.name} | {most} | {len(text)} | {verdict.cpu_s:.3f} | {again_s:.3f} | {kept} |"
        f" {refused or 'the text is too long'} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    size = Tokenizer.from_file(str(options.tokenizer)).get_vocab_size()
    vocabulary = Vocabulary.read(options.tokenizer.parent, size, (size - 1,))
    compiler = Compiler(vocabulary)
    print("| kind | largest | chars | compile, s | again, s | kept, MiB | a larger one |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for kind in KINDS:
        print(measure(kind, compiler, vocabulary), flush=True)
    compiler.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
