"""Every form of tool calls: what parses, what stays text, and the same parts however it is cut."""

import json
import random
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.forms.parts import Call, Reasoning, Text, join
from tests.noise import least

TOOLS = {
    "look": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["a", "b"]},
            "size": {"$ref": "#/$defs/Size"},
            "any": {},
            "code": {"$ref": "#code"},
            "codes": {"anyOf": [{"$ref": "#code"}, {"$ref": "#twice"}]},
        },
        "$defs": {
            "Size": {"type": "object"},
            "Code": {"$anchor": "code", "type": "string"},
            "A": {"$anchor": "twice", "type": "null"},
            "B": {"$anchor": "twice"},
        },
    },
    "stop": {},
}
RNG_CUTS = 60


def plain(pieces):
    """Joined parts without their random ids; checks that pieces are valid on the way."""
    found = []
    seen = set()
    for piece in pieces:
        if isinstance(piece, Call):
            # The first piece of a call names it, the others add arguments.
            assert bool(piece.call_id) == bool(piece.name) == (piece.index not in seen)
            assert piece.index in seen or piece.index == len(seen)
            seen.add(piece.index)
        else:
            assert piece.text
    for part in join(pieces):
        if isinstance(part, Call):
            assert part.call_id.startswith("call_")
            assert isinstance(json.loads(part.arguments), dict), part.arguments
            found.append((part.name, part.arguments))
        else:
            found.append(part.text)
    return found


def parse(form, chunks, **options):
    parser = PARSERS[form](TOOLS, **options)
    pieces = []
    for chunk in chunks:
        pieces += parser.feed(chunk)
    return plain(pieces + parser.finish())


def cut(text, rng):
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


HERMES = {
    'Hi.\n\n<tool_call>\n{"name": "look", "arguments": {"text": "a}\\" <b", "n": [1, {}]}}\n'
    '</tool_call>\n<tool_call>{"arguments": {"count": 2}, "name": "stop"}</tool_call>\nDone.': [
        "Hi.", ("look", '{"text": "a}\\" <b", "n": [1, {}]}'), ("stop", '{"count": 2}'), "Done.",
    ],
    '<tool_call>{"name": "stop"}</tool_call>': [("stop", "{}")],
    '<tool_call>{"name": "look", "parameters": {}}}\n</tool_call> ': [("look", "{}")],
    '\n <tool_call>\n{"name": "other", "arguments": {"q": "</tool_call>"}}': [
        ("other", '{"q": "</tool_call>"}'),
    ],
    # Cut in the middle: what is certain, and always an object.
    '<tool_call>\n{"name": "look", "arguments": {"text": "ab': [("look", '{"text": "ab"}')],
    '<tool_call>\n{"name": "look", "arguments": {"text": "a", "cou': [("look", '{"text": "a"}')],
    '<tool_call>\n{"name": "look", "arguments": {"a": [1, {"b": 2': [
        ("look", '{"a": [1, {"b": 2}]}'),
    ],
    '<tool_call>\n{"name": "look", "arguments": {"a": tr': [("look", "{}")],
    '<tool_call>\n{"name": "look", "arguments": {"a": "\\u00': [("look", '{"a": ""}')],
    '<tool_call>\n{"name": "look", "arguments": ': ['<tool_call>\n{"name": "look", "arguments": '],
    # What models write for an object.
    '<tool_call>{"name": "look", "arguments": null}</tool_call>': [("look", "{}")],
    '<tool_call>{"name": "look", "arguments": ""}</tool_call>x': [
        '<tool_call>{"name": "look", "arguments": ""}</tool_call>x',
    ],
    '<tool_call>{"name": "look", "arguments": "{\\"n\\": [1]}"}</tool_call>ok': [
        ("look", '{"n": [1]}'), "ok",
    ],
    '<tool_call>{"name": "look", "arguments": "{\\"n\\": [1"}</tool_call>': [
        ("look", '{"n": [1]}'),
    ],
    '<tool_call>{"name": "look", "arguments": [1]}</tool_call>': [
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    ],
    '<tool_call>{"name": "look", "arguments": {"text": "a\nb\t", "p": "C:\\d\\u1"}}</tool_call>': [
        ("look", '{"text": "a\\nb\\t", "p": "C:\\\\d\\\\u1"}'),
    ],
    '<tool_call>{"name": "look", "arguments": {"a": True, "b": [None,], }}</tool_call>': [
        ("look", '{"a": true, "b": [null]}'),
    ],
    '<tool_call>{"name": "look", "arguments": {\'a"b\': \'it\\\'s "\', "c": "\\\'"}}</tool_call>': [
        ("look", '{"a\\"b": "it\'s \\"", "c": "\\\\\'"}'),
    ],
    # As Qwen2.5-Coder's template shows it.
    '<tool_call>\n{{"name": "look", "arguments": {"a": {"b": 1}}}}\n</tool_call>ok': [
        ("look", '{"a": {"b": 1}}'), "ok",
    ],
    '<tool_call>{"name": "look", "arguments": {"a": 1, "b": NaN}}</tool_call>ok': [
        ("look", '{"a": 1}'), "ok",
    ],
    '<tool_call>\n{"name": "lo': ['<tool_call>\n{"name": "lo'],
    # A brace too few, broken JSON, no JSON: never lost, never evaluated.
    '<tool_call>{"name": "look", "arguments": {"count": 1}\n</tool_call>ok': [
        ("look", '{"count": 1}'), "ok",
    ],
    '<tool_call>{"name": "look", "arguments": {"a"; 1}}</tool_call>ok': [("look", "{}"), "ok"],
    "<tool_call>no</tool_call>": ["<tool_call>no</tool_call>"],
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>': [
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    ],
    "x < y <tool": ["x < y <tool"],
    # A tag that is only mentioned takes no blanks away.
    "Use the tag <tool_call> here": ["Use the tag <tool_call> here"],
    "Write\n\n<tool_call>{": ["Write\n\n<tool_call>{"],
    '<tool_call>{"name": "stop"}</tool_call>\n<tool_call>no': [("stop", "{}"), "<tool_call>no"],
    "text alone \n": ["text alone \n"],
    "": [],
}  # fmt: skip
LLAMA = {
    '{"name": "look", "parameters": {"text": "1"}}': [("look", '{"text": "1"}')],
    '<|python_tag|>{"name": "look", "parameters": {"a": {}}}; {"name":"stop","parameters":{}}': [
        ("look", '{"a": {}}'), ("stop", "{}"),
    ],
    '{"name": "stop", "parameters": {}};\n': [("stop", "{}")],
    '{"name": "stop", "parameters": {}}; x': [("stop", "{}"), "; x"],
    ' {"a": 1} x': [' {"a": 1} x'],
    '{"name": "Bob", "parameters": {"a": 1}} x': ['{"name": "Bob", "parameters": {"a": 1}} x'],
    'I call {"name": "look"}': ['I call {"name": "look"}'],
    '{"name": "look", "age": 3': ['{"name": "look", "age": 3'],
    "<|python": ["<|python"],
}  # fmt: skip
XML = {
    'Sure\n\n<tool_call>\n<function=look>\n<parameter=text>\nline 1\n"q" </par\n\n</parameter>\n'
    "<parameter=count>\n5\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n"
    '<parameter=kind>\na\n</parameter>\n<parameter=size>\n{"w": [1]}\n</parameter>\n'
    "<parameter=any>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>": [
        "Sure",
        ("look", '{"text": "line 1\\n\\"q\\" </par\\n", "count": 5, "maybe": null, "kind": "a", '
                 '"size": {"w": [1]}, "any": true}'),
        ("stop", "{}"),
    ],
    "<function=look>\n<parameter=text>x</parameter></function> bye": [
        ("look", '{"text": "x"}'), "bye",
    ],
    '<function=look><parameter=size>\n{"a": "</parameter>\\""}\n</parameter></function>': [
        ("look", '{"size": {"a": "</parameter>\\""}}'),
    ],
    # Of objects and lists, what models write of them: Python's quotes, a comma, a line break.
    "<tool_call><function=look><parameter=size>\n{'a': True, \"b\": [None,], 'c': 'x\ny'}\n"
    "</parameter><parameter=any>\n{'a': 1}\n</parameter></function></tool_call>": [
        ("look", '{"size": {"a": true, "b": [null], "c": "x\\ny"}, "any": "{\'a\': 1}"}'),
    ],
    "<tool_call><function=look><parameter=size>\n{'a': 1} x\n</parameter></function>": [
        ("look", '{"size": "{\'a\': 1} x"}'),
    ],
    # Without a parameter's closing tag, or the bracket of an opening one.
    "<tool_call>\n<function=look>\n<parameter=text>\na </function>\nb\n<parameter=count>\n5\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>": [
        ("look", '{"text": "a </function>\\nb", "count": 5}'), ("stop", "{}"),
    ],
    "<tool_call>\n<function=look>\n<parameter=text>\na\n</function>": [("look", '{"text": "a"}')],
    # Closing tags of nothing, and tags that are only mentioned.
    "<tool_call>\n<function=stop>\n</function>\n</function>\n</function_invocation>\n"
    "</tool_call>x": [("stop", "{}"), "x"],
    "Write `<function=look>`, or <function=stop> \nas I do in <tool_call>\n<function=look> .": [
        "Write `<function=look>`, or <function=stop> \nas I do in <tool_call>\n<function=look> .",
    ],
    "<tool_call>\n<function=look\n<parameter=text\na > b\n</parameter>\n</function>": [
        ("look", '{"text": "a > b"}'),
    ],
    # What is no value of the type is a string; a word of a union with string stays one.
    "<tool_call><function=look><parameter=count>\nfive\n</parameter><parameter=maybe>\n5\n"
    "</parameter></function></tool_call>": [("look", '{"count": "five", "maybe": "5"}')],
    # An anchor is no place from the root; what several have is any value.
    "<tool_call><function=look><parameter=code>\n5\n</parameter><parameter=codes>\n5\n"
    "</parameter></function></tool_call>": [("look", '{"code": "5", "codes": 5}')],
    "<tool_call>\n<function=look>\n<parameter=text>\nabc": [("look", '{"text": "abc"}')],
    "<tool_call>\n<function=look>\n<parameter=text>\nab\n</param": [("look", '{"text": "ab"}')],
    "<tool_call>\n<function=look>\n<parameter=count>\n1": [("look", '{"count": 1}')],
    "<tool_call>\n<function=look>\n<parameter=size>\n{1": [("look", '{"size": "{1"}')],
    "<tool_call>\n<function=look>\n<parameter=te": [("look", "{}")],
    "<tool_call>\n<function=look>\n<parameter=count>\n1\n</parameter>\n": [
        ("look", '{"count": 1}'),
    ],
    '<tool_call>{"name": "look"}': ['<tool_call>{"name": "look"}'],
    "<function=a b\n c": ["<function=a b\n c"],
    "Use <tool_call> tags, or <function=\n> ones": ["Use <tool_call> tags, or <function=\n> ones"],
    "so \n<function=": ["so \n<function="],
    "1 < 2 <function": ["1 < 2 <function"],
}  # fmt: skip
CASES = [
    (form, text, expected)
    for form, cases in (("hermes", HERMES), ("llama3_json", LLAMA), ("qwen3_coder", XML))
    for text, expected in cases.items()
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_parses_whole_and_in_pieces(form, text, expected):
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    rng = random.Random(0)
    for _ in range(RNG_CUTS):
        chunks = cut(text, rng)
        assert parse(form, chunks) == expected, chunks


@pytest.mark.parametrize("form", PARSERS)
def test_wherever_an_answer_is_cut_its_calls_are_objects_in_any_pieces(form):
    """`plain` checks the arguments. Partial-JSON libraries fail here (ADR 0026)."""
    rng = random.Random(1)
    for _, text, _ in (case for case in CASES if case[0] == form):
        for end in range(len(text)):
            assert parse(form, cut(text[:end], rng)) == parse(form, [text[:end]]), text[:end]


PIECES = [
    "<tool_call>", "</tool_call>", "<function=", "look", "stop", ">", "</function>", "<parameter=",
    "text", "count", "</parameter>", "\n", " ", '"', "\\", "{", "}", "[", "]", ":", ",", "5", "<",
    '{"name": "look", "arguments": ', '{"name": "stop", "parameters": ', "<|python_tag|>", ";", "é",
    "true", '"name"', '"arguments"', "x",
]  # fmt: skip


@pytest.mark.parametrize("form", PARSERS)
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.randoms(use_true_random=False))
@example(["<function=", " ", ">"], random.Random(0))  # a name of blanks is none
def test_any_text_gives_the_same_parts_in_any_pieces(form, pieces, rng):
    text = "".join(pieces)
    expected = parse(form, [text])
    assert parse(form, list(text)) == expected
    assert parse(form, cut(text, rng)) == expected


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama3_json"])
def test_only_as_many_calls_as_are_allowed(form):
    two = {
        "hermes": '<tool_call>{"name": "stop"}</tool_call>' * 2,
        "qwen3_coder": "<tool_call><function=stop></function></tool_call>" * 2,
        "llama3_json": '{"name": "stop", "parameters": {}};' * 2,
    }[form]
    parser = PARSERS[form](TOOLS, 1)
    pieces = [piece for character in two for piece in parser.feed(character)]
    assert plain(pieces + parser.finish()) == [("stop", "{}")]
    assert parser.done


def test_a_grammar_closes_each_parameter_so_that_a_value_may_hold_the_other_tags():
    text = "a\n<parameter=count>\n5\n</function>\n</tool_call>"
    call = f"<tool_call>\n<function=look>\n<parameter=text>\n{text}\n</parameter>\n</function>"
    for chunks in ([call], list(call)):
        ((_, arguments),) = parse("qwen3_coder", chunks, has_grammar=True)
        assert json.loads(arguments) == {"text": text}


@settings(max_examples=200, deadline=None)
@given(st.text(), st.integers(), st.dictionaries(st.text(), st.none() | st.text() | st.floats(0)))
def test_xml_values_come_back_as_they_were(text, count, size):
    """As the template writes them: strings bare, objects as JSON."""
    if "</parameter>" in text:
        return
    call = (
        f"<tool_call>\n<function=look>\n<parameter=text>\n{text}\n</parameter>\n"
        f"<parameter=count>\n{count}\n</parameter>\n"
        f"<parameter=size>\n{json.dumps(size, ensure_ascii=False)}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    ((name, arguments),) = parse("qwen3_coder", [call])
    if any(value == float("inf") for value in size.values()):
        return
    assert name == "look"
    assert json.loads(arguments) == {"text": text, "count": count, "size": size}


def test_anchors_of_a_huge_schema_are_not_searched_to_the_end():
    class Schema(dict[str, object]):
        searched = 0

        def items(self):
            Schema.searched += 1
            return super().items()

    schema = {
        "properties": {"a": {"$ref": "#x"}},
        "$defs": {str(n): Schema() for n in range(100_000)},
    }
    parser = PARSERS["qwen3_coder"]({"f": schema})
    parser.feed("<tool_call><function=f><parameter=a>\n5\n</parameter>")
    assert 0 < Schema.searched <= 20_000


def test_cost_does_not_grow_with_the_arguments():
    """A long string streams; nothing of it is kept."""
    for form, start in (
        ("hermes", '<tool_call>{"name": "look", "arguments": {"text": "'),
        ("qwen3_coder", "<tool_call><function=look><parameter=text>\n"),
    ):
        parser = PARSERS[form](TOOLS)
        parser.feed(start)
        for _ in range(2000):
            assert parser.feed("abcdefgh")
        assert parser.num_buffered < 32


def test_closing_tags_within_a_string_are_read_once():
    def read() -> float:
        parser = PARSERS["qwen3_coder"](TOOLS)
        parts = parser.feed('<tool_call><function=look><parameter=size>{"a": "')
        start = time.process_time()
        for _ in range(1000):
            parts += parser.feed("</parameter>")
        taken = time.process_time() - start
        parts += parser.feed('"}\n</parameter></function></tool_call>') + parser.finish()
        assert plain(parts) == [("look", '{"size": {"a": "%s"}}' % ("</parameter>" * 1000))]
        return taken

    assert least(read, 0.5) <= 0.5  # seconds; each time from the start, it takes minutes


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ('"\\uD83D"', "\ufffd"),
        ('"a\\ude00b"', "a\ufffdb"),
        ('"\\ud83d\\ud83d\\ude00\\n"', "\ufffd\U0001f600\n"),
        ('"\\ud83d\\u12"', "\ufffd\\u12"),
        ('"\\ud83d', ""),  # cut within a pair
        ('"\\ud83d\\ude', ""),
    ],
)
def test_half_a_surrogate_pair_is_replaced(written, expected):
    """msgspec, jiter and others refuse it: an answer could not be sent back."""
    text = f'<tool_call>{{"name": "look", "arguments": {{"text": {written}'
    for chunks in ([text], list(text)):
        ((_, arguments),) = parse("hermes", chunks)
        assert json.loads(arguments) == {"text": expected}
    assert msgspec.json.decode(arguments)


def test_what_a_string_of_json_holds_can_be_sent():
    inner = json.dumps('{"text": "\ud83d"}', ensure_ascii=True)
    call = f'<tool_call>{{"name": "\\ud83d", "arguments": {inner}}}</tool_call>'
    assert msgspec.json.encode(parse("hermes", [call])) == (
        '[["\ufffd","{\\"text\\": \\"\ufffd\\"}"]]'.encode()
    )


def test_a_number_that_no_float_holds_is_the_nearest():
    largest = "1.7976931348623157e+308"
    bare = "<function=look><parameter=any>\n%s\n</parameter></function>"
    assert parse("qwen3_coder", [bare % "1e999"]) == [("look", f'{{"any": {largest}}}')]
    nested = '{"a": [1e999, "\\ud83d"], "b": 2}'
    assert parse("qwen3_coder", [bare % nested]) == [
        ("look", f'{{"any": {{"a": [{largest}, "\ufffd"], "b": 2}}}}')
    ]
    call = '<tool_call>{"name": "look", "arguments": {"a": [-1e999], "count": 1e308}}</tool_call>'
    assert parse("hermes", [call]) == [("look", f'{{"a": [-{largest}], "count": 1e308}}')]


@pytest.mark.parametrize("digits", ["9" * 5000, "-" + "9" * 5000, "1" * 400])
def test_digits_that_a_model_does_not_stop_writing_are_a_number_that_can_be_read(digits):
    """Python's readers, our own among them, take 4,300."""
    sign = digits.removesuffix(digits.lstrip("-"))
    expected = {"any": float(f"{sign}1.7976931348623157e+308")}
    for form, call in (
        ("hermes", '<tool_call>{"name": "look", "arguments": {"any": %s'),
        ("llama3_json", '{"name": "look", "parameters": {"any": %s'),
        ("qwen3_coder", "<function=look><parameter=any>\n%s"),
    ):
        ((_, arguments),) = parse(form, [call % digits])
        assert json.loads(arguments) == msgspec.json.decode(arguments) == expected
    ((_, arguments),) = parse("qwen3_coder", [f"<function=look><parameter=any>\n[{digits}]"])
    assert json.loads(arguments) == {"any": [expected["any"]]}


def test_a_value_that_is_nested_without_end_is_no_arguments():
    call = '<tool_call>{"name": "look", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert parse("hermes", [call]) == [call]


@pytest.mark.parametrize(
    ("form", "before"),
    [
        *((form, before) for form in PARSERS for before in ("", "text")),
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"any": 1,'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"'),
        ("hermes", '<tool_call>{"name": "'),
        ("qwen3_coder", "<tool_call>"),
        ("qwen3_coder", "<function=look>"),
        ("qwen3_coder", "<function=look><parameter=size>"),
        ("qwen3_coder", "<function=look></function>"),
        ("llama3_json", "<|python_tag|>"),
        ("llama3_json", '{"name": "look", "parameters": {}}'),
        ("llama3_json", '{"name": "look", "parameters": {}};'),
    ],
)
def test_blanks_that_do_not_end_cost_little(form, before):
    def read():
        parser = PARSERS[form](TOOLS)
        start = time.process_time()
        for piece in [before, *(" " * 64 for _ in range(4000))]:
            parser.feed(piece)
        parser.finish()
        return time.process_time() - start

    assert least(read, 0.5) <= 0.5  # seconds; gone through again with each token, up to 5


def test_parts_join():
    pieces = [
        Reasoning("a"), Reasoning("b"), Text("c"), Call(0, "i", "f", ""), Call(0, "", "", "{"),
        Call(0, "", "", "}"), Call(1, "j", "g", "{}"), Text("d"), Text("e"),
    ]  # fmt: skip
    assert join(pieces) == [
        Reasoning("ab"), Text("c"), Call(0, "i", "f", "{}"), Call(1, "j", "g", "{}"), Text("de"),
    ]  # fmt: skip
    assert join([]) == []
