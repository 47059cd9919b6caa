"""Parser for bodies of the type `multipart/form-data` (RFC 7578), whose parts are all in memory."""

import re
from dataclasses import dataclass, field

from services.common.errors import InvalidRequest

FORM_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_ESCAPE = re.compile(r"\\(.)|%22|%0A|%0D", re.IGNORECASE)
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
        InvalidRequest: the body is not a form with this boundary, or has a field twice.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidRequest("the Content-Type of a form names its boundary")
    boundary = b"--" + (found[1] or found[2]).encode("latin-1")
    form = Form()
    start = 0 if body.startswith(boundary) else body.find(b"\r\n" + boundary) + 2
    if start == 1:
        raise InvalidRequest("the body is not a form: it lacks its boundary")
    for _ in range(_MAX_PARTS + 1):
        start += len(boundary)
        if body.startswith(b"--", start):
            return form
        head = body.find(b"\r\n", start) + 2
        end = body.find(b"\r\n" + boundary, head - 2)
        content = head if body.startswith(b"\r\n", head) else body.find(b"\r\n\r\n", head) + 2
        if head < 2 or end < 0 or not head <= content <= min(end, head + _MAX_HEAD_BYTES):
            break
        _add(form, bytes(body[head:content]), bytes(body[content + 2 : end]))
        start = end + 2
    raise InvalidRequest(f"the body is not a form with at most {_MAX_PARTS} whole parts")


def _add(form: Form, head: bytes, data: bytes) -> None:
    parameters: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            parameters = {key.lower(): _plain(text) for key, text in _PARAMETER.findall(value)}
    name = parameters.get("name", "")
    if not name or name in form.texts or name in form.files:
        raise InvalidRequest("each part of a form has a name of its own", param=name[:100] or None)
    if "filename" in parameters:
        form.files[name] = FormFile(parameters["filename"], data)
        return
    if len(data) > _MAX_VALUE_BYTES:
        raise InvalidRequest("the field is too long, or is a file without a name", param=name[:100])
    form.texts[name] = data.decode("utf-8", "replace")


def _plain(text: str) -> str:
    escaped = {"%22": '"', "%0a": "\n", "%0d": "\r"}
    return _ESCAPE.sub(lambda found: found[1] or escaped[found[0].lower()], text)
