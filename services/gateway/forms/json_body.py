"""Parser for the JSON bodies of requests, with limits on their size.

The request types of every endpoint are msgspec structs. A body that does not fit its type is an
`InvalidRequest` whose `param` is the path of the field, such as `messages[0].content[1].text`.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import numpy as np

from services.common.errors import InvalidRequest, PayloadTooLarge
from services.gateway.forms.ignored import Ignored
from services.gateway.forms.successors import refused_part, successor

Decoded = TypeVar("Decoded")
Body = bytes | bytearray

_NO_JSON = "the body is not valid JSON"
_WHERE = re.compile(r" - at (?:`key` in )?`\$(?:\.)?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)
_VALUE = re.compile(r"Invalid value '(.*)'", re.DOTALL)
# The end of the pattern of a text. In Python, `$` matches before a line break at the end, too. `\Z`
# does not, but the OpenAPI document has the patterns, and ECMA's expressions have no `\Z`.
TEXT_END = r"$(?!\n)"
# Most bytes of a body, not counting its images.
MAX_JSON_BYTES = 4 << 20
# The parser holds the interpreter lock, so every other request waits meanwhile. A body with this
# many nodes takes some 10 ms. One megabyte of tools has 50,000 nodes.
MAX_JSON_NODES = 1 << 17
_MAX_UNCOUNTED_BYTES = 256 << 10
# Finds the text before base64: a `data:` URL, whose type may have quotes (`codecs="vp8, opus"` in
# Firefox's recordings), the field `data` of Anthropic's API, or the field `result` of an
# `image_generation_call` in OpenAI's.
_BASE64 = re.compile(
    rb'"(?:data(?:"\s{0,64}:\s{0,64}"|:[^",]{0,256},|:[^",\\]{0,64}\\"[^"\\]{0,64}\\"[^",\\]{0,64},)'
    rb'|result"\s{0,64}:\s{0,64}"(?=[A-Za-z0-9+/\\]{64}))'
)
_MAX_IMAGES = 4096  # Further images count as text.


def free(body: Body) -> None:
    """Frees the memory of a body even if other objects, such as the traceback of an error, still
    refer to the body. A body that a thread is reading is freed with its last reference.
    """
    if isinstance(body, bytearray):
        with suppress(BufferError):
            body.clear()


def without_images(body: Body) -> Body:
    """Returns the body without its base64, to compare the rest with the limits. Only characters
    within strings are removed.
    """
    pieces: list[Body] = []
    begin = 0
    for _ in range(_MAX_IMAGES):
        found = _BASE64.search(body, begin, begin + MAX_JSON_BYTES)
        end = body.find(b'"', found.end()) if found else -1
        if not found or end < 0:
            break
        pieces.append(body[begin : found.end()])
        begin = end
    # More than one byte over the limit need not be copied.
    return b"".join([*pieces, body[begin : begin + MAX_JSON_BYTES + 1]]) if pieces else body


def has_more_nodes(text: Body, limit: int) -> bool:
    """Returns whether a JSON text has more than `limit` nodes.

    Each string, array and object is a node. Each member of an object counts as two more nodes,
    because members take longest to parse. Numbers take hardly any time and are not counted. Most of
    the work runs without the interpreter lock.

    Args:
        text: any bytes. The result is arbitrary if the bytes are not JSON.
        limit: most nodes for which the result is false.
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
    # Brackets and colons within strings do not count. A character is within a string if the number
    # of quotes before it is odd. The sums are bytes; they wrap around at 256, which keeps the
    # parity.
    outside = (np.cumsum(quotes, dtype=np.uint8) & 1) == 0
    return bool(strings + count(opening & outside) + 2 * count(colons & outside) > limit)


class Parser(Generic[Decoded]):
    """Reads bodies of one type.

    Args:
        kind: type of the bodies.
        check: function that raises InvalidRequest for faults that the types of the fields allow.
    """

    def __init__(
        self, kind: type[Decoded], check: Callable[[Decoded], None] = lambda _: None
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._fields = frozenset(getattr(kind, "__struct_fields__", ()))
        self._check = check

    def __call__(self, body: Body, ignored: Ignored | None = None) -> Decoded:
        """Returns the value of a body. Every field has its type and is within its limits.

        Args:
            body: JSON of the request.
            ignored: object that records the fields and elements that are removed from the body.

        Raises:
            PayloadTooLarge: the body exceeds `MAX_JSON_BYTES` or `MAX_JSON_NODES`.
            InvalidRequest: the body is not JSON, or a field is wrong and `param` names the field.
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
            detail = str(error)
            where = _WHERE.search(detail)
            message, param = (detail[: where.start()], where[1]) if where else (detail, "")
            if field := _FIELD.search(message):
                if not param and "unknown" in field[0]:
                    message += successor(field[1], self._fields)
                param = f"{param}.{field[1]}" if param else field[1]
            elif part := _VALUE.fullmatch(message):
                message = refused_part(part[1]) or message
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
    """Returns the text of a field that is parsed later. msgspec does not check the encoding of such
    a field.

    Raises:
        InvalidRequest: the field is not UTF-8.
    """
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError:
        raise InvalidRequest(_NO_JSON, param=param) from None
