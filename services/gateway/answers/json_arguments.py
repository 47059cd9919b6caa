"""A JSON object that a model writes as the arguments of a call, read as it arrives.

What is handed on can always be closed: whatever the model does next, or leaves out, the whole is
the text of a JSON object.
"""

import json
import math
import re
import sys
from contextlib import suppress
from typing import Any, Literal, NoReturn

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them back
_MAX_DEPTH = 100
_QUOTES = "\"'"
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_ENDS_SCALAR = frozenset(" \t\r\n,]}")
# In place of half a surrogate pair, which is JSON that most readers refuse, ours among them.
_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


class ArgumentsReader:
    """Reads the object from its first brace on.

    A comma, a key, and a number or word that may go on are handed on with what follows them. Line
    breaks and the like within strings become escapes, unknown escapes backslashes, and half a
    surrogate pair U+FFFD; a comma too many, Python's words and quotes, and numbers that no float
    holds are mended.

    Attributes:
        ended: the last brace has been read, or the text was closed.
    """

    def __init__(self) -> None:
        self.ended = False
        self._state: Literal["value", "first", "key", "colon", "next", "string", "scalar"] = "value"
        self._open: list[str] = []  # braces and brackets
        self._is_key = False  # the string
        self._quote = '"'  # that ends it
        self._escape = ""
        self._high = ""  # the first half of a surrogate pair, as an escape
        self._scalar: list[str] = []
        self._held: list[str] = []  # what the next value needs before it
        self._new: list[str] = []

    def read(self, character: str) -> bool:
        """Takes one character; False: it cannot follow."""
        if self._state == "string":
            self._read_string(character)
            return True
        if self._state == "scalar":
            if character not in _ENDS_SCALAR:
                self._scalar.append(character)
                return True
            if not self._end_scalar():
                return False
        if character in " \t\r\n":
            self._held.append(character)
            return True
        if self._open and character == _CLOSERS[self._open[-1]] and self._state != "colon":
            return self._close_one(character)
        match self._state:
            case "next":
                self._held.append(character)
                self._state = "key" if self._open[-1] == "{" else "value"
                return character == ","
            case "colon":
                self._held.append(character)
                self._state = "value"
                return character == ":"
            case _:
                in_object = self._state == "first" and self._open[-1] == "{"
                self._is_key = self._state == "key" or in_object
                return self._begin(character)

    def take(self) -> str:
        """What is new and certain."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def close(self) -> None:
        """No more text follows: closes what is open, without what is incomplete."""
        if self.ended:
            return
        if self._state == "string" and not self._is_key:
            self._new.append('"')
        elif self._state == "scalar":
            self._end_scalar()
        self._new += [_CLOSERS[opened] for opened in reversed(self._open)]
        self.ended = True

    def _begin(self, character: str) -> bool:
        """A key, or a value."""
        if character in _QUOTES:
            self._write('"')
            self._state, self._quote = "string", character
        elif self._is_key:
            return False
        elif character in _CLOSERS:
            if len(self._open) == _MAX_DEPTH:
                return False
            self._flush(character)
            self._open.append(character)
            self._state = "first"
        else:
            self._state, self._scalar = "scalar", [character]
            return character not in ",:]}"
        return True

    def _close_one(self, character: str) -> bool:
        if self._state == "value" and self._open[-1] == "{":
            return False  # a key without a value
        if self._state in ("key", "value"):
            self._held.clear()  # a comma
        self._flush(character)
        self._open.pop()
        self._state = "next"
        self.ended = not self._open
        return True

    def _end_scalar(self) -> bool:
        word = "".join(self._scalar)
        word = PYTHON_WORDS.get(word, word)
        self._state = "next"
        try:
            value = parse_json(word)
        except ValueError:
            return False
        if isinstance(value, float) and math.isinf(value):
            word = repr(math.copysign(sys.float_info.max, value))
        self._flush(word)
        return True

    def _read_string(self, character: str) -> None:
        if self._escape:
            self._read_escape(character)
        elif character == "\\":
            self._escape = character
        elif character == self._quote:
            self._write('"')
            self._state = "colon" if self._is_key else "next"
        elif character == '"':
            self._write('\\"')
        else:
            self._write(character if character >= " " else json.dumps(character)[1:-1])

    def _read_escape(self, character: str) -> None:
        escape, self._escape = self._escape + character, ""
        if len(escape) == 2 and character in _ESCAPES:
            self._write(escape)
        elif escape == "\\" + self._quote:
            self._write(self._quote)
        elif escape == "\\u" or (len(escape) > 2 and character in _HEX):
            if len(escape) == 6:
                self._write_unit(escape)
            else:
                self._escape = escape
        else:  # none: a backslash, and what follows it
            self._write("\\" + escape[:-1])
            self._read_string(character)

    def _write_unit(self, escape: str) -> None:
        """One of UTF-16."""
        unit = int(escape[2:], 16)
        if 0xD800 <= unit < 0xDC00:
            self._write("")  # ends a half before it
            self._high = escape
            return
        if 0xDC00 <= unit < 0xE000:
            escape, self._high = (self._high + escape if self._high else _REPLACEMENT), ""
        self._write(escape)

    def _write(self, text: str) -> None:
        if self._high:
            self._high, text = "", _REPLACEMENT + text
        if self._is_key:
            self._held.append(text)
        else:
            self._flush(text)

    def _flush(self, text: str) -> None:
        self._new += (*self._held, text)
        self._held.clear()


def object_of(text: str) -> str:
    """The JSON object that a string holds; empty if it holds none."""
    text = text.strip()
    return _mended(text)[0] if text.startswith("{") else ""


def nested_of(text: str) -> str:
    """The JSON object or array that a text is, mended; empty if it is none."""
    mended, is_whole = _mended(text) if text.startswith(("{", "[")) else ("", False)
    return mended if is_whole else ""


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON
    """The value of JSON text. Integers are 0, and as floats where those may not hold them: no more
    is asked for, and Python refuses thousands of digits.

    Raises:
        ValueError: it is none, or one of Python's constants.
    """
    return json.loads(text, parse_constant=_refuse, parse_int=_integer)


def readable(text: str, value: object) -> str:
    """JSON text, without what most readers refuse, as `ArgumentsReader` mends it; `value` is what
    `parse_json` made of it.
    """
    with suppress(ValueError, RecursionError):
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return text
    return _mended(text)[0]


def _mended(text: str) -> tuple[str, bool]:
    """A value as `ArgumentsReader` reads it, closed, and whether it is the whole text."""
    reader = ArgumentsReader()
    is_read = all(not reader.ended and reader.read(character) for character in text)
    is_whole = is_read and reader.ended
    reader.close()
    return reader.take(), is_whole


def parse_string(text: str) -> str:
    """The value of a JSON string, in which line breaks may stand; empty if it is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    return _SURROGATE.sub(_REPLACEMENT, value) if isinstance(value, str) else ""


def _integer(digits: str) -> float:
    return 0 if len(digits) <= sys.float_info.max_10_exp else float(digits)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
