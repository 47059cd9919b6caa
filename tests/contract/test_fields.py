"""Each field of the references is served, ignored by name, or refused by name: `field_rows`."""

import json
import pkgutil

import pytest

from tests.contract.field_rows import (
    CHAT,
    FLAT,
    MESSAGES,
    RESPONSES,
    ROWS,
    TEXT,
    TOOL,
    Refused,
    user,
)
from tests.gateway_stack import MODEL, GatewayStack

BASE = {
    CHAT: {"messages": [user()]},
    TEXT: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [user()], "max_tokens": 64},
}
HEADER = "x-triptych-ignored"
REFERENCES = {
    CHAT: "openai.types.chat.completion_create_params.CompletionCreateParamsBase",
    TEXT: "openai.types.completion_create_params.CompletionCreateParamsBase",
    RESPONSES: "openai.types.responses.response_create_params.ResponseCreateParamsBase",
    MESSAGES: "anthropic.types.beta.message_create_params.MessageCreateParamsBase",
}


def post(stack, path, **fields):
    with stack.client() as client:
        return client.post(path, json={"model": MODEL, **BASE[path], **fields})


def ignored(response):
    return [name for name in response.headers.get(HEADER, "").split(", ") if name]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path} {json.dumps(row.fields)}"[:90])
def test_each_field_gets_what_the_rule_says(stack, row):
    response = post(stack, row.path, **row.fields)
    if isinstance(row.gets, Refused):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error.get("param", row.gets.param) == row.gets.param
        assert row.gets.param in error["message"]
        assert not stack.decoder.submits
        return
    assert response.status_code == 200, response.text
    assert (row.gets in ignored(response)) if row.gets else not ignored(response)


def test_there_are_as_many_probes_as_in_the_review_and_more():
    assert len(ROWS) >= 155


@pytest.mark.parametrize("path", REFERENCES)
def test_every_field_of_the_official_client_is_probed(path):
    probed = {name for row in ROWS if row.path == path for name in row.fields} | {"model"}
    probed |= BASE[path].keys()
    reference = pkgutil.resolve_name(REFERENCES[path])  # imports seconds of the clients
    assert set(reference.__annotations__) <= probed


def test_ignored_fields_are_counted(stack):
    def count(field):
        found = stack.gateway.metrics.registry.get_sample_value(
            "triptych_gateway_ignored_fields_total", {"field": field}
        )
        return found or 0

    before = count("user"), count("other"), count("tools")
    post(stack, CHAT, user="u", unheard_of=None, also_unheard_of=[], tools=[{"type": "x"}])
    assert (count("user"), count("other"), count("tools")) == tuple(n + 1 for n in before)


def test_the_header_names_a_field_once_and_only_what_a_header_can_hold(stack):
    history = [user(images=[]) for _ in range(50)]
    fields = {f"x{n}\r\nx-forged: ü": None for n in range(50)}
    response = post(stack, CHAT, messages=history, **fields)
    assert response.status_code == 200
    assert "x-forged" not in response.headers
    assert ignored(response).count("messages.images") == 1
    assert len(ignored(response)) <= 32


def test_large_images_that_are_ignored_are_not_read(stack):
    url = "data:image/png;base64," + "A" * 300_000
    generated = [{"type": "image_url", "image_url": {"url": url}}]
    history = [user(), {"role": "assistant", "content": "x", "images": generated}, user()]
    assert post(stack, CHAT, messages=history).status_code == 200


def test_tools_that_are_left_out_are_not_in_the_prompt(stack):
    alone = post(stack, CHAT, tools=[TOOL]).json()["usage"]["prompt_tokens"]
    both = post(stack, CHAT, tools=[{"type": "web_search"}, TOOL]).json()["usage"]
    assert both["prompt_tokens"] == alone
    response = post(stack, RESPONSES, tools=[{"type": "web_search"}, FLAT])
    assert [tool["type"] for tool in response.json()["tools"]] == ["function"]


def test_without_a_model_it_is_the_one_that_is_served(stack):
    for path in BASE:
        for fields in ({}, {"model": None}):
            body = {**BASE[path], **fields}
            with stack.client() as client:
                answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == MODEL and not ignored(answer)


def test_the_smaller_of_both_token_limits_holds(stack):
    for limits in ((2, 64), (64, 2)):
        answer = post(stack, CHAT, max_tokens=limits[0], max_completion_tokens=limits[1]).json()
        assert answer["usage"]["completion_tokens"] == 2


def test_unknown_fields_can_be_ignored(loop_thread, tmp_path):
    stack = GatewayStack(loop_thread, tmp_path, log_level="ERROR", unknown_fields="ignore")
    try:
        response = post(stack, CHAT, no_such_field={"a": 1}, messages=[user(unheard_of=1)])
        assert response.status_code == 200
        assert ignored(response) == ["messages.unheard_of", "no_such_field"]
        # What would change the answer is refused all the same.
        assert post(stack, CHAT, use_beam_search=True).status_code == 400
    finally:
        stack.close()


def test_other_endpoints_ignore_and_name_them_too(stack):
    with stack.client() as client:
        tokens = client.post("/tokenize", json={"prompt": "x", "unheard_of": None})
        assert ignored(tokens) == ["unheard_of"]
        body = {"model": MODEL, "messages": [user()], "tools": [{"type": "bash_20250124"}]}
        count = client.post("/v1/messages/count_tokens", json=body)
        assert ignored(count) == ["tools.bash_20250124"]
        shifted = [{"type": "bash_20250124"}, {"name": "f"}]
        refused = client.post("/v1/messages/count_tokens", json={**body, "tools": shifted})
        assert "tools[1].input_schema" in refused.json()["error"]["message"]
