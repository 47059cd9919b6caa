"""The splitter of reasoning and content, for models that think between tags before they answer.

`AnswerParser` feeds each choice's text through a splitter. The end of the prompt decides where an
answer begins: some templates open the reasoning block themselves, and some write an empty block to
switch reasoning off.
"""

from collections.abc import Sequence
from typing import Literal

from services.gateway.forms.parts import Part, Reasoning, Text

OPEN, CLOSE = "<think>", "</think>"

# The place where an answer begins: inside the reasoning block, before a block that the model may
# open, or behind the block.
Start = Literal["open", "optional", "closed"]


def answer_start(tail: str) -> Start:
    """Returns the place where the answer begins.

    Args:
        tail: the prompt after its last special token, which is the beginning of the model's turn.
    """
    opened, closed = tail.rfind(OPEN), tail.rfind(CLOSE)
    if opened < 0 and closed < 0:
        # A turn that has begun with other text contains no reasoning.
        _, _, text = tail.partition("\n")
        return "closed" if text.strip() else "optional"
    return "open" if opened > closed else "closed"


class ReasoningSplitter:
    """Splits `<think>…</think>` from the rest of an answer, however the text is cut into pieces.

    Line breaks beside the tags belong to neither part. Without a closing tag, the whole answer is
    reasoning.

    Args:
        start: the place where the answer begins.
        call_tag: the tag that a tool call begins with. None if there are no tool calls.
        call_head: the text that follows the tag of a call, behind blanks. A tag without this text
            is only mentioned, and begins no call.

    Attributes:
        thinking: true if the text so far ends inside the block.
        call: a tool call that begins inside the block, with all text behind it, which the splitter
            has not read. Some models call tools before they close the block.
    """

    def __init__(self, start: Start, call_tag: str | None = None, call_head: str = "") -> None:
        self._tags = (CLOSE,) if call_tag is None else (CLOSE, call_tag)
        self._call_head = call_head
        self.call: str = ""
        self.thinking = start == "open"
        self._undecided = start == "optional"
        self._strip = start == "open"  # True if the next line breaks are left out
        self._held: str = ""  # text that waits, because it may be the beginning of a tag
        # Pieces of white space that came after `_held`, and do not show whether it is a tag. They
        # are joined only when other text comes, because a model may write very many of them.
        self._idle: list[str] = []
        self._idle_characters: str | None = ""  # characters of `_idle`; None for all white space

    def feed(self, text: str) -> list[Part]:
        """Takes more text, and returns the parts that are certain."""
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
        """Returns the characters that can follow `_held` without showing whether it is a tag. None
        stands for all white space.
        """
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
        """True if the reasoning ends in text that may begin a tool call or the closing tag."""
        return self.thinking and bool(self._held.strip("\n"))

    def take_call(self) -> str:
        """Takes the call that has begun, with all text behind it. Empty if there is no call."""
        call, self.call = self.call, ""
        return call

    def _end(self, text: str) -> tuple[int, str]:
        """Returns the end of the reasoning and the tag that ends it.

        If there is no tag, returns an empty string, and the place where text begins that may be
        the beginning of a tag.
        """
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
        """Returns the buffered text, once no more text follows."""
        held, self._held = self._held + "".join(self._idle), ""
        self._idle.clear()
        if not held:
            return []
        return [Reasoning(held) if self.thinking else Text(held)]

    def _content(self, text: str) -> list[Part]:
        """Returns the content without its first line breaks."""
        text = text.lstrip("\n")
        if not text:
            return []
        self._strip = False
        return [Text(text)]


def certain(text: str, tags: Sequence[str]) -> int:
    """Returns the length of the text before a suffix that may begin one of the tags."""
    size = len(text)
    for tag in tags:
        at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
        while at >= 0 and not tag.startswith(text[at:]):
            at = text.find(tag[0], at + 1)
        size = min(size, at) if at >= 0 else size
    return size
