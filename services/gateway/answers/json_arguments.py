"""Streaming reader of the JSON object that a model writes as the arguments of a call.

The text that the reader returns can be closed at any time: whatever the model writes next, or
leaves out, the result is the text of a JSON object.
"""

import json
import math
import re
import sys
from contextlib import suppress
from typing import Any, Literal, NoReturn

PYTHON_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
}  # templates write these words into prompts
_MAX_DEPTH = 100
_QUOTES = "\"'"
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_ENDS_SCALAR = frozenset(" \t\r\n,]}")
# Replaces half a surrogate pair, which most JSON parsers refuse, msgspec's among them.
_REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")


class ArgumentsReader:
    """Reader of a JSON object, from its first brace on, that repairs the mistakes of models.

    A comma, a key, and a number or word that may continue are returned together with the value that
    follows. Control characters within strings become escapes, unknown escapes become escaped
    backslashes, and half a surrogate pair becomes U+FFFD. Superfluous commas are dropped, Python's
    words and quotes become JSON's, and numbers beyond a float's range become the largest float.

    Attributes:
        ended: true if the last brace was read or the reader was closed.
    """

    def __init__(self) -> None:
        self.ended = False
        self._state: Literal["value", "first", "key", "colon", "next", "string", "scalar"] = "value"
        self._open: list[str] = []  # braces and brackets that are not closed
        self._is_key = False  # whether the current string is a key
        self._quote = '"'  # quote that ends the current string
        self._escape = ""
        self._high = ""  # the first half of a surrogate pair, as an escape
        self._scalar: list[str] = []
        self._held: list[str] = []  # text that is returned before the next value, or dropped
        self._new: list[str] = []

    def read(self, character: str) -> bool:
        """Takes one character, and returns False if it cannot follow the text so far."""
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
        """Returns the text that is certain and new since the last call of this method."""
        new = "".join(self._new)
        self._new.clear()
        return new

    def close(self) -> None:
        """Closes everything that is open, and drops an incomplete key or value."""
        if self.ended:
            return
        if self._state == "string" and not self._is_key:
            self._new.append('"')
        elif self._state == "scalar":
            self._end_scalar()
        self._new += [_CLOSERS[opened] for opened in reversed(self._open)]
        self.ended = True

    def _begin(self, character: str) -> bool:
        """Begins a key or a value."""
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
            return False  # the key has no value
        if self._state in ("key", "value"):
            self._held.clear()  # drops a superfluous comma
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
        else:  # not an escape: a backslash, and the character after it
            self._write("\\" + escape[:-1])
            self._read_string(character)

    def _write_unit(self, escape: str) -> None:
        """Writes an escape with four hexadecimal digits, which is one unit of UTF-16."""
        unit = int(escape[2:], 16)
        if 0xD800 <= unit < 0xDC00:
            self._write("")  # replaces a first half that has no second
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
    """Returns the repaired JSON object that a string contains, or "" if there is none."""
    text = text.strip()
    return _repaired(text)[0] if text.startswith("{") else ""


def nested_of(text: str) -> str:
    """Returns a text repaired as a JSON object or array, or an empty text if it is neither."""
    repaired, is_whole = _repaired(text) if text.startswith(("{", "[")) else ("", False)
    return repaired if is_whole else ""


def parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Returns the value of JSON text, in which every integer is 0, or a float if it is very long.

    Callers need the types of the values only, and Python refuses integers with thousands of digits.

    Raises:
        ValueError: the text is not JSON, or contains a constant of Python such as NaN.
    """
    return json.loads(text, parse_constant=_refuse, parse_int=_integer)


def readable(text: str, value: object) -> str:
    """Returns JSON text that common JSON parsers accept, repaired if necessary.

    Args:
        text: JSON text.
        value: result of `parse_json` for the text.
    """
    with suppress(ValueError, RecursionError):
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return text
    return _repaired(text)[0]


def _repaired(text: str) -> tuple[str, bool]:
    """Reads and closes a value.

    Returns:
        The repaired value, and whether the value is the whole text.
    """
    reader = ArgumentsReader()
    is_read = all(not reader.ended and reader.read(character) for character in text)
    is_whole = is_read and reader.ended
    reader.close()
    return reader.take(), is_whole


def parse_string(text: str) -> str:
    """Returns the value of a JSON string, which may contain line breaks.

    The value is empty if the text is no JSON string.
    """
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    return _SURROGATE.sub(_REPLACEMENT, value) if isinstance(value, str) else ""


def _integer(digits: str) -> float:
    return 0 if len(digits) <= sys.float_info.max_10_exp else float(digits)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
