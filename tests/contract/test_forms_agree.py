"""One request in each form of the API, whole and streamed: the answers say the same."""

import json
import random
import re

import pytest

from tests.cases import cases
from tests.gateway_stack import MODEL
from tests.unit.gateway.test_answers import encode

pytestmark = pytest.mark.thorough

NUM_CASES = cases(40, 500)
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {"type": "object", "properties": {}},
}
PIECES = [
    "Hello", " world", "\n", "\n\n", " ", "中文", "🙂", "e\u0301", "<", "<tool", "<tool_call>",
    "</tool_call>", "STOP", "ST", "OP", "<think>", "</think>", "{", "}", '"', "<|im_start|>",
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich STOP 🙂", "days": 3}}\n'
    "</tool_call>",
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "weather", "arguments": {"city": "A"',
]  # fmt: skip
STOPS = ["STOP", "🙂", "\n\n", "文", "</think>", "<tool_call>", "OP", "\u0301", " "]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def written(rng, thinks):
    """A model's text."""
    text = "".join(rng.choices(PIECES, k=rng.randint(0, 8)))
    if not thinks or rng.random() < 0.3:
        return text
    opening, closing = "<think>\n" * rng.randint(0, 1), "\n</think>\n\n" * rng.randint(0, 1)
    return opening + text + closing + "".join(rng.choices(PIECES, k=rng.randint(0, 3)))


def bodies(rng, thinks):
    """The same request for each of the paths."""
    turns, limit = [{"role": "user", "content": "hello"}], rng.choice((1, 2, 3, 5, 10, 30, 300))
    chat = {"model": MODEL, "messages": turns, "max_tokens": limit}
    response = {"model": MODEL, "input": "hello", "max_output_tokens": limit}
    message = {"model": MODEL, "messages": turns, "max_tokens": limit}
    if rng.random() < 0.6:
        tools = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]
        chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
        response["tools"] = [{"type": "function", **tool} for tool in tools]
        message["tools"] = [{"name": n, "input_schema": schema} for n, schema in TOOLS.items()]
        choice = rng.choice(("auto", "auto", "none"))
        chat["tool_choice"] = response["tool_choice"] = choice
        message["tool_choice"] = {"type": choice}
        if choice == "auto" and rng.random() < 0.3:
            chat["parallel_tool_calls"] = response["parallel_tool_calls"] = False
            message["tool_choice"]["disable_parallel_tool_use"] = True
    if rng.random() < 0.5:
        chat["stop"] = rng.sample(STOPS, rng.randint(1, 3))
        response["stop"] = message["stop_sequences"] = chat["stop"]
    if thinks and (thinking := rng.choice((None, True, False))) is not None:
        chat["enable_thinking"] = thinking
        response["chat_template_kwargs"] = {"enable_thinking": thinking}
        message["thinking"] = {"type": "enabled" if thinking else "disabled"}
    return dict(zip(PATHS, (chat, response, message), strict=True))


def events_of(text):
    return [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]


def streamed_chat(events):
    """The whole answer that its chunks make."""
    message, calls, end = {"content": "", "reasoning_content": ""}, [], {}
    for event in events:
        for choice in event["choices"]:
            assert not end
            delta = choice["delta"]
            for name in message:
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            end = choice if choice["finish_reason"] else {}
    return {"choices": [{**end, "message": message | {"tool_calls": calls}}],
            "usage": events[-1]["usage"]}  # fmt: skip


def streamed_response(events):
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    for item in done:
        told = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas.get(item["id"], "") == told
    assert done == response["output"] or not deltas
    return response


def streamed_message(events):
    message, inputs = events[0]["message"], {}
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta, at = event["delta"], event["index"]
                assert at == len(message["content"]) - 1
                name = delta["type"].removesuffix("_delta")
                if name == "input_json":
                    inputs[at] = inputs.get(at, "") + delta["partial_json"]
                else:
                    message["content"][at][name] += delta[name]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for at, text in inputs.items():
        message["content"][at]["input"] = json.loads(text)
    return message


def of_chat(answer):
    """Reasoning, text, calls, why it ended, tokens of the prompt and of the answer."""
    (choice,), usage = answer["choices"], answer["usage"]
    message, end = choice["message"], choice["finish_reason"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return (message.get("reasoning_content", ""), message["content"] or "", calls, end,
            usage["prompt_tokens"], usage["completion_tokens"])  # fmt: skip


def of_response(answer):
    texts, calls, usage = {"reasoning": "", "message": ""}, [], answer["usage"]
    for item in answer["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        else:
            texts[item["type"]] += item["content"][0]["text"]
    end = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return (texts["reasoning"], texts["message"], calls, end, usage["input_tokens"],
            usage["output_tokens"])  # fmt: skip


def of_message(answer):
    blocks, usage = answer["content"], answer["usage"]
    ends = {"max_tokens": "length", "tool_use": "tool_calls"}
    return (
        "".join(block.get("thinking", "") for block in blocks),
        "".join(block.get("text", "") for block in blocks),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        ends.get(answer["stop_reason"], "stop"),
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
    )


READERS = (of_chat, of_response, of_message)
STREAMS = (streamed_chat, streamed_response, streamed_message)


@pytest.mark.parametrize("kind", ["stack", "thinking"])
def test_all_forms_say_the_same_whole_and_streamed(request, kind):
    stack, rng = request.getfixturevalue(kind), random.Random(kind)
    with stack.client() as client:
        for _ in range(NUM_CASES):
            text, found = written(rng, kind == "thinking"), {}
            stack.decoder.reply = encode(stack.tokenizer, text)
            stack.decoder.tokens_per_event = rng.choice((1, 1, 2, 3, 50))
            requests = bodies(rng, kind == "thinking")
            for (path, body), read, join in zip(requests.items(), READERS, STREAMS, strict=True):
                whole = client.post(path, json=body)
                usage = {"stream_options": {"include_usage": True}} if "chat" in path else {}
                stream = client.post(path, json=body | usage | {"stream": True})
                assert whole.status_code == stream.status_code == 200, whole.text
                found[path] = read(whole.json())
                found[f"{path}, streamed"] = read(join(events_of(stream.text)))
            assert len({json.dumps(each) for each in found.values()}) == 1, (text, requests, found)
