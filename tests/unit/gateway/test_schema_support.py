"""Keywords that a grammar does not enforce: refused by their place where that was promised, left
out elsewhere, and never the end of another function.
"""

import json
import time
from dataclasses import replace

import pytest

pytest.importorskip("llguidance")  # the decoder's
from llguidance import LLMatcher, LLTokenizer

from services.common.errors import InvalidGrammar
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.tools import FunctionDefinition
from tests.cases import THOROUGH
from tests.noise import least
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size
from tests.unit.gateway.test_answers import encode

END = added_ids()["<|im_end|>"]
INT = {"type": "integer"}
# What nothing here enforces: the keyword's place within a parameter, and the parameter's schema.
PATTERNS = {
    "look-ahead": "^(?!\\.)[a-z]+$",
    "look-behind": "(?<=a)b",
    "back reference": "^(a)\\1$",
    "word boundary": "\\bx\\b",
    "group that is not closed": "^(a|(b)$",
    "group that is not opened": "[(]a)",
    "set that is not closed": "x[a-z\\]",
}
UNSUPPORTED = {
    **{f"{name}": ("pattern", {"type": "string", "pattern": p}) for name, p in PATTERNS.items()},
    "in a list": (
        "items.pattern", {"type": "array", "items": {"type": "string", "pattern": "(?=a)"}},
    ),
    "in an alternative": (
        "anyOf[0].pattern", {"anyOf": [{"type": "string", "pattern": "(?=a)"}, {"type": "null"}]},
    ),
    "of names": (
        "patternProperties.(?=a)", {"type": "object", "patternProperties": {"(?=a)": INT}},
    ),
    "not": ("not", {"type": "integer", "not": {"const": 3}}),
    "if": ("if", {"type": "object", "if": {}, "then": {}}),
    "uniqueItems": ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}),
    "contains": ("contains", {"type": "array", "contains": INT}),
    "dependentSchemas": ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
    "dependentRequired": (
        "dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}},
    ),
    "propertyNames": ("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}),
    "unevaluatedProperties": (
        "unevaluatedProperties", {"type": "object", "unevaluatedProperties": False},
    ),
    "unevaluatedItems": ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
    "remote $ref": ("$ref", {"$ref": "https://example.com/schema.json"}),
    "$dynamicRef": ("$dynamicRef", {"$dynamicRef": "#node"}),
    "format": ("format", {"type": "string", "format": "idn-email"}),
    "type": ("type", {"type": "file"}),
    "minProperties": (
        "minProperties", {"type": "object", "properties": {"a": INT}, "minProperties": 1},
    ),
}  # fmt: skip
# What the library may refuse, or not: with strict it decides.
UNSURE = {
    "flags": {"type": "string", "pattern": "(?m)^a$"},
    "anchor inside": {"type": "string", "pattern": "a^b"},
    "control": {"type": "string", "pattern": "\\cA"},
    "unknown property": {"type": "string", "pattern": "^\\p{Foo}+$"},
    "half a character": {"type": "string", "pattern": "\\ud83d"},
    "range": {"type": "string", "pattern": "[z-a]"},
    "brace": {"type": "string", "pattern": "a{b}"},
    "quantifier": {"type": "string", "pattern": "*a"},
    "class in a class": {"type": "string", "pattern": "[a[b]"},
    "brackets in a class": {"type": "string", "pattern": "^[])(]$"},
    "empty class": {"type": "string", "pattern": "[^]"},
    "blank in a class": {"type": "string", "pattern": "[\\b]"},
    "several patterns": {"type": "object", "patternProperties": {"^a": INT, "^ab": {}}},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "reference and more": {"$ref": "#/properties/other", "minimum": 3},
    "unknown schema": {"$schema": "http://example.com/draft", "type": "integer"},
}
SERVED = {
    "e-mail": {"type": "string", "pattern": "^[^@\\s]+@[A-Za-z0-9.-]+\\.[A-Za-z]{2,}$"},
    "identifier": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_-]{0,62}(?:\\.[a-z]+)*$"},
    "date": {"type": "string", "pattern": "^\\d{4}-\\d{2}-\\d{2}$", "maxLength": 10},
    "alternatives": {"type": "string", "pattern": "^(foo|bar)?\\u0041\\x41[\\w\\s.+-]*"},
    "unknown format": {"type": "string", "format": "int32"},
    "idle": {"type": "array", "items": INT, "uniqueItems": False, "unevaluatedItems": True},
    "zod's record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": INT,
    },
}
OTHER = {
    "type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
}  # fmt: skip


def functions(schema, *, strict, required=True):
    parameters = {
        "type": "object",
        "properties": {"a": schema, "other": INT},
        "required": ["a", "other"],
    }
    found = {
        "other": FunctionDefinition("other", parameters=OTHER),
        "send": FunctionDefinition("send", parameters=parameters, strict=strict),
    }
    return ToolCalls(PARSERS["hermes"], {"other": 0, "send": 1}, found, required=required)


def format_of(form, use):
    return None, replace(use, parser=PARSERS[form])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_json())
    return LLTokenizer(str(path), n_vocab=vocab_size(), eos_token=[END])


def accepts(vocabulary, tokenizer, grammar, text):
    matcher = LLMatcher(vocabulary, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = encode(tokenizer, text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(form, name, **arguments):
    if form == "qwen3_coder":
        written = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}"
            "\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"
    key = {"hermes": "arguments", "llama3_json": "parameters"}[form]
    text = json.dumps({"name": name, key: arguments})
    return f"<tool_call>\n{text}\n</tool_call>" if form == "hermes" else text


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_strict_refuses_by_function_place_and_keyword(form, name, tokenizer):
    place, schema = UNSUPPORTED[name]
    with pytest.raises(InvalidGrammar) as caught:
        answer_grammar(None, *format_of(form, functions(schema, strict=True)), tokenizer)
    assert caught.value.param == f"tools[1].function.parameters.properties.a.{place}"
    assert caught.value.message.startswith("in function send, ")
    assert caught.value.message.endswith(" is not supported with strict")
    assert len(caught.value.message) < 200 and "\n" not in caught.value.message


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_schema_of_an_answer_is_refused_by_place_and_keyword(name, tokenizer):
    place, schema = UNSUPPORTED[name]
    asked = Grammar("json_schema", json.dumps({"properties": {"a": schema}}), "response_format")
    with pytest.raises(InvalidGrammar) as caught:
        answer_grammar(asked, None, None, tokenizer)
    assert caught.value.param == f"response_format.properties.a.{place}"
    assert caught.value.message.endswith(" is not supported")


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("name", [*UNSUPPORTED, *UNSURE, *SERVED])
def test_without_strict_the_rest_holds_and_other_functions_go_on(form, name, tokenizer, vocabulary):
    schema = UNSUPPORTED[name][1] if name in UNSUPPORTED else (UNSURE | SERVED)[name]
    free = format_of(form, functions(schema, strict=False, required=False))
    assert answer_grammar(None, *free, tokenizer) is None
    answer_format = format_of(form, functions(schema, strict=False))
    grammar = answer_grammar(None, *answer_format, tokenizer)
    assert grammar is not None
    assert accepts(vocabulary, tokenizer, grammar, call(form, "other", n=3))
    assert not accepts(vocabulary, tokenizer, grammar, call(form, "other", n=10))
    assert not accepts(vocabulary, tokenizer, grammar, call(form, "send", other=1))


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("name", SERVED)
def test_what_is_supported_is_enforced(form, name, tokenizer, vocabulary):
    grammar = answer_grammar(
        None, *format_of(form, functions(SERVED[name], strict=True)), tokenizer
    )
    assert grammar is not None
    assert not accepts(vocabulary, tokenizer, grammar, call(form, "send", a=" ", other=1)) or (
        name == "unknown format"
    )


@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_without_an_end_names_its_function(strict, tokenizer):
    schema = {"$ref": "#/properties/a"}
    with pytest.raises(InvalidGrammar) as caught:
        answer_grammar(None, *format_of("hermes", functions(schema, strict=strict)), tokenizer)
    assert caught.value.param == "tools[1].function.parameters.properties.a.$ref"
    assert "in function send, $ref #/properties/a leads back" in caught.value.message


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("reference", ["#/$defs/a", "#/properties/a/anyOf/7", "#/properties/~1"])
def test_a_reference_to_nothing_names_its_place(reference, strict, tokenizer):
    schema = {"anyOf": [{"type": "null"}, {"items": {"$ref": reference}}]}
    with pytest.raises(InvalidGrammar) as caught:
        answer_grammar(None, *format_of("hermes", functions(schema, strict=strict)), tokenizer)
    place = "tools[1].function.parameters.properties.a.anyOf[1].items.$ref"
    assert caught.value.param == place
    assert f"in function send, $ref {reference} refers to nothing" in caught.value.message


ELSEWHERE = {
    "const": {"const": {"$ref": "#/nowhere"}},
    "a property": {"type": "object", "properties": {"$ref": {"type": "string"}}},
    "an anchor": {"$ref": "#there", "$defs": {"there": {"$anchor": "there"}}},
    "another URI": {"$id": "https://x.y/z", "items": {"$ref": "#/$defs/b"}, "$defs": {"b": True}},
    "true": {"items": {"$ref": "#/$defs/b"}, "$defs": {"b": True}},
    "a cycle with an end": {"items": {"$ref": "#"}},
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_no_reference_to_nothing_is_left_to_the_library(name, tokenizer):
    grammar = Grammar("json_schema", json.dumps(ELSEWHERE[name]), "s")
    assert answer_grammar(grammar, None, None, tokenizer) is not None


WRAPS = "bare", "anyOf", "allOf", "items"


# Only the form without quotes looks along the references.
@pytest.mark.thorough
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("wrap", "form"),
    [
        (wrap, form) for wrap in WRAPS for form in PARSERS
        if THOROUGH or form == "qwen3_coder" or wrap == "bare"
    ],
)  # fmt: skip
def test_a_long_chain_of_references_is_left_to_the_library(wrap, form, strict, tokenizer):
    """The gateway itself looks along 64 of them, which it needs for values without quotes."""

    def link(number: int) -> dict[str, object]:
        reference = {"$ref": f"#/$defs/d{number}"}
        wrapped = {
            "anyOf": {"anyOf": [reference, {"type": "string"}]}, "allOf": {"allOf": [reference]},
            "items": {"items": reference}, "bare": reference,
        }  # fmt: skip
        return wrapped[wrap]

    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"]}
    definitions = {f"d{number}": link(number + 1) for number in range(3000)}
    schema["$defs"] = {**definitions, "d3000": {"type": "null"}}
    use = functions({"type": "null"}, strict=strict)
    parameters = use.functions["send"].parameters
    assert parameters is not None
    parameters.clear()
    parameters.update(schema)
    if form == "qwen3_coder" and strict and wrap != "items":
        with pytest.raises(InvalidGrammar, match="behind more than 64 references"):
            answer_grammar(None, *format_of(form, use), tokenizer)
    else:
        assert answer_grammar(None, *format_of(form, use), tokenizer) is not None


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", PARSERS)
def test_a_schema_may_name_itself_by_its_id(form, strict, tokenizer, vocabulary):
    use = functions({"$ref": "https://example.com/s#/$defs/A"}, strict=strict)
    parameters = use.functions["send"].parameters
    assert parameters is not None
    parameters |= {"$id": "https://example.com/s", "$defs": {"A": {"enum": [12, 34]}}}
    grammar = answer_grammar(None, *format_of(form, use), tokenizer)
    assert grammar is not None
    assert accepts(vocabulary, tokenizer, grammar, call(form, "send", a=12, other=1))
    assert not accepts(vocabulary, tokenizer, grammar, call(form, "send", a=13, other=1))


@pytest.mark.parametrize("form", PARSERS)
def test_a_count_may_be_written_with_a_point(form, tokenizer, vocabulary):
    schema = {"type": "array", "items": INT, "minItems": 1.0, "maxItems": 2.0}
    grammar = answer_grammar(None, *format_of(form, functions(schema, strict=True)), tokenizer)
    assert grammar is not None
    for items in ([], [1], [1, 2], [1, 2, 3]):
        accepted = accepts(vocabulary, tokenizer, grammar, call(form, "send", a=items, other=1))
        assert accepted == (1 <= len(items) <= 2)


def test_many_required_names_take_linear_time(tokenizer):
    names = [f"p{number}" for number in range(10_000)]
    schema = {"type": "object", "properties": {name: {} for name in names}, "required": names}

    def write() -> float:
        start = time.process_time()
        answer_grammar(Grammar("json_schema", json.dumps(schema), "s"), None, None, tokenizer)
        return time.process_time() - start

    assert least(write, 0.5) <= 0.5  # seconds; each name compared with each, one
