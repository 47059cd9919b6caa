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
        call: a call that begins within the block, and all text behind it, which was not read:
            some models call tools before they close the block.

    Args:
        call_tag: what a call begins with; None: there are none.
        call_head: what follows the tag, behind blanks; without it, the tag is only mentioned.
    """

    def __init__(self, start: Start, call_tag: str | None = None, call_head: str = "") -> None:
        self._tags = (CLOSE,) if call_tag is None else (CLOSE, call_tag)
        self._call_head = call_head
        self.call: str = ""
        self.thinking = start == "open"
        self._undecided = start == "optional"
        self._strip = start == "open"  # line breaks that come next
        self._held: str = ""
        # Text behind it that decides nothing, joined once: a model may write nothing else.
        self._idle: list[str] = []
        self._idle_characters: str | None = ""  # None: white space

    def feed(self, text: str) -> list[Part]:
        """Takes more text; returns what is certain."""
        if not (self.thinking or self._undecided or self._strip):
            return [Text(text)] if text else []
        if not text.strip(self._idle_characters):
            self._idle.append(text)
            return []
        text = self._held + "".join(self._idle) + text
        self._idle.clear()
        parts = self._read(text)
        self._idle_characters = self._deciding_nothing()
        return parts

    def _deciding_nothing(self) -> str | None:
        """Characters of which any number may follow what is held back; None: white space."""
        if not self._held:
            return ""
        held = self._held.rstrip()
        if (self._undecided and not held) or (self._call_head and held.endswith(self._tags[-1])):
            return None
        return "" if self._undecided or self._held.strip("\n") else "\n"

    def _read(self, text: str) -> list[Part]:
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
        end, tag = self._end(text)
        if not tag:
            size = len(text[: certain(text[:end], self._tags)].rstrip("\n"))
            self._held = text[size:]
            return [Reasoning(text[:size])] if size else []
        reasoning = text[:end].rstrip("\n")
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        self._strip = True
        if tag != CLOSE:
            self.call = text[end:]
            return parts
        self.thinking = False
        return parts + self._content(text[end + len(CLOSE) :])

    @property
    def in_head(self) -> bool:
        """Whether the reasoning ends in what may be the head of a call or of the closing tag."""
        return self.thinking and bool(self._held.strip("\n"))

    def take_call(self) -> str:
        """The call that begins here, and what follows it; empty if none does."""
        call, self.call = self.call, ""
        return call

    def _end(self, text: str) -> tuple[int, str]:
        """Where the reasoning ends, and by which tag; none: where what is uncertain begins."""
        start = 0
        while True:
            found = [(at, tag) for tag in self._tags if (at := text.find(tag, start)) >= 0]
            if not found:
                return len(text), ""
            at, tag = min(found)
            follows = text[at + len(tag) :].lstrip()
            if tag == CLOSE or follows.startswith(self._call_head):
                return at, tag
            if self._call_head.startswith(follows):
                return at, ""
            start = at + len(tag)

    def finish(self) -> list[Part]:
        """The text held back, once no more follows."""
        held, self._held = self._held + "".join(self._idle), ""
        self._idle.clear()
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


def certain(text: str, tags: Sequence[str]) -> int:
    """Length of the text before what may begin one of the tags."""
    size = len(text)
    for tag in tags:
        at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
        while at >= 0 and not tag.startswith(text[at:]):
            at = text.find(tag[0], at + 1)
        size = min(size, at) if at >= 0 else size
    return size
