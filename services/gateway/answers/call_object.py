"""The JSON object of one tool call, read as it arrives.

`tool_parsers` feeds it; nothing here fails.
"""

from typing import Literal

from services.gateway.answers.json_arguments import ArgumentsReader, object_of, parse_string

SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class CallObject:
    """The JSON object of one call, read character by character.

    Attributes:
        name: of the function, once it is known.
        begun: the name is known and the arguments have begun, or the object is complete.
        ended: complete, or no object that can be a call.
        complete: its last brace has been read.
    """

    def __init__(self) -> None:
        self.name = ""
        self.begun = self.ended = self.complete = False
        self._state: Literal["start", "key", "colon", "value", "next"] = "start"
        self._key = ""
        self._token: list[str] = []  # of a key, or of a value
        self._in_string = self._escaped = self._value_begun = False
        self._depth = 0
        self._arguments: list[str] = []  # not yet taken
        self._reader: ArgumentsReader | None = None  # of an object
        self._has_arguments = self._arguments_ended = False
        self._read_so_far: list[str] = []  # until the call has begun
        self._reported = False

    @property
    def raw(self) -> str:
        """All text read, if the call has not begun."""
        return "".join(self._read_so_far)

    def feed(self, text: str) -> str:
        """Reads up to the object's end; returns what follows it."""
        for index, character in enumerate(text):
            if self.ended or not self._read(character):
                self.close()
                return text[index:]
            if not self._reported:
                self._read_so_far.append(character)
        return ""

    def name_is_new(self) -> bool:
        """Whether the call has begun since the last question."""
        is_new = self.begun and not self._reported
        self._reported = self._reported or is_new
        return is_new

    def close(self) -> None:
        """No more text follows: the arguments of a call that has begun become an object."""
        self._end_arguments()
        self.ended = True

    def take_arguments(self) -> str:
        """New text of the arguments."""
        if not self.begun:
            return ""
        if self.complete and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _read(self, character: str) -> bool:
        """Takes one character; False: it cannot follow, and is not part of the object."""
        if self._state == "value":
            return self._read_value(character)
        if self._in_string:
            self._token.append(character)
            self._follow_string(character)
            if not self._in_string:
                self._key, self._state = parse_string("".join(self._token)), "colon"
            return True
        if character in SPACE:
            return True
        if character == "{" and self._state in ("start", "key") and not self._key:
            self._state = "key"  # twice, where a template shows calls in two pairs of braces
            return True
        if self._state == "key" and character == '"':
            self._in_string, self._token = True, ['"']
            return True
        if self._state == "colon" and character == ":":
            self._state, self._token, self._value_begun = "value", [], False
            return True
        if self._state == "next" and character == ",":
            self._state = "key"
            return True
        if self._state == "next" and character == "}":
            self.begun = bool(self.name)
            self.ended = self.complete = True
            return True
        return False

    def _read_value(self, character: str) -> bool:
        if self._reader is not None and not self._reader.ended:
            return self._read_object(self._reader, character)
        if self._is_arguments and not self._value_begun and character == "{":
            self._reader = ArgumentsReader()
            self._value_begun = self._has_arguments = True
            self.begun = bool(self.name)
            return self._read_object(self._reader, character)
        if self._in_string:
            self._follow_string(character)
            return self._extend(character)
        if not self._depth:
            if character in SPACE:
                return not self._value_begun or self._end_value()
            if character in ",}":
                return self._end_value() and self._read(character)
            if self._value_begun and character in '"{[':
                return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth >= 0 and self._extend(character)
        elif character not in "0123456789+-.eE,: \t\r\ntrufalsn":  # of scalars, or between them
            return False
        return self._extend(character)

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENT_KEYS and not self._arguments_ended

    def _read_object(self, reader: ArgumentsReader, character: str) -> bool:
        can_follow = reader.read(character)
        if reader.ended:
            self._end_arguments()
        elif can_follow:
            self._arguments.append(reader.take())
        return can_follow

    def _extend(self, character: str) -> bool:
        """One more character of a value; False: it makes the name none."""
        self._value_begun = True
        if self._is_arguments:
            self._token.append(character)
        elif self._key == "name" and not self.name:
            self._token.append(character)
            if not self._in_string:
                self.name = parse_string("".join(self._token))
                self.begun = bool(self.name) and self._has_arguments
                return bool(self.name)
        return True

    def _end_value(self) -> bool:
        """False: it is none, or these are no arguments."""
        if not self._value_begun:
            return False
        if self._is_arguments and self._reader is None:
            token = "".join(self._token)
            text = "{}" if token == "null" else object_of(parse_string(token))
            if not text:
                return False
            self._arguments.append(text)
            self._has_arguments = self._arguments_ended = True
            self.begun = bool(self.name)
        self._state = "next"
        return True

    def _end_arguments(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._arguments.append(self._reader.take())
            self._arguments_ended = True

    def _follow_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
