"""A model that misbehaves: cut, nested, repeated, unclosed and re-ordered tags, calls and JSON.

Whatever it writes, arguments are JSON objects, the stream is the whole answer, and the answer is
taken back as history.
"""

import json
import random

import pytest

from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.tool_parsers import PARSERS
from services.gateway.forms.openai import parse_chat_request
from services.gateway.prompts.messages import read_messages
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
_VALUES = ("5", "-", "1e", "true", "None", "[1, {", '{"b": "c"}', '"x', "NaN", "null", '"\\u12"')
_PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "<function=now>",
    "</function>", "<parameter=city>", "</parameter>", "<|python_tag|>", "<|im_start|>",
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
    name = rng.choice(("weather", "now", "other", ""))
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
    if start == "open" and "</think>" not in text:
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
    read_messages(request, max_images=0, takes_images=False)
    return bool(calls)


@pytest.mark.parametrize("form", PARSERS)
def test_its_answers_are_valid(tokenizer, form):
    with_calls = sum(check(tokenizer, form, seed) for seed in range(NUM_SEEDS // len(PARSERS)))
    assert with_calls > NUM_SEEDS // len(PARSERS) // 15


@pytest.mark.nightly
@pytest.mark.parametrize("form", PARSERS)
def test_ten_thousand_of_its_answers_are_valid(tokenizer, form):
    for seed in range(NUM_NIGHTLY_SEEDS):
        check(tokenizer, form, seed)
