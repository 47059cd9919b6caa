"""Each event is one line of JSON in OpenAI's chunk shape."""

import json

from services.common.errors import InvalidRequest, Unavailable
from services.gateway.forms.error_answers import error_of
from services.gateway.forms.parts import Text
from services.gateway.forms.responses import (
    ChunkWriter,
    LogprobEntry,
    PromptTokensDetails,
    Update,
    Usage,
    error_event,
)

USAGE = Usage(3, 2, 5, PromptTokensDetails(1, None))


def parse(data: bytes) -> dict:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return json.loads(data[6:])


def test_text_survives_json():
    writer = ChunkWriter('id"', 1, "m\n", False)
    for text in ("plain", 'quote " back \\ new\nline\u2028', "中🙂", "\x00\x1f"):
        chunk = parse(writer.update(Update(1, [Text(text)], None, None)))
        assert chunk["choices"] == [
            {"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        ]
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == 'id"'
        assert chunk["model"] == "m\n"
        assert "usage" not in chunk


def test_usage_is_null_until_the_closing_event():
    writer = ChunkWriter("id", 1, "m", True)
    assert parse(writer.role(0))["usage"] is None
    assert parse(writer.role(0))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parse(writer.update(Update(0, [Text("x")], None, None)))["usage"] is None
    assert parse(writer.update(Update(0, [], None, "stop")))["usage"] is None
    closing = parse(writer.closing({"usage": USAGE, "stage_times_ms": {"total": 1.5}}))
    assert closing["choices"] == []
    assert closing["usage"]["total_tokens"] == 5
    assert closing["usage"]["prompt_tokens_details"] == {"image_tokens": 1}
    assert closing["stage_times_ms"] == {"total": 1.5}


def test_usage_can_be_in_each_event():
    writer = ChunkWriter("id", 1, "m", True)
    assert (
        parse(writer.update(Update(0, [Text("x")], None, None), USAGE))["usage"]["prompt_tokens"]
        == 3
    )


def test_last_update_has_text_and_reason():
    entry = LogprobEntry("x", [120], -0.1, [])
    chunk = parse(
        ChunkWriter("id", 1, "m", False).update(Update(0, [Text("x")], [entry], "length"))
    )
    choice = chunk["choices"][0]
    assert choice["delta"] == {"content": "x"}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["content"][0]["bytes"] == [120]


def test_role_and_last_update_of_a_choice():
    writer = ChunkWriter("id", 1, "m", True)
    assert parse(writer.role(0, USAGE))["usage"]["prompt_tokens"] == 3
    last = parse(writer.update(Update(0, [], None, "stop", "END")))
    assert last["choices"][0]["stop_reason"] == "END"


def test_message_of_an_error_begins_with_the_field():
    found = error_of(InvalidRequest("Expected `float`", param="logit_bias.1")).error
    assert found.message == "logit_bias.1: Expected `float`"
    assert error_of(InvalidRequest("n is odd", param="n")).error.message == "n is odd"
    assert error_of(InvalidRequest("at most 8", param="n")).error.message == "n: at most 8"
    found = error_of(InvalidRequest("no answer has it", param="n")).error
    assert found.message == "n: no answer has it"


def test_nothing_new_is_no_event():
    assert ChunkWriter("id", 1, "m", False).update(Update(0, [], None, None)) == b""


def test_error_event_has_no_addresses():
    event = parse(error_event(Unavailable("lost <object at 0x7f12ab34cd>")))
    assert event["error"]["code"] == "unavailable"
    assert "0x7f" not in event["error"]["message"]
