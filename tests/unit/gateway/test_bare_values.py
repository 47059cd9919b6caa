"""Calls whose strings are bare text (Qwen3-Coder's, Qwen3.5's form): names, types, enumerations and
constants are enforced, values come back by their types, and the rest is refused by its place.
"""

import asyncio
import itertools
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")  # the decoder's
import jsonschema
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.common.errors import InvalidRequest
from services.decoder.masks.grammar import Grammar as Form
from services.decoder.masks.grammar import GrammarSource, TokenConstraints
from services.decoder.masks.grammars import Grammars
from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.argument_values import Parameters
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.parts import Call, join
from services.gateway.forms.tools import FunctionDefinition
from tests.cases import cases
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size
from tests.unit.gateway.test_answers import encode

END = added_ids()["<|im_end|>"]
NUM_SAMPLES = cases(10, 25)


def object_of(required="", /, **properties):
    return {"type": "object", "properties": properties, "required": required.split(),
            "additionalProperties": False}  # fmt: skip


def of(schema, **more):
    """Parameters of which `a` alone is required."""
    return object_of("a", a=schema) | more


def of_pattern(pattern, schema):
    return {"patternProperties": {pattern: schema}, "additionalProperties": False}


TEXT, INT, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
POINT = object_of("x", x={"type": "number", "maximum": 1e6, "minimum": -3}, label=TEXT)
SERVED = {
    "all types": object_of(
        "s i", s=TEXT, i=INT, n={"type": "number", "minimum": 0, "maximum": 9},
        b={"type": "boolean"}, z=NULL, o=POINT,
        l={"type": "array", "items": POINT, "maxItems": 2},
    ),
    "enum of texts": of({"enum": ["12", "", "a\nb", "null", "{}", "°C", ' "x" ']}),
    "enum of all": of({"enum": ["12", 12, 13, True, None, 1.5, ["a", {"b": 1}]]}),
    "empty const": of({"const": ""}),
    "const": of({"const": "</para"}),
    "const object": of({"const": {"k": [1, None]}}),
    "limits": of({"type": "integer", "minimum": -5, "maximum": 12}),
    "multiple": of({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70}),
    "text or null": of({"anyOf": [TEXT, NULL]}),
    "choice or null": of({"anyOf": [{"enum": ["1", "null", "b"]}, NULL]}),
    "text, number or boolean": of({"type": ["string", "number", "boolean"]}),
    "text or object": of({"anyOf": [TEXT, POINT]}),
    "text or array or limited": of({"oneOf": [
        TEXT,
        {"type": "array", "items": INT, "maxItems": 2},
        {"type": "integer", "minimum": 100, "maximum": 120}]}),
    "anything": of({}),
    "true": of(True),
    "reference": of({"$ref": "#/$defs/P"}, **{"$defs": {"P": POINT}}),
    "anchor": object_of("a", a={"$ref": "#p"}, b={"type": "array", "items": {"$ref": "#p"}})
        | {"$defs": {"P": {"$anchor": "p", **POINT}}},
    "reference into properties": object_of(
        "a", a={"type": "array", "items": {"$ref": "#/properties/b"}, "maxItems": 2}, b=POINT),
    "root reference": {"$ref": "#/$defs/R", "$defs": {"R": object_of("p", p=POINT, q=INT)}},
    "tree": of({"$ref": "#/$defs/N"}, **{"$defs": {"N": object_of(
        "v", v=INT, next={"$ref": "#/$defs/N"})}}),
    "escaped pointer": of({"$ref": "#/$defs/a~1b"}, **{"$defs": {"a/b": INT}}),
    "names": object_of("", **{"é": INT, '"': TEXT, "a b": INT, "\\": NULL, "<b": INT}),
    "names of keywords": of(object_of(
        "default const examples", default=INT, const=object_of("enum", enum=INT),
        examples={"$ref": "#/$defs/default"}), **{"$defs": {"default": INT}}),
    "optional alone": object_of("", a=TEXT, b=INT, c=POINT),
    "forbidden": object_of("a", a=INT, b=False),
    "unknown format": of({"type": "string", "format": "odd"}),
    "annotations": of({"type": "string", "title": "T", "x-order": 1}, title="U"),
    "others of a type": object_of("a", a=TEXT) | {"additionalProperties": INT},
    "others of any type": object_of("a", a=TEXT) | {"additionalProperties": True},
    "any object": {"type": "object"},
    "no more than two": object_of("a", a=INT) | {"additionalProperties": INT, "maxProperties": 2},
    "required among others": object_of("q") | {"additionalProperties": POINT},
    "nested and free": of({"type": "object"}),
    "limits that are met": of(INT, minProperties=1, maxProperties=5),
}  # fmt: skip
REFUSED = {
    ".properties.a.pattern": of({"type": "string", "pattern": "^(?!x)"}),
    ".$defs.A.pattern": of({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"pattern": "\\bx", **TEXT}}}),
    ".properties.a.format": of({"type": "string", "format": "iri"}),
    ".properties.a.not": of({"type": "string", "not": {"const": "x"}}),
    ".properties.a.if": of({"type": "string", "if": {}}),
    ".properties.a.uniqueItems": of({"type": "array", "uniqueItems": True}),
    ".properties.a.items.properties.k.contains": of(
        {"type": "array", "items": object_of("", k={"type": "array", "contains": INT})}
    ),
    ".properties.a.minLength": of({"type": "string", "minLength": 2}),
    ".properties.a": of({"enum": ["ok", "</parameter>"]}),
    ".properties.a.maxLength": of({"type": "string", "maxLength": 5}),
    ".properties.a.anyOf[0].pattern": of({"anyOf": [{"type": "string", "pattern": "a"}, NULL]}),
    ".properties.a.oneOf": of({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]}),
    ".properties.b.format": object_of("", a=INT, b={"type": "string", "format": "email"}),
    ".additionalProperties.minLength": {"additionalProperties": {"minLength": 2}},
    ".properties.a.type": of({"type": "file"}),
    ".properties.b": object_of("b", b=False),
    ".properties.a>b": object_of("", **{"a>b": TEXT}),
    ".properties. a": object_of("", **{" a": TEXT}),
    ".anyOf": {"properties": {}, "anyOf": [{}]},
    ".patternProperties": {"patternProperties": {"^a": TEXT, "b$": INT}},
    ".patternProperties.(?!a)": of_pattern("(?!a)", {}),
    ".patternProperties.^a.pattern": of_pattern("^a", {"pattern": "\\bx", **TEXT}),
    ".unevaluatedProperties": {"properties": {}, "unevaluatedProperties": INT},
    ".minProperties": object_of("", a=INT) | {"minProperties": 1},
    ".maxProperties": object_of("", a=INT, b=INT) | {"maxProperties": 1},
    ".required[0]": object_of("b", a=INT),
    ".properties.a.$ref": of({"$ref": "http://elsewhere/"}),
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_json())
    return LLTokenizer(str(path), n_vocab=vocab_size(), eos_token=[END])


def format_of(schema, *, strict=True, required=True, form="qwen3_coder"):
    function = FunctionDefinition("f", parameters=schema, strict=strict)
    return None, ToolCalls(PARSERS[form], {"f": 0}, {"f": function}, required, max_calls=1)


def compiled(schema, tokenizer, vocabulary, *, strict=True):
    grammar = answer_grammar(None, *format_of(schema, strict=strict), tokenizer)
    assert grammar is not None
    matcher = LLMatcher(vocabulary, grammar.text, limits=LLParserLimits())
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar.text}"
    return matcher


def takes(matcher, tokenizer, text):
    ids = encode(tokenizer, text)
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()


def arguments_of(text, schema, chunks=None):
    """The arguments of the one call, whole or by pieces."""
    start, calls = format_of(schema)
    parser = AnswerFormat(start, replace(calls, has_grammar=True), calls.required).parser()
    assert parser is not None
    parts = [part for chunk in chunks or [text] for part in parser.feed(chunk)]
    (call,) = join([*parts, *parser.finish()])
    assert isinstance(call, Call)
    return call.arguments


def call_of(**values):
    """As the model's template writes it."""
    written = "".join(
        f"<parameter={name}>\n{as_template(value)}\n</parameter>\n"
        for name, value in values.items()
    )
    return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"


def as_template(value):
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def cut(text, rng):
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


ENDS = ("\n</parameter>\n", "</", '"', "}", "]", "\n", "a", "1", "true", "{", "[")


def sample(matcher, tokenizer, rng, max_tokens=220):
    """What a random model writes, if it comes to an end."""
    matcher, ids = matcher.deep_copy(), []
    mask = allocate_token_bitmask(1, vocab_size())
    ends = [tokenizer.encode_text(text) for text in ENDS]
    while len(ids) < max_tokens and not matcher.is_stopped():
        # Random text does not end on its own.
        some = rng.choice(ends[:1] * 3 + ends)
        if rng.random() < 0.5 and matcher.deep_copy().try_consume_tokens(some) == len(some):
            assert matcher.consume_tokens(some)
            ids += some
            continue
        fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocab_size()]
        token = rng.choice(np.flatnonzero(bits).tolist())
        if token == END:
            break
        assert matcher.consume_token(token)
        ids.append(token)
    else:
        if not matcher.is_accepting():
            return None
    return b"".join(tokenizer.token_bytes(i) for i in ids).decode()


def validate(text, schema):
    """The arguments, checked."""
    twins = None if is_open_ended(schema) else _without_twins
    found = json.loads(text, object_pairs_hook=twins)
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(found)
    return found


def is_open_ended(schema):
    """Whether names that the schema does not list may come; perhaps twice, as in any JSON."""
    return schema.get("additionalProperties") is not False or "patternProperties" in schema


def _without_twins(pairs):
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return dict(pairs)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SERVED)
def test_every_call_of_a_random_model_validates(name, tokenizer, vocabulary):
    schema = SERVED[name]
    matcher = compiled(schema, tokenizer, vocabulary)
    rng, ended = random.Random(name), 0
    for _ in range(NUM_SAMPLES):
        text = sample(matcher, tokenizer, rng)
        if text is None:
            continue
        ended += 1
        whole = arguments_of(text, schema)
        found = validate(whole, schema)
        assert arguments_of(text, schema, cut(text, rng)) == whole
        # What a template writes of it is a call with the same arguments; Python's JSON has no
        # number like 1e999.
        again = call_of(**found)
        if "nfinity" in again or "inf" in again:
            continue
        assert json.loads(arguments_of(again, schema)) == found
    assert ended > NUM_SAMPLES / 4


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(tokenizer_json())
    return Grammars(directory, vocab_size(), (END,))


def form_of(grammar, **options):
    source = GrammarSource(grammar.kind, grammar.text, grammar.plain_strings)
    return Form(source, stop_ids=(END,), **options)


def check_masks(grammar, tokenizer, grammars, rng):
    """A random model's masks, of the decoder and of llguidance alone; how many had a probe."""
    form = form_of(grammar)
    rows = np.zeros((2, grammars.num_mask_words), np.int32)
    openers = [
        tokenizer.encode_text(text)
        for text in ("\n<function=f>\n<parameter=a>\n", "\n</parameter>\n", "</param", "{", "nu")
    ]
    num_probed = 0
    for _ in range(4):
        matcher = asyncio.run(grammars.matcher(TokenConstraints(form)))
        alone = matcher.grammar.state.deep_copy()
        assert grammars.fill(matcher, [], rows[0]) is True
        ids = [added_ids()["<tool_call>"], *openers[0]] if rng.random() < 0.8 else []
        for _ in range(60):
            if ids and alone.deep_copy().try_consume_tokens(ids[:1]):
                token_id, *ids = ids
            else:
                allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little"))
                allowed = allowed[allowed < vocab_size()]
                token_id = int(rng.choice(allowed.tolist() or [END]))
                ids = rng.choice(openers) if rng.random() < 0.2 else []
            if token_id == END:
                break
            assert alone.consume_token(token_id)
            assert grammars.fill(matcher, [token_id], rows[0]) is True
            num_probed += matcher.grammar._in_string
            alone.unsafe_compute_mask_ptr(rows[1].ctypes.data, rows[1].nbytes)
            words = rows[:, : grammars.num_words]
            assert (words[0] == words[1]).all()
    return num_probed


@pytest.mark.parametrize("length", [40, 4000])
def test_a_long_string_is_no_work_that_ends_a_call(length, tokenizer, grammars):
    schema = object_of("a", a=TEXT)
    grammar = answer_grammar(None, *format_of(schema), tokenizer)
    assert grammar is not None
    rows = np.zeros((1, grammars.num_mask_words), np.int32)
    form = form_of(grammar)
    matcher = asyncio.run(grammars.matcher(TokenConstraints(form)))
    text = ("é </p \n</parameter " * (length // 30 + 1))[:length].rstrip()
    for token_id in encode(tokenizer, call_of(a=text[:1000])):
        assert grammars.fill(matcher, [token_id], rows[0]) is True
    assert rows[0].view(np.uint8)[END >> 3] >> (END & 7) & 1


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_free_text_beside_strict_calls_has_its_least_tokens(form, tokenizer, grammars):
    schema = object_of("a", a=INT)
    grammar = answer_grammar(None, *format_of(schema, required=False, form=form), tokenizer)
    assert grammar is not None
    rows = np.zeros((1, grammars.num_mask_words), np.int32)
    form = form_of(grammar, min_tokens=3)
    matcher = asyncio.run(grammars.matcher(TokenConstraints(form)))
    may_end: list[bool] = []
    for ids in ([], *([i] for i in tokenizer.encode_text("some words of an answer")[:5])):
        assert grammars.fill(matcher, ids, rows[0]) is True
        may_end.append(bool(rows[0].view(np.uint8)[END >> 3] >> (END & 7) & 1))
    assert may_end == [False, False, False, True, True, True]


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("required", [True, False])
def test_bounded_strings_of_calls_are_known_to_be_plain(form, required, tokenizer, grammars):
    schema = object_of("a", a={"type": "string", "maxLength": 9}, b={"anyOf": [TEXT, NULL]})
    grammar = answer_grammar(None, *format_of(schema, required=required, form=form), tokenizer)
    assert grammar is not None
    if form == "llama3_json" and not required:  # what text may begin with depends
        assert not grammar.plain_strings
    else:
        assert check_masks(grammar, tokenizer, grammars, random.Random(form)) > 10


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_its_place(path, tokenizer, vocabulary):
    with pytest.raises(InvalidRequest, match="strict") as refused:
        answer_grammar(None, *format_of(REFUSED[path]), tokenizer)
    assert refused.value.param == f"tools[0].function.parameters{path}"
    # Not strict, the rest is enforced.
    matcher = compiled(REFUSED[path], tokenizer, vocabulary, strict=False)
    assert not takes(matcher, tokenizer, call_of(a=1, zz=[]).replace("=f>", "=g>"))


FIVE = object_of("s i", s=TEXT, i=INT, b={"type": "boolean"}, o=POINT)


@pytest.mark.parametrize(
    ("values", "is_valid"),
    [
        ({"s": "12", "i": 3}, True),
        ({"s": "a\n<b>", "i": -3, "b": True, "o": {"x": 1.5, "label": "</parameter>"}}, True),
        ({"s": "", "i": 0, "b": "false"}, True),
        ({"s": "a"}, False),  # a required one is missing
        ({"i": 3}, False),
        ({}, False),
        ({"i": 3, "s": "a"}, False),  # in another order
        ({"s": "a", "i": 3, "c": 1}, False),  # unknown
        ({"s": "a", "i": "three"}, False),
        ({"s": "a", "i": 3.5}, False),
        ({"s": "a", "i": 3, "b": 1}, False),
        ({"s": "a", "i": 3, "o": {"x": 1, "y": 2}}, False),
        ({"s": "a", "i": 3, "o": "{x: 1}"}, False),
        ({"s": "</parameter>", "i": 3}, False),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_which_calls_are_of_the_schema(values, is_valid, strict, tokenizer, vocabulary):
    matcher = compiled(FIVE, tokenizer, vocabulary, strict=strict)
    assert takes(matcher, tokenizer, call_of(**values)) == is_valid
    if is_valid:
        found = json.loads(arguments_of(call_of(**values), FIVE))
        assert found == values | ({"b": False} if values.get("b") == "false" else {})


def test_a_parameter_is_there_once(tokenizer, vocabulary):
    matcher = compiled(FIVE, tokenizer, vocabulary)
    twice = call_of(s="a", i=3).replace(
        "</function>", "<parameter=i>\n3\n</parameter>\n</function>"
    )
    assert takes(matcher, tokenizer, call_of(s="a", i=3))
    assert not takes(matcher, tokenizer, twice)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (TEXT, "12", "12"),
        (TEXT, " true\n", " true\n"),
        (TEXT, '{"a": 1}', '{"a": 1}'),
        (INT, "12", 12),
        (INT, " 12 ", 12),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "False", False),
        (NULL, "None", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "12.0", 12.0),
        ({"type": ["string", "integer"]}, "12.5", "12.5"),
        ({"type": ["string", "integer"]}, '"12"', '"12"'),
        ({"enum": ["12", 13]}, "12", "12"),
        ({"enum": ["12", 13]}, "13", 13),
        ({"anyOf": [{"enum": ["null"]}, INT]}, "null", "null"),
        ({"type": ["string", "object"]}, '{"a": "</parameter>"}', {"a": "</parameter>"}),
        ({"type": ["string", "object"]}, '{"a', '{"a'),
        ({"allOf": [TEXT, {"maxLength": 9}]}, "12", "12"),
        ({}, "12", 12),
        ({}, "twelve", "twelve"),
        ({"type": "array"}, "\u00a0[1]", "\u00a0[1]"),
    ],
)
def test_values_have_the_schema_s_types(schema, text, expected):
    call = call_of(a=text)
    for chunks in ([call], list(call)):
        found = json.loads(arguments_of(call, of(schema), chunks))["a"]
        assert found == expected and type(found) is type(expected)


def test_an_integer_of_any_length_is_one():
    digits = "1" * 5000  # more than Python reads
    found = arguments_of(call_of(a=digits), of(INT))
    assert found == '{"a": 1.7976931348623157e+308}'
    validate(found, of(INT))


@pytest.mark.parametrize("strict", [True, False])
def test_open_ended_parameters_may_have_more(strict, tokenizer, vocabulary):
    schema = object_of("a", a=TEXT) | {"additionalProperties": INT}
    matcher = compiled(schema, tokenizer, vocabulary, strict=strict)
    assert takes(matcher, tokenizer, call_of(a="x"))
    assert takes(matcher, tokenizer, call_of(a="x", b=1, c=2))
    assert not takes(matcher, tokenizer, call_of(a="x", b="y"))
    assert json.loads(arguments_of(call_of(a="1", b=2), schema)) == {"a": "1", "b": 2}


def test_a_name_of_some_pattern_may_have_any_value(tokenizer, vocabulary):
    schema = object_of("b", b=INT) | {"patternProperties": {"^x_": {"type": "string"}}}
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(None, *format_of(schema), tokenizer)
    assert refused.value.param == "tools[0].function.parameters.patternProperties"
    matcher = compiled(schema, tokenizer, vocabulary, strict=False)
    assert takes(matcher, tokenizer, call_of(b=1, x_a="12"))
    assert not takes(matcher, tokenizer, call_of(x_a="12"))
    assert json.loads(arguments_of(call_of(b=1, x_a="12", c="d"), schema)) == {
        "b": 1, "x_a": 12, "c": "d",
    }  # fmt: skip


def test_no_schema_takes_exponential_time(tokenizer, vocabulary):
    """Each definition names the next one many times."""
    names = [f"d{index}" for index in range(25)]
    definitions: dict[str, object] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{following}"}] * 20}
        for name, following in itertools.pairwise(names)
    }
    definitions[names[-1]] = TEXT
    schema = of({"$ref": "#/$defs/d0"}, **{"$defs": definitions})
    assert Parameters(schema).type_of("a").types == {"string"}
    matcher = compiled(schema, tokenizer, vocabulary)
    assert takes(matcher, tokenizer, call_of(a="12"))


def test_what_many_parameters_share_is_not_copied_without_end(tokenizer):
    big = object_of("", **{f"property {index}": INT for index in range(900)})
    schema = object_of("", **{f"p{index}": {"$ref": "#/$defs/B", "maxProperties": index}
                              for index in range(100)}) | {"$defs": {"B": big}}  # fmt: skip
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="more than 262144") as refused:
        answer_grammar(None, *format_of(schema), tokenizer)
    assert refused.value.param == "tools[0].function.parameters"
    assert time.process_time() - started < 2  # seconds; all copies take minutes


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)  # fmt: skip
TYPED = object_of("", s=TEXT, i=INT, n={"type": "number"}, b={"type": "boolean"}, z=NULL,
                  o={"type": "object"}, l={"type": "array"})  # fmt: skip


@pytest.mark.thorough
@settings(max_examples=cases(50, 150), deadline=None)
@given(
    st.fixed_dictionaries({}, optional={
        "s": st.text(), "i": st.integers(), "n": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(), "z": st.none(), "o": st.dictionaries(st.text(), JSON_VALUES),
        "l": st.lists(JSON_VALUES),
    }),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_what_the_template_writes_comes_back(values, rng):
    if "</parameter>" in values.get("s", ""):
        return
    call = call_of(**values)
    found = json.loads(arguments_of(call, TYPED))
    assert found == values
    assert list(map(type, found.values())) == list(map(type, values.values()))
    assert json.loads(arguments_of(call, TYPED, cut(call, rng))) == values
