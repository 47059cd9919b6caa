"""POST /v1/messages, as Anthropic's client sends and reads it."""

import base64
import importlib
import json
import re

import numpy as np
import pytest

from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.unit.gateway.test_answers import CALLS, encode

TOOLS = [
    {
        "name": "weather",
        "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "now", "input_schema": {"type": "object"}},
]
HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<think>\nI think.\n</think>\n\n"


@pytest.fixture(scope="module")
def anthropic():
    """Imported by the processes that run a test of this file: it takes two seconds."""
    return importlib.import_module("anthropic")


def client_of(stack, **options):
    anthropic = importlib.import_module("anthropic")
    return anthropic.Anthropic(base_url=stack.url, api_key="x", max_retries=0, **options)


@pytest.fixture
def client(stack):
    with client_of(stack) as client:
        yield client


def say(stack, text, tokens_per_event=1):
    stack.decoder.reply = encode(stack.tokenizer, text)
    stack.decoder.tokens_per_event = tokens_per_event


def prompt(stack) -> str:
    """Text of the last prompt."""
    ids = np.frombuffer(stack.decoder.submits[-1].prompt_token_ids, "<i4").tolist()
    return b"".join(map(stack.tokenizer.token_bytes, ids)).decode()


def chat_prompt(stack, **fields) -> str:
    """Text of the prompt of a chat request."""
    response = stack.chat(**fields)
    assert response.status_code == 200, response.text
    return prompt(stack)


def post(stack, path="/v1/messages", **fields):
    body = {"model": MODEL, "max_tokens": 16, "messages": HELLO, **fields}
    with stack.client() as client:
        return client.post(path, json={k: v for k, v in body.items() if v is not ...})


def test_answer(client, stack):
    answer = client.messages.create(
        model=MODEL, max_tokens=9, messages=HELLO, system="Be brief.",
        metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 5},
    )  # fmt: skip
    assert answer._request_id.startswith("req-")
    assert answer.id.startswith("msg_") and (answer.type, answer.role) == ("message", "assistant")
    (block,) = answer.content
    assert (block.type, block.text) == ("text", "A red circle.")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (5, 7)
    sampling = stack.decoder.submits[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (9, 0.5, 5)
    found = prompt(stack)
    assert len(stack.decoder.submits[0].prompt_token_ids) // 4 == answer.usage.input_tokens + 7
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert found == chat_prompt(stack, messages=messages)


def test_models_have_what_the_client_reads(client):
    (model,) = client.models.list().data
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.lifecycle == "active"
    assert model.created_at.timestamp() == model.created
    assert client.models.retrieve(MODEL) == model
    assert client.models.retrieve(MODEL)._request_id.startswith("req-")


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/uploads"])
def test_errors_of_all_paths_are_the_clients(client, anthropic, path):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.get(path, cast_to=object)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id.startswith("req-")


def test_text_has_no_citations(stack):
    """Clients that know them as a list refuse null: @ai-sdk/anthropic 3."""
    assert post(stack).json()["content"] == [{"type": "text", "text": "A red circle."}]
    assert "citations" not in post(stack, stream=True).text


def test_ends(client, stack):
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=HELLO)
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model=MODEL, max_tokens=9, messages=HELLO, stop_sequences=[" circle"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " circle")
    stack.decoder.reply = []
    assert client.messages.create(model=MODEL, max_tokens=9, messages=HELLO).content == []


@pytest.mark.parametrize("stream", [False, True])
def test_calls_before_a_stop_sequence_are_to_be_answered(stack, stream):
    say(stack, CALLS["hermes"] + " then STOP and more")
    with client_of(stack) as client:
        fields = {"model": MODEL, "max_tokens": 300, "messages": HELLO, "tools": TOOLS}
        fields["stop_sequences"] = ["STOP"]
        if stream:
            with client.messages.stream(**fields) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**fields)
    assert [block.type for block in answer.content].count("tool_use") == 2
    assert answer.content[-1].text == "then "
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


def test_events_in_the_order_of_anthropic(stack):
    text = post(stack, stream=True).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [e["type"] for e in events]
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", *["content_block_delta"] * 4, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[1]["content_block"]["text"] == ""
    assert "".join(e["delta"]["text"] for e in events[2:6]) == "A red circle."
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_thinking_text_and_tools(thinking, tokens_per_event):
    say(thinking, THOUGHT + CALLS["hermes"], tokens_per_event)
    fields = {"model": MODEL, "max_tokens": 500, "messages": HELLO, "tools": TOOLS}
    fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with client_of(thinking) as client:
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        thought, text, first, second = answer.content
        assert (thought.type, thought.thinking) == ("thinking", "I think.")
        assert text.text == "Let me see 🙂."
        assert (first.type, first.name, first.input["days"]) == ("tool_use", "weather", 3)
        assert (second.name, second.input) == ("now", {})
        assert first.id != second.id
        assert answer.stop_reason == "tool_use"
    assert streamed.usage == whole.usage


def test_usage_has_the_thoughts_that_a_chats_has(thinking):
    say(thinking, THOUGHT + "Done.")
    chat = thinking.chat(messages=HELLO, max_tokens=99).json()["usage"]
    with client_of(thinking) as client:
        fields = {"model": MODEL, "messages": HELLO, "max_tokens": 99}
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            begun = next(iter(stream)).message.usage.output_tokens_details
            streamed = stream.get_final_message()
    reasoning = chat["completion_tokens_details"]["reasoning_tokens"]
    assert whole.usage.output_tokens_details.thinking_tokens == reasoning > 0
    assert (begun, streamed.usage) == (None, whole.usage)


def test_answer_can_be_sent_back(thinking):
    """A second turn is the same prompt as that of chat with the same messages."""
    say(thinking, THOUGHT + CALLS["hermes"])
    with client_of(thinking) as client:
        fields = {"model": MODEL, "max_tokens": 500, "tools": TOOLS}
        answer = client.messages.create(**fields, messages=HELLO)
        calls = [block for block in answer.content if block.type == "tool_use"]
        say(thinking, "Done.")
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": [{"type": "text", "text": "7"}]}
            for c in calls
        ]
        turns = [
            *HELLO,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
        ]
        second = client.messages.create(**fields, messages=turns)
    assert second.content[0].text == "Done."
    found = prompt(thinking)
    assistant = {
        "role": "assistant", "content": "Let me see 🙂.", "reasoning_content": "I think.",
        "tool_calls": [
            {"id": c.id, "type": "function",
             "function": {"name": c.name, "arguments": json.dumps(c.input)}}
            for c in calls
        ],
    }  # fmt: skip
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool["name"], "parameters": tool["input_schema"],
                **({"description": tool["description"]} if "description" in tool else {}),
            },
        }
        for tool in TOOLS
    ]  # fmt: skip
    messages = [
        *HELLO, assistant,
        *({"role": "tool", "tool_call_id": c.id, "content": "7"} for c in calls),
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    assert found == chat_prompt(thinking, messages=messages, tools=tools)


def test_the_answer_goes_on_with_a_last_turn_of_the_assistant(client, stack):
    turns = [*HELLO, {"role": "assistant", "content": "A red"}]
    client.messages.create(model=MODEL, max_tokens=9, messages=turns)
    assert prompt(stack).endswith("assistant\nA red")


def test_tool_choice(thinking):
    for choice, chat_choice in (
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ):
        assert post(thinking, tools=TOOLS, tool_choice=choice).status_code == 200
        tools = [
            {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}}
            for t in TOOLS
        ]
        thinking.chat(tools=tools, tool_choice=chat_choice)
        ours, chats = thinking.decoder.submits[-2:]
        assert ours.grammar == chats.grammar
    post(thinking, tools=TOOLS, tool_choice={"type": "none"})
    assert "weather" not in prompt(thinking)


def test_structured_answer(stack):
    schema = {"type": "object", "properties": {"color": {"type": "string"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert post(stack, output_config=config).status_code == 200
    assert json.loads(stack.decoder.submits[0].grammar.text) == schema


def test_thinking_can_be_switched_off(thinking):
    post(thinking, thinking={"type": "disabled"})
    off = prompt(thinking)
    assert off == chat_prompt(
        thinking, messages=HELLO, chat_template_kwargs={"enable_thinking": False}
    )


@pytest.mark.parametrize("kind", ["base64", "data url"])
def test_images(client, stack, kind):
    url = image_url(300, 200)
    source = {"type": "url", "url": url}
    if kind == "base64":
        data = url.partition(",")[2]
        assert base64.b64decode(data)
        source = {"type": "base64", "media_type": "image/png", "data": data}
    turn = {"role": "user", "content": [{"type": "image", "source": source},
                                        {"type": "text", "text": "what?"}]}  # fmt: skip
    assert client.messages.create(model=MODEL, max_tokens=9, messages=[turn]).content
    assert stack.decoder.submits[0].images[0].num_tokens == 70
    counted = client.messages.count_tokens(model=MODEL, messages=[turn])
    assert counted.input_tokens == len(stack.decoder.submits[0].prompt_token_ids) // 4


def test_failure_in_mid_stream_raises_in_the_client(anthropic, client, stack):
    stack.decoder.fail_after = (2, "internal_error")
    with (
        pytest.raises(anthropic.APIStatusError) as broken,
        client.messages.stream(model=MODEL, max_tokens=9, messages=HELLO) as stream,
    ):
        stream.get_final_message()
    assert broken.value.body["error"]["type"] == "api_error"


def test_errors_are_the_clients_own(anthropic, client, stack):
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id.startswith("req-")
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["message"].startswith("max_tokens: ")
    assert bad.value.body["error"]["details"] == {"error_code": "invalid_request"}
    assert post(stack, path="/v1/messages/x").json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("length", [3000, 300_000])
def test_a_long_prompt_is_told_in_words_that_agents_look_for(stack, length):
    """Claude Code, LangChain, LiteLLM and others then shorten the conversation."""
    messages = [{"role": "user", "content": "ab " * length}]
    for answer in (post(stack, messages=messages), stack.chat(messages=messages)):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert "prompt is too long: " in error["message"]
        assert "maximum context length is 4096 tokens" in error["message"]
        if length < 10_000:
            ((count, most),) = re.findall(r"too long: (\d+) tokens > (\d+) ", error["message"])
            assert int(count) > int(most) == 4095


def test_an_image_or_a_pdf_that_is_not_taken_is_told_in_words_that_agents_look_for(stack, thinking):
    """Claude Code then goes on without it; else its session would end there."""
    for each, data in ((stack, "AAAA"), (thinking, image_url().partition(",")[2])):
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "image", "source": source}]
        error = post(each, messages=[{"role": "user", "content": content}]).json()["error"]
        assert error["message"].startswith("Could not process image: messages[0].content[0]: ")
        assert error["details"] == {"error_code": "invalid_image"}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    document = {"type": "document", "source": pdf}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [document]}
    for block, place in ((document, ""), (result, ".content[0]")):
        error = post(stack, messages=[{"role": "user", "content": [block]}]).json()["error"]
        told = f"messages[0].content[0]{place}: Could not process PDF: the model reads none"
        assert error["message"] == told


def test_a_tool_runner_sends_the_whole_conversation(anthropic, client, stack):
    """It asks the server to keep the conversation, until that is refused in Anthropic's words."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather."""
        return f"sunny in {city}"

    say(stack, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    answers = list(
        client.beta.messages.tool_runner(
            model=MODEL, max_tokens=300, messages=HELLO, tools=[weather], max_iterations=2
        )
    )
    assert len(answers) == len(stack.decoder.submits) == 2
    assert "hello" in prompt(stack) and "sunny in Rome" in prompt(stack)
    refused = post(stack, thread={"type": "continue", "previous_message_id": answers[0].id})
    assert refused.json()["error"]["message"].startswith("thread: ")


def test_key_is_taken_from_either_header(anthropic, loop_thread, tmp_path):
    stack = GatewayStack(loop_thread, tmp_path, api_keys="x")
    try:
        for options in ({"api_key": "x"}, {"api_key": None, "auth_token": "x"}):
            with anthropic.Anthropic(base_url=stack.url, max_retries=0, **options) as client:
                assert client.messages.create(model=MODEL, max_tokens=1, messages=HELLO).content
        wrong = anthropic.Anthropic(base_url=stack.url, api_key="y", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
        assert refused.value.body["error"]["type"] == "authentication_error"
    finally:
        stack.close()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "image", "source": {
            "type": "url", "url": "data:,"}}]}]}, "messages[1].content[0]"),
        ({"system": "s", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "x"},
            {"type": "image", "source": {"type": "url", "url": "data:,"}}]}]},
         "messages[0].content[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
         "messages[0].content[0].text"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"container": "x"}, "container"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": 2}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": -9}}, "thinking"),
    ],
)  # fmt: skip
def test_refused_by_name(stack, fields, path):
    response = post(stack, **fields)
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert path in error["error"]["message"]
    assert not stack.decoder.submits
