"""JSON bodies of requests: how long they may be, and how they become the types that check them.

Every endpoint's types are msgspec structs; a body that does not fit is an `InvalidRequest` whose
`param` is the path of the field, such as `messages[0].content[1].text`.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import numpy as np

from services.common.errors import InvalidRequest, PayloadTooLarge
from services.gateway.forms.ignored import Ignored

Decoded = TypeVar("Decoded")
Body = bytes | bytearray

_NO_JSON = "the body is not valid JSON"
_WHERE = re.compile(r" - at (?:`key` in )?`\$(?:\.)?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)
# Without images.
MAX_JSON_BYTES = 4 << 20
# The parser keeps the interpreter lock, and with it every other request: these take it some 10 ms.
# A megabyte of tools has 50,000.
MAX_JSON_NODES = 1 << 17
_MAX_UNCOUNTED_BYTES = 256 << 10
# The beginning of base64: of a `data:` URL, whose type may have quotes (`codecs="vp8, opus"`, as
# Firefox records), or in a field of Anthropic's, or the image in `result` of OpenAI's
# `image_generation_call`.
_BASE64 = re.compile(
    rb'"(?:data(?:"\s{0,64}:\s{0,64}"|:[^",]{0,256},|:[^",\\]{0,64}\\"[^"\\]{0,64}\\"[^",\\]{0,64},)'
    rb'|result"\s{0,64}:\s{0,64}"(?=[A-Za-z0-9+/\\]{64}))'
)
_MAX_IMAGES = 4096  # looked for


def free(body: Body) -> None:
    """Frees a body's memory, whatever else refers to it: an error's traceback may for long. One
    that a thread still reads goes with its last reference.
    """
    if isinstance(body, bytearray):
        with suppress(BufferError):
            body.clear()


def without_images(body: Body) -> Body:
    """The body without base64, for its bounds. What is left out is within strings."""
    pieces: list[Body] = []
    begin = 0
    for _ in range(_MAX_IMAGES):
        found = _BASE64.search(body, begin, begin + MAX_JSON_BYTES)
        end = body.find(b'"', found.end()) if found else -1
        if not found or end < 0:
            break
        pieces.append(body[begin : found.end()])
        begin = end
    # Of the rest no more than is over the bound.
    return b"".join([*pieces, body[begin : begin + MAX_JSON_BYTES + 1]]) if pieces else body


def has_more_nodes(text: Body, limit: int) -> bool:
    """Whether JSON has more than `limit` nodes: strings, arrays and objects, and twice its members,
    which take longest to parse. Numbers are hardly work. Mostly without the interpreter lock.

    Args:
        text: any bytes; of what is not JSON some number is compared.
    """
    if b"\\" in text:  # an escaped quote ends no string
        text = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    letters = np.frombuffer(text, np.uint8)
    count = np.count_nonzero
    quotes, colons = letters == ord('"'), letters == ord(":")
    opening = (letters == ord("[")) | (letters == ord("{"))
    strings = count(quotes) // 2
    if strings > limit:
        return True
    if strings + count(opening) + 2 * count(colons) <= limit:
        return False
    # Without those within strings. The parity of the quotes before; sums of bytes wrap around at an
    # even number.
    outside = (np.cumsum(quotes, dtype=np.uint8) & 1) == 0
    return bool(strings + count(opening & outside) + 2 * count(colons & outside) > limit)


class Parser(Generic[Decoded]):
    """Reads bodies of one type.

    Args:
        check: raises InvalidRequest for what the types of its fields do not say.
    """

    def __init__(
        self, kind: type[Decoded], check: Callable[[Decoded], None] = lambda _: None
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._check = check

    def __call__(self, body: Body, ignored: Ignored | None = None) -> Decoded:
        """A body's value; every field is of its type and within its bounds.

        Args:
            ignored: gets the names of what changes no answer and is left out.

        Raises:
            PayloadTooLarge: more than `MAX_JSON_BYTES` or `MAX_JSON_NODES`.
            InvalidRequest: not JSON, or a field is wrong; `param` names the field.
        """
        text = body if len(body) <= _MAX_UNCOUNTED_BYTES else without_images(body)
        if len(text) > MAX_JSON_BYTES:
            raise PayloadTooLarge(f"the body has more than {MAX_JSON_BYTES} bytes beside images")
        if len(text) > _MAX_UNCOUNTED_BYTES and has_more_nodes(text, MAX_JSON_NODES):
            raise PayloadTooLarge(
                f"the body has more than {MAX_JSON_NODES} strings, arrays and members of objects"
            )
        try:
            found = self._decoded(body, ignored or Ignored())
        except msgspec.ValidationError as error:
            told = str(error)
            where = _WHERE.search(told)
            message, param = (told[: where.start()], where[1]) if where else (told, "")
            if field := _FIELD.search(message):
                param = f"{param}.{field[1]}" if param else field[1]
            raise InvalidRequest(message[:300], param=param[:200] or None) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidRequest(_NO_JSON) from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None
        self._check(found)
        return found

    def _decoded(self, body: Body, ignored: Ignored) -> Decoded:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError:
            rest = ignored.without(self._decoder.type, body)
            if rest is None:
                raise
            return self._decoder.decode(rest)


def text_of(raw: msgspec.Raw, param: str) -> str:
    """The text of a field that is parsed later: msgspec has not looked at its encoding.

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(_NO_JSON, param=param) from None
