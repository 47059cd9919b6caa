"""The JSON object of one tool call, read as it arrives.

`tool_parsers` feeds it; nothing here fails.
"""

from collections.abc import Generator

from services.gateway.answers.json_arguments import ArgumentsReader, object_of, parse_string

SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_OF_SCALARS = "0123456789+-.eE,: \t\r\ntrufalsn"  # or between them


class _CannotFollow(Exception):
    """The character is not part of the object."""


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
        self._arguments: list[str] = []  # not yet taken
        self._reader: ArgumentsReader | None = None  # of an object
        self._has_arguments = False
        self._read_so_far: list[str] = []  # until the call has begun
        self._reported = False
        self._object = self._read_object()
        next(self._object)

    @property
    def raw(self) -> str:
        """All text read, if the call has not begun."""
        return "".join(self._read_so_far)

    def feed(self, text: str) -> str:
        """Reads up to the object's end; returns what follows it."""
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
        """Whether the call has begun since the last question."""
        is_new = self.begun and not self._reported
        self._reported = self._reported or is_new
        return is_new

    def close(self) -> None:
        """No more text follows: the arguments of a call that has begun become an object."""
        if self._reader is not None:
            self._reader.close()
            self._arguments.append(self._reader.take())
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

    def _read_object(self) -> Generator[None, str]:
        character = yield from _behind_space()
        _expect(character == "{")
        while character == "{":  # twice, where a template shows calls in two pairs of braces
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
        """An object, or a string that holds one; returns the character behind it."""
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
    """The first character that is no blank."""
    while (character := (yield)) in SPACE:
        pass
    return character


def _string() -> Generator[None, str, str]:
    """A string whose first quote has been read."""
    token, is_escaped = ['"'], False
    while True:
        character = yield
        token.append(character)
        if character == '"' and not is_escaped:
            return "".join(token)
        is_escaped = character == "\\" and not is_escaped


def _value(character: str) -> Generator[None, str, tuple[str, str]]:
    """The text of a value, of whose containers the brackets are counted, and what is behind it."""
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
            _expect(character in _OF_SCALARS)
        token.append(character)
        character = yield
    _expect(bool(token))
    return "".join(token), character
