"""The table of hints: its names, and what a body loses by it."""

import time

import msgspec
import pytest

from services.common.errors import InvalidRequest
from services.gateway.forms import (
    messages_api,
    openai,
    responses_api,
    search,
    text_completions,
    tools,
)
from services.gateway.forms.hints import BY_LIST, BY_OBJECT
from services.gateway.forms.ignored import Ignored
from services.gateway.forms.openai import ChatRequest, parse_chat_request

MODULES = (messages_api, openai, responses_api, search, text_completions, tools)


def struct_of(name):
    found = [getattr(module, name) for module in MODULES if hasattr(module, name)]
    return found[0] if found else None


def test_names_are_those_of_the_forms_and_no_served_field_is_a_hint():
    for name, fields in BY_OBJECT.items():
        struct = struct_of(name)
        served = {f.encode_name for f in msgspec.structs.fields(struct)} if struct else set()
        assert struct is not None or name in ("TokenizeRequest", "StreamOptions",
                                              "StructuredOutputs"), name  # fmt: skip
        assert not served & fields.keys(), name
    for name in BY_LIST:
        owner, _, field = name.partition(".")
        struct = struct_of(owner)
        assert struct is None or field in struct.__struct_fields__, name


def test_a_body_without_hints_is_not_walked(monkeypatch):
    monkeypatch.setattr(Ignored, "without", lambda *_: pytest.fail("walked"))
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    assert parse_chat_request(msgspec.json.encode(body)).temperature == 0


def test_what_is_kept_is_byte_for_byte_the_same():
    body = {
        "model": "m", "user": "u", "seed": (1 << 63) - 1, "temperature": 0.1,
        "messages": [{"role": "user", "content": "ü\n\u2028\"\\ \U0001f600", "name": "x"}],
        "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": {"user": {"const": 1e-7}}}}}],
    }  # fmt: skip
    clean = {name: value for name, value in body.items() if name != "user"}
    clean["messages"] = [{"role": "user", "content": body["messages"][0]["content"]}]
    found = parse_chat_request(msgspec.json.encode(body))
    assert found == parse_chat_request(msgspec.json.encode(clean))


def test_the_error_says_which_values_are_taken():
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "use_beam_search": True}
    with pytest.raises(InvalidRequest, match="leave it out, or send false") as refused:
        parse_chat_request(msgspec.json.encode(body))
    assert refused.value.param == "use_beam_search"


def test_long_histories_cost_milliseconds():
    turn = {"role": "assistant", "content": "x" * 200, "provider_specific_fields": None}
    messages = [{"role": "user", "content": "x"}, turn] * 1000
    body = msgspec.json.encode({"model": "m", "messages": messages})
    start = time.process_time()
    ignored = Ignored()
    ignored.without(ChatRequest, body)
    assert list(ignored.names) == ["messages.provider_specific_fields"]
    assert time.process_time() - start < 1
