"""Grammars of calls, in the library that holds answers to them: what a random model writes parses
into calls that validate.
"""

import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")  # the decoder's
import jsonschema
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from services.common.errors import InvalidRequest
from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.parts import Call, Reasoning, Text, join
from services.gateway.forms.tools import FunctionDefinition
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size
from tests.unit.gateway.test_answers import encode

END = added_ids()["<|im_end|>"]
POINT = {
    "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"],
    "additionalProperties": False,
}  # fmt: skip
LOOK = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "what \"to\" say"},
        "count": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "unit": {"enum": ["°C", "<F>", "\n"]},
        "at": {"$ref": "#/$defs/Point"},
        "many": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 2},
        "flag": {"type": "boolean"},
    },
    "required": ["text", "unit", "at"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}  # fmt: skip
NONE = {"type": "object", "properties": {}}
TWO = {"look": LOOK, "now": NONE}
OTHER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def use(functions, *, strict=False, **fields):
    found = {
        name: FunctionDefinition(name, parameters=schema, strict=strict)
        for name, schema in functions.items()
    }
    places = {name: index for index, name in enumerate(functions)}
    return ToolCalls(PARSERS["hermes"], places, found, **fields)


def format_of(form, tool_use, reasoning=None):
    return reasoning, replace(tool_use, parser=PARSERS[form])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_json())
    return LLTokenizer(str(path), n_vocab=vocab_size(), eos_token=[END])


@pytest.fixture(scope="module")
def matcher(vocabulary):
    def create(grammar: Grammar) -> LLMatcher:
        text = grammar.text
        if grammar.kind != "grammar":
            text = LLMatcher.grammar_from_json_schema(text)
        found = LLMatcher(vocabulary, text, limits=LLParserLimits())
        assert not found.is_error(), f"{found.get_error()}\n{grammar.text}"
        return found

    return create


def accepts(matcher, tokenizer, text):
    """Whether a text is whole of the grammar."""
    ids = encode(tokenizer, text)
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()


def sample(matcher, rng, max_tokens=250):
    """What a random model writes: ids, and whether it came to an end."""
    matcher, ids = matcher.deep_copy(), []
    mask = allocate_token_bitmask(1, vocab_size())
    while len(ids) < max_tokens and not matcher.is_stopped():
        fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocab_size()]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed
        # Random text does not end on its own: what ends it is as likely as all else.
        if rng.random() < 0.1 and matcher.deep_copy().try_consume_tokens(CLOSING) == len(CLOSING):
            assert matcher.consume_tokens(CLOSING)
            ids += CLOSING
            continue
        enders = [i for i in allowed if i == END or i in ENDERS]
        token = rng.choice(enders if enders and rng.random() < 0.3 else allowed)
        if token == END:
            return ids, True
        assert matcher.consume_token(token)
        ids.append(token)
    return ids, matcher.is_accepting()


ENDERS: set[int] = set()
CLOSING: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def _enders(tokenizer):
    for text in ('"', "}", "]", ",", "</", "<", "\n", "0", "{", '{"', "para", "meter", ">"):
        ENDERS.update(tokenizer.encode_text(text)[:1])
    CLOSING.extend(tokenizer.encode_text("\n</parameter>\n"))
    ENDERS.update(added_ids()[t] for t in ("</tool_call>", "<tool_call>", "</think>"))


def parse(tokenizer, ids, answer_format):
    start, calls = answer_format
    parser = AnswerFormat(start, replace(calls, has_grammar=True), calls.required).parser()
    text = b"".join(tokenizer.token_bytes(i) for i in ids).decode(errors="replace")
    return join([*parser.feed(text), *parser.finish()])


def check(parts, schemas):
    """Every call is of a function and validates."""
    calls = [part for part in parts if isinstance(part, Call)]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return calls


@pytest.mark.parametrize("form", PARSERS)
@pytest.mark.parametrize("strict", [False, True])
def test_required_calls_of_a_random_model_validate(form, strict, tokenizer, matcher):
    answer_format = format_of(form, use(TWO, strict=strict, required=True))
    compiled = matcher(answer_grammar(None, *answer_format, tokenizer))
    rng, names, ended = random.Random(form), set(), 0
    for _ in range(60):
        ids, is_whole = sample(compiled, rng)
        if not is_whole:
            continue
        ended += 1
        parts = parse(tokenizer, ids, answer_format)
        calls = check(parts, TWO)
        assert calls and len(calls) == len(parts)  # calls alone
        names |= {call.name for call in calls}
    assert ended > 5 and names == {"look", "now"}


@pytest.mark.parametrize("form", PARSERS)
def test_strict_functions_leave_text_free(form, tokenizer, matcher):
    answer_format = format_of(form, use(TWO, strict=True))
    compiled = matcher(answer_grammar(None, *answer_format, tokenizer))
    assert accepts(compiled, tokenizer, "Just text, 中 < 5.\n\n")
    assert accepts(compiled, tokenizer, "")
    rng, num_calls, num_texts = random.Random(form), 0, 0
    for _ in range(150):
        ids, is_whole = sample(compiled, rng)
        if is_whole:
            parts = parse(tokenizer, ids, answer_format)
            num_calls += len(check(parts, TWO))
            num_texts += any(isinstance(part, Text) for part in parts)
    assert num_calls > 1 and num_texts > 3


CALL = {
    "hermes": '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>',
    "llama3_json": '{{"name": "{}", "parameters": {{}}}}',
    "qwen3_coder": "<tool_call>\n<function={}>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("form", PARSERS)
def test_what_may_be_called(form, tokenizer, matcher):
    def taken(text, *args, **fields):
        answer_format = format_of(form, *args, **fields)
        return accepts(matcher(answer_grammar(None, *answer_format, tokenizer)), tokenizer, text)

    now, look = CALL[form].format("now"), CALL[form].format("look")
    two = {"look": NONE, "now": NONE}
    named = use({"now": NONE}, required=True, max_calls=1)
    assert taken(now, named) and not taken(look, named) and not taken("hi", named)
    assert not taken(f"{now}\n{now}", named)
    required = use(two, required=True)
    assert taken(now, required) and taken(look, required) and not taken("", required)
    assert taken(f"{now}\n{look}", required) == (form != "llama3_json")
    allowed = use(TWO)
    allowed = replace(allowed, functions={"now": allowed.functions["now"]})
    assert taken(now, allowed) and taken("hi", allowed) and not taken(look, allowed)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("reasoning", ["open", "optional"])
@pytest.mark.parametrize("required", [False, True])
def test_reasoning_stays_free(form, reasoning, required, tokenizer, matcher):
    answer_format = format_of(form, use(TWO, strict=True, required=required), reasoning)
    grammar = answer_grammar(None, *answer_format, tokenizer)
    compiled, call = matcher(grammar), CALL[form].format("now")
    if reasoning == "open":
        assert grammar.begins_after == (added_ids()["</think>"],)
        assert accepts(compiled, tokenizer, f"\n\n{call}")
    else:
        assert grammar.begins_after == ()
        assert accepts(compiled, tokenizer, f"<think>\nwhy? <b>\n</think>\n\n{call}")
        assert accepts(compiled, tokenizer, call)
        assert not accepts(compiled, tokenizer, "<think>\nwhy?")
    assert accepts(compiled, tokenizer, "\n\nNo call.") != required


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_an_answer_is_a_call_or_of_the_format(form, tokenizer, matcher):
    answer_format = format_of(form, use(TWO))
    asked = Grammar("json_schema", json.dumps(OTHER), "response_format")
    compiled = matcher(answer_grammar(asked, *answer_format, tokenizer))
    assert accepts(compiled, tokenizer, '{"a": 5}')
    assert accepts(compiled, tokenizer, CALL[form].format("now"))
    assert not accepts(compiled, tokenizer, "text")
    rng, kinds = random.Random(form), set()
    for _ in range(40):
        ids, is_whole = sample(compiled, rng)
        if is_whole:
            parts = parse(tokenizer, ids, answer_format)
            kinds.add(bool(check(parts, TWO)))
            if isinstance(parts[0], Text):
                jsonschema.validate(json.loads(parts[0].text), OTHER)
    assert kinds == {True, False}
    choice = Grammar("choice", '["a\\"b","c"]', "structured_outputs.choice")
    compiled = matcher(answer_grammar(choice, *answer_format, tokenizer))
    assert accepts(compiled, tokenizer, 'a"b')
    lark = Grammar("grammar", 'start: "a"', "structured_outputs.grammar")
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(lark, *answer_format, tokenizer)
    assert refused.value.param == "structured_outputs.grammar"
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(asked, *format_of("llama3_json", use(TWO)), tokenizer)
    assert refused.value.param == "response_format"
    required = format_of("llama3_json", use(TWO, required=True))
    assert not accepts(matcher(answer_grammar(asked, *required, tokenizer)), tokenizer, '{"a": 5}')


def test_the_decoder_learns_who_has_written_a_grammar(tokenizer):
    """Only clients' grammars may be ambiguous."""
    calls = answer_grammar(None, *format_of("hermes", use(TWO, strict=True)), tokenizer)
    lark = Grammar("grammar", 'start: "a"', "structured_outputs.grammar")
    for grammar, by_gateway in (
        (calls, True),
        (lark, False),
        (answer_grammar(lark, None, None, tokenizer), False),
        (answer_grammar(lark, "open", None, tokenizer), False),
        (answer_grammar(lark, "optional", None, tokenizer), False),
    ):
        sent = grammar.to_proto((1,))
        assert (sent.kind, sent.by_gateway) == (pb.Grammar.KIND_GRAMMAR, by_gateway)


def test_without_a_need_there_is_no_grammar(tokenizer):
    assert answer_grammar(None, "open", None, tokenizer) is None
    assert answer_grammar(None, *format_of("hermes", use(TWO)), tokenizer) is None
    asked = Grammar("json_schema", '{"type": "object"}', "response_format")
    assert answer_grammar(asked, None, None, tokenizer) == asked
    begun = answer_grammar(asked, "open", None, tokenizer)
    assert begun.kind == "json_schema"
    assert begun.begins_after == (added_ids()["</think>"],)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", json.dumps(OTHER | {"format": "odd"}), '{"a": 1}', "text"),
        ("json_schema", '{"type": "object"}', '{"b": {}}', "[]"),
        ("choice", '["yes","no"]', "no", "maybe"),
        ("regex", r"a/\/b\n?", "a//b", "a/b"),
    ],
)
def test_a_model_that_may_think_answers_in_form_either_way(
    kind, text, good, bad, tokenizer, matcher
):
    asked = Grammar(kind, text, "response_format")
    grammar = answer_grammar(asked, "optional", None, tokenizer)
    assert (grammar.begins_after, grammar.param) == ((), "response_format")
    compiled = matcher(grammar)
    for before in ("", "<think>\nwhy? <b>\n</think>\n\n"):
        assert accepts(compiled, tokenizer, before + good)
        assert not accepts(compiled, tokenizer, before + bad)
    lark = Grammar("grammar", 'start: "a"', "structured_outputs.grammar")
    waiting = answer_grammar(lark, "optional", None, tokenizer)
    assert waiting.begins_after == (added_ids()["</think>"],)


@pytest.mark.parametrize("form", PARSERS)
def test_a_schema_of_no_object_is_refused(form, tokenizer):
    functions = use({"now": NONE, "f": {"type": "array"}}, required=True)
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(None, *format_of(form, functions), tokenizer)
    assert refused.value.param == "tools[1].function.parameters.type"


@pytest.mark.parametrize("form", PARSERS)
def test_keywords_that_are_not_enforced_are_refused_only_if_strict(
    form, vocabulary, tokenizer, matcher
):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "if": {}}}}
    matcher(answer_grammar(None, *format_of(form, use({"f": schema}, required=True)), tokenizer))
    strict = use({"now": NONE, "f": schema}, strict=True, required=True)
    with pytest.raises(InvalidRequest, match="if is not supported") as refused:
        answer_grammar(None, *format_of(form, strict), tokenizer)
    assert refused.value.param == "tools[1].function.parameters.properties.a.if"
    # What only the library knows, it refuses.
    limits = {"type": "integer", "minimum": 0.5, "maximum": 0.6}
    schema = {"type": "object", "properties": {"a": limits}, "required": ["a"]}
    grammar = answer_grammar(None, *format_of(form, use({"f": schema}, strict=True)), tokenizer)
    assert grammar.param == "tools[0].function.parameters"
    assert "nsatisfiable" in LLMatcher(vocabulary, grammar.text, log_level=0).get_error()


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("name", ['a"b', "a\nb", "a/b", "é", "start: x", "a}b", "\\"])
def test_no_name_breaks_out_of_the_grammar(form, name, tokenizer, matcher):
    schema = {"type": "object", "properties": {name: {"enum": [name]}}, "required": [name]}
    answer_format = format_of(form, use({"f": schema}, required=True))
    compiled = matcher(answer_grammar(None, *answer_format, tokenizer))
    ids, is_whole = sample(compiled, random.Random(0), 400)
    if is_whole:
        check(parse(tokenizer, ids, answer_format), {"f": schema})


def test_reasoning_is_parsed_beside_a_required_call(tokenizer):
    answer_format = format_of("hermes", use(TWO, required=True), "open")
    ids = encode(tokenizer, "hm\n</think>\n\n" + CALL["hermes"].format("now"))
    reasoning, call = parse(tokenizer, ids, answer_format)
    assert reasoning == Reasoning("hm")
    assert re.fullmatch("call_.*", call.call_id) and call.arguments == "{}"


KEYWORDS = [
    "type", "properties", "required", "enum", "const", "anyOf", "$ref", "$defs", "items",
    "additionalProperties", "maxLength", "pattern", "x-guidance", "a",
]  # fmt: skip
VALUES = [
    "object", "string", "integer", ["string", "null"], "a", "#/$defs/a", "#", "/", 1, -1, None,
    True, [], {}, 0.5, "\ud7ff", '"',
]  # fmt: skip
SCHEMAS = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: (
        st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4) | st.lists(inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("form", PARSERS)
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYWORDS), SCHEMAS, max_size=5), st.booleans())
def test_no_schema_breaks_the_gateway(form, tokenizer, vocabulary, schema, strict):
    """It is a grammar, or refused by name; the library may refuse it, too."""
    answer_format = format_of(form, use({"f": schema}, strict=strict, required=True))
    try:
        grammar = answer_grammar(None, *answer_format, tokenizer)
    except InvalidRequest as error:
        assert error.param.startswith("tools[0].function.parameters")
        return
    LLMatcher(vocabulary, grammar.text, log_level=0).get_error()
    # Nor does it break the parser of what comes.
    start, calls = answer_format
    parser = AnswerFormat(start, replace(calls, has_grammar=True), calls.required).parser()
    for text in ("<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>", '{"name": "f"}'):
        parser.feed(text)
    parser.finish()
