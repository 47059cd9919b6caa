"""Numbers of schemas that a double does not hold: the number itself, or a 400 that names the
keyword, never a neighbour.
"""

import json
import random
from decimal import Decimal

import pytest

pytest.importorskip("llguidance")  # the decoder's
from llguidance import LLMatcher, LLTokenizer

from services.common.errors import InvalidGrammar
from services.gateway.answers.grammar import Grammar
from services.gateway.answers.schema_numbers import inexact_value, is_exact_bound
from services.gateway.answers.schema_place import SchemaPlace
from services.gateway.answers.schema_support import held_to
from services.gateway.answers.tool_grammar import answer_grammar
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.forms.tools import FunctionDefinition
from tests.cases import cases
from tests.tiny_tokenizer import added_ids, tokenizer_json, vocab_size
from tests.unit.gateway.test_answers import encode
from tests.unit.gateway.test_schema_support import call

END = added_ids()["<|im_end|>"]
# Held exactly in `const` and `enum`.
EXACT = [
    0, 1, -1, 2**53, -(2**53), 2**53 + 2, 2**60, -(2**62), 10**18, 2**63 - 1024, 0.5, -0.25, 1.0,
    0.1, 1e-7, 123456.789, 1e14, 7923407486850361.0, 3e5, 1.5e-10, 0.3, 1e18,
]  # fmt: skip
# The neighbours of these would come in their places.
INEXACT = [
    2**53 + 1, -(2**53) - 1, 2**53 + 3, 1234567890123456789, 2**62 + 1, 2**63 - 1, 2**63,
    -(2**63), 2**64 - 1, 2**64, 10**20, 10**20 + 1, 10**30, 10**400, -(10**400), 1e300, -1e300,
    5e-324, 1.7976931348623157e308, 123456789.12345679, 0.30000000000000004, 2.0**80, 1e-300,
    2.749773901394e18,
]  # fmt: skip
WITHIN = {
    "itself": lambda v: v,
    "a list": lambda v: [1, v],
    "an object": lambda v: {"k": {"n": v}},
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_json())
    return LLTokenizer(str(path), n_vocab=vocab_size(), eos_token=[END])


@pytest.fixture(scope="module")
def accepts(vocabulary, tokenizer):
    """Whether a text is whole of a schema, or of a grammar."""

    def accept(grammar, text):
        lark = grammar.text if isinstance(grammar, Grammar) else f"start: %json {grammar}"
        found = LLMatcher(vocabulary, lark, log_level=0)
        assert not found.is_error(), found.get_error()
        ids = encode(tokenizer, text)
        return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()

    return accept


def plain(value):
    """A number without an exponent, as the library writes it."""
    number = Decimal(repr(value))
    return format(number.to_integral() if number == number.to_integral() else number, "f")


def parameters(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def grammar_of(schema, tokenizer, *, strict, form="hermes"):
    found = {"send": FunctionDefinition("send", parameters=parameters(schema), strict=strict)}
    calls = ToolCalls(PARSERS[form], {"send": 0}, found, required=True)
    grammar = answer_grammar(None, None, calls, tokenizer)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("value", EXACT)
@pytest.mark.parametrize("form", PARSERS)
def test_an_exact_number_comes_itself(value, form, tokenizer, accepts):
    kind = "integer" if isinstance(value, int) else "number"
    for schema in ({"const": value}, {"enum": [value]}, {"type": kind, "enum": [value, 7]}):
        for strict in (False, True):
            grammar = grammar_of(schema, tokenizer, strict=strict, form=form)
            number = Decimal(plain(value))
            text = call(form, "send", a="NUMBER").replace('"NUMBER"', "NUMBER")
            assert accepts(grammar, text.replace("NUMBER", format(number, "f")))
            neighbour = number + (1 if value == int(value) else Decimal("1e-12"))
            assert not accepts(grammar, text.replace("NUMBER", format(neighbour, "f")))


@pytest.mark.parametrize("value", INEXACT, ids=lambda v: f"{v:.3e}" if abs(v) < 1e300 else "huge")
@pytest.mark.parametrize("keyword", ["const", "enum"])
@pytest.mark.parametrize("within", WITHIN)
def test_an_inexact_constant_is_refused_by_its_place(value, keyword, within, tokenizer):
    constant = WITHIN[within](value)
    schema = {keyword: constant if keyword == "const" else [constant]}
    for form in PARSERS:
        for strict in (False, True):
            with pytest.raises(InvalidGrammar, match="cannot be represented exactly") as refused:
                grammar_of(schema, tokenizer, strict=strict, form=form)
            assert refused.value.param == f"tools[0].function.parameters.properties.a.{keyword}"
            assert refused.value.message.startswith(f"in function send, {keyword} ")
            assert len(refused.value.message) < 150
    asked = Grammar("json_schema", json.dumps(parameters(schema)), "response_format")
    with pytest.raises(InvalidGrammar, match=f"^{keyword} ") as refused:
        answer_grammar(asked, None, None, tokenizer)
    assert refused.value.param == f"response_format.properties.a.{keyword}"


@pytest.mark.parametrize("value", [v for v in INEXACT if abs(v) > 1])
@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"], None])
def test_no_neighbour_of_a_bound_is_answered(value, kind, tokenizer, accepts):
    schema = {"minimum": value, "maximum": value} | ({"type": kind} if kind else {})
    for form in PARSERS:
        for strict in (False, True):
            with pytest.raises(InvalidGrammar) as refused:
                grammar_of(schema, tokenizer, strict=strict, form=form)
            place = "tools[0].function.parameters.properties.a."
            assert refused.value.param in (f"{place}minimum", f"{place}maximum")


# Limits of types, as zod, Java and .NET write them: held, without effect, or left out.
LIMITS = {
    "zod's int": (("integer", -(2**53) + 1, 2**53 - 1), True),
    "int32": (("integer", -(2**31), 2**31 - 1), True),
    "to int64": (("integer", 0, 2**63 - 1), True),
    "doubles": (("number", -1.7976931348623157e308, 1.7976931348623157e308), True),
    "int64": (("integer", -(2**63), 2**63 - 1), False),
    "uint64": (("integer", 0, 2**64 - 1), False),
    "float32": (("number", -3.4028234663852886e38, 3.4028234663852886e38), False),
    "large numbers": (("number", -1e18, 1e18), False),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_of_a_type_end_no_function(name, tokenizer, accepts):
    (kind, least, most), is_held = LIMITS[name]
    schema = {"type": kind, "minimum": least, "maximum": most}
    text = call("hermes", "send", a=5)
    assert accepts(grammar_of(schema, tokenizer, strict=False), text)
    if is_held:
        grammar = grammar_of(schema, tokenizer, strict=True)
        assert accepts(grammar, text)
        if kind == "integer":
            assert accepts(grammar, call("hermes", "send", a=most))
            assert not accepts(grammar, call("hermes", "send", a=most + 1))
            assert accepts(grammar, call("hermes", "send", a=least))
            assert not accepts(grammar, call("hermes", "send", a=least - 1))
        return
    with pytest.raises(InvalidGrammar, match="is not supported with strict") as refused:
        grammar_of(schema, tokenizer, strict=True)
    places = [f"tools[0].function.parameters.properties.a.{k}imum" for k in ("min", "max")]
    assert refused.value.param in places


@pytest.mark.parametrize(
    ("multiple", "is_held"),
    [(1, True), (0.01, True), (1e-7, True), (20_000, True), (10**8, True), (1e-8, False),
     (1e-300, False), (1e300, False), (10**20, False), (10**400, False)],
)  # fmt: skip
def test_multiples_are_held_or_refused_by_place(multiple, is_held, tokenizer, accepts):
    schema = {"type": "number", "multipleOf": multiple}
    assert accepts(grammar_of(schema, tokenizer, strict=False), call("hermes", "send", a=0))
    if is_held:
        assert accepts(grammar_of(schema, tokenizer, strict=True), call("hermes", "send", a=0))
        return
    with pytest.raises(InvalidGrammar) as refused:
        grammar_of(schema, tokenizer, strict=True)
    assert refused.value.param == "tools[0].function.parameters.properties.a.multipleOf"


def test_bounds_of_other_types_say_nothing():
    schema = {"type": "string", "minimum": 2**53 + 1, "exclusiveMaximum": -(10**400)}
    assert held_to(schema, SchemaPlace()) == {"type": "string"}


def random_number(rng):
    sign = rng.choice((1, -1))
    kind = rng.random()
    if kind < 0.4:
        value = sign * rng.getrandbits(rng.randint(1, 64))
        return value if rng.random() < 0.5 else int(float(value))
    if kind < 0.7:
        return round(rng.uniform(-10, 10) * 10 ** rng.randint(-8, 12), rng.randint(0, 6))
    return sign * rng.randint(1, 10 ** rng.randint(1, 17)) * 10.0 ** rng.randint(-25, 25)


def probes(keyword, value, kind):
    """Texts beside a bound, and whether they are within it."""
    outward = 1 if keyword in ("maximum", "exclusiveMaximum") else -1
    number = Decimal(repr(value))
    step = Decimal(1) if kind == "integer" else Decimal(10) ** (number.as_tuple().exponent - 1)
    if number != number.to_integral() and kind == "integer":
        within = number.to_integral("ROUND_FLOOR" if outward > 0 else "ROUND_CEILING") + 0
        return {within: True, within + outward: False}
    inclusive = not keyword.startswith("exclusive")
    return {number: inclusive, number + outward * step: False, number - outward * step: True}


def held(schema):
    """The schema as the library gets it."""
    return json.dumps(held_to(schema, SchemaPlace()))


@pytest.mark.parametrize("seed", range(cases(3, 30)))
def test_what_is_taken_for_exact_is_exact_in_the_library(seed, accepts):
    rng = random.Random(seed)
    for _ in range(20):
        value = random_number(rng)
        if value and inexact_value(value) is None:
            kind = "integer" if value == int(value) else "number"
            for schema in ({"const": value}, {"type": kind, "enum": [value]}):
                assert accepts(held(schema), plain(value)), schema
        for kind in ("integer", "number", None):
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                if not value or not is_exact_bound(keyword, value, kind):
                    continue
                schema = {keyword: value} | ({"type": kind} if kind else {})
                for number, is_within in probes(keyword, value, kind).items():
                    text = format(number, "f")
                    text = text.removesuffix(".0") if kind == "integer" else text
                    assert accepts(held(schema), text) == is_within, (schema, text)
