"""POST /v1/responses, as the official client sends and reads it."""

import json
import time

import numpy as np
import openai
import pydantic
import pytest

from services.gateway.endpoints.responses_endpoint import to_chat
from services.gateway.forms.responses_api import parse_responses_request
from services.gateway.prompts.prompt import PromptBuilder
from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL
from tests.noise import least
from tests.unit.gateway.test_answers import CALLS, encode

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
THOUGHT = "<think>\nI think.\n</think>\n\n"


def client_of(stack):
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)


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
    assert stack.chat(**fields).status_code == 200
    return prompt(stack)


def post(stack, **fields):
    with stack.client() as client:
        return client.post("/v1/responses", json={"model": MODEL, "input": "hello", **fields})


def events_of(response) -> list[dict]:
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [e["type"] for e in events]
    return events


def test_answer(client, stack):
    answer = client.responses.create(
        model=MODEL, input="hello", instructions="Be brief.", store=True, temperature=0.5,
        metadata={"a": "b"}, user="me", max_output_tokens=9,
    )  # fmt: skip
    assert answer.id.startswith("resp_") and answer.object == "response"
    assert answer.status == "completed"
    assert answer.output_text == "A red circle."
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert answer.usage.output_tokens == 5
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert (answer.temperature, answer.metadata) == (0.5, {"a": "b"})
    assert answer.instructions == "Be brief."
    sampling = stack.decoder.submits[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 9)
    found = prompt(stack)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert found == chat_prompt(stack, messages=messages)


def test_events_in_the_order_of_openai(stack):
    events = events_of(post(stack, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 4, "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    assert events[2]["item"]["status"] == "in_progress"
    assert events[3]["part"]["text"] == ""
    deltas = [e["delta"] for e in events if e["type"].endswith("text.delta")]
    done = events[-1]["response"]
    assert "".join(deltas) == events[-4]["text"] == done["output"][0]["content"][0]["text"]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1
    assert done["usage"]["total_tokens"] > 5


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
def test_reasoning_text_and_calls(thinking, tokens_per_event):
    say(thinking, THOUGHT + CALLS["hermes"], tokens_per_event)
    fields = {
        "model": MODEL,
        "input": "x",
        "tools": TOOLS,
        "include": ["reasoning.encrypted_content"],
    }
    with client_of(thinking) as client:
        whole = client.responses.create(**fields)
        with client.responses.stream(**fields) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
    for answer in (whole, streamed):
        thought, text, first, second = answer.output
        assert thought.content[0].text == "I think."
        assert text.content[0].text == "Let me see 🙂."
        assert (first.type, first.name, second.name) == ("function_call", "weather", "now")
        assert json.loads(first.arguments)["days"] == 3
        assert first.call_id != second.call_id
        assert {item.status for item in answer.output} == {"completed"}
        assert answer.status == "completed"
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    )
    assert kinds.count("response.function_call_arguments.done") == 2


def test_answer_can_be_sent_back(thinking):
    """A second turn is the same prompt as that of chat with the same messages."""
    say(thinking, THOUGHT + CALLS["hermes"])
    with client_of(thinking) as client:
        answer = client.responses.create(model=MODEL, input="x", tools=TOOLS)
        calls = [item for item in answer.output if item.type == "function_call"]
        say(thinking, "Done.")
        history = [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            *answer.output,
            *({"type": "function_call_output", "call_id": c.call_id, "output": "7"} for c in calls),
        ]
        second = client.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert second.output_text == "Done."
    found = prompt(thinking)
    assistant = {
        "role": "assistant", "content": "Let me see 🙂.", "reasoning_content": "I think.",
        "tool_calls": [
            {"id": c.call_id, "type": "function",
             "function": {"name": c.name, "arguments": c.arguments}}
            for c in calls
        ],
    }  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": TOOLS[0]["parameters"]}},
        {"type": "function", "function": {"name": "now"}},
    ]
    results = [{"role": "tool", "tool_call_id": c.call_id, "content": "7"} for c in calls]
    messages = [{"role": "user", "content": "x"}, assistant, *results]
    assert found == chat_prompt(thinking, messages=messages, tools=tools)


def test_many_system_messages_are_joined_in_linear_time():
    items = [{"role": "system", "content": "a" * 2000}] * 2000
    items += [{"role": "user", "content": "x"}, *items[:2]]
    request = parse_responses_request(json.dumps({"input": items}).encode())

    def join() -> float:
        start = time.process_time()
        first, _, last = to_chat(request, {}).messages
        taken = time.process_time() - start
        assert first.content == "\n\n".join(["a" * 2000] * 2000)
        assert last.content == "\n\n".join(["a" * 2000] * 2)
        return taken

    assert least(join, 0.1) <= 0.1


def test_images(client, stack):
    url = image_url(300, 200)
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"},
             {"type": "input_text", "text": "what?"}]  # fmt: skip
    answer = client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}])
    assert answer.output_text == "A red circle."
    assert stack.decoder.submits[0].images[0].num_tokens == 70
    # As `model_dump` writes it, and as Chat Completions spell it.
    for part in ({**parts[0], "file_id": None}, {**parts[0], "image_url": {"url": url}}):
        client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])
        assert stack.decoder.submits[-1].images[0].num_tokens == 70
    for part, field in (
        ({**parts[0], "file_id": "file-1"}, "file_id"),
        ({"type": "input_image"}, "image_url"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])
        assert refused.value.param == f"input[0].content[0].{field}"


def test_structured_text(client, stack):
    class Shape(pydantic.BaseModel):
        color: str

    say(stack, '{"color": "red"}')
    answer = client.responses.parse(model=MODEL, input="x", text_format=Shape)
    assert answer.output_parsed == Shape(color="red")
    grammar = stack.decoder.submits[0].grammar
    assert json.loads(grammar.text)["properties"]["color"]["type"] == "string"
    client.responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}})
    assert stack.decoder.submits[1].HasField("grammar")


def test_cut_answer_is_incomplete(client, stack):
    answer = client.responses.create(model=MODEL, input="x", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    events = events_of(post(stack, stream=True, max_output_tokens=2))
    assert events[-1]["type"] == "response.incomplete"


def test_empty_answer_is_an_empty_message(client, stack):
    stack.decoder.reply = []
    assert client.responses.create(model=MODEL, input="x").output_text == ""
    kinds = [event["type"] for event in events_of(post(stack, stream=True))]
    assert kinds[-1] == "response.completed" and "response.output_item.done" in kinds


def test_logprobs(client):
    answer = client.responses.create(
        model=MODEL, input="x", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    found = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in found) == "A red circle."
    assert len(found[0].top_logprobs) == 2


@pytest.mark.parametrize("tokens_per_event", [1, 2])
def test_logprobs_of_text_that_waits_for_its_rest(stack, tokens_per_event):
    """A character of several tokens, and what may become a stop string."""
    text = "Ein 🙂 中文 ünd stop ste."
    say(stack, text, tokens_per_event)
    fields = {"include": ["message.output_text.logprobs"], "stop": ["stopped"]}
    whole = post(stack, **fields).json()
    events = events_of(post(stack, stream=True, **fields))
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    (added,) = (e for e in events if e["type"] == "response.content_part.added")
    assert (added["part"]["text"], added["part"]["logprobs"]) == ("", [])
    streamed = [entry for event in deltas for entry in event["logprobs"]]
    (part,) = whole["output"][0]["content"]
    for entries in (streamed, part["logprobs"]):
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [("a stopped", {"stop": ["stopped"]}, "a "), ("a 🙂", {"max_output_tokens": 3}, "a "),
     ("🙂", {"max_output_tokens": 2}, "")],
)  # fmt: skip
def test_logprobs_of_tokens_whose_text_is_cut_off_are_those_of_chat(
    stack, text, fields, expected, stream
):
    say(stack, text)
    most, stop = fields.get("max_output_tokens"), fields.get("stop")
    chat = stack.chat(logprobs=True, max_tokens=most, stop=stop).json()
    include = ["message.output_text.logprobs"]
    answer = post(stack, include=include, stream=stream, **fields)
    found = events_of(answer)[-1]["response"] if stream else answer.json()
    (part,) = found["output"][0]["content"]
    assert part["text"] == expected
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]


def test_failure_in_mid_stream(client, stack):
    stack.decoder.fail_after = (2, "internal_error")
    events = list(client.responses.create(model=MODEL, input="x", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "call_id": "1"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "a"},
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[1].content[0]"),
        ({"input": [{"role": "user", "content": "x" * 100_000}]}, "input"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "oldest"}, "truncation"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "g"}]}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}},
         "text.format.schema"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"messages": [1]}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
def test_refused_by_name(stack, fields, param):
    response = post(stack, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param) or param in error["message"]
    assert not stack.decoder.submits


def test_benchmark_clients_answers_have_the_length_they_ask_for(stack):
    """`vllm bench serve --backend openai-responses` sends ignore_eos."""
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 9, "ignore_eos": True}
    with stack.client() as client:
        assert client.post("/v1/responses", json=body).status_code == 200
    assert stack.decoder.end_token not in stack.decoder.submits[-1].sampling.stop_token_ids


def test_truncation_cuts_the_oldest_turns(stack):
    def turn(number, size):
        return [
            {"role": "user", "content": f"question {number} " + "x " * size},
            {"role": "assistant", "content": f"answer {number}"},
        ]

    history = [*turn(1, 900), *turn(2, 900), *turn(3, 900), *turn(4, 900)]
    fields = {"instructions": "Be brief.", "input": [*history, {"role": "user", "content": "5"}],
              "max_output_tokens": 64}  # fmt: skip
    limit = stack.decoder.description.max_model_len
    assert post(stack, **fields).json()["error"]["code"] == "context_length_exceeded"
    response = post(stack, **fields, truncation="auto")
    assert response.status_code == 200 and response.json()["truncation"] == "auto"
    assert "input" in response.headers["x-triptych-ignored"]
    found = prompt(stack)
    assert "Be brief." in found and "question 4" in found and "question 1" not in found
    usage = response.json()["usage"]
    assert limit - 2000 < usage["input_tokens"] <= limit - 64
    # One that fits loses nothing.
    short = post(stack, input=[*turn(1, 5), {"role": "user", "content": "2"}], truncation="auto")
    assert "x-triptych-ignored" not in short.headers
    assert "question 1" in prompt(stack)
    # The last turn is never cut.
    refused = post(stack, input="x " * limit, truncation="auto")
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("num_turns", [4, 60])
def test_truncation_renders_tools_three_times_at_most(stack, monkeypatch, num_turns):
    draft, num_rendered = PromptBuilder.draft, []

    def counting(builder, conversation, max_tokens):
        num_rendered.append("y y" in str(conversation.tools))
        return draft(builder, conversation, max_tokens)

    monkeypatch.setattr(PromptBuilder, "draft", counting)
    limit = stack.decoder.description.max_model_len
    size = limit // num_turns  # two tokens each: about half of them fit
    turns = [item for number in range(num_turns) for item in (
        {"role": "user", "content": f"question {number} " + "x " * size},
        {"role": "assistant", "content": "ok"})]  # fmt: skip
    tool = {"type": "function", "name": "g", "description": "y " * (limit // 8)}
    fields = {"input": [*turns, {"role": "user", "content": "?"}], "tools": [tool],
              "max_output_tokens": 8, "truncation": "auto"}  # fmt: skip
    response = post(stack, **fields)
    assert response.status_code == 200, response.text
    assert sum(num_rendered) <= 3
    assert "y y" in prompt(stack) and "question 0" not in prompt(stack)
    used = response.json()["usage"]["input_tokens"]
    assert limit - 8 - (2 * size + 40) < used <= limit - 8
    # Tools that leave no room are found at once.
    del num_rendered[:]
    fields["tools"] = [tool | {"description": "y " * limit}]
    assert post(stack, **fields).json()["error"]["code"] == "context_length_exceeded"
    assert len(num_rendered) <= 2


def test_functions_of_namespaces(stack):
    group = {"type": "namespace", "name": "mcp__files", "description": "Files of the project.",
             "tools": [{**TOOLS[0], "name": "read", "description": "Reads one."}]}  # fmt: skip
    name = "mcp__files__read"
    say(stack, f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>')
    answer = post(stack, tools=[TOOLS[0], group]).json()
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    assert (call["namespace"], call["name"]) == ("mcp__files", "read")
    assert "Files of the project." in prompt(stack)
    assert answer["tools"][1]["type"] == "namespace"
    # It comes back as it went.
    history = [{"role": "user", "content": "x"}, call,
               {"type": "function_call_output", "call_id": call["call_id"], "output": "y"},
               {"role": "user", "content": "z"}]  # fmt: skip
    assert post(stack, input=history, tools=[group]).status_code == 200
    assert name in prompt(stack)
    choice = {"type": "function", "name": "read", "namespace": "mcp__files"}
    assert post(stack, tools=[group], tool_choice=choice).status_code == 200
    twice = post(stack, tools=[group, group])
    assert twice.json()["error"]["param"] == "tools[1].tools[0].name"


def test_sampling_fields_of_chat_reach_the_decoder(stack):
    fields = {
        "presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"5": 2},
        "stop_token_ids": [7], "priority": -3, "structured_outputs": {"choice": ["a", "b"]},
    }  # fmt: skip
    assert post(stack, **fields).status_code == 200
    (submit,) = stack.decoder.submits
    sampling = submit.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5)
    assert dict(sampling.logit_bias) == {5: 2.0} and 7 in sampling.stop_token_ids
    assert submit.priority == -3 and submit.HasField("grammar")
