"""JSON bodies of requests, decoded into the types that check them.

Every endpoint's types are msgspec structs; a body that does not fit is an `InvalidRequest` whose
`param` is the path of the field, such as `messages[0].content[1].text` or `logit_bias.50256`.
"""

import re
from typing import Any, TypeVar, cast

import msgspec

from services.common.errors import InvalidRequest

Decoded = TypeVar("Decoded")

_WHERE = re.compile(r" - at (?:`key` in )?`\$(?:\.)?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`$", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_ANY_KEY = "[...]"  # how msgspec writes a key of a map that is not a struct
_MAX_SEARCHED_KEYS = 4096
_MAX_SEARCHED_BYTES = 4 << 20


def decode_json(decoder: "msgspec.json.Decoder[Decoded]", body: bytes) -> Decoded:
    """Decodes a JSON body.

    Raises:
        InvalidRequest: not JSON, or a field has the wrong type; `param` names the field.
    """
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
