"""ECMA-262 patterns of JSON schemas as regular expressions that a whole text has to match.

`text_grammar` puts them into a Lark grammar. A pattern of a schema is searched for anywhere in a
text; a terminal of a grammar is matched from end to end, by Rust's syntax. Strangers' input: what
cannot be translated is a ValueError that says what it is, and nothing is left out.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from pydantic_core import SchemaError, SchemaValidator, core_schema

_ANYTHING = "(?s:.*)"
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_$][\w$]*>|(?!\?))")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]{1,40}\}")
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}
# Where ECMA-262 and Python disagree on blanks, what both agree on.
_CLASSES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]",
    "s": r"[\s&&[^\x85]]", "S": r"[^\s\x1C-\x1F\x{FEFF}]",
}  # fmt: skip
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_MAX_DEPTH = 50
_MAX_CHARS = 2000  # of a pattern that is matched here


@dataclass(slots=True)
class _Item:
    """A part of a sequence: an anchor, a group, or an expression of its own."""

    text: str = ""
    anchor: str = ""
    group: "list[list[_Item]] | None" = None
    quantifier: str = ""


def full_match(pattern: str) -> str:
    """An expression in Rust's syntax, without `/`, that matches all texts with such a place.

    Raises:
        ValueError: the pattern is none, or has what no automaton does.
    """
    reader = _Reader(pattern)
    alternatives = reader.read_alternatives(0)
    if reader.at < len(pattern):
        raise ValueError("an unbalanced )")
    return _written(alternatives, is_first=True, is_last=True)


@lru_cache(maxsize=256)
def matcher_of(pattern: str) -> SchemaValidator:
    """What takes the texts with such a place, in linear time, as Python's expressions do not; to
    be asked by `isinstance_python`.

    Raises:
        ValueError: the pattern is none, has what no automaton does, or is too large.
    """
    whole = rf"\A(?:{full_match(pattern)})\z"
    if len(whole) > _MAX_CHARS:
        raise ValueError(f"more than {_MAX_CHARS} characters")
    try:
        return SchemaValidator(core_schema.str_schema(pattern=whole))
    except SchemaError:
        raise ValueError("what takes too much memory") from None


def escaped(text: str) -> str:
    """An expression that matches this text alone."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in "_ ") else f"\\x{{{ord(c):X}}}" for c in text
    )


def _written(alternatives: list[list[_Item]], *, is_first: bool, is_last: bool) -> str:
    """Alternatives as text.

    Args:
        alternatives: sequences.
        is_first, is_last: whether they stand at the pattern's beginning, or its end, where an
            anchor may stand and where a text may have more without one.
    """
    return "|".join(_sequence(items, is_first, is_last) for items in alternatives)


def _sequence(items: list[_Item], is_first: bool, is_last: bool) -> str:
    head, tail, found = "", "", list(items)
    if is_first and found and found[0].anchor == "^":
        found, is_first = found[1:], False
    elif is_first and not (found and found[0].group and not found[0].quantifier):
        head, is_first = _ANYTHING, False
    if is_last and found and found[-1].anchor == "$":
        found, is_last = found[:-1], False
    elif is_last and not (found and found[-1].group and not found[-1].quantifier):
        tail, is_last = _ANYTHING, False
    written: list[str] = []
    for index, item in enumerate(found):
        if item.anchor:
            raise ValueError(f"{item.anchor} inside a pattern")
        text = item.text
        if item.group is not None:
            first = is_first and index == 0
            last = is_last and index == len(found) - 1
            text = f"(?:{_written(item.group, is_first=first, is_last=last)})"
        written.append(text + item.quantifier)
    return head + "".join(written) + tail


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.at = 0
        self._pattern = pattern

    def read_alternatives(self, depth: int) -> list[list[_Item]]:
        """Up to a closing bracket or the end."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        alternatives: list[list[_Item]] = [[]]
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._take("|"):
                alternatives.append([])
            else:
                alternatives[-1].append(self._read_item(depth))
        return alternatives

    def _read_item(self, depth: int) -> _Item:
        character = self._pattern[self.at]
        if character in "^$":
            self.at += 1
            return _Item(anchor=character)
        if character in "*+?" or (character == "{" and _QUANTIFIER.match(self._pattern, self.at)):
            raise ValueError(f"{character} after nothing")
        if character == "(":
            item = self._read_group(depth)
        elif character == "[":
            item = _Item(self._read_class())
        elif character == "\\":
            item = _Item(self._read_escape())
        else:
            self.at += 1
            item = _Item(_DOT if character == "." else escaped(character))
        if (found := _QUANTIFIER.match(self._pattern, self.at)) is not None:
            item.quantifier, self.at = found[0], found.end()
            self._take("?")  # lazy: the same texts
            if _QUANTIFIER.match(self._pattern, self.at):
                raise ValueError("a quantifier after a quantifier")
        return item

    def _read_group(self, depth: int) -> _Item:
        found = _GROUP.match(self._pattern, self.at)
        if found is None:
            is_look = re.match(r"\(\?<?[=!]", self._pattern[self.at :])
            raise ValueError("look-around" if is_look else "a group's flags")
        self.at = found.end()
        group = self.read_alternatives(depth + 1)
        if not self._take(")"):
            raise ValueError("an unbalanced (")
        return _Item(group=group)

    def _read_escape(self) -> str:
        found = self._read_escaped()
        return escaped(found[1]) if found[0] else found[1]

    def _read_escaped(self, *, in_class: bool = False) -> tuple[bool, str]:
        """What a backslash begins: a character (true), or the text of a class (false)."""
        self.at += 1
        if self.at == len(self._pattern):
            raise ValueError("a backslash at the end")
        character = self._pattern[self.at]
        if (found := _HEX.match(self._pattern, self.at)) is not None:
            self.at = found.end()
            return True, self._code_point(int(found[1] or found[2] or found[3], 16))
        if (found := _PROPERTY.match(self._pattern, self.at)) is not None:
            self.at = found.end()
            return False, f"\\{found[0]}"
        self.at += 1
        if character in _CLASSES:
            return False, _CLASSES[character]
        if character in _CONTROLS and not self._pattern[self.at : self.at + 1].isdigit():
            return True, _CONTROLS[character]
        if in_class and character == "b":
            return True, "\b"
        if character in "bB":
            raise ValueError("a word boundary")
        if character.isdigit() or character == "k":
            raise ValueError("a back reference")
        if character.isalpha() and character.isascii():
            raise ValueError(f"the escape \\{character}")
        return True, character

    def _code_point(self, code: int) -> str:
        if 0xD800 <= code < 0xDC00 and self._pattern.startswith("\\u", self.at):
            found = _HEX.match(self._pattern, self.at + 1)
            if found and found[2] and 0xDC00 <= (low := int(found[2], 16)) < 0xE000:
                self.at = found.end()
                return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise ValueError("half a character")
        return chr(code)

    def _read_class(self) -> str:
        self.at += 1
        parts, start = (["[^"] if self._take("^") else ["["]), self.at
        while not self._take("]"):
            is_literal, text = self._read_member()
            ranged = self._pattern[self.at : self.at + 1] == "-"
            if is_literal and ranged and self._pattern[self.at + 1 : self.at + 2] not in ("", "]"):
                self.at += 1
                is_character, last = self._read_member()
                if not is_character:
                    raise ValueError("a range of classes")
                if last < text:
                    raise ValueError("a range out of order")
                parts.append(f"{escaped(text)}-{escaped(last)}")
            else:
                parts.append(escaped(text) if is_literal else text)
        if self.at == start + 1:
            raise ValueError("an empty class")
        return "".join(parts) + "]"

    def _read_member(self) -> tuple[bool, str]:
        if self.at == len(self._pattern):
            raise ValueError("an unbalanced [")
        if self._pattern[self.at] == "\\":
            return self._read_escaped(in_class=True)
        self.at += 1
        return True, self._pattern[self.at - 1]

    def _take(self, character: str) -> bool:
        found = self._pattern.startswith(character, self.at)
        self.at += found
        return found
