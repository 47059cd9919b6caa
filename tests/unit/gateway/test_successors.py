"""An error about a field of an older API, or about a part that no model reads, says what to use."""

import json

import pytest

from services.common.errors import InvalidRequest
from services.gateway.forms.json_body import Parser
from services.gateway.forms.messages_api import MessagesRequest
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses_api import ResponsesRequest

HELLO = [{"role": "user", "content": "hello"}]


def refused(kind: type, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        Parser(kind)(json.dumps({"messages": HELLO, **fields}).encode())
    return error.value


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("guided_json", {"type": "object"}, '; use structured_outputs: {"json": SCHEMA}'),
        ("guided_regex", "a+", '; use structured_outputs: {"regex": EXPRESSION}'),
        ("guided_choice", ["a"], '; use structured_outputs: {"choice": [TEXT, ...]}'),
        ("guided_grammar", "root ::= 1", '; use structured_outputs: {"grammar": GRAMMAR}'),
        ("guided_decoding_backend", "xgrammar", "; use structured_outputs, which needs no choice"),
        ("functions", [{"name": "f"}], "functions is not supported; use tools: ["),
        ("function_call", {"name": "f"}, "; use tool_choice: {"),
        ("num_predict", 4, "; use max_tokens: NUMBER"),
        ("regex", "a+", '; use structured_outputs: {"regex": EXPRESSION}'),
        ("ebnf", "root ::= 1", '; use structured_outputs: {"grammar": GRAMMAR}'),
        ("grammar", "root ::= 1", '; use structured_outputs: {"grammar": GRAMMAR}'),
        ("json_schema", {"type": "object"}, '; use structured_outputs: {"json": SCHEMA}'),
        ("n_predict", 4, "; use max_tokens: NUMBER"),
        ("min_new_tokens", 4, "; use min_tokens: NUMBER"),
        ("images", ["aGk="], "; use messages, in whose content an image is a part"),
    ],
)
def test_a_field_of_an_older_api_names_its_successor(field: str, value: object, words: str) -> None:
    error = refused(ChatRequest, **{field: value})
    assert error.param == field
    assert words in error.message


def test_no_successor_is_named_that_the_request_does_not_have() -> None:
    assert "use" not in refused(MessagesRequest, guided_regex="a+").message
    assert "use" not in refused(ResponsesRequest, num_predict=4).message
    assert "use" not in refused(ChatRequest, nonsense=4).message


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_audio", "input_audio": {}}, "audio is not served"),
        ({"type": "file", "file": {}}, "files are not served: send the pages as images"),
        ({"type": "smell"}, "Invalid value 'smell'"),
    ],
)
def test_a_part_that_no_model_reads_is_refused_by_its_kind(part: dict, words: str) -> None:
    error = refused(ChatRequest, messages=[{"role": "user", "content": [part]}])
    assert error.param == "messages[0].content[0].type"
    assert words in error.message
