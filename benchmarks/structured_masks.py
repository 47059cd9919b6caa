"""What one token mask costs, by kind of grammar: CPU time of the thread that fills it.

    python -m benchmarks.structured_masks --tokenizer tokenizer.json

The decoder's matchers follow answers that a model might write, token by token; a mask's time is all
that the front does for it: taking the token, filling, finishing. The first answer under a grammar
finds its lexer empty ("cold"), later ones share what it has learned. No model, no device.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.structured import SCHEMA
from benchmarks.workloads import WORDS
from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Grammars
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.tools import FunctionDefinition
from services.gateway.tokenizer.tokenizer import ModelTokenizer

TEXT = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A schema whose values are answers, or with `form` the parameters of a tool.

    Attributes:
        value: a text, a number … that `write` makes anew for each answer.
    """

    name: str
    schema: dict[str, Any]
    value: Any
    form: str = ""


def object_of(**properties: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """A schema with all properties required."""
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


def words(rng: random.Random, count: int) -> str:
    """Text with what models write: capitals, punctuation, quotes, tags, other scripts."""
    found = rng.choices(WORDS, k=count)
    for mark in (",", ".", " (x < y)", "\u2019s", " é", " 你好", " -", ":"):
        found[rng.randrange(count)] += mark
    return " ".join(found).capitalize()


def _of(count: int):  # noqa: ANN202
    return lambda rng: words(rng, count)


def _record(rng: random.Random) -> Any:  # noqa: ANN401
    return {
        "name": words(rng, 4)[:40], "kind": rng.choice(["circle", "star"]), "size": rng.random(),
        "tags": [words(rng, 1)[:12] for _ in range(3)],
        "position": {"x": rng.randrange(999), "y": -3},
    }  # fmt: skip


def _any(rng: random.Random) -> Any:  # noqa: ANN401
    nested = {"list": [1, 2.5, None, True], "deep": {"er": words(rng, 20)}}
    return {words(rng, 2): words(rng, 12), "n": rng.random(), "nested": nested}


_DATE = {"type": "string", "format": "date-time"}
_MAIL = {"type": "string", "format": "email"}
_URI = {"type": "string", "format": "uri"}
_CODE = {"type": "string", "pattern": "^[A-Z]{2}-\\d{4}$"}
_SLUG = {"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$", "maxLength": 60}
_PLACES = [f"{a} {b}" for a in WORDS[:30] for b in WORDS[30:40]]
_ARGUMENTS = {
    "free": (TEXT, _of(80)),
    "bounded": ({**TEXT, "maxLength": 4000}, _of(80)),
    "short": ({**TEXT, "maxLength": 60}, lambda rng: words(rng, 12)[:60]),
    "pattern": (_SLUG, lambda rng: "-".join(rng.choices(WORDS, k=6)).lower()[:60].strip("-")),
    "format": (_DATE, lambda rng: f"20{rng.randrange(10, 99)}-05-17T10:3{rng.randrange(9)}:00Z"),
    "enum": ({"enum": _PLACES}, lambda rng: rng.choice(_PLACES)),
    "text or null": ({"type": ["string", "null"]}, _of(80)),
    "integer": ({"type": "integer"}, lambda rng: rng.randrange(10**9)),
    "object": ({"type": "object"}, _any),
}
_OF_JSON_STRINGS = ("bounded", "short", "pattern", "format")  # not enforced without quotes
KINDS = [
    Kind("JSON object", {"type": "object"}, _any),
    Kind("record, strings bounded", {**SCHEMA, "minItems": 1},
         lambda rng: [_record(rng) for _ in range(4)]),
    Kind("nested arrays", {"type": "array", "items": {"type": "array", "items": {
        "type": "array", "items": {"type": "number"}}}},
        lambda rng: [[[rng.random() for _ in range(3)] for _ in range(3)] for _ in range(3)]),
    *(Kind(f"JSON: {name}", object_of(a=schema), lambda rng, v=value: {"a": v(rng)})
      for name, (schema, value) in _ARGUMENTS.items()),
    Kind("JSON: e-mail", object_of(a=_MAIL), lambda rng: {"a": f"{rng.choice(WORDS)}.x@mail.org"}),
    Kind("JSON: URI", object_of(a=_URI),
         lambda rng: {"a": f"https://www.example.org/{rng.choice(WORDS)}/a?b=c"}),
    Kind("JSON: short pattern", object_of(a=_CODE),
         lambda rng: {"a": f"DE-{rng.randrange(1000, 9999)}"}),
    *(Kind(f"{form}: {name}", object_of(a=schema, b={"type": "integer"}),
           lambda rng, v=value: {"a": v(rng), "b": 3}, form)
      for form in PARSERS for name, (schema, value) in _ARGUMENTS.items()
      if form != "qwen3_coder" or name not in _OF_JSON_STRINGS),
]  # fmt: skip


def grammar_of(kind: Kind, tokenizer: ModelTokenizer, end_id: int) -> Grammar:
    """For the decoder; a tool's is strict, so that text is free before a call."""
    if not kind.form:
        source = GrammarSource("json_schema", json.dumps(kind.schema))
        return Grammar(source, stop_ids=(end_id,))
    function = FunctionDefinition("f", parameters=kind.schema, strict=True)
    calls = ToolCalls(PARSERS[kind.form], {"f": 0}, {"f": function})
    asked = answer_grammar(None, None, calls, tokenizer)
    assert asked is not None
    source = GrammarSource(asked.kind, asked.text, asked.plain_strings)
    return Grammar(source, stop_ids=(end_id,))


def answer_of(kind: Kind, rng: random.Random, tokenizer: ModelTokenizer) -> list[int]:
    """Token ids of an answer."""
    value = kind.value(rng)
    if not kind.form:
        return tokenizer.encode_text(json.dumps(value, ensure_ascii=False))
    if kind.form == "llama3_json":
        call = {"name": "f", "parameters": value}
        return tokenizer.encode_text(json.dumps(call, ensure_ascii=False))
    if kind.form == "hermes":
        call = {"name": "f", "arguments": value}
        text = json.dumps(call, ensure_ascii=False)
    else:
        values = "".join(
            f"<parameter={name}>\n"
            f"{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n</parameter>\n"
            for name, v in value.items()
        )
        text = f"<function=f>\n{values}</function>"
    begin, end = (tokenizer.added[tag].token_id for tag in ("<tool_call>", "</tool_call>"))
    before = tokenizer.encode_text(f"I will look. {words(rng, 12)}\n")
    return [*before, begin, *tokenizer.encode_text(f"\n{text}\n"), end]


def measure(
    kind: Kind, grammars: Grammars, tokenizer: ModelTokenizer, end_id: int, answers: int
) -> tuple[list[float], list[float]]:
    """Seconds of each mask but an answer's first, of the first answer and of the others."""
    constraints = TokenConstraints(grammar_of(kind, tokenizer, end_id))
    rows = np.empty((1, grammars.num_mask_words), np.int32)
    rng = random.Random(kind.name)
    cold: list[float] = []
    warm: list[float] = []
    for number in range(answers):
        ids = answer_of(kind, rng, tokenizer)
        matcher = asyncio.run(grammars.matcher(constraints))
        grammars.fill(matcher, [], rows[0])
        for token_id in ids:
            mask = rows[0].view(np.uint8)
            if not mask[token_id >> 3] >> (token_id & 7) & 1:
                raise AssertionError(f"{kind.name}: {tokenizer.token_bytes(token_id)} is forbidden")
            started = time.thread_time()
            found = grammars.fill(matcher, [token_id], rows[0])
            (warm if number else cold).append(time.thread_time() - started)
            if found is not True:
                raise AssertionError(f"{kind.name}: {found}")
    return cold, warm


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE")
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--end", default="<|im_end|>", help="the token that ends an answer")
    parser.add_argument("--answers", type=int, default=20, help="of each kind")
    parser.add_argument("--only", default="", help="kinds with this in their name")
    options = parser.parse_args(arguments)
    tokenizer = ModelTokenizer.from_directory(options.tokenizer.parent)
    end_id = tokenizer.added[options.end].token_id
    grammars = Grammars(options.tokenizer.parent, options.vocab_size, (end_id,))
    print(f"{'µs of CPU a mask':<28} {'p50':>7} {'p99':>7} {'max':>7}   cold: p50, max")
    for kind in KINDS:
        if options.only not in kind.name:
            continue
        cold, warm = (
            np.array(found) * 1e6
            for found in measure(kind, grammars, tokenizer, end_id, options.answers)
        )
        p50, p99 = np.percentile(warm, (50, 99))
        print(
            f"{kind.name:<28} {p50:7.0f} {p99:7.0f} {warm.max():7.0f}   "
            f"{np.percentile(cold, 50):7.0f} {cold.max():7.0f}  ({len(warm)})",
            flush=True,
        )
    grammars.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
