"""Bounds on grammars: what is just within them passes, what is just beyond is refused by name."""

import json
import time

import pytest

from services.common.errors import InvalidGrammar
from services.common.grammar import grammar_bounds, grammar_counts, schema_bounds
from services.common.grammar.grammar_bounds import check_grammar


def chain(links, wrap, end=None):
    """`links` references, one behind the other."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(links - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links - 1}": end or {}}}


def cycle(links, wrap):
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": wrap({"$ref": f"#/$defs/d{(i + 1) % links}"}) for i in range(links)},
    }


def nested(levels, schema=None):
    schema = schema or {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def rules(links, form="{}: {}", first="start", name="r"):
    lines = [form.format(first, f"{name}0")]
    lines += [form.format(f"{name}{i}", f"{name}{i + 1}") for i in range(links - 1)]
    return "\n".join([*lines, form.format(f"{name}{links - 1}", '"a"')])


WRAPPED = {
    "bare": lambda r: r,
    "items": lambda r: {"type": "array", "items": r},
    "prefixItems": lambda r: {"prefixItems": [r]},
    "properties": lambda r: {"properties": {"a": r}},
    "patternProperties": lambda r: {"patternProperties": {"a": r}},
    "additionalProperties": lambda r: {"additionalProperties": r},
    "anyOf": lambda r: {"anyOf": [r, {"type": "null"}]},
    "oneOf": lambda r: {"oneOf": [r]},
    "allOf": lambda r: {"allOf": [r]},
    "not": lambda r: {"not": r},
    "unknown keyword": lambda r: {"later": {"deep": r}},
    "property named const": lambda r: {"properties": {"const": r}},
    "$dynamicRef": lambda r: {"items": {"$dynamicRef": r["$ref"]}},
    "absolute": lambda r: {"items": {"$ref": f"http://x.y/root.json{r['$ref']}"}},
}


def refusal(kind, text):
    """Why a grammar is refused; empty: it is not."""
    try:
        check_grammar(kind, text if isinstance(text, str) else json.dumps(text))
    except InvalidGrammar as error:
        assert len(error.message) < 200
        return error.message
    return ""


@pytest.mark.parametrize("place", WRAPPED)
def test_a_chain_of_references_is_bounded_in_every_position(place):
    wrap = WRAPPED[place]
    identified = {"$id": "http://x.y/root.json"}
    assert not refusal("json_schema", {**identified, **chain(64, wrap)})
    assert "64 references" in refusal("json_schema", {**identified, **chain(65, wrap)})


def test_a_chain_by_anchors_and_by_ids_is_bounded():
    for keyword, mark in (("$anchor", "#d{}"), ("$id", "http://x.y/d{}")):
        for links, is_within in ((64, True), (65, False)):
            definitions = {
                f"d{i}": {
                    keyword: mark.format(i).lstrip("#"),
                    "items": {"$ref": mark.format(i + 1)},
                }
                for i in range(links - 1)
            }
            last = {keyword: mark.format(links - 1).lstrip("#")}
            schema = {"$ref": mark.format(0), "$defs": {**definitions, "last": last}}
            if is_within:
                assert not refusal("json_schema", schema)
            else:
                assert "64 references" in refusal("json_schema", schema)


def test_nesting_counts_along_references():
    assert not refusal("json_schema", chain(5, lambda r: nested(50, r)))
    assert "512 levels" in refusal("json_schema", chain(20, lambda r: nested(50, r)))


def test_a_cycle_is_no_endless_chain():
    assert "leads back to itself" in refusal("json_schema", {"$ref": "#"})
    assert not refusal("json_schema", cycle(3, WRAPPED["items"]))
    assert not refusal("json_schema", cycle(100, WRAPPED["properties"]))
    assert "512 levels" in refusal("json_schema", cycle(400, WRAPPED["properties"]))
    assert not refusal("json_schema", {"type": "array", "items": {"$ref": "#"}})


def test_a_reference_to_nothing_is_refused_by_name():
    assert "'#/$defs/a'" in refusal("json_schema", {"$ref": "#/$defs/a"})
    assert "'http://x.y/z'" in refusal("json_schema", {"items": {"$ref": "http://x.y/z"}})
    assert not refusal("json_schema", {"const": {"$ref": "#/$defs/a"}})
    assert not refusal("json_schema", {"properties": {"$ref": {"type": "string"}}})


def test_what_is_no_uri_names_itself():
    """`urljoin` raises."""
    document = {"$id": "http://x.y/z", "$defs": {"a": {"$id": "http://["}}}
    assert not refusal("json_schema", document)
    assert not refusal("json_schema", {**document, "items": {"$ref": "http://["}})
    assert not refusal("json_schema", {"$id": "http://[", "items": {"$ref": "http://["}})
    assert "'//]['" in refusal("json_schema", {**document, "items": {"$ref": "//]["}})


def test_a_reference_to_true_or_false_is_taken():
    assert not refusal("json_schema", {"items": {"$ref": "#/$defs/any"}, "$defs": {"any": True}})
    assert not refusal("json_schema", {"anyOf": [{"$ref": "#/anyOf/1"}, False]})


NODE = {"$ref": "#/$defs/n"}
ENDLESS = {
    "itself": NODE,
    "another": {"$ref": "#/$defs/m"},
    "required": {"type": "object", "properties": {"a": NODE}, "required": ["a"]},
    "an item": {"type": "array", "items": NODE, "minItems": 1},
    "a first item": {"type": "array", "prefixItems": [NODE], "minItems": 1},
    "all alternatives": {"anyOf": [{"allOf": [NODE]}, {"$ref": "#/$defs/m"}]},
    "both types": {
        "type": ["object", "array"], "properties": {"a": NODE}, "required": ["a"], "items": NODE,
        "minItems": 2,
    },
}  # fmt: skip
ENDING = {
    "optional": {"type": "object", "properties": {"a": NODE}},
    "no item": {"type": "array", "items": NODE},
    "fewer items": {"type": "array", "prefixItems": [{}, NODE], "minItems": 1},
    "another type": {"type": ["object", "null"], "properties": {"a": NODE}, "required": ["a"]},
    "any type": {"properties": {"a": NODE}, "required": ["a"]},
    "an alternative": {"anyOf": [NODE, {"type": "null"}]},
    "anything": {"anyOf": [NODE, True]},
    "a value": {"type": "object", "enum": [{}], "properties": {"a": NODE}, "required": ["a"]},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_finite_json_is_refused(name):
    definitions = {"n": ENDLESS[name], "m": NODE}
    assert "leads back to itself" in refusal("json_schema", {**NODE, "$defs": definitions})
    assert "leads back" in refusal(
        "grammar", f"start: %json {json.dumps({**NODE, '$defs': definitions})}"
    )


@pytest.mark.parametrize("name", ENDING)
def test_a_cycle_with_an_end_is_taken(name):
    assert not refusal("json_schema", {**NODE, "$defs": {"n": ENDING[name]}})


@pytest.mark.parametrize("schema", ["true", "3", "null"])
def test_a_schema_may_be_no_object(schema):
    """Which of them are schemas is the compiler's to say."""
    check_grammar("grammar", f"start: %json {schema}")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 40_000, "[" * 10**5 + "]" * 10**5])
def test_deep_json_is_refused(text):
    assert "nested too deeply" in refusal("json_schema", text)
    assert "nested too deeply" in refusal("choice", text)
    assert "nested too deeply" in refusal("grammar", f"start: %json {text}")


def test_nesting_of_one_text_is_bounded():
    assert not refusal("json_schema", nested(100))
    assert "100 levels" in refusal("json_schema", nested(101))
    assert "100 levels" in refusal("json_schema", {"const": json.loads("[" * 101 + "]" * 101)})


def properties(count, prefix="p"):
    return {"properties": {f"{prefix}{i}": {"type": "string"} for i in range(count)}}


WITHIN = {
    "properties of an object": ("json_schema", properties(1000), properties(1001), "1000 prop"),
    "required": (
        "json_schema", {"required": [str(i) for i in range(1000)]},
        {"required": [str(i) for i in range(1001)]}, "1000 prop",
    ),
    "properties in all": (
        "json_schema", {"allOf": [properties(1000, f"{i}_") for i in range(5)]},
        {"allOf": [properties(900, f"{i}_") for i in range(6)]}, "5000 prop",
    ),
    "patternProperties": (
        "json_schema", {"patternProperties": {f"^a{i}": {} for i in range(64)}},
        {"patternProperties": {f"^a{i}": {} for i in range(65)}}, "64 patternProperties",
    ),
    "const": (
        "json_schema", {"const": "x" * (2**16 - 2)}, {"const": "x" * (2**16 - 1)}, "65536 bytes",
    ),
    "enum": ("json_schema", {"enum": ["x"] * 5000}, {"enum": ["x"] * 5001}, "5000 values"),
    "pattern": (
        "json_schema", {"pattern": "x" * 2**15}, {"pattern": "x" * (2**15 + 1)}, "32768 char",
    ),
    "patterns in all": (
        "json_schema", {"allOf": [{"pattern": "x" * 2**14}] * 2},
        {"allOf": [{"pattern": "x" * 2**14}] * 3}, "32768 char",
    ),
    "repeats of a pattern": (
        "json_schema", {"pattern": "(a{100}b){1000}"}, {"pattern": "(a{100}b){1001}"}, "100000",
    ),
    "minItems": (
        "json_schema", {"minItems": 1000, "items": {"minItems": 100}},
        {"minItems": 1001, "items": {"minItems": 100}}, "100000",
    ),
    "minLength": ("json_schema", {"minLength": 100_000}, {"minLength": 100_001}, "100000"),
    "maxLength": ("json_schema", {"maxLength": 2**31, "maxItems": 2**31}, None, ""),
    "counted lists": (
        "json_schema", {"anyOf": [{"minItems": 1, "maxItems": 2}] * 500},
        {"anyOf": [{"minItems": 1, "maxItems": 2}] * 501}, "1000 counted",
    ),
    "multipleOf": ("json_schema", {"multipleOf": 0.01}, {"multipleOf": 99991}, "multipleOf"),
    "common multiple": (
        "json_schema", {"allOf": [{"multipleOf": 97}, {"multipleOf": 101}]},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 101}]}, "multipleOf",
    ),
    "choice": ("choice", ["x"] * 5000, ["x"] * 5001, "5000 values"),
    "bytes of a choice": ("choice", ["é" * 32764], ["é" * 32767], "65536 bytes"),
    "regex": ("regex", "x" * 2**15, "x" * (2**15 + 1), "32768 char"),
    "repeats": ("regex", "a{100000}", "a{100001}", "100000"),
    "repeats within repeats": ("regex", "((a{10}b?){0,100}c){100}", "(a{400}){2,300}", "100000"),
    "repeats of repeats": ("regex", "a{100}{1000}", "(?:a{101}+){1000}", "100000"),
    "repeats beside others": ("regex", r"a{90000}b{90000}[(]\({90000}", "a{9}{99999}", "100000"),
    "an endless number": ("regex", "a{1,}", "a{" + "9" * 400 + "}", "100000"),
    "rules in a chain": ("grammar", rules(64), rules(65), "64 references"),
    "terminals in a chain": ("grammar", rules(64, name="R"), rules(65, name="R"), "64 references"),
    "GBNF in a chain": (
        "grammar", rules(64, "{} ::= {}", "root"), rules(65, "{} ::= {}", "root"), "64 references",
    ),
    "inlined rules in a chain": (
        "grammar", rules(64, "?{}: {}").replace("?start", "start"),
        rules(65, "?{}: {}").replace("?start", "start"), "64 references",
    ),
    "grammars within grammars": (
        "grammar", 'start: %lark {\n' * 63 + 'start: "a"\n' + "}\n" * 63,
        'start: %lark {\n' * 65 + 'start: "a"\n' + "}\n" * 65, "64 references",
    ),
    "a chain behind a nested grammar": (
        "grammar", 'start: %lark {\nstart: "a"\n}\n| r0\n' + rules(63).partition("\n")[2],
        'start: %lark {\nstart: "a"\n}\n| r0\n' + rules(65).partition("\n")[2], "64 references",
    ),
    "rules": (
        "grammar", "start:\n" + "\n".join(f'r{i}: "a"' for i in range(3998)),
        "start:\n" + "\n".join(f'r{i}: "a"' for i in range(4000)), "4000 rules",
    ),
    "groups in rules": (
        "grammar", f"start: {'(' * 900}a{')' * 900}", f"start: {'(' * 1100}a{')' * 1100}", "1024",
    ),
    "intersections": (
        "grammar", "start: A\nA: " + " & ".join("/.*a.*/" for _ in range(9)),
        "start: A\nA: B & B\nB: C & C\nC: D & D\nD: E & E", "8 intersections",
    ),
    "strings": ("grammar", f'start: "{"x" * 65534}"', f'start: "{"x" * 65535}"', "65536 bytes"),
    "expressions": ("grammar", f"start: /{'x' * 32766}/", f"start: /{'x' * 32768}/", "32768 char"),
    "repeats of rules": (
        "grammar", "start: r{1000}\nr: s~1..100\ns: /a/", "start: r{1000}\nr: s~101\ns: /a/",
        "100000",
    ),
    "repeats in GBNF": (
        "grammar", "root ::= (r{10} [{]){100}\nr ::= [a]{1,100}",
        "root ::= (r{10}){101}\nr ::= [a]{100}", "100000",
    ),
    "schemas in a grammar": (
        "grammar", "start: " + "%json {} | " * 1000, "start: " + "%json {} | " * 1001, "1000 sch",
    ),
    "a schema in a grammar": (
        "grammar", f"start: %json {json.dumps(chain(64, WRAPPED['items']))}",
        f"start: %json {json.dumps(chain(65, WRAPPED['items']))}", "64 references",
    ),
    "blanks": ("grammar", 'start:"a"' + "\n" * 256, 'start:"a"' + "\n" * 257, "256 blanks"),
    "GBNF": ("grammar", "root ::= a" + " a" * 32_000, "root ::= a" + " a" * 33_000, "of GBNF"),
    "all": ("grammar", "start: a" + " a" * 131_000, "start: a" + " a" * 131_100, "262144 char"),
}  # fmt: skip


@pytest.mark.parametrize("bound", WITHIN)
def test_each_bound_is_where_it_is_said_to_be(bound):
    kind, within, beyond, word = WITHIN[bound]
    assert not refusal(kind, within)
    if beyond is not None:
        assert word in refusal(kind, beyond)


@pytest.mark.parametrize(
    "part",
    ['"', "/", "<", '"\\', "[", "(", "{", "#", "~", "a", "\n", "%lark {\n", "%json ", "\\", "|"],
)
def test_hostile_texts_take_linear_time(part):
    started = time.process_time()
    for kind, start, size in (
        ("grammar", "start: a\n", 2**18), ("grammar", "root ::= a ", 2**16), ("regex", "", 2**15),
    ):  # fmt: skip
        try:
            check_grammar(kind, (start + part * size)[:size])
        except InvalidGrammar as error:
            assert len(error.message) < 200
    assert time.process_time() - started < 5


def test_what_is_no_json_is_refused():
    for text in ("", "{", "NaN", "1" * 5000):
        assert "not JSON" in refusal("json_schema", text)
        assert "not JSON" in refusal("choice", text)
    assert "not a list" in refusal("choice", "{}")


def test_bounds_are_named_in_one_place():
    assert grammar_bounds.MAX_CHAIN == schema_bounds.MAX_CHAIN == 64
    assert grammar_counts.MAX_REPEATS == 100_000
