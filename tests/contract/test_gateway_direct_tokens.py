"""Streams whose tokens reach the client directly, and through the request's task."""

import json
from itertools import count

import pytest

from services.gateway.http.protocol import Pieces
from tests.gateway_stack import MODEL

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
NUM_TOKENS = 200


def text_of(path: str, answer: dict) -> str:
    """The text of a whole answer."""
    if path == "messages":
        return answer["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == "chat/completions" else choice["text"]


def texts_of(path: str, event: dict) -> list[str]:
    """The text of an event of a stream, if it has any."""
    if path == "messages":
        return [event["delta"].get("text", "")] if event["type"] == "content_block_delta" else []
    if path == "completions":
        return [choice["text"] for choice in event["choices"]]
    return [choice["delta"].get("content", "") for choice in event["choices"]]


@pytest.mark.parametrize("num_direct", [0, 1, 3, NUM_TOKENS], ids=lambda n: f"{n} of four")
@pytest.mark.parametrize(
    ("path", "prompt"),
    [("chat/completions", HELLO), ("completions", {"prompt": "hello"}), ("messages", HELLO)],
)
def test_tokens_of_both_ways_come_in_order(stack, monkeypatch, path, prompt, num_direct):
    numbers, direct = count(), []
    can_send, send = Pieces.can_send, Pieces.send
    monkeypatch.setattr(
        Pieces, "can_send", lambda p: can_send(p) and next(numbers) % 4 < num_direct
    )
    monkeypatch.setattr(Pieces, "send", lambda p, data: (direct.append(data), send(p, data)))
    stack.decoder.reply = [40 + i % 50 for i in range(NUM_TOKENS)]
    fields = {"model": MODEL, "max_tokens": NUM_TOKENS, **prompt}
    with stack.client() as client:
        whole = client.post(f"/v1/{path}", json=fields).json()
        streamed = client.post(f"/v1/{path}", json={**fields, "stream": True}).text
    data = [line[6:] for line in streamed.splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    assert "".join(text for event in events for text in texts_of(path, event)) == text_of(
        path, whole
    )
    assert bool(direct) == bool(num_direct)
