"""Schemas as SDKs of Go, PHP, Java, Python and Google write them: read as what they stand for, or
refused by the function and the keyword's place, never in the words of the grammar's library.
"""

import json
from contextlib import suppress
from copy import deepcopy

import pytest

pytest.importorskip("llguidance")  # the decoder's
from llguidance import LLMatcher, LLTokenizer

from services.common.errors import InvalidGrammar, InvalidRequest, TriptychError
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.schema_dialects import READERS, standard_schema
from services.gateway.answers.schema_place import SchemaPlace
from services.gateway.answers.schema_support import UNSUPPORTED, held_to
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS, Qwen3CoderParser
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.parts import Call, join
from services.gateway.forms.tools import FunctionDefinition
from tests.cases import first
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size
from tests.unit.gateway.test_answers import encode
from tests.unit.gateway.test_schema_support import call

END = added_ids()["<|im_end|>"]
TEXT, INT, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
STRICT, LENIENT = SchemaPlace("s"), SchemaPlace("s", strict=False)


def of(**properties):
    return {"type": "object", "properties": properties}


# As it is written, and as the standard has it.
READ = {
    # Go and Java: null for what is not set; zero values.
    "null properties": ({"type": "object", "properties": None}, {"type": "object"}),
    "null required": ({"type": "object", "required": None}, {"type": "object"}),
    "null enum": ({"type": "string", "enum": None}, TEXT),
    "null description": ({"type": "string", "description": None}, TEXT),
    "null items": ({"type": "array", "items": None}, {"type": "array"}),
    "null format": ({"type": "string", "format": None}, TEXT),
    "null pattern": ({"type": "string", "pattern": None}, TEXT),
    "null additionalProperties": (
        {"type": "object", "additionalProperties": None}, {"type": "object"},
    ),
    "null bounds": (
        {"type": "integer", "minimum": None, "maximum": None, "multipleOf": None}, INT,
    ),
    "null counts": ({"type": "string", "minLength": None, "maxLength": None}, TEXT),
    "null alternatives": ({"type": "string", "anyOf": None, "oneOf": None, "allOf": None}, TEXT),
    "null reference": ({"type": "string", "$ref": None, "$id": None, "$schema": None}, TEXT),
    "null unsupported": ({"type": "string", "not": None, "if": None, "contains": None}, TEXT),
    "null type": ({"type": None, "description": "any"}, {"description": "any"}),
    "null const of a type": ({"type": "string", "const": None}, TEXT),
    "null const": ({"const": None}, {"const": None}),
    "null default": ({"type": "string", "default": None}, {"type": "string", "default": None}),
    "null member": (of(a=None, b=INT), of(a={}, b=INT)),
    "empty texts": ({"type": "", "format": "", "pattern": "", "$ref": ""}, {}),
    "empty enum": ({"type": "string", "enum": []}, TEXT),
    "empty type": ({"type": [], "minimum": 1}, {"minimum": 1}),
    "empty alternatives": ({"type": "string", "anyOf": [], "oneOf": [], "allOf": []}, TEXT),
    "multiple of nothing": ({"type": "integer", "multipleOf": 0}, INT),
    "no limit": ({"type": "string", "maxLength": -1, "minLength": -1}, TEXT),
    "Java's largest long": ({"type": "string", "maxLength": 2**63 - 1}, TEXT),
    # PHP: [] for an empty object, an object for a list with gaps, numbers for names of digits.
    "list for properties": ({"type": "object", "properties": []}, of()),
    "list for a schema": (of(a=[]), of(a={})),
    "list for items": ({"type": "array", "items": []}, {"type": "array", "items": {}}),
    "list for additionalProperties": ({"additionalProperties": []}, {"additionalProperties": {}}),
    "list for definitions": ({"$defs": [], "definitions": []}, {"$defs": {}, "definitions": {}}),
    "list for dependents": ({"type": "object", "dependentRequired": []}, {"type": "object"}),
    "numbered required": (
        {**of(a=INT, b=INT), "required": {"0": "a", "2": "b"}},
        {**of(a=INT, b=INT), "required": ["a", "b"]},
    ),
    "numbered enum": ({"enum": {"1": "x", "3": "y"}}, {"enum": ["x", "y"]}),
    "numbered type": ({"type": {"0": "string", "1": "null"}}, {"type": ["string", "null"]}),
    "numbered alternatives": ({"anyOf": {"0": TEXT, "1": NULL}}, {"anyOf": [TEXT, NULL]}),
    "names of digits": (
        {**of(**{"1": INT}), "required": [1]}, {**of(**{"1": INT}), "required": ["1"]},
    ),
    "empty object for a list": ({"required": {}, "enum": {}}, {"required": []}),
    "keys of a list": ({"type": "string", "enum": [1, 2]}, {"type": "string", "enum": ["1", "2"]}),
    # Draft 3 and 4.
    "required in a property": (
        of(a={"type": "string", "required": True}, b={"type": "string", "required": False}),
        {**of(a=TEXT, b=TEXT), "required": ["a"]},
    ),
    "required in both": (
        {**of(a=INT, b={"type": "integer", "required": "true"}), "required": ["a"]},
        {**of(a=INT, b=INT), "required": ["a", "b"]},
    ),
    "required at the root": ({"type": "object", "required": True}, {"type": "object"}),
    "required name": ({**of(a=INT), "required": "a"}, {**of(a=INT), "required": ["a"]}),
    "exclusive by a boolean": (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 9,
         "exclusiveMaximum": False},
        {"type": "integer", "exclusiveMinimum": 3, "maximum": 9},
    ),
    "exclusive of nothing": ({"type": "integer", "exclusiveMinimum": True}, INT),
    "any": ({"type": "any"}, {}),
    "odd draft": ({"$schema": "http://example.com/draft", **INT}, INT),
    "latest draft": ({"$schema": "http://json-schema.org/schema#", **INT}, INT),
    "no draft": ({"$schema": 7, **INT}, INT),
    "Java's class as an id": (
        {"id": "urn:jsonschema:org:example:Foo", **INT},
        {"id": "urn:jsonschema:org:example:Foo", **INT},
    ),
    "id that is no URI": ({"$id": "my schema <1>", "id": "http://a:b/", **INT}, INT),
    # Google's SDKs: upper case, numbers as texts, `nullable`, names of Python's.
    "numbers as texts": (
        {"type": "STRING", "minLength": "1", "maxLength": "20"},
        {"type": "string", "minLength": 1, "maxLength": 20},
    ),
    "bounds as texts": (
        {"type": "NUMBER", "minimum": "-1.5", "maximum": "1e3"},
        {"type": "number", "minimum": -1.5, "maximum": 1000.0},
    ),
    "enum of texts": (
        {"type": "INTEGER", "enum": ["1", "-20"]}, {"type": "integer", "enum": [1, -20]},
    ),
    "enum of booleans": (
        {"type": "BOOLEAN", "enum": ["true"]}, {"type": "boolean", "enum": [True]},
    ),
    "const of a text": ({"type": "number", "const": "1.5"}, {"type": "number", "const": 1.5}),
    "nullable": ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
    "not nullable": ({"type": "string", "nullable": False}, TEXT),
    "nullable enum": (
        {"type": "string", "enum": ["a"], "nullable": True},
        {"type": ["string", "null"], "enum": ["a", None]},
    ),
    "nullable reference": (
        {"$ref": "#/$defs/A", "nullable": True, "description": "d"},
        {"description": "d", "anyOf": [{"$ref": "#/$defs/A"}, NULL]},
    ),
    "nullable alternatives": (
        {"anyOf": [TEXT, INT], "nullable": "true"}, {"anyOf": [TEXT, INT, NULL]},
    ),
    "nullable of null": ({"oneOf": [TEXT, NULL], "nullable": True}, {"oneOf": [TEXT, NULL]}),
    "snake case": (
        {"any_of": [TEXT], "min_items": "2", "additional_properties": False, "max_length": None},
        {"anyOf": [TEXT], "minItems": 2, "additionalProperties": False},
    ),
    "both cases": ({"min_items": 1, "minItems": 2}, {"minItems": 2}),
    # Python and YAML.
    "name of a type for a schema": (of(a="str", b="integer"), of(a=TEXT, b=INT)),
    "name of a type for items": ({"items": "str"}, {"items": TEXT}),
    "null without quotes": ({"type": ["string", None]}, {"type": ["string", "null"]}),
    "null type of a branch": (
        {"anyOf": [TEXT, {"type": None, "description": "none"}]},
        {"anyOf": [TEXT, {"type": "null", "description": "none"}]},
    ),
    "booleans as texts": (
        {"type": "object", "additionalProperties": "false"},
        {"type": "object", "additionalProperties": False},
    ),
    "uniqueItems as a text": ({"uniqueItems": "True"}, {"uniqueItems": True}),
    "at each depth": (
        of(a={"type": "ARRAY", "items": {"anyOf": [of(b={"type": "INT", "enum": None})]}}),
        of(a={"type": "array", "items": {"anyOf": [of(b=INT)]}}),
    ),
}  # fmt: skip
TYPES = {
    "string": "string str text varchar char String STRING Str",
    "integer": "integer int Integer INTEGER int8 int16 int32 int64 uint8 uint32 uint64 long bigint",
    "number": "number float double decimal NUMBER Float float32 float64",
    "boolean": "boolean bool BOOLEAN Bool Boolean",
    "array": "array list tuple set ARRAY List list[str] List<String> string[] array<int>",
    "object": "object dict map OBJECT Dict dict[str,int] Map<String,Object>",
    "null": "null None NoneType nil NULL",
}
NAMES = [(name, kind) for kind, names in TYPES.items() for name in names.split()]
# What stands for nothing certain, and where.
UNCLEAR = {
    "properties": ({"properties": "abc"}, ".properties"),
    "list of properties": ({"properties": [{"name": "a"}]}, ".properties"),
    "member": (of(a="the city"), ".properties.a"),
    "number for a member": (of(a=1), ".properties.a"),
    "required": ({"required": 1}, ".required"),
    "name in required": ({"required": ["a", ["b"]]}, ".required[1]"),
    "enum": ({"enum": "a,b"}, ".enum"),
    "items": ({"items": "list of things"}, ".items"),
    "prefixItems": ({"prefixItems": True}, ".prefixItems"),
    "anyOf": ({"anyOf": TEXT}, ".anyOf"),
    "null in anyOf": ({"anyOf": [TEXT, None]}, ".anyOf[1]"),
    "number in oneOf": ({"oneOf": [1]}, ".oneOf[0]"),
    "allOf": ({"allOf": "x"}, ".allOf"),
    "type": ({"type": 1}, ".type"),
    "type of types": ({"type": [{"type": "string"}]}, ".type"),
    "minLength": ({"minLength": "a"}, ".minLength"),
    "half a character": ({"maxLength": 1.5}, ".maxLength"),
    "boolean count": ({"minItems": True}, ".minItems"),
    "immense count": ({"minItems": 10**400}, ".minItems"),
    "minimum": ({"minimum": "now"}, ".minimum"),
    "infinity": ({"maximum": "1e999"}, ".maximum"),
    "exclusiveMaximum": ({"exclusiveMaximum": [3]}, ".exclusiveMaximum"),
    "multipleOf": ({"multipleOf": -2}, ".multipleOf"),
    "format": ({"format": {"a": 1}}, ".format"),
    "pattern": ({"pattern": ["a"]}, ".pattern"),
    "$ref": ({"$ref": 7}, ".$ref"),
    "uniqueItems": ({"uniqueItems": "perhaps"}, ".uniqueItems"),
    "additionalProperties": ({"additionalProperties": 0}, ".additionalProperties"),
    "patternProperties": ({"patternProperties": [1]}, ".patternProperties"),
    "$defs": ({"$defs": 1}, ".$defs"),
    "long": ({"pattern": ["a" * 1000]}, ".pattern"),
}
STANDARD = [
    {},
    True,
    {"type": ["string", "null"], "enum": ["a", None, 1], "default": None},
    {**of(required=INT, type=TEXT, enum=False, nullable=NULL), "required": ["type"]},
    {"type": "array", "items": [TEXT, INT], "additionalItems": False},
    {"type": "string", "minLength": 1.0, "maxLength": 0, "pattern": "^a$", "format": "odd"},
    {"const": {"type": "STRING", "enum": None, "required": True}},
    {"enum": [[], {}, None, {"properties": []}]},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://a.b/c#", **TEXT},
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a b": INT}},
    {"anyOf": [{}, {"$ref": "#/$defs/A~1b"}, False], "$defs": {"A/b": {"not": {}}}},
    {"type": "object", "dependentRequired": {"a": ["b"]}, "propertyNames": {"maxLength": 3}},
    {"type": "number", "exclusiveMinimum": -1e-5, "multipleOf": 0.5},
    {"type": "file", "x-order": 1, "examples": [None]},
    {"type": "null", "const": None},
]


@pytest.mark.parametrize("name", READ)
def test_each_value_is_read_as_what_it_stands_for(name):
    written, meant = READ[name]
    before = deepcopy(written)
    for place in (STRICT, LENIENT):
        assert standard_schema(written, place) == meant
    assert written == before
    assert standard_schema(meant, STRICT) == meant


@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_each_name_of_a_type_is_that_type(name, kind):
    assert standard_schema({"type": name}, STRICT) == {"type": kind}
    assert standard_schema({"type": [name]}, STRICT) == {"type": [kind]}
    assert standard_schema(of(a=name), STRICT) == of(a={"type": kind})


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_unclear_is_refused_by_its_place_or_left_out(name):
    written, path = UNCLEAR[name]
    with pytest.raises(InvalidGrammar) as refused:
        standard_schema(written, STRICT)
    assert refused.value.param == f"s{path}"
    assert len(refused.value.message) < 150
    standard_schema(written, LENIENT)


@pytest.mark.parametrize("schema", STANDARD, ids=json.dumps)
def test_a_standard_schema_stays_as_it_is(schema):
    assert standard_schema(schema, STRICT) == schema


def functions(schema, *, strict, form="hermes", root=None):
    parameters = {
        "type": "object", "properties": {"a": schema, "other": INT}, "required": ["a", "other"],
    } if root is None else root  # fmt: skip
    other = of(n={"type": "integer", "maximum": 9}) | {"required": ["n"]}
    found = {
        "other": FunctionDefinition("other", parameters=other),
        "send": FunctionDefinition("send", parameters=parameters, strict=strict),
    }
    return ToolCalls(PARSERS[form], {"other": 0, "send": 1}, found, required=True)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_json())
    return LLTokenizer(str(path), n_vocab=vocab_size(), eos_token=[END])


def matcher(vocabulary, grammar):
    text = grammar.text if grammar.kind == "grammar" else f"start: %json {grammar.text}"
    found = LLMatcher(vocabulary, text, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepts(found, tokenizer, text):
    ids = encode(tokenizer, text)
    copy = found.deep_copy()
    return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()


_OTHERS = {"const", "description", "title", "default", "examples", "unknown", "any_of"}
KEYWORDS = sorted({*READERS, *UNSUPPORTED, *_OTHERS})
VALUES = (
    None, [], {}, True, False, "", "1", "abc", "STRING", "true", 0, 1.5, -1, 2**53 + 1, 10**400,
    1e300, ["a"], [None], [1], [[]], [True], {"a": None}, {"a": []}, {"a": 1}, {"0": "a"}, "::",
    ["string", None], "#/x", "(", "http://a:b/",
)  # fmt: skip
OBJECTS = {"properties", "required", "dependentRequired", "propertyNames"}
TYPE_OF = {
    **dict.fromkeys(("format", "pattern", "minLength", "maxLength", "enum"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "additionalItems"), "array"),
    **dict.fromkeys((k for k in KEYWORDS if "Properties" in k), "object"),
    **dict.fromkeys(OBJECTS, "object"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("strict", first(1, [False, True]))
def test_no_value_of_a_keyword_ends_another_function(keyword, strict, tokenizer, vocabulary):
    num_served = 0
    for number, value in enumerate(VALUES):
        schema = {"type": TYPE_OF.get(keyword, "integer"), keyword: value}
        # `make test` has each value with one of the forms, and the next keyword with the other.
        turn = (number + KEYWORDS.index(keyword)) % 2
        for form in first(1, ("hermes", "qwen3_coder")[:: 1 - 2 * turn]):
            calls = functions(schema, strict=strict, form=form)
            try:
                grammar = answer_grammar(None, None, calls, tokenizer)
            except InvalidGrammar as refused:
                assert "in function send, " in refused.message, value
                assert len(refused.message) < 250
                place = "tools[1].function.parameters"
                assert (refused.param or "").startswith(place)
                # A reference is named, and so is a bound on the whole schema.
                assert (
                    keyword in (refused.param or "")
                    or keyword in refused.message
                    or (keyword == "any_of")
                ), (value, refused.message)
                continue
            assert grammar is not None
            found = matcher(vocabulary, grammar)
            assert accepts(found, tokenizer, call(form, "other", n=3)), value
            assert not accepts(found, tokenizer, call(form, "other", n=10)), value
            num_served += 1
    assert num_served


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("strict", [False, True])
def test_values_below_an_unknown_keyword_are_read_or_refused(keyword, strict):
    """They are no schema, unless a reference names them, so nothing has corrected them before."""
    odd = (*VALUES, [["string"]], [{}], {"a": [1]})
    for value in odd:
        for other in ("minItems", "maximum", "required", "properties"):
            for beside in ([["string"]], {}, None, "x"):
                schema = {"type": "object", "x-a": {keyword: value, other: beside}}
                with suppress(TriptychError):
                    found = held_to(schema, SchemaPlace("parameters", "send", strict=strict))
                    names = found["x-a"].get("required", [])
                    assert not isinstance(names, list) or all(isinstance(n, str) for n in names)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_no_value_of_a_keyword_of_an_answer_gets_the_librarys_words(keyword, tokenizer, vocabulary):
    for value in VALUES:
        schema = of(a={"type": TYPE_OF.get(keyword, "integer"), keyword: value})
        asked = Grammar("json_schema", json.dumps(schema), "response_format")
        try:
            grammar = answer_grammar(asked, None, None, tokenizer)
        except InvalidRequest as refused:
            assert (refused.param or "").startswith("response_format"), value
            continue
        assert grammar is not None
        matcher(vocabulary, grammar)


# A function as an SDK writes it, a call that it takes, and one that it does not.
ROOTS = {
    "PHP without parameters": ({"type": "object", "properties": [], "required": []}, {}, {"x": 1}),
    "Go's zero values": (
        {"type": "object", "properties": {"a": {"type": "string", "enum": None, "items": None,
         "properties": None, "required": None}}, "required": ["a"], "additionalProperties": None},
        {"a": "x"}, {"b": 1},
    ),
    "Google's": (
        {"type": "OBJECT", "properties": {"a": {"type": "ARRAY", "items": {"type": "STRING"},
         "maxItems": "1"}}, "required": ["a"]},
        {"a": ["x"]}, {"a": ["x", "y"]},
    ),
    "Python's": (
        {"type": "dict", "properties": {"a": {"type": "int"}, "b": "bool"}, "required": ["a", "b"]},
        {"a": 1, "b": True}, {"a": 1, "b": "x"},
    ),
    "draft 3": (
        {"type": "object", "properties": {"a": {"type": "integer", "required": True}}},
        {"a": 1}, {},
    ),
    "nullable": (
        {"type": "OBJECT", "nullable": True, "required": ["a"],
         "properties": {"a": {"type": "INTEGER", "nullable": True}}},
        {"a": None}, {"a": "x"},
    ),
    "required that is forbidden": (
        {"type": "object", "properties": {"a": INT}, "required": ["a", "b"]}, {"a": 1}, {"b": 1},
    ),
    "enum of another type": (
        {"type": "object", "properties": {"a": {"type": "integer", "enum": ["x"]}},
         "required": ["a"]},
        {"a": 1}, {"a": "x"},
    ),
    "limits that exclude each other": (
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}},
         "required": ["a"]},
        {"a": 1}, {"a": "x"},
    ),
    "property without a value": (
        {"type": "object", "properties": {"a": INT, "b": {"allOf": [TEXT, INT]}},
         "required": ["a", "b"]},
        {"a": 1}, {"a": "x"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("name", ROOTS)
def test_a_function_of_another_language_is_held_to_what_it_means(form, name, tokenizer, vocabulary):
    root, taken, refused = ROOTS[name]
    calls = functions(None, strict=False, form=form, root=root)
    grammar = answer_grammar(None, None, calls, tokenizer)
    assert grammar is not None
    found = matcher(vocabulary, grammar)
    assert accepts(found, tokenizer, call(form, "send", **taken))
    assert not accepts(found, tokenizer, call(form, "send", **refused))
    assert accepts(found, tokenizer, call(form, "other", n=1))


CONTRADICTIONS = {
    "required that is forbidden": ".required[1]",
    "enum of another type": ".properties.a.enum",
    "limits that exclude each other": ".properties.a.minimum",
    "property without a value": ".properties.b",
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_strict_refuses_a_contradiction_by_its_place(name, tokenizer):
    calls = functions(None, strict=True, root=ROOTS[name][0])
    with pytest.raises(InvalidGrammar, match=r"^in function send, ") as refused:
        answer_grammar(None, None, calls, tokenizer)
    path = CONTRADICTIONS[name]
    assert refused.value.param == f"tools[1].function.parameters{path}"


@pytest.mark.parametrize("kind", ["STRING[", "file", "ARRAY", "str", ["array", "null"], 3])
@pytest.mark.parametrize("strict", [False, True])
def test_arguments_that_are_no_object_are_refused_by_their_type(kind, strict, tokenizer):
    calls = functions(None, strict=strict, root={"type": kind})
    if kind == 3 and not strict:
        assert answer_grammar(None, None, calls, tokenizer) is not None
        return
    with pytest.raises(InvalidGrammar) as refused:
        answer_grammar(None, None, calls, tokenizer)
    assert refused.value.param == "tools[1].function.parameters.type"
    assert refused.value.message.startswith("in function send, ")


def test_a_schema_without_a_value_is_refused(tokenizer):
    schema = {"type": "object", "anyOf": [TEXT]}
    with pytest.raises(InvalidGrammar, match="no value fits") as refused:
        answer_grammar(Grammar("json_schema", json.dumps(schema), "s"), None, None, tokenizer)
    assert refused.value.param == "s"


# The type of a bare value, its text, and its value.
BARE = [
    ("STRING", "12345", "12345"),
    ("String", "true", "true"),
    ("str", "null", "null"),
    ("INTEGER", "12", 12),
    ("int", "12", 12),
    ("bool", "True", True),
    ("dict", '{"a": 1}', {"a": 1}),
    ("list[str]", '["a"]', ["a"]),
    ("float", "1.5", 1.5),
    ("any", "12", 12),
    (["STRING", None], "null", None),
]


@pytest.mark.parametrize(("kind", "text", "value"), BARE)
@pytest.mark.parametrize("root", ["object", "OBJECT", "dict", None])
def test_bare_values_come_back_as_the_type_that_is_meant(kind, text, value, root):
    schema = {"type": root, "properties": {"zip": {"type": kind}}}
    written = f"<tool_call>\n<function=f>\n<parameter=zip>\n{text}\n</parameter>\n</function>\n"
    for step in (1, 7, len(written)):
        parser = Qwen3CoderParser({"f": schema})
        pieces = [written[at : at + step] for at in range(0, len(written), step)]
        parts = [part for piece in pieces for part in parser.feed(piece)]
        (found,) = (part for part in join([*parts, *parser.finish()]) if isinstance(part, Call))
        assert json.loads(found.arguments) == {"zip": value}


def test_each_property_of_a_wide_schema_is_read(tokenizer):
    names = [f"p{number}" for number in range(900)]
    member = {"type": "STRING", "required": True}
    root = {"type": "OBJECT", "properties": dict.fromkeys(names, member)}
    grammar = answer_grammar(None, None, functions(None, strict=False, root=root), tokenizer)
    assert grammar is not None
    assert grammar.text.count('"type": "string"') == len(names)
