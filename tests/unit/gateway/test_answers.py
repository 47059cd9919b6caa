"""A scripted model's answers: streamed in any pieces they are the whole answer, at every moment
valid, for every form of calls, with and without reasoning.
"""

import json
import random
import re

import msgspec
import pytest

from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.answers.tool_use import ToolCalls
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest, Message
from services.gateway.forms.responses import ChunkWriter, assistant_message
from services.gateway.forms.tools import FunctionDefinition
from tests.cases import cases
from tests.tiny_tokenizer import added_ids

pytestmark = pytest.mark.thorough

NUM_CHUNKINGS = cases(100, 1000)
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "now": {},
}


def tool_calls(form, max_calls=None):
    functions = {name: FunctionDefinition(name, parameters=TOOLS[name]) for name in TOOLS}
    return ToolCalls(PARSERS[form], {}, functions, max_calls=max_calls)


THOUGHT = "<think>\nThe user asks: 中 🙂 < 5?\n</think>\n\n"
CALLS = {
    "hermes": 'Let me see 🙂.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich '
    '\\"中\\"", "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n'
    "</tool_call>",
    "qwen3_coder": "Let me see 🙂.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich "
    '"中"\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Zürich \\"中\\"", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
}
EXPECTED = [
    ("weather", {"city": 'Zürich "中"', "days": 3}),
    ("now", {}),
]


def encode(tokenizer, text):
    """As a model writes it: the names of added tokens are tokens."""
    pattern = "|".join(re.escape(token) for token in added_ids())
    ids = []
    for piece in re.split(f"({pattern})", text):
        ids += [added_ids()[piece]] if piece in added_ids() else tokenizer.encode_text(piece)
    return ids


def groups(ids, rng):
    rest = list(ids)
    while rest:
        size = rng.randint(1, 6)
        yield rest[:size]
        rest = rest[size:]


def request(**fields):
    return ChatRequest([Message("user", "x")], "m", **fields)


def answer(tokenizer, ids, answer_format, sizes, reason="stop", **fields):
    """All updates of one choice, and the choice."""
    choice = Choice(0, request(**fields), tokenizer, answer_format.parser())
    updates = []
    grouped = [*sizes, []]
    for index, group in enumerate(grouped):
        last = index == len(grouped) - 1
        ending = [added_ids()["<|im_end|>"]] if last and reason == "stop" else []
        event = TokenEvent(0, [*group, *ending], finish_reason=reason if last else None)
        updates.append(choice.feed(event))
        if choice.finish_reason is not None:
            break
    return updates, choice


def whole(updates):
    return assistant_message([part for update in updates for part in update.parts])


def plain(message):
    """A message without random ids."""
    found = json.loads(msgspec.json.encode(message))
    for call in found.get("tool_calls", ()):
        assert re.fullmatch(r"call_[0-9a-f]{24}", call.pop("id"))
        assert call.pop("type") == "function"
    return found


def streamed(updates):
    """What a client makes of the chunks; checks each on the way."""
    writer = ChunkWriter("id", 1, "m", False)
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = None
    for update in updates:
        data = writer.update(update)
        if not data:
            continue
        assert finish_reason is None
        (choice,) = json.loads(data[6:])["choices"]
        delta, finish_reason = choice["delta"], choice["finish_reason"]
        message["content"] += delta.get("content", "")
        message["reasoning_content"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        if delta.get("content") and not message["tool_calls"]:
            assert not delta.get("reasoning_content") or message["content"] == delta["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                assert call["type"] == "function" and call["function"]["name"]
                message["tool_calls"].append({"function": call["function"]})
            else:
                assert set(call) == {"index", "function"} and "name" not in call["function"]
                assert call["function"]["arguments"]
                into = message["tool_calls"][call["index"]]["function"]
                into["arguments"] += call["function"]["arguments"]
    return message, finish_reason


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", PARSERS)
def test_streamed_is_the_whole_in_any_chunking(tokenizer, form, thinking):
    answer_format = AnswerFormat("optional" if thinking else None, tool_calls(form))
    ids = encode(tokenizer, (THOUGHT if thinking else "") + CALLS[form])
    updates, choice = answer(tokenizer, ids, answer_format, [ids])
    expected = plain(whole(updates))
    assert choice.finish_reason == "tool_calls"
    assert choice.num_tokens == len(ids) + 1
    assert choice.num_reasoning_tokens == (
        len(encode(tokenizer, THOUGHT.rstrip())) if thinking else 0
    )
    assert [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in expected["tool_calls"]
    ] == EXPECTED
    assert expected["content"] == (None if form == "llama3_json" else "Let me see 🙂.")
    assert expected.get("reasoning_content") == ("The user asks: 中 🙂 < 5?" if thinking else None)
    rng = random.Random(1)
    for _ in range(NUM_CHUNKINGS):
        updates, choice = answer(tokenizer, ids, answer_format, groups(ids, rng))
        assert plain(whole(updates)) == expected
        message, finish_reason = streamed(updates)
        assert finish_reason == "tool_calls"
        assert message["content"] == (expected["content"] or "")
        assert message["reasoning_content"] == expected.get("reasoning_content", "")
        assert message["tool_calls"] == expected["tool_calls"]


@pytest.mark.parametrize("form", PARSERS)
def test_cut_anywhere_the_stream_is_a_prefix(tokenizer, form):
    """The arguments of an answer cut by max_tokens are an object that begins as the whole one."""
    answer_format = AnswerFormat("optional", tool_calls(form))
    ids = encode(tokenizer, THOUGHT + CALLS[form])
    full = plain(whole(answer(tokenizer, ids, answer_format, [ids])[0]))
    for size in range(len(ids)):
        updates, choice = answer(
            tokenizer, ids[:size], answer_format, [[i] for i in ids[:size]], "length"
        )
        assert choice.finish_reason == "length"
        message, _ = streamed(updates)
        for call, expected in zip(message["tool_calls"], full["tool_calls"], strict=False):
            assert call["function"]["name"] == expected["function"]["name"]
            cut = json.loads(call["function"]["arguments"])
            full_arguments = json.loads(expected["function"]["arguments"])
            for (name, value), (full_name, full_value) in zip(
                cut.items(), full_arguments.items(), strict=False
            ):
                assert name == full_name and str(full_value).startswith(str(value))


@pytest.mark.parametrize("form", PARSERS)
def test_markup_of_a_required_call_is_never_content(tokenizer, form):
    """Cut anywhere, also within a tag or a name."""
    answer_format = AnswerFormat("optional", tool_calls(form), has_to_call=True)
    text = CALLS[form][CALLS[form].index("<" if form != "llama3_json" else "{") :]
    for thought in (THOUGHT, ""):
        ids = encode(tokenizer, thought + text)
        for size in range(len(ids)):
            cut = [[i] for i in ids[:size]]
            updates, _ = answer(tokenizer, ids[:size], answer_format, cut, "length")
            assert not plain(whole(updates))["content"]
    free = AnswerFormat(None, tool_calls(form))
    ids = encode(tokenizer, text[:6])
    assert plain(whole(answer(tokenizer, ids, free, [ids])[0]))["content"] == text[:6]


def test_stop_strings_match_in_content_alone(tokenizer):
    """Neither in the reasoning, nor in the arguments."""
    answer_format = AnswerFormat("open", tool_calls("hermes"))
    ids = encode(
        tokenizer,
        'a STOP b\n</think>\n\nfirst<tool_call>{"name": "now", "arguments": {"a": "STOP"}}'
        "</tool_call> then STOP and more",
    )
    rng = random.Random(2)
    for sizes in ([ids], [[i] for i in ids], list(groups(ids, rng))):
        updates, choice = answer(tokenizer, ids, answer_format, sizes, stop=["STOP"])
        message = plain(whole(updates))
        assert message["reasoning_content"] == "a STOP b"
        assert message["content"] == "firstthen "
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "STOP"}'
        assert updates[-1].stop_reason == "STOP"
        assert choice.finish_reason == "tool_calls"
        assert choice.num_tokens < len(ids)


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("stop", ["\n", "<", "lo<tool"])
def test_a_stop_string_at_the_end_is_the_reason_although_it_could_have_begun_a_call(
    tokenizer, stop, reason
):
    answer_format = AnswerFormat(None, tool_calls("hermes"))
    ids = encode(tokenizer, f"hello{stop.removeprefix('lo')}")
    for sizes in ([ids], [[i] for i in ids]):
        updates, choice = answer(tokenizer, ids, answer_format, sizes, reason, stop=[stop])
        assert "hello".removesuffix("lo") in (content := whole(updates).content)
        assert stop not in content
        assert (choice.finish_reason, updates[-1].stop_reason) == ("stop", stop)


def test_parallel_calls_can_be_switched_off(tokenizer):
    answer_format = AnswerFormat(None, tool_calls("hermes", 1))
    ids = encode(tokenizer, CALLS["hermes"])
    updates, choice = answer(tokenizer, ids, answer_format, [[i] for i in ids])
    assert [c["function"]["name"] for c in plain(whole(updates))["tool_calls"]] == ["weather"]
    assert choice.finish_reason == "tool_calls"
    # The first call's end ends the choice: the rest is not generated.
    assert choice.num_tokens == ids.index(added_ids()["</tool_call>"]) + 1


def test_reasoning_alone_has_no_content(tokenizer):
    ids = encode(tokenizer, "never ends")
    updates, _ = answer(tokenizer, ids, AnswerFormat("open"), [ids], "length")
    message = whole(updates)
    assert (message.content, message.reasoning_content) == (None, "never ends")


def test_an_empty_answer_has_empty_content(tokenizer):
    updates, choice = answer(tokenizer, [], AnswerFormat(), [])
    assert whole(updates).content == ""
    assert choice.finish_reason == "stop"
