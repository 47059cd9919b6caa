"""One streaming HTTP/1.1 connection that costs next to nothing.

A general client spends more time per token than the server under test may take; this one parses
chunked server-sent events as they arrive and notes the times. It knows just what a chat completion
needs: POST a body, read events until the response ends, keep the connection for the next request.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Sample:
    """What one request showed. Times are of `time.monotonic()`, comparable between processes.

    Attributes:
        start: the request was written to the socket.
        first: the first content arrived; 0 when none did.
        last: the last content arrived.
        end: the response was complete.
        gap_s: longest time in seconds between two events with content.
        error: why the request does not count; empty when it does.
        status: of the response; 0 without one.
        retry_after: the header's value; empty without it.
    """

    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    status: int = 0
    retry_after: str = ""
    gap_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first content."""
        return self.first - self.start

    @property
    def tpot_s(self) -> float:
        """Mean seconds of each token after the first."""
        return (self.last - self.first) / max(1, self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        path: of the chat completions endpoint.
        headers: complete header lines besides those of the body.
    """

    host: str
    port: int
    path: str
    headers: bytes
    tls: bool

    @classmethod
    def from_url(cls, url: str, api_key: str = "") -> "Target":
        """The chat completions endpoint below `url` (with or without `/v1`).

        Raises:
            ValueError: not an http or https URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http URL: {url}")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        if api_key:
            headers += f"Authorization: Bearer {api_key}\r\n"
        return cls(
            parts.hostname,
            parts.port or (443 if tls else 80),
            f"{base}/v1/chat/completions",
            headers.encode(),
            tls,
        )


class Connection(asyncio.Protocol):
    """One connection; one request at a time. Reconnects when the server has closed it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._sample = Sample()
        self._done: asyncio.Future[None] | None = None
        self._reset()

    async def post(self, body: bytes, timeout_s: float) -> Sample:
        """Sends one request and returns when its response is complete. Raises nothing."""
        self._sample = sample = Sample(start=time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                await self._post(body)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            sample.error = sample.error or f"{type(error).__name__}: {error}"
            self.close()
        sample.end = time.monotonic()
        if not sample.error and not sample.first:
            sample.error = "the answer had no content"
        return sample

    def close(self) -> None:
        """Ends the connection; the next `post` makes a new one."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _post(self, body: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            context = ssl.create_default_context() if self._target.tls else None
            self._transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: self, self._target.host, self._target.port, ssl=context
            )
        self._reset()
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST {self._target.path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        self._sample.start = time.monotonic()
        self._transport.writelines((head + self._target.headers + b"\r\n", body))
        await self._done

    def on_text(self, text: str, now: float) -> None:
        """Called with the content of each event; subclasses override it."""

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feeds what arrived through head, chunks and events."""
        now = time.monotonic()
        self._buffer += data
        try:
            if not self._in_body and not self._read_head():
                return
            complete = self._read_chunks() if self._chunked else self._read_plain()
            self._read_events(now, complete)
        except (ValueError, LookupError, TypeError) as error:
            self._fail(f"malformed response: {error}")
            return
        if complete and self._done and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """A response that is not complete by now never will be."""
        self._transport = None
        self._fail(f"connection lost{f': {exc}' if exc else ''}")

    # --- parsing --------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._buffer = bytearray()  # of the wire, not yet understood
        self._text = bytearray()  # of the body, not yet a whole event
        self._in_body = False
        self._chunked = False
        self._remaining = 0  # of a body with a length
        self._status = 0
        self._finished = False

    def _fail(self, reason: str) -> None:
        if self._done and not self._done.done():
            self._sample.error = reason
            self._done.set_result(None)
            self.close()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status_line, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        self._sample.status = self._status = int(status_line.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"transfer-encoding":
                    self._chunked = b"chunked" in value.lower()
                case b"content-length":
                    self._remaining = int(value)
                case b"retry-after":
                    self._sample.retry_after = value.strip().decode()
        self._in_body = True
        return True

    def _read_chunks(self) -> bool:
        """Moves whole chunks to `_text`; true after the last one."""
        buffer, position = self._buffer, 0
        complete = False
        while (end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:end].split(b";")[0], 16)
            if len(buffer) < end + size + 4:
                break
            self._text += buffer[end + 2 : end + 2 + size]
            position = end + size + 4
            if size == 0:
                complete = True
                break
        del buffer[:position]
        return complete

    def _read_plain(self) -> bool:
        self._text += self._buffer
        self._remaining -= len(self._buffer)
        self._buffer.clear()
        return self._remaining <= 0

    def _read_events(self, now: float, complete: bool) -> None:
        if self._status != 200:
            if complete:
                self._sample.error = f"HTTP {self._status}: {_message(bytes(self._text))}"
            return
        if b"\r\n" in self._text:
            self._text = self._text.replace(b"\r\n", b"\n")
        *events, self._text = self._text.split(b"\n\n")
        for event in events:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload.startswith(b"{"):
                self._read_event(json.loads(payload), now)
            elif payload == b"[DONE]":
                self._finished = True
        if complete and not self._finished and not self._sample.error:
            self._sample.error = "the stream ended before the answer did"

    def _read_event(self, event: dict[str, Any], now: float) -> None:
        if error := event.get("error"):
            self._sample.error = f"error event: {error.get('message')}"
        for choice in event.get("choices", ()):
            self._finished = self._finished or bool(choice.get("finish_reason"))
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if text:
                sample = self._sample
                sample.first = sample.first or now
                sample.gap_s = max(sample.gap_s, now - (sample.last or now))
                sample.last = now
                self.on_text(text, now)
        if usage := event.get("usage"):
            self._sample.prompt_tokens = usage["prompt_tokens"]
            self._sample.completion_tokens = usage["completion_tokens"]


class TimedConnection(Connection):
    """Notes when content came.

    Attributes:
        arrivals: time and text of each event with content; cleared by the sender of a request.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.arrivals: list[tuple[float, str]] = []

    def on_text(self, text: str, now: float) -> None:
        """Notes the time and the text."""
        self.arrivals.append((now, text))


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
