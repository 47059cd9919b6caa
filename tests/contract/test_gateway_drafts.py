"""With drafts, an event of a decoder has several tokens. Where an answer ends within them, it has
the text, the reason of its end, the log-probabilities and the numbers of tokens that it has token
by token.
"""

import json
from typing import Any

import pytest

from tests.gateway_stack import GatewayStack

REPLY = "A red circle, a blue circle, and a red square."
# Stop strings at the end of a token, within one, over several tokens, and over the end of an event;
# and token budgets.
FIELDS: list[dict[str, Any]] = [
    {"stop": [" circle"]},
    {"stop": ["rcl"]},
    {"stop": ["d circle, a b"]},
    {"stop": ["square.", "blue c"]},
    {"stop": ["nowhere"]},
    {"stop": ["le,"], "include_stop_str_in_output": True},
    {"stop": ["blue"], "max_tokens": 6, "n": 2},
    {"stop": ["blue"], "logprobs": True},
    *({"max_tokens": count} for count in (1, 2, 5, 9)),
]


def answer_of(stack: GatewayStack, tokens_per_event: int, fields: dict[str, Any]) -> list[Any]:
    """Choices and token counts of an answer, whole and streamed."""
    stack.reset()
    stack.decoder.reply = stack.tokenizer.encode_text(REPLY)
    stack.decoder.tokens_per_event = tokens_per_event
    whole = stack.chat(**fields).json()
    streamed = stack.chat(stream=True, stream_options={"include_usage": True}, **fields)
    texts, reasons, usage = dict[int, str](), dict[int, Any](), None
    for line in streamed.text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            number = choice["index"]
            texts[number] = texts.get(number, "") + (choice["delta"].get("content") or "")
            reasons[number] = choice.get("finish_reason") or reasons.get(number)
    choices = [
        (c["message"]["content"], c["finish_reason"], c["stop_reason"], c.get("logprobs"))
        for c in whole["choices"]
    ]
    assert [texts[number] for number in sorted(texts)] == [choice[0] for choice in choices]
    assert [reasons[number] for number in sorted(reasons)] == [choice[1] for choice in choices]
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    return [choices, whole["usage"]]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_an_answer_ends_within_an_event_where_it_ends_token_by_token(
    stack: GatewayStack, fields: dict[str, Any]
) -> None:
    expected = answer_of(stack, 1, fields)
    for tokens_per_event in (2, 3, 5, 9, 100):
        assert answer_of(stack, tokens_per_event, fields) == expected
    text, reason, *_ = expected[0][0]
    assert text == REPLY or reason == ("length" if "stop" not in fields else "stop")
    assert REPLY.startswith(text)
