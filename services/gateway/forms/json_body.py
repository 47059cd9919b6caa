"""JSON bodies of requests, decoded into the types that check them.

Every endpoint's types are msgspec structs; a body that does not fit is an `InvalidRequest` whose
`param` is the path of the field, such as `messages[0].content[1].text` or `logit_bias.50256`.
"""

import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from services.common.errors import InvalidRequest, PayloadTooLarge
from services.gateway.forms.ignored import Ignored

Decoded = TypeVar("Decoded")
Body = bytes | bytearray

_WHERE = re.compile(r" - at (?:`key` in )?`\$(?:\.)?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_ANY_KEY = "[...]"  # how msgspec writes a key of a map that is not a struct
_MAX_SEARCHED_KEYS = 4096
# Without large images. As many small ones as a request may have are half of it.
MAX_JSON_BYTES = 4 << 20
# The parser keeps the interpreter lock, and with it every other request: these take it some 10 ms.
# A megabyte of tools has 50,000.
MAX_JSON_NODES = 1 << 17
_MAX_UNCOUNTED_BYTES = 256 << 10
_DATA_FIELD = re.compile(rb'"data"\s{0,64}:\s{0,64}"')
_URL_FIELD = re.compile(rb'"(?:url|image|image_url|video|video_url)"\s{0,64}:\s{0,64}$')
_IN_LIST = re.compile(rb"[\[,]\s{0,64}$")  # of frames
_MAX_KEY_LENGTH = 140
_DATA_URL = re.compile(rb'"data:(?:[^",\\]|\\/){0,256};\s{0,64}base64,')
_MIN_LARGE_BYTES = 64 << 10
_MIN_LISTED_BYTES = 4 << 10  # a list may have hundreds of frames
_NAME_LENGTH = 32
_BACKSLASH = ord("\\")
_MAX_IMAGES = 4096  # looked for, small ones included
_MAX_SEARCHED_BYTES = 256 << 10


@dataclass(slots=True)
class LargeImages:
    """The large images of a body, as base64 where they were received. In the JSON a name stands for
    each, so that the parser reads none of their bytes and no string is made of them.

    Attributes:
        ranges: of the body, by name. Nobody can guess a name.
    """

    body: Body = b""
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    def range_of(self, url: str) -> tuple[int, int] | None:
        """Where the image is, if the URL ends in its name."""
        return self.ranges.get(url[-_NAME_LENGTH:]) if self.ranges else None

    def check(self, urls: Iterable[str]) -> None:
        """Raises InvalidRequest: one of them is not among the URLs of the request's images."""
        if self.ranges.keys() - {url[-_NAME_LENGTH:] for url in urls}:
            raise InvalidRequest("a large image or video stands where none is read")

    def forget(self, text: bytes) -> None:
        """Takes out those whose names are in a text: nobody reads them."""
        for name in [name for name in self.ranges if text and name.encode() in text]:
            del self.ranges[name]

    def clear(self) -> None:
        """Frees the body, unless a thread still reads it."""
        self.ranges.clear()
        free(self.body)
        self.body = b""


def free(body: Body) -> None:
    """Frees a body's memory, whatever else refers to it: an error's traceback may for long. One
    that a thread still reads goes with its last reference.
    """
    if isinstance(body, bytearray):
        with suppress(BufferError):
            body.clear()


def cut_images(body: Body) -> tuple[Body, LargeImages]:
    """The body's JSON with a name in place of each large image, and the images.

    An image is the value of a field `data`, or a `data:` URL that is the value of a field `url`,
    `image`, `image_url`, `video` or `video_url`, or of an array. Images are passed over at memory's
    speed, and no more than `MAX_JSON_BYTES` beside them are searched. Base64 has no escapes but
    those of slashes and line ends; nobody has looked for others here.
    """
    images = LargeImages(body)
    pieces: list[Body] = []
    begin = outside = position = 0  # of the next piece, bytes of `pieces`, where to search
    for _ in range(_MAX_IMAGES):
        start = body.find(b'"data', position, begin + MAX_JSON_BYTES - outside + 6)
        if start < 0:
            break
        first, least = _payload_start(body, start)
        if first is None:
            position = start + 5
            continue
        end = body.find(b'"', first)
        if end < 0:
            break
        position = end
        if end - first < least or body[end - 1] == _BACKSLASH:
            continue
        name = secrets.token_hex(_NAME_LENGTH // 2)
        images.ranges[name] = first, end
        pieces += [body[begin:first], name.encode()]
        outside += first - begin
        begin = end
    if not pieces:
        return body, images
    return b"".join([*pieces, body[begin:]]), images


def _payload_start(body: Body, start: int) -> tuple[int | None, int]:
    """Where the base64 begins, if the string at `start` is such a field or such a URL, and how long
    it is at least.
    """
    if found := _DATA_FIELD.match(body, start):
        return found.end(), _MIN_LARGE_BYTES
    before = max(0, start - _MAX_KEY_LENGTH)
    least = _MIN_LARGE_BYTES if _URL_FIELD.search(body, before, start) else 0
    least = least or (_MIN_LISTED_BYTES if _IN_LIST.search(body, before, start) else 0)
    url = _DATA_URL.match(body, start) if least else None
    return (url.end() if url else None), least


def has_more_nodes(text: Body, limit: int) -> bool:
    """Whether JSON has more than `limit` nodes: strings, arrays and objects, and twice its members,
    which take longest to parse. Numbers are hardly work. Mostly without the interpreter lock.

    Args:
        text: any bytes; of what is not JSON some number is compared.
        limit: of nodes.
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


def decode_json(
    decoder: "msgspec.json.Decoder[Decoded]", body: Body, ignored: Ignored | None = None
) -> Decoded:
    """Decodes a JSON body.

    Args:
        decoder: of the type.
        body: of the request, without large images.
        ignored: gets the names of what changes no answer and is left out.

    Raises:
        PayloadTooLarge: more than `MAX_JSON_BYTES` or `MAX_JSON_NODES`.
        InvalidRequest: not JSON, or a field has the wrong type; `param` names the field.
    """
    if len(body) > MAX_JSON_BYTES:
        raise PayloadTooLarge(f"the body has more than {MAX_JSON_BYTES} bytes beside large images")
    if len(body) > _MAX_UNCOUNTED_BYTES and has_more_nodes(body, MAX_JSON_NODES):
        raise PayloadTooLarge(
            f"the body has more than {MAX_JSON_NODES} strings, arrays and members of objects"
        )
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            rest = (ignored or Ignored()).without(decoder.type, body)
            if rest is None:
                raise
            body = rest
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        message, param = _read(error)
        if _ANY_KEY in param and len(body) <= _MAX_SEARCHED_BYTES:
            param = _with_key(param, body, decoder)
        if field := _FIELD.search(message):
            param = f"{param}.{field[1]}" if param else field[1]
        raise InvalidRequest(message[:300], param=param[:200] or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("the body is not valid JSON") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _read(error: msgspec.ValidationError) -> tuple[str, str]:
    """The message and the path of the field."""
    text = str(error)
    where = _WHERE.search(text)
    return (text[: where.start()], where[1]) if where else (text, "")


def _with_key(param: str, body: Body, decoder: "msgspec.json.Decoder[Any]") -> str:
    """`param` with the first key of the map whose entry does not fit, if it can be found.

    Each entry is tried alone, in a body that holds nothing else.
    """
    before, _, after = param.partition(_ANY_KEY)
    try:
        entries = msgspec.json.decode(body)
        steps = [(int(i) if i else name) for i, name in _STEP.findall(before)]
        for step in steps:
            entries = entries[step]
        for key in list(cast("dict[str, Any]", entries))[:_MAX_SEARCHED_KEYS]:
            alone: Any = {key: entries[key]}
            for step in reversed(steps):
                alone = [alone] if isinstance(step, int) else {step: alone}
            try:
                msgspec.convert(alone, decoder.type)
            except msgspec.ValidationError as error:
                if _ANY_KEY in _read(error)[1]:
                    return f"{before}.{key}{after}"
    except (LookupError, TypeError, ValueError, RecursionError):
        pass
    return f"{before}{after}"
