"""Reasoning apart from content, for models that think between tags before they answer.

`answer` feeds each choice's text through a splitter. Where an answer begins follows from the end
of the prompt: some templates open the block themselves, some write an empty one to switch it off.
"""

from collections.abc import Sequence
from typing import Literal

from services.gateway.forms.parts import Part, Reasoning, Text

OPEN, CLOSE = "<think>", "</think>"

# Where an answer begins: inside the block; outside, where the model may open it; after it.
Start = Literal["open", "optional", "closed"]


def answer_start(tail: str) -> Start:
    """Where the answer begins.

    Args:
        tail: the prompt after its last special token: the beginning of the model's turn.
    """
    opened, closed = tail.rfind(OPEN), tail.rfind(CLOSE)
    if opened < 0 and closed < 0:
        # A turn that has begun with other text does not think any more.
        _, _, text = tail.partition("\n")
        return "closed" if text.strip() else "optional"
    return "open" if opened > closed else "closed"


class ReasoningSplitter:
    """`<think>…</think>` at the beginning of an answer, however the text is cut into pieces.

    Line breaks beside the tags belong to neither part. Without a closing tag everything is
    reasoning.

    Attributes:
        thinking: the text up to now has not left the block.

    Args:
        start: where the answer begins.
        call_tag: ends the block, too, and is content: Qwen3.5 calls tools before it closes it.
    """

    def __init__(self, start: Start, call_tag: str | None = None) -> None:
        self._ends = (CLOSE,) if call_tag is None else (CLOSE, call_tag)
        self.thinking = start == "open"
        self._undecided = start == "optional"
        self._strip = start == "open"  # line breaks that come next
        self._held: str = ""

    def feed(self, text: str) -> list[Part]:
        """Takes more text; returns what is certain."""
        if not (self.thinking or self._undecided or self._strip):
            return [Text(text)] if text else []
        text = self._held + text
        self._held: str = ""
        if self._undecided:
            head = text.lstrip()
            if len(head) < len(OPEN) and OPEN.startswith(head):
                self._held = text
                return []
            self._undecided = False
            if not head.startswith(OPEN):
                return [Text(text)]
            self.thinking = self._strip = True
            text = head[len(OPEN) :]
        if not self.thinking:
            return self._content(text)
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        found = [(at, tag) for tag in self._ends if (at := text.find(tag)) >= 0]
        if not found:
            size = _certain(text, self._ends)
            self._held = text[size:]
            return [Reasoning(text[:size])] if size else []
        end, _ = min(found)
        self.thinking, self._strip = False, True
        reasoning = text[:end].rstrip("\n")
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        return parts + self._content(text[end:].removeprefix(CLOSE))

    def finish(self) -> list[Part]:
        """The text held back, once no more follows."""
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self.thinking else Text(held)]

    def _content(self, text: str) -> list[Part]:
        """Content, of which the first line breaks are left out."""
        text = text.lstrip("\n")
        if not text:
            return []
        self._strip = False
        return [Text(text)]


def _certain(text: str, tags: Sequence[str]) -> int:
    """Length of the text before what may be one of the tags, and its line breaks."""
    size = len(text)
    at = text.rfind("<", max(0, size - max(map(len, tags)) + 1))
    if at >= 0 and any(tag.startswith(text[at:]) for tag in tags):
        size = at
    while size and text[size - 1] == "\n":
        size -= 1
    return size
