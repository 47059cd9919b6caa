"""A small client of the chat API on the standard library alone: one question, streamed.

`triptych ask` and `triptych demo` use it; whatever goes wrong is an `AskError`.
"""

import base64
import http.client
import json
import mimetypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 600


class AskError(Exception):
    """The question was not answered; the message says why."""


@dataclass(slots=True)
class Answer:
    """One streamed answer.

    Attributes:
        text: all of it.
        ttft_s: request sent to first text; None when there was no text.
        total_s: request sent to the end of the stream.
        finish_reason: `stop` or `length`.
        usage: as the server counted, or empty.
        stage_times_ms: as the server measured, or empty.
        images: the server's report on each image, or empty.
    """

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    stage_times_ms: dict[str, float] = field(default_factory=dict)
    images: list[dict[str, Any]] = field(default_factory=list)


def image_part(image: str) -> dict[str, Any]:
    """The content part for a URL (passed on) or a file (sent as a data URL).

    Raises:
        AskError: the file cannot be read.
    """
    url = image
    if urlsplit(image).scheme not in ("http", "https", "data"):
        kind = mimetypes.guess_type(image)[0] or "application/octet-stream"
        try:
            data = Path(image).read_bytes()
        except OSError as error:
            raise AskError(f"cannot read {image}: {error.strerror}") from error
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def question_message(images: Sequence[str], question: str) -> dict[str, Any]:
    """One user message: the images in order, then the question."""
    text = {"type": "text", "text": question}
    return {"role": "user", "content": [*map(image_part, images), text]}


def ask(
    url: str, body: dict[str, Any], on_text: Callable[[str], None] = lambda _: None,
    api_key: str = "",
) -> Answer:  # fmt: skip
    """Posts a chat completion and streams the answer.

    Args:
        url: of the API, without `/v1`.
        body: the request; `stream` and usage are set here.
        on_text: receives each piece of text as it arrives.
        api_key: sent as a bearer token, unless it is empty.

    Raises:
        AskError: no answer, an error, or a stream that breaks off.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = Answer()
    start = time.monotonic()
    done = False
    for event in _events(url, "/v1/chat/completions", body, api_key):
        if event == "[DONE]":
            done = True
            break
        chunk = json.loads(event)
        if error := chunk.get("error"):
            raise AskError(f"the answer broke off: {error.get('message')}")
        answer.usage = chunk.get("usage") or answer.usage
        answer.stage_times_ms = chunk.get("stage_times_ms") or answer.stage_times_ms
        answer.images = chunk.get("images") or answer.images
        for choice in chunk.get("choices", []):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := (choice.get("delta") or {}).get("content"):
                answer.ttft_s = answer.ttft_s or time.monotonic() - start
                answer.text += text
                on_text(text)
    if not done:
        raise AskError("the connection ended before the answer did")
    answer.total_s = time.monotonic() - start
    return answer


def first_model(url: str, api_key: str = "") -> str:
    """The name of the first model served at `url`.

    Raises:
        AskError: no answer, or no model is served.
    """
    connection = _connect(url)
    try:
        path = urlsplit(url).path.rstrip("/") + "/v1/models"
        connection.request("GET", path, headers=_authorization(api_key))
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise AskError(_error_text(answer.status, answer.read()))
        models = json.loads(answer.read())["data"]
        return models[0]["id"]
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error
    except (ValueError, LookupError) as error:
        raise AskError(f"{url} serves no model") from error
    finally:
        connection.close()


def _events(url: str, path: str, body: dict[str, Any], api_key: str) -> Iterator[str]:
    """The `data:` payloads of a server-sent event stream."""
    connection = _connect(url)
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    headers |= _authorization(api_key)
    try:
        path = urlsplit(url).path.rstrip("/") + path
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise AskError(_error_text(answer.status, answer.read()))
        for line in answer:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error
    finally:
        connection.close()


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AskError(f"not an http URL: {url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)


def _unreachable(url: str, error: Exception) -> AskError:
    return AskError(f"no answer from {url} ({error}); is `triptych serve` running?")


def _error_text(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")[:300]
    return f"HTTP {status}: {message}"
