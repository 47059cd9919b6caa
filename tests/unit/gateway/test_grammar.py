"""The grammar that a request names."""

import json

import pytest

from services.common.errors import InvalidGrammar, InvalidRequest
from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.grammar import MAX_GRAMMAR_CHARS, Grammar, read_grammar
from services.gateway.forms.openai import parse_chat_request

SCHEMA_PARAM = "response_format.json_schema.schema"
OBJECT = '{"type": "object"}'
SCHEMA = {"type": "object", "properties": {"ü": {"type": "string"}}}


def grammar_of(**fields: object) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return read_grammar(parse_chat_request(json.dumps(body).encode()))


def schema_format(**fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", **fields}}


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_no_grammar(value):
    assert grammar_of(response_format=value) is None
    assert grammar_of(structured_outputs=None) is None


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", OBJECT, "response_format"),
        (
            {"response_format": schema_format(schema=SCHEMA, strict=True)},
            "json_schema", json.dumps(SCHEMA), SCHEMA_PARAM,
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema", json.dumps(SCHEMA), "response_format.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": None}},
            "json_schema", OBJECT, "response_format",
        ),
        *(
            ({"response_format": given}, "json_schema", OBJECT, SCHEMA_PARAM)
            for given in (schema_format(), schema_format(schema=None))
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            "json_schema", json.dumps(SCHEMA), "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
            "json_schema", json.dumps(SCHEMA), "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            "choice", '["a","b"]', "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            "grammar", 'root ::= "a"', "structured_outputs.grammar",
        ),
    ],
)  # fmt: skip
def test_grammar(fields, kind, text, param):
    found = grammar_of(**fields)
    assert found is not None
    assert (found.kind, found.text) == (kind, text) and found.param.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": schema_format(schema=[1])},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[...]"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_refused(fields, param):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(**fields)
    assert refused.value.param.startswith(param.split("[")[0])


def test_as_the_decoder_takes_it():
    found = Grammar("json_schema", OBJECT, "p", begins_after=(7, 8)).to_proto((1, 2))
    assert found.kind == pb.Grammar.KIND_JSON_SCHEMA
    assert json.loads(found.text) == {"type": "object"}
    assert (*found.begins_after, *found.end_token_ids) == (7, 8, 1, 2)
    with pytest.raises(InvalidGrammar):
        Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "p").to_proto((1,))
    with pytest.raises(InvalidRequest):
        Grammar("regex", "a", "p").to_proto(())
