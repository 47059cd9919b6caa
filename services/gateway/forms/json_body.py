"""JSON bodies of requests, decoded into the types that check them.

Every endpoint's types are msgspec structs; a body that does not fit is an `InvalidRequest` whose
`param` is the path of the field, such as `messages[0].content[1].text` or `logit_bias.50256`.
"""

import re
from typing import Any, TypeVar, cast

import msgspec

from services.common.errors import InvalidRequest, PayloadTooLarge

Decoded = TypeVar("Decoded")

_WHERE = re.compile(r" - at (?:`key` in )?`\$(?:\.)?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_ANY_KEY = "[...]"  # how msgspec writes a key of a map that is not a struct
_MAX_SEARCHED_KEYS = 4096
# Parsed JSON takes up to 25 times its bytes, strings of images as many as they have.
MAX_JSON_BYTES = 2 << 20
_IMAGE = re.compile(rb'"data(?::|"\s{0,64}:\s{0,64}")')
_MIN_IMAGE_BYTES = 1024
_MAX_IMAGES = 4096  # looked for, small ones included
_MAX_SEARCHED_BYTES = 4 << 20


def json_bytes(body: bytes, limit: int) -> int | None:
    """Bytes of a body beside its images; None: over `limit`, as far as it was counted.

    An image is a long string that begins with `data:`, or the value of a field `data`. One with
    letters beyond ASCII, or escapes but that of a slash, would take several times its bytes as a
    `str`, so it does not count as an image.
    """
    outside, position, is_ascii = len(body), 0, body.isascii()
    for _ in range(_MAX_IMAGES):
        if outside <= limit:
            return outside
        start = body.find(b'"data', position)
        found = _IMAGE.match(body, start) if start >= 0 else None
        if start < 0:
            break
        position = start + 5
        if found is None:
            continue
        end = body.find(b'"', found.end())
        if end < 0:
            break
        position, size = end, end - found.end()
        plain = is_ascii or body[found.end() : end].isascii()
        escapes = body.count(b"\\", found.end(), end)
        if size >= _MIN_IMAGE_BYTES and plain and escapes == body.count(b"\\/", found.end(), end):
            outside -= size
    return outside if outside <= limit else None


def decode_json(decoder: "msgspec.json.Decoder[Decoded]", body: bytes) -> Decoded:
    """Decodes a JSON body.

    Raises:
        PayloadTooLarge: more than `MAX_JSON_BYTES` beside images.
        InvalidRequest: not JSON, or a field has the wrong type; `param` names the field.
    """
    if len(body) > MAX_JSON_BYTES and json_bytes(body, MAX_JSON_BYTES) is None:
        raise PayloadTooLarge(f"the body has more than {MAX_JSON_BYTES} bytes beside its images")
    try:
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


def _with_key(param: str, body: bytes, decoder: "msgspec.json.Decoder[Any]") -> str:
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
