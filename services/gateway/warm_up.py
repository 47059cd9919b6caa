"""Warm-up: a gateway sends itself a few requests before it says that it is ready.

The first requests through a process are slow: connections are opened, libraries initialize, the
interpreter specializes its bytecode. The warm-up requests go through the gateway's own port, text
and images in turn, to a secret path that closes after them. Encoders and decoders count them; the
gateway's metrics do not. A failure is logged and changes nothing: health checks decide readiness.
"""

import asyncio
import base64
import json
import logging
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

_IMAGE_SIDE = 512
_TEXT = "Write a short story about a lighthouse, a storm and the keeper's grey cat. "
_POLL_S = 0.02
_TIMEOUT_S = 10.0
_MAX_DURATION_S = 0.25  # no further rounds after this: they gain little on a slow machine


class WarmUp:
    """The warm-up requests of one gateway.

    Attributes:
        done: they have been sent, or none are wanted.
        path: where they are sent.
        address: host and port on which the gateway listens; None: not yet.

    Args:
        chat: the chat endpoint, with metrics of its own.
        model_name: the `model` of requests.
        can_start: whether the services are there.
        rounds: at most; each sends a text and, with `images`, an image. 0: no warm-up.
        images: whether images are served.
    """

    def __init__(
        self,
        chat: ASGIApp,
        model_name: str,
        can_start: Callable[[], bool],
        *,
        rounds: int,
        images: bool,
    ) -> None:
        self._chat = chat
        self._model_name = model_name
        self._can_start = can_start
        self._rounds = rounds
        self._images = images
        self.done = rounds == 0
        self.path = f"/warm-up/{secrets.token_urlsafe(16)}"
        self.address: tuple[str, int] | None = None

    @property
    def route(self) -> Route:
        return Route(self.path, self, methods=["POST"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.done:
            raise HTTPException(404)
        await self._chat(scope, receive, send)

    async def run(self) -> None:
        """Waits for the services, sends the requests, and sets `done`."""
        if self.done:
            return
        while self.address is None or not self._can_start():  # noqa: ASYNC110 - of several pools
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                start = time.monotonic()
                for number in range(self._rounds):
                    if time.monotonic() - start > _MAX_DURATION_S:
                        break
                    await self._send(*self.address, [_text_part(number)])
                    if self._images:
                        await self._send(*self.address, [_image_part(), _text_part(number)])
        except (OSError, _Refused) as error:  # TimeoutError is an OSError
            log.warning("the warm-up failed: %s", error)
        except Exception:
            log.exception("the warm-up failed")
        finally:
            self.done = True

    async def _send(self, host: str, port: int, content: list[dict[str, object]]) -> None:
        body = json.dumps(
            {
                "model": self._model_name, "messages": [{"role": "user", "content": content}],
                "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
            }
        ).encode()  # fmt: skip
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.writelines((head.encode(), body))
            answer = await reader.read(-1)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise _Refused(answer.partition(b"\r\n")[0].decode(errors="replace"))


class _Refused(Exception):
    """The response's status is not 200."""


def _text_part(number: int) -> dict[str, object]:
    # Random from the first word on, so that no cache has it.
    return {"type": "text", "text": f"{os.urandom(8).hex()} {_TEXT * (number + 1)}"}


def _image_part() -> dict[str, object]:
    side = _IMAGE_SIDE
    rows = b"".join(b"\0" + os.urandom(side) for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)  # 8-bit grey
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b"")
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
