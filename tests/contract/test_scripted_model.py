"""The model that `make peers` runs other systems' tests with: it thinks, calls, repeats, obeys."""

import json

import pytest

from tests.peers.scripted_server import ScriptedStack

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer"},
            },
        },
    },
}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "What is the weather in Rome for 3 days in fahrenheit?"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    stack = ScriptedStack(tmp_path_factory.mktemp("scripted"), thinks=False, max_model_len=8192)
    yield stack
    stack.close()


def ask(stack, *messages, **fields):
    response = stack.chat(messages=list(messages), **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_it_thinks_where_it_is_told_to(scripted):
    message = ask(scripted, QUESTION, enable_thinking=True, temperature=0)["message"]
    assert "Rome" in message["reasoning_content"] and "Rome" in message["content"]
    message = ask(scripted, QUESTION, temperature=0)["message"]
    assert "reasoning_content" not in message


def test_it_calls_the_tool_that_is_asked_for_and_repeats_the_result(scripted):
    choice = ask(scripted, QUESTION, tools=[OTHER, WEATHER], temperature=0)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments == {"city": "Rome", "unit": "fahrenheit", "days": 3}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is 70 degrees."}
    choice = ask(scripted, QUESTION, choice["message"], result, tools=[OTHER, WEATHER])
    assert choice["message"]["content"] == "It is 70 degrees."


def test_it_keeps_to_grammars_limits_and_bias(scripted):
    named = {"type": "function", "function": {"name": "other"}}
    choice = ask(scripted, QUESTION, tools=[OTHER, WEATHER], tool_choice=named)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "other"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    value = json.loads(ask(scripted, QUESTION, response_format=form)["message"]["content"])
    assert isinstance(value["a"], int)
    choice = ask(scripted, QUESTION, max_tokens=3, logit_bias={"40": 100}, return_token_ids=True)
    assert (choice["token_ids"], choice["finish_reason"]) == ([40] * 3, "length")
    assert ask(scripted, QUESTION, ignore_eos=True, max_tokens=500)["finish_reason"] == "length"


def test_without_greed_its_answers_differ(scripted):
    answers = scripted.chat(messages=[QUESTION], n=8).json()["choices"]
    assert len({choice["message"]["content"] for choice in answers}) > 1
    greedy = scripted.chat(messages=[QUESTION], n=8, temperature=0).json()["choices"]
    assert len({choice["message"]["content"] for choice in greedy}) == 1
