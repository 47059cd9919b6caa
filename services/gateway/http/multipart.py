"""Parser for bodies of the type `multipart/form-data` (RFC 7578), whose parts are all in memory.

Clients write the names in a part's `Content-Disposition` in several ways, all of which are read: as
a quoted string with backslashes before quotes and backslashes (RFC 2183), as a quoted string with
`%22` for a quote (browsers, httpx), as a token without quotes (.NET), and as `filename*` with the
charset and percent signs (RFC 8187; .NET, requests).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from services.common.errors import InvalidRequest

FORM_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_FOLD = re.compile(r"\r\n(?=[ \t])")  # A header line that begins with a space continues the last.
_DISPOSITION = re.compile(r"[ \t]*([^\s;]*)[ \t]*(?:;|\Z)")
# A parameter: its name, and its value as a string in quotes or without quotes. Browsers write a
# backslash of a file's name as it is, so one before a quote may be the last character of the name;
# it is if otherwise no quote would end the value.
_PARAMETER = re.compile(
    r"""[ \t]*(?P<name>[^\s=;"]+)[ \t]*=[ \t]*
        (?: "(?P<escaped>(?:[^"\\]|\\["\\]|\\(?!["\\]))*)"(?=[ \t]*(?:;|\Z))
          | "(?P<plain>[^"]*)"(?=[ \t]*(?:;|\Z))
          | (?P<token>[^\s;"]+)
        )[ \t]*(?:;|\Z)""",
    re.VERBOSE,
)
_EMPTY = re.compile(r"[ \t]*(?:;|\Z)")  # no parameter, as behind the last semicolon
_ESCAPE = re.compile(r'\\(["\\])|%22|%0A|%0D', re.IGNORECASE)
_EXTENDED = re.compile(r"(utf-8|iso-8859-1|us-ascii)'[^']*'([^']*)", re.IGNORECASE)
_WRONG_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MAX_PARTS, _MAX_HEAD_BYTES, _MAX_VALUE_BYTES = 32, 8192, 4096


@dataclass(frozen=True, slots=True)
class FormFile:
    """A file of a form: its name at the client, and its content."""

    filename: str
    data: bytes


@dataclass(slots=True)
class Form:
    """The texts and the files of a form, by the names of their fields."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, FormFile] = field(default_factory=dict[str, FormFile])


def parse_form(content_type: str, body: bytes | bytearray) -> Form:
    """Parses a form.

    Args:
        content_type: value of the request's `Content-Type`, which names the boundary.

    Raises:
        InvalidRequest: the body is not a form with this boundary, has a field twice, or has a part
            whose head does not name its field. The message says which part it is.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidRequest("the Content-Type of a form names its boundary")
    boundary = b"--" + (found[1] or found[2]).encode("latin-1")
    form = Form()
    start = 0 if body.startswith(boundary) else body.find(b"\r\n" + boundary) + 2
    if start == 1:
        raise InvalidRequest("the body is not a form: it lacks its boundary")
    for number in range(1, _MAX_PARTS + 2):
        start += len(boundary)
        if body.startswith(b"--", start):
            return form
        head = body.find(b"\r\n", start) + 2
        end = body.find(b"\r\n" + boundary, head - 2)
        content = head if body.startswith(b"\r\n", head) else body.find(b"\r\n\r\n", head) + 2
        if head < 2 or end < 0 or not head <= content <= min(end, head + _MAX_HEAD_BYTES):
            break
        _add(form, number, bytes(body[head:content]), bytes(body[content + 2 : end]))
        start = end + 2
    raise InvalidRequest(f"the body is not a form with at most {_MAX_PARTS} whole parts")


def _add(form: Form, number: int, head: bytes, data: bytes) -> None:
    """Adds a part to the form.

    Args:
        number: number of the part, from 1, for errors.
        head: header lines of the part.
        data: content of the part.
    """
    parameters = _parameters(number, head.decode("utf-8", "replace"))
    name = _value(number, parameters, "name")
    if not name:
        raise InvalidRequest(f"part {number} of the form has no name")
    if name in form.texts or name in form.files:
        raise InvalidRequest("the form has this field twice", param=name[:100])
    filename = _value(number, parameters, "filename")
    if filename is not None:
        form.files[name] = FormFile(filename, data)
        return
    if len(data) > _MAX_VALUE_BYTES:
        raise InvalidRequest("the field is too long, or is a file without a name", param=name[:100])
    form.texts[name] = data.decode("utf-8", "replace")


def _parameters(number: int, head: str) -> Mapping[str, str]:
    """Returns the parameters of a part's `Content-Disposition`, by their names in lower case."""
    found: str | None = None
    for line in _FOLD.sub("", head).split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            if found is not None:
                raise InvalidRequest(f"part {number} of the form has two Content-Dispositions")
            found = value.strip()
    if found is None:
        raise InvalidRequest(f"part {number} of the form has no Content-Disposition")
    kind = _DISPOSITION.match(found)
    if kind is None or kind[1].lower() != "form-data":
        raise InvalidRequest(
            f"the Content-Disposition of part {number} of the form begins with "
            f"{found[:40]!r} and not with form-data"
        )
    parameters: dict[str, str] = {}
    position = kind.end()
    while position < len(found):
        if empty := _EMPTY.match(found, position):
            position = empty.end()
            continue
        parameter = _PARAMETER.match(found, position)
        if parameter is None:
            raise InvalidRequest(
                f"the Content-Disposition of part {number} of the form cannot be read from "
                f"{found[position:].strip()[:40]!r} on: a parameter is name=token or "
                'name="string"'
            )
        key = parameter["name"].lower()
        if key in parameters:
            raise InvalidRequest(f"part {number} of the form has {key[:40]} twice in its head")
        parameters[key] = _text(parameter)
        position = parameter.end()
    return parameters


def _text(parameter: re.Match[str]) -> str:
    """Returns the value of a parameter, without quotes and escapes."""
    if (token := parameter["token"]) is not None:
        return token
    escaped = {"%22": '"', "%0a": "\n", "%0d": "\r"}
    text = parameter["escaped"]
    if text is None:
        text = parameter["plain"].replace("\\", "\\\\")
    return _ESCAPE.sub(lambda found: found[1] or escaped[found[0].lower()], text)


def _value(number: int, parameters: Mapping[str, str], name: str) -> str | None:
    """Returns the value of the parameter `name*`, which has all characters, or of `name`. None if
    there is neither.

    Clients that write both write something shorter or an encoded word (RFC 2047) in `name`. A value
    of `name*` that cannot be read is left out if there is `name` (RFC 6266, section 4.3).
    """
    plain, extended = parameters.get(name), parameters.get(f"{name}*")
    if extended is None:
        return plain
    found = _EXTENDED.fullmatch(extended)
    if found is not None and not _WRONG_PERCENT.search(found[2]):
        try:
            return unquote_to_bytes(found[2]).decode(found[1])
        except UnicodeDecodeError:
            pass
    if plain is None:
        raise InvalidRequest(
            f"{name}* in the head of part {number} of the form is not like utf-8''a%20name"
        )
    return plain
