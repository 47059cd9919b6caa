"""Tools and reasoning over HTTP: the official client, and a decoder that says what it is told."""

import json

import numpy as np
import openai
import pydantic
import pytest

from services.common.errors import InvalidGrammar
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL
from tests.tiny_tokenizer import added_ids
from tests.unit.gateway.test_answers import CALLS, THOUGHT, encode

QUESTION = {"role": "user", "content": "how is it?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {"city": 'Zürich "中"', "days": 3}


def client_of(stack):
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)


def prompt_of(stack) -> list[int]:
    """Token ids of the last prompt."""
    return np.frombuffer(stack.decoder.submits[-1].prompt_token_ids, "<i4").tolist()


def say(stack, text, tokens_per_event=1):
    stack.reset()
    stack.decoder.reply = encode(stack.tokenizer, text)
    stack.decoder.tokens_per_event = tokens_per_event


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_calls_whole_and_streamed(stack, tokens_per_event):
    say(stack, CALLS["hermes"], tokens_per_event)
    fields = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS}
    with client_of(stack) as client:
        (whole,) = client.chat.completions.create(**fields).choices
        with client.chat.completions.stream(**fields) as stream:
            (streamed,) = stream.get_final_completion().choices
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see 🙂."
        first, second = choice.message.tool_calls
        assert first.id != second.id
        assert (first.type, first.function.name) == ("function", "weather")
        assert json.loads(first.function.arguments) == ARGUMENTS
        assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert "completion_tokens_details" not in stack.chat(tools=TOOLS).json()["usage"]


def test_without_tools_a_call_is_text(stack):
    say(stack, CALLS["hermes"])
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = stack.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == CALLS["hermes"]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_one_call_at_a_time_ends_the_sequence(stack):
    say(stack, CALLS["hermes"])
    stack.decoder.delay_s = 0.01
    body = stack.chat(tools=TOOLS, parallel_tool_calls=False).json()
    (choice,) = body["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] < len(stack.decoder.reply)
    stack.wait(lambda: stack.decoder.cancelled and not stack.decoder.running)


def test_an_answer_goes_back_with_its_result(stack):
    """What the client library returns is what it sends; an image comes as a tool's result."""
    say(stack, CALLS["hermes"])
    with client_of(stack) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[QUESTION], tools=TOOLS)
        message = answer.choices[0].message
        results = [
            {
                "role": "tool", "tool_call_id": message.tool_calls[0].id,
                "content": [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": image_url()}},
                ],
            },
            {"role": "tool", "tool_call_id": message.tool_calls[1].id, "content": "12:00"},
        ]  # fmt: skip
        say(stack, "It is fine.")
        answer = client.chat.completions.create(
            model=MODEL, messages=[QUESTION, message, *results], tools=TOOLS
        )
    assert answer.choices[0].message.content == "It is fine."
    assert answer.choices[0].finish_reason == "stop"
    assert len(stack.decoder.submits[-1].images) == 1
    prompt = prompt_of(stack)
    assert prompt.count(added_ids()["<tool_call>"]) == 4  # two calls, two in the instruction
    assert prompt.count(added_ids()["<tool_response>"]) == 2


def test_reasoning_whole_and_streamed(thinking):
    say(thinking, THOUGHT + CALLS["hermes"], 2)
    fields = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS}
    with client_of(thinking) as client:
        answer = client.chat.completions.create(**fields)
        chunks = [*client.chat.completions.create(**fields, stream=True)]
    (choice,) = answer.choices
    assert choice.message.reasoning_content == "The user asks: 中 🙂 < 5?"
    assert choice.message.reasoning == choice.message.reasoning_content
    assert choice.message.content == "Let me see 🙂."
    assert len(choice.message.tool_calls) == 2
    num_tokens = len(encode(thinking.tokenizer, THOUGHT.rstrip()))
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens
    deltas = [chunk.choices[0].delta for chunk in chunks]
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert streamed == choice.message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_can_be_left_out(thinking):
    say(thinking, THOUGHT + "yes")
    body = thinking.chat(include_reasoning=False).json()
    message = body["choices"][0]["message"]
    assert message["content"] == "yes" and "reasoning" not in message
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5


def test_thinking_switched_off(thinking):
    say(thinking, "plain")
    body = thinking.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert body["choices"][0]["message"]["content"] == "plain"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert prompt_of(thinking).count(added_ids()["</think>"]) == 1


def test_a_grammar_begins_after_the_reasoning(thinking):
    say(thinking, THOUGHT + "{}")
    answer = thinking.chat(response_format={"type": "json_object"}).json()
    assert answer["choices"][0]["message"]["content"] == "{}"
    fields = {"response_format": {"type": "json_object"}, "reasoning_effort": "none"}
    thinking.chat(**fields)
    with_reasoning, without = (submit.grammar for submit in thinking.decoder.submits)
    tags = [f"<[{added_ids()[tag]}]>" for tag in ("<think>", "</think>")]
    assert all(tag in with_reasoning.text for tag in tags)
    assert without.text == '{"type": "object"}'


@pytest.mark.parametrize(
    ("fields", "has_grammar"),
    [
        ({}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, True),
        ({"tool_choice": "none"}, False),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
def test_choices_that_have_to_hold_go_with_a_grammar(stack, fields, has_grammar):
    say(stack, CALLS["hermes"])
    assert stack.chat(tools=TOOLS, **fields).status_code == 200
    submit = stack.decoder.submits[-1]
    assert submit.HasField("grammar") == has_grammar
    if has_grammar:
        assert "%json" in submit.grammar.text and "now" in submit.grammar.text


def test_the_client_s_own_parsing(stack):
    """Strict functions made of classes; what was parsed goes back as the client writes it."""

    class Now(pydantic.BaseModel):
        zone: str | None = None

    say(stack, '<tool_call>\n{"name": "Now", "arguments": {"zone": "CET"}}\n</tool_call>')
    fields = {"model": MODEL, "tools": [openai.pydantic_function_tool(Now)]}
    with client_of(stack) as client:
        answer = client.chat.completions.parse(**fields, messages=[QUESTION])
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert call.function.parsed_arguments == Now(zone="CET")
        result = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
        client.chat.completions.parse(**fields, messages=[QUESTION, message, result])
    assert stack.decoder.submits[-1].HasField("grammar")


def test_a_function_that_cannot_be_held_to_is_named(stack):
    async def refuse(submit):
        raise InvalidGrammar("no such keyword")

    say(stack, "x")
    stack.decoder.before = refuse
    for parameters, place in (
        ({"properties": {"a": {"not": {}}}}, ".properties.a.not"),  # known in the gateway
        ({"properties": {"a": {"pattern": r"\p{Foo}"}}}, ""),  # to the decoder's library
    ):
        function = {"name": "f", "strict": True, "parameters": parameters}
        response = stack.chat(tools=[{"type": "function", "function": function}])
        assert response.status_code == 400
        param = f"tools[0].function.parameters{place}"
        assert response.json()["error"]["param"] == param


def test_tokenize_counts_tools(stack):
    body = {"messages": [QUESTION], "tools": TOOLS}
    stack.chat(**body)
    with stack.client() as client:
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        shorter = client.post("/tokenize", json={**body, "add_generation_prompt": False}).json()
    assert tokens == prompt_of(stack)
    assert tokens[: shorter["count"]] == shorter["tokens"]
