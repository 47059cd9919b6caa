"""Bodies are bounded before they are parsed, in time that others can wait."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest, PayloadTooLarge
from services.gateway.forms.batches import BatchRequest
from services.gateway.forms.ignored import Ignored
from services.gateway.forms.json_body import (
    MAX_JSON_BYTES,
    MAX_JSON_NODES,
    Parser,
    has_more_nodes,
    without_images,
)
from services.gateway.forms.openai import parse_chat_request
from services.gateway.forms.responses_api import parse_responses_request
from services.gateway.forms.tools import FunctionName
from services.gateway.forms.video import NamedVideoPart
from tests.attacks.rows import HELLO, body, json_bodies, many
from tests.noise import least

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


def nodes(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(3 + nodes(v) for v in value.values())
    if isinstance(value, list):
        return 1 + sum(map(nodes, value))
    return int(isinstance(value, str))


@settings(max_examples=50)
@given(_VALUES)
def test_nodes_are_counted_as_they_are_parsed(value):
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
        assert not has_more_nodes(text, nodes(value))
        assert has_more_nodes(text, nodes(value) - 1)


def test_image_may_be_large_and_text_may_be_long():
    image = '"data:image/png;base64,' + "A" * 3_000_000 + '"'
    text = json.dumps('{"a": [1, "b"]}, ' * 90_000)
    parts = ", ".join(
        f'{{"type": "{kind}", "{kind}": {image}}}' for kind in ("image", "image_url", "input_image")
    ).replace('"input_image": "', '"image_url": "')
    content = f'[{{"type": "text", "text": {text}}}, {parts}]'
    whole = body(f'[{{"role": "user", "content": {content}}}]')
    assert len(without_images(whole)) < len(text) + 1000 < MAX_JSON_BYTES < len(whole)
    found = parse_chat_request(whole).messages[0].content
    assert found[0].text == json.loads(text)
    assert all(len(part.image.url) > 3_000_000 for part in found[1:])


@pytest.mark.parametrize(
    "value", ["data:image/png;base64,{}", "data:video/jpeg;base64,{0},{0}", "data:;base64,A\\/{}"]
)
def test_base64_does_not_count_as_json(value):
    text = '{"url": "' + value.format("A" * 100_000) + '", "b": 1}'
    assert without_images(text.encode()) == b'{"url": "' + value[
        : value.index(",") + 1
    ].encode() + (b'", "b": 1}')
    source = b'{"type": "base64", "data" : "%b", "b": 1}' % (b"A" * 100_000)
    assert without_images(source) == b'{"type": "base64", "data" : "", "b": 1}'


def test_an_image_that_another_server_made_does_not_count_as_json():
    item = {"type": "image_generation_call", "id": "i", "result": "A/" + "A" * MAX_JSON_BYTES}
    body = json.dumps({"input": [item, {"role": "user", "content": "x"}]}).encode()
    ignored = Ignored()
    assert len(parse_responses_request(body, ignored).input) == 1
    assert list(ignored.names) == ["input.image_generation_call"]


@pytest.mark.parametrize("codecs", ["vp8,opus", '"vp9"', '"vp8, opus"'])
def test_base64_of_what_browsers_record_does_not_count_as_json(codecs):
    url = f"data:video/webm; codecs={codecs};base64,{'A' * 100_000}"
    assert len(without_images(json.dumps({"url": url, "b": 1}).encode())) < 100


def test_other_strings_count_as_json():
    for item in ('"text": "{}"', '"result": "a {}"', '"x": "\\"data\\":\\"{}"', '"url": "http:{}"'):
        text = ("{" + item.format("A" * 100_000) + "}").encode()
        assert without_images(text) is text


def test_too_many_nodes_are_refused():
    # a body of this form has 13 nodes and those of `stop`
    for count, kind in ((MAX_JSON_NODES - 30, InvalidRequest), (MAX_JSON_NODES, PayloadTooLarge)):
        dense = body(HELLO, stop="[" + ",".join(['"ab"'] * count) + "]")
        with pytest.raises(kind):
            parse_chat_request(dense)


def cpu_s(data: bytes) -> float:
    start = time.thread_time()
    with pytest.raises((InvalidRequest, PayloadTooLarge)):
        parse_chat_request(data)
    return time.thread_time() - start


@pytest.mark.parametrize("name", json_bodies(8))
def test_dense_bodies_take_the_parser_little_time(name):
    """13 to 33 ms; other parsers take up to 1.5 s."""
    data = json_bodies(MAX_JSON_BYTES - 100)[name]
    assert least(lambda: cpu_s(data), 0.15) <= 0.15
    barely = body(HELLO, stop=many('"a"', 4 * (MAX_JSON_NODES - 30)))
    assert least(lambda: cpu_s(barely), 0.15) <= 0.15


@pytest.mark.parametrize("item", ['"a"', "[[[]]]", '"data:"', '{"data":""}'])
def test_large_bodies_are_refused_at_memory_speed(item):
    """In 2 to 45 ms; to parse them takes 0.6 to 10 s."""
    data = body(HELLO, stop=many(item, 32 << 20))
    assert least(lambda: cpu_s(data), 0.2) <= 0.2


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        (FunctionName, {"name": "f"}, [{"name": each} for each in ("f\n", "\nf", "f\ng", "é")]),
        (
            BatchRequest,
            {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
            [{"completion_window": each} for each in ("24h\n", "2\u0663h", "024h", "24")],
        ),
        (
            NamedVideoPart,
            {"type": "video", "video": [], "sample_fps": "2.5"},
            [{"sample_fps": each} for each in ("2.5\n", "\u0662", "0")],
        ),
    ],
)
def test_a_pattern_holds_for_the_whole_text(kind, text, wrong):
    """A line break at the end is refused, and digits are those of ASCII."""
    parse = Parser(kind)
    parse(json.dumps(text).encode())
    for fields in wrong:
        with pytest.raises(InvalidRequest) as refused:
            parse(json.dumps(text | fields).encode())
        assert refused.value.param in fields
