"""A small sample of `benchmarks.schemas`: answers of a random model validate, or the schema is
refused by the keyword's name.
"""

import argparse
import os
import signal
import time

import pytest

from benchmarks.schemas import Case, Examiner, cpu_limit
from tests.tiny_tokenizer import tokenizer_json


def object_of(required: str = "", /, **properties: object) -> dict[str, object]:
    names = required.split()
    return {"type": "object", "properties": properties, "required": names,
            "additionalProperties": False}  # fmt: skip


TEXT = {"type": "string", "maxLength": 6}
ODD = TEXT | {"format": "odd"}
TREE = {
    "$defs": {"node": object_of("v", v={"type": "integer"}, left={"$ref": "#/$defs/node"})},
    "$ref": "#/$defs/node",
}
SERVED = {
    "object": object_of("a", a=TEXT, b={"type": "integer"}),
    "no properties": {"type": "object", "additionalProperties": False},
    "any object": {"type": "object", "additionalProperties": TEXT, "maxProperties": 3},
    "additional": {**object_of("a", a=TEXT), "additionalProperties": {"type": "boolean"}},
    "optional between required": object_of("a c", a=TEXT, b=TEXT, c=TEXT),
    "names with escapes": object_of('" \\ \n', **{'"': TEXT, "\\": TEXT, "\n": TEXT}),
    "pattern properties": {
        "type": "object", "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False, "maxProperties": 2,
    },
    "integer range": {"type": "integer", "minimum": -17, "exclusiveMaximum": 230},
    "number range": {"type": "number", "exclusiveMinimum": 0.25, "maximum": 3},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,3}$"},
    "unanchored pattern": {"type": "string", "pattern": "ab", "maxLength": 9},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "unknown format": {"type": "integer", "format": "int32"},
    "unknown formats of properties that are named as keywords": object_of(
        "default enum format properties",
        default=ODD, enum={"$ref": "#/$defs/const"}, format=ODD,
        properties=object_of("format", format=ODD),
    ) | {"$defs": {"const": ODD}},
    "literals that look like formats": {
        "const": {"format": "odd", "properties": {"format": "odd"}}, "format": "odd",
    },
    "array": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "null"}], "items": False},
    "enum": {"enum": ["é", 1, 1.5, None, True, ["a", {}], {"a": "b"}]},
    "const": {"const": {"x": [1, "a\"b\\c\n"]}},
    "any of": {"anyOf": [{"type": "integer"}, object_of("k", k={"const": "a"})]},
    "one of disjoint": {
        "oneOf": [object_of("k", k={"const": "a"}, x=TEXT), object_of("k", k={"const": "b"})]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "types": {"type": ["string", "null"], "maxLength": 4},
    "nullable reference": object_of("a", a={"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]})
    | {"$defs": {"t": TEXT}},
    "recursive": TREE,
    "reference to true": object_of("a", a={"$ref": "#/$defs/any"}) | {"$defs": {"any": True}},
    "true": object_of("a", a=True),
    "annotations": {"title": "T", "description": "D", "default": 3, "examples": [1], "const": 2},
}  # fmt: skip
REFUSED = {
    "not": {"not": TEXT},
    "uniqueItems": {"type": "array", "items": TEXT, "uniqueItems": True},
    "contains": {"type": "array", "contains": TEXT},
    "if": {"if": TEXT, "then": TEXT},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "propertyNames": {"type": "object", "propertyNames": TEXT},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "idn-email": {"type": "string", "format": "idn-email"},
    "look-": {"type": "string", "pattern": "^(?!a)"},
    "http://elsewhere": {"$ref": "http://elsewhere/schema"},
    "unsatisfiable": {"type": "object", "properties": {"a": False}, "required": ["a"]},
}


@pytest.fixture(scope="module")
def examiner(tmp_path_factory) -> Examiner:
    path = tmp_path_factory.mktemp("schemas") / "tokenizer.json"
    path.write_text(tokenizer_json())
    options = argparse.Namespace(
        tokenizer=path, end="<|im_end|>", library="llguidance", answers=5, tokens=300, cpu_s=0
    )
    return Examiner(options)


@pytest.mark.parametrize("name", SERVED)
def test_every_answer_validates(examiner, name):
    outcome = examiner.examine(Case(name, SERVED[name], []))
    assert not outcome.refused and not outcome.invalid, outcome
    assert outcome.valid > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(examiner, name):
    outcome = examiner.examine(Case(name, REFUSED[name], []))
    assert name in outcome.refused and "FAILED" not in outcome.refused, outcome
    assert "coerce" not in outcome.refused, "an option that no request has"


def test_a_compilation_that_takes_too_much_cpu_time_ends_its_process() -> None:
    """Here by a fork that runs nothing of this process but the loop."""
    child = os.fork()
    if not child:
        with cpu_limit(0.05):
            pass
        started = time.process_time()
        while time.process_time() < started + 1.2:  # the limit is gone
            pass
        with cpu_limit(0.05):
            while time.process_time() < started + 20:
                pass
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
