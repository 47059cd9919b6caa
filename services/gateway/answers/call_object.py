"""Streaming reader of the JSON object of one tool call.

`tool_parsers` feeds it. A malformed object ends the reading, and raises no error.
"""

from collections.abc import Generator

from services.gateway.answers.json_arguments import ArgumentsReader, object_of, parse_string

SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
# Characters of numbers, literals and separators.
_SCALAR_CHARACTERS = "0123456789+-.eE,: \t\r\ntrufalsn"


class _CannotFollow(Exception):
    """Raised for a character that cannot follow the text of the object so far."""


class CallObject:
    """Reader of the JSON object of one call, character by character.

    Attributes:
        name: name of the function. Empty until it is known.
        begun: true if the name is known and the arguments have begun, or the object is complete.
        ended: true if the object is complete, or its text cannot be that of a call.
        complete: true if the last brace of the object has been read.
    """

    def __init__(self) -> None:
        self.name = ""
        self.begun = self.ended = self.complete = False
        self._arguments: list[str] = []  # text that `take_arguments` has not returned yet
        self._reader: ArgumentsReader | None = None  # None until the arguments begin as an object
        self._has_arguments = False
        self._read_so_far: list[str] = []  # text up to the beginning of the call
        self._reported = False
        self._object = self._read_object()
        next(self._object)

    @property
    def raw(self) -> str:
        """All text that was read so far, valid until the call has begun."""
        return "".join(self._read_so_far)

    def feed(self, text: str) -> str:
        """Reads text up to the object's end, and returns the text after the object."""
        for index, character in enumerate(text):
            try:
                if self.ended:
                    raise _CannotFollow
                self._object.send(character)
            except _CannotFollow:
                self.close()
                return text[index:]
            if not self._reported:
                self._read_so_far.append(character)
        return ""

    def name_is_new(self) -> bool:
        """Returns whether the call has begun since this method was called last."""
        is_new = self.begun and not self._reported
        self._reported = self._reported or is_new
        return is_new

    def close(self) -> None:
        """Ends the reading, and closes the arguments so that they are a whole JSON object."""
        if self._reader is not None:
            self._reader.close()
            self._arguments.append(self._reader.take())
        self.ended = True

    def take_arguments(self) -> str:
        """Returns the text of the arguments that is new since the last call of this method."""
        if not self.begun:
            return ""
        if self.complete and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _read_object(self) -> Generator[None, str]:
        character = yield from _behind_space()
        _expect(character == "{")
        while character == "{":  # a template may show calls in two pairs of braces
            character = yield from _behind_space()
        while True:
            _expect(character == '"')
            key = parse_string((yield from _string()))
            _expect((yield from _behind_space()) == ":")
            character = yield from _behind_space()
            if key in _ARGUMENT_KEYS and not self._has_arguments:
                character = yield from self._read_arguments(character)
            elif key == "name" and not self.name:
                _expect(character == '"')
                self.name = parse_string((yield from _string()))
                _expect(bool(self.name))
                self.begun = self._has_arguments
                character = yield
            else:
                _, character = yield from _value(character)
            if character in SPACE:
                character = yield from _behind_space()
            if character == "}":
                self.begun, self.ended, self.complete = bool(self.name), True, True
                yield
            _expect(character == ",")
            character = yield from _behind_space()

    def _read_arguments(self, character: str) -> Generator[None, str, str]:
        """Reads an object, or a string that contains an object.

        Returns:
            The character after the arguments.
        """
        if character == "{":
            self._reader = reader = ArgumentsReader()
            self._has_arguments, self.begun = True, bool(self.name)
            while not reader.ended:
                _expect(reader.read(character))
                self._arguments.append(reader.take())
                character = yield
            return character
        token, character = yield from _value(character)
        text = "{}" if token == "null" else object_of(parse_string(token))
        _expect(bool(text))
        self._arguments.append(text)
        self._has_arguments, self.begun = True, bool(self.name)
        return character


def _expect(can_follow: bool) -> None:
    if not can_follow:
        raise _CannotFollow


def _behind_space() -> Generator[None, str, str]:
    """Reads up to the first character that is not whitespace, and returns it."""
    while (character := (yield)) in SPACE:
        pass
    return character


def _string() -> Generator[None, str, str]:
    """Reads the rest of a string whose first quote has been read, and returns the whole string."""
    token, is_escaped = ['"'], False
    while True:
        character = yield
        token.append(character)
        if character == '"' and not is_escaped:
            return "".join(token)
        is_escaped = character == "\\" and not is_escaped


def _value(character: str) -> Generator[None, str, tuple[str, str]]:
    """Reads a value that begins with `character`. Only the brackets of containers are checked.

    Returns:
        The text of the value, and the character after it.
    """
    token: list[str] = []
    depth = 0
    while depth or character not in SPACE + ",}":
        _expect(depth > 0 or not token or character not in '"{[')
        if character == '"':
            character = yield from _string()
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            _expect(depth >= 0)
        else:
            _expect(character in _SCALAR_CHARACTERS)
        token.append(character)
        character = yield
    _expect(bool(token))
    return "".join(token), character
