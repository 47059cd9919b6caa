"""A small streaming client of the chat API that needs only the standard library.

`triptych ask`, `chat` and `demo` use it. All failures raise `AskError`.
"""

import argparse
import base64
import http.client
import json
import mimetypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 600
# A server that starts or is full answers 503 and asks to be called again. This is the longest time
# in which it is.
_MOST_WAITING_S = 120
_UNKNOWN_TYPE = "application/octet-stream"
# Python 3.12 knows these types only from a file of the system that small images do not have.
mimetypes.add_type("image/webp", ".webp")
mimetypes.add_type("video/x-m4v", ".m4v")


class AskError(Exception):
    """The question was not answered. The message gives the reason."""


@dataclass(slots=True)
class Answer:
    """A streamed answer.

    Attributes:
        text: text of the answer so far.
        ttft_s: seconds from the request to the first text. None if there was no text.
        total_s: seconds from the request to the end of the stream.
        usage: the server's `usage`. Empty if it sent none.
        stage_times_ms: the server's times of the request's stages. Empty if it sent none.
    """

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    stage_times_ms: dict[str, float] = field(default_factory=dict)


class Server:
    """A server of the chat API and the key to call it with.

    Attributes:
        url: URL of the API, without `/v1` and without a slash at the end.
        key: API key. Empty if requests have no key.

    Args:
        url: URL as people write it: also with `/v1`, with the path of a call, or without `http://`.
        key: API key. None if OPENAI_API_KEY of the environment is used.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        if "://" not in url:
            url = f"http://{url}"
        self.url = re.sub(r"/v1(/.*)?$", "", url.rstrip("/")).rstrip("/")
        self.key = os.environ.get("OPENAI_API_KEY", "") if key is None else key
        if not (self.key.isascii() and self.key.isprintable()):
            raise AskError("the API key has invalid characters, perhaps a newline at its end")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise AskError(f"not an http URL: {url} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AskError(f"not an http URL: {url}")
        self._is_encrypted = parts.scheme == "https"
        # The port is always passed, because http.client would look for a port in an IPv6 address.
        self._host, self._port = parts.hostname, port or (443 if self._is_encrypted else 80)
        self._path = parts.path

    def first_model(self) -> str:
        """Returns the name of the first model that the server lists.

        Raises:
            AskError: the server does not answer or lists no model.
        """
        with self.request("GET", "/v1/models") as answer:
            body = answer.read()
            if answer.status != http.client.OK:
                raise AskError(_error_text(answer.status, body))
        try:
            return json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise AskError(f"{self.url} serves no model") from error

    @contextmanager
    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Sends a request and yields the response before its body is read.

        Raises:
            AskError: the server does not answer, or the connection breaks.
        """
        kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            payload = None if body is None else json.dumps(body)
            with closing(kind(self._host, self._port, timeout=_TIMEOUT_S)) as connection:
                connection.request(method, self._path + path, payload, headers)
                yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise AskError(
                f"no answer from {self.url} ({error}); is `triptych serve` running? It "
                "answers after its line `Triptych is ready`"
            ) from error


def media_part(named: str) -> dict[str, Any]:
    """Makes the content part for an image or clip. A file is sent as a data URL.

    Args:
        named: URL, which is passed on, or path of a file.

    Raises:
        AskError: the file cannot be read, or is neither an image nor a clip.
    """
    url, kind = named, mimetypes.guess_type(named)[0] or _UNKNOWN_TYPE
    if not _is_url(named):
        _check_type(named, kind)
        try:
            data = Path(named).read_bytes()
        except OSError as error:
            raise AskError(f"cannot read {named}: {error.strerror}") from error
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    field = "video_url" if kind.startswith("video/") else "image_url"
    return {"type": field, field: {"url": url}}


def _check_type(named: str, kind: str) -> None:
    """Raises AskError if a file's name has the ending of something that models do not read."""
    if kind == _UNKNOWN_TYPE or kind.startswith(("image/", "video/")):
        return
    what = {"application/pdf": "a PDF file", "text/plain": "a text file"}.get(kind)
    what = what or f"a file of type {kind}"
    do = "paste its text into the question"
    if not kind.startswith("text/"):
        do = f"give a picture of it, or {do}"
    raise AskError(f"{named} is {what}, and models read text, images and clips: {do}")


def question_message(media: Sequence[str], question: str) -> dict[str, Any]:
    """Makes a user message with the images and clips in order and then the question."""
    text = {"type": "text", "text": question}
    return {"role": "user", "content": [*map(media_part, media), text]}


def split_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Divides the arguments of `triptych ask` into images and clips, and the question.

    Raises:
        AskError: there is no question, or more than one.
    """
    images = [word for word in words if _names_media(word)]
    questions = [word for word in words if not _names_media(word)]
    if not questions:
        raise AskError(f'no question about {images[0]}: triptych ask {images[0]} "What is this?"')
    if len(questions) > 1 and all(" " not in word for word in questions):
        return images, " ".join(questions)  # a question without quotes
    if len(questions) > 1:
        raise AskError(
            f"{questions[0]!r} is not a file; if it belongs to the question, put the whole "
            "question in quotes"
        )
    return images, questions[0]


def is_media(word: str) -> bool:
    """Returns whether a name has the ending of an image or a clip."""
    return (mimetypes.guess_type(word)[0] or "").startswith(("image/", "video/"))


def _is_url(word: str) -> bool:
    return word[:6].lower().startswith(("http:", "https:", "data:"))


def _names_media(word: str) -> bool:
    is_named = (_is_url(word) or is_media(word)) and " " not in word
    return is_named or os.path.isfile(word)  # Path.is_file raises an error for long names


def begin(options: argparse.Namespace) -> tuple[Server, dict[str, Any]]:
    """Returns the server of the options and the fields that each request to it has.

    Raises:
        AskError: the server does not answer, or the URL is invalid.
    """
    server = Server(options.url, options.api_key)
    body: dict[str, Any] = {"model": options.model or server.first_model()}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    return server, body


def ask_once(options: argparse.Namespace) -> int:
    """Runs `triptych ask` and returns the exit status."""
    try:
        message = question_message(*split_words(options.words))
        server, body = begin(options)
        body["messages"] = [message]
        ask(server, body, lambda text: print(text, end="", flush=True))
    except AskError as error:
        print(f"triptych ask: {error}", file=sys.stderr)
        return 1
    print()
    return 0


def ask(
    server: Server, body: dict[str, Any], on_text: Callable[[str], None] = lambda _: None
) -> Answer:
    """Posts a chat completion and streams the answer.

    Args:
        server: server to ask.
        body: JSON body of the request, without `stream` and `stream_options`.
        on_text: called with each piece of text when it arrives.

    Raises:
        AskError: the server does not answer or sends an error, or the stream ends too early.
    """
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = Answer()
    start = time.monotonic()
    for event in _events(server, body):
        if event == "[DONE]":
            break
        chunk = _chunk(event)
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise AskError(f"the answer was interrupted by an error: {message}")
        answer.usage = chunk.get("usage") or answer.usage
        answer.stage_times_ms = chunk.get("stage_times_ms") or answer.stage_times_ms
        for choice in chunk.get("choices", []):
            if text := (choice.get("delta") or {}).get("content"):
                answer.ttft_s = answer.ttft_s or time.monotonic() - start
                answer.text += text
                on_text(text)
    else:
        raise AskError("the connection ended before the answer was complete")
    answer.total_s = time.monotonic() - start
    return answer


def _chunk(event: str) -> dict[str, Any]:
    try:
        chunk = json.loads(event)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise AskError(f"the server sent an event that is not a chunk of an answer: {event[:100]}")
    return chunk


def _events(server: Server, body: dict[str, Any]) -> Iterator[str]:
    """Yields the `data:` payloads of a server-sent event stream. Waits for a server that is not
    ready yet, and says so on stderr.
    """
    deadline, has_told = time.monotonic() + _MOST_WAITING_S, False
    while True:
        with server.request("POST", "/v1/chat/completions", body) as answer:
            if answer.status == http.client.OK:
                for line in answer:
                    if line.startswith(b"data:"):
                        yield line[5:].strip().decode(errors="replace")
                return
            message = _error_text(answer.status, answer.read())
            wait_s = _retry_after_s(answer)
        if wait_s is None or time.monotonic() + wait_s > deadline:
            raise AskError(message)
        if not has_told:
            print(f"waiting for the server ({message})", file=sys.stderr, flush=True)
            has_told = True
        time.sleep(wait_s)


def _retry_after_s(answer: http.client.HTTPResponse) -> float | None:
    """Returns the seconds after which the server asks to be called again. None if it does not."""
    wanted = answer.getheader("Retry-After", "")
    if answer.status != http.client.SERVICE_UNAVAILABLE or not wanted.isdecimal():
        return None
    return max(1.0, float(wanted))


def _error_text(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")[:300]
    if status == http.client.UNAUTHORIZED:
        message += "; give --api-key, or export OPENAI_API_KEY"
    return f"HTTP {status}: {message}"
