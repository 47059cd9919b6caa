"""A model that misbehaves: cut, nested, repeated, unclosed and re-ordered tags, calls and JSON.

Whatever it writes, arguments are JSON objects, the stream is the whole answer, and the answer is
taken back as history.
"""

import json
import random
import time
from types import SimpleNamespace

import msgspec
import pytest

from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.bounds import Bounds
from services.gateway.endpoints import messages_endpoint, responses_endpoint
from services.gateway.endpoints.messages_endpoint import MessageWriter, blocks
from services.gateway.endpoints.responses_endpoint import ResponseWriter
from services.gateway.forms.messages_api import (
    MessageAnswer,
    MessageUsage,
    parse_messages_request,
)
from services.gateway.forms.openai import parse_chat_request
from services.gateway.forms.parts import Text
from services.gateway.forms.responses import LogprobEntry, PromptTokensDetails, Update, Usage
from services.gateway.forms.responses_api import parse_responses_request
from services.gateway.prompts.conversation import read_messages
from tests.noise import least
from tests.unit.gateway.test_answers import (
    answer,
    encode,
    groups,
    plain,
    streamed,
    tool_calls,
    whole,
)

NUM_SEEDS = 1000
NUM_NIGHTLY_SEEDS = 10_000
_STARTS = ("open", "optional", "closed", None)
_STRINGS = ("a.py", "5", "null", "{", '"', "\\", "\n", "</think>", "<tool_call>", "ü中", "")
_SPECIAL = "<|im_start|>"
_VALUES = (
    "5", "-", "1e", "true", "None", "[1, {", '{"b": "c"}', '"x', "NaN", "null", '"\\u12"',
    '"\\ud83d"', '["\\ude00", "\\ud83d\\ude00"]', '{"\\ud83d\\ud83d": 1}', "1e999", "-1e999",
)  # fmt: skip
_PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "<function=now>",
    "</function>", "<parameter=city>", "</parameter>", "<|python_tag|>", _SPECIAL,
    '{"name": "now"', '"arguments": ', '"parameters": {', "}", "{", "]", ";", ", ", "\n", "\n\n",
    " and ", "Hello.", "<", '"', "\\",
)  # fmt: skip


def arguments(rng):
    """Mostly an object."""
    pairs = [
        f"{json.dumps(rng.choice(('city', 'days', 'x')))}: "
        + rng.choice((json.dumps(rng.choice(_STRINGS)), f'"{rng.choice(_STRINGS)}"',
                      rng.choice(_VALUES)))
        for _ in range(rng.randrange(4))
    ]  # fmt: skip
    found = "{" + ", ".join(pairs) + "}"
    return rng.choice((found, found, found, json.dumps(found), "null", "[1]", '"a"', "5", ""))


def call(rng, form):
    name = rng.choice(("weather", "now", "other", "", "\\ud83d"))
    if form == "qwen3_coder":
        parameters = "".join(
            f"<parameter={rng.choice(('city', 'days', 'x'))}>\n"
            f"{rng.choice(_STRINGS + _VALUES)}\n</parameter>\n"
            for _ in range(rng.randrange(4))
        )
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
    key = "parameters" if form == "llama3_json" else "arguments"
    fields = [f'"name": "{name}"', f'"{key}": {arguments(rng)}', '"id": 5'][: rng.randrange(1, 4)]
    rng.shuffle(fields)
    found = "{" + ", ".join(fields) + "}"
    return found if form == "llama3_json" else f"<tool_call>\n{found}\n</tool_call>"


def misbehaving(rng, form):
    """One answer."""
    pieces = []
    for _ in range(rng.randrange(1, 7)):
        kind = rng.random()
        pieces.append(call(rng, form) if kind < 0.5 else rng.choice(_PIECES))
    if rng.random() < 0.5:
        pieces.insert(0, rng.choice(("<think>\nhm\n</think>\n\n", "hm\n</think>\n\n", "<think>")))
    text = rng.choice(("", "\n", " ")).join(pieces)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text) + 1)
        more = rng.choice(_PIECES)
        text = rng.choice((
            text[:at], text[:at] + text[at + rng.randrange(9) :],
            text[:at] + more + text[at:], text + text[:at],
        ))  # fmt: skip
    return text


def check(tokenizer, form, seed):
    rng = random.Random(f"{form} {seed}")
    start, text = rng.choice(_STARTS), misbehaving(rng, form)
    ids = encode(tokenizer, text)
    answer_format = AnswerFormat(start, tool_calls(form, rng.choice((None, None, 1))))
    reason = rng.choice(("stop", "stop", "length"))
    updates, choice = answer(tokenizer, ids, answer_format, [ids], reason)
    message = plain(whole(updates))
    calls = message.get("tool_calls") or []
    for made in calls:
        assert isinstance(json.loads(made["function"]["arguments"]), dict), text
    # With the last call that is allowed an answer ends, before its tokens do.
    expected = {"stop": ("tool_calls",), "length": ("length", "tool_calls")}[reason]
    assert choice.finish_reason in (expected if calls else (reason,)), text
    if start == "open" and "</think>" not in text.replace(_SPECIAL, ""):  # special: not in the text
        assert not message["content"], text
    for sizes in ([[i] for i in ids], groups(ids, rng)):
        pieces, cut = answer(tokenizer, ids, answer_format, sizes, reason)
        assert plain(whole(pieces)) == message, text
        assert cut.finish_reason == choice.finish_reason
        seen, _ = streamed(pieces)
        assert seen["content"] == (message["content"] or ""), text
        assert seen["reasoning_content"] == message.get("reasoning_content", ""), text
        assert seen["tool_calls"] == calls, text
    back = [{"id": f"c{n}", "type": "function", **made} for n, made in enumerate(calls)]
    results = [{"role": "tool", "tool_call_id": made["id"], "content": "x"} for made in back]
    history = [
        {"role": "user", "content": "x"},
        {**message, "role": "assistant", **({"tool_calls": back} if back else {})},
        *results,
        {"role": "user", "content": "go on"},
    ]
    request = parse_chat_request(json.dumps({"model": "m", "messages": history}).encode())
    read_messages(request, Bounds(), takes_images=False)
    for surface in (check_messages, check_responses):
        surface(pieces, choice, text)
    return bool(calls)


def check_messages(updates, choice, text):
    """Anthropic's form: the stream is the whole; each input is an object; it is taken back."""
    completion = SimpleNamespace(
        usage=lambda: Usage(1, 1, 2, PromptTokensDetails(0, 0)), cached_tokens=0
    )
    writer = MessageWriter(MessageAnswer("msg_1", "m", [], MessageUsage(0, 0)), completion)
    events = [event for update in updates for event in writer.update(update)] + writer.finish()
    found = []
    for event in json.loads(msgspec.json.encode(events)):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(found)
                found.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                delta = event["delta"]
                assert event["index"] == len(found) - 1
                kind = delta.pop("type").removesuffix("_delta")
                into = "json" if kind == "input_json" else kind
                (more,) = delta.values()
                found[-1][into] = found[-1].get(into, "") + more
    for block in found:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    whole_answer = json.loads(
        msgspec.json.encode(blocks([part for update in updates for part in update.parts]))
    )
    assert found == whole_answer, text
    ids = [block["id"] for block in found if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": i, "content": "x"} for i in ids]
    turns = [{"role": "user", "content": "x"}]
    if found:
        turns.append({"role": "assistant", "content": found})
    turns.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
    body = {"model": "m", "max_tokens": 9, "messages": turns}
    chat = messages_endpoint.to_chat(parse_messages_request(json.dumps(body).encode()), {})
    read_messages(chat, Bounds(), takes_images=False)


def check_responses(updates, choice, text):
    """OpenAI's Responses: the deltas are the items; arguments are objects; they are taken back."""
    completion = SimpleNamespace(
        usage=lambda: Usage(1, 1, 2, PromptTokensDetails(0, 0)), cached_tokens=0, choices=[choice],
        sampling=SimpleNamespace(temperature=1.0, top_p=1.0),
        prompt=SimpleNamespace(num_image_tokens=0),
    )  # fmt: skip
    request = parse_responses_request(b'{"model": "m", "input": "x"}')
    writer = ResponseWriter(request, "resp-1", completion, "m")
    events = [*(e for u in updates for e in writer.update(u)), *writer.finish()]
    deltas = {}
    for event in json.loads(msgspec.json.encode(events)):
        if event["type"].endswith(".delta"):
            at = event["item_id"]
            deltas[at] = deltas.get(at, "") + event["delta"]
    items = json.loads(msgspec.json.encode(writer.response.output))
    for item in items:
        if item["type"] == "function_call":
            assert isinstance(json.loads(item["arguments"]), dict), text
        mine = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas.get(item["id"], "") == mine, text
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
        for item in items
        if item["type"] == "function_call"
    ]
    turns = [{"role": "user", "content": "x"}, *items, *results, {"role": "user", "content": "y"}]
    back = parse_responses_request(json.dumps({"model": "m", "input": turns}).encode())
    read_messages(responses_endpoint.to_chat(back, {}), Bounds(), takes_images=False)


def test_a_long_response_takes_linear_time():
    completion = SimpleNamespace(
        usage=lambda: Usage(1, 1, 2, PromptTokensDetails(0, 0)), cached_tokens=0,
        choices=[SimpleNamespace(finish_reason="stop")],
        sampling=SimpleNamespace(temperature=1.0, top_p=1.0),
    )  # fmt: skip
    request = parse_responses_request(b'{"model": "m", "input": "x"}')

    def write() -> float:
        writer = ResponseWriter(request, "resp-1", completion, "m")
        start = time.process_time()
        for _ in range(200_000):
            writer.update(Update(0, [Text(" word")], None, None))
        writer.finish()
        taken = time.process_time() - start
        assert writer.response.output[0].content[0].text == " word" * 200_000
        return taken

    def wait() -> float:
        """Blanks whose end decides whether they are text."""
        writer = ResponseWriter(request, "resp-1", completion, "m")
        start = time.process_time()
        for _ in range(30_000):
            writer.update(Update(0, [], [LogprobEntry(" ", [32], 0.0, [])], None))
        writer.update(Update(0, [Text(" " * 30_000)], None, None))
        taken = time.process_time() - start
        assert len(writer.response.output[0].content[0].logprobs) == 30_000
        return taken

    assert least(write, 4) <= 4  # seconds; a text that is copied for each token, more than ten
    assert least(wait, 0.5) <= 0.5  # log-probabilities that are, two


@pytest.mark.parametrize("form", PARSERS)
def test_its_answers_are_valid(tokenizer, form):
    with_calls = sum(check(tokenizer, form, seed) for seed in range(NUM_SEEDS // len(PARSERS)))
    assert with_calls > NUM_SEEDS // len(PARSERS) // 15


@pytest.mark.nightly
@pytest.mark.parametrize("form", PARSERS)
def test_ten_thousand_of_its_answers_are_valid(tokenizer, form):
    for seed in range(NUM_NIGHTLY_SEEDS):
        check(tokenizer, form, seed)
