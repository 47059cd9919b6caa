"""What a gateway does before it says that it is ready: a few requests of its own.

The first requests through a process pay for what later ones find done: connections, the first calls
of libraries, what the interpreter and the processor learn. These come through the gateway's own
port, texts and pictures in turn, and nobody waits for them. They have a path of their own, which
nobody knows and which is closed when they are over: encoders and decoders count them, the gateway's
metrics do not. Failures are logged and change nothing: who is ready is for the health checks to
say.
"""

import asyncio
import base64
import io
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from PIL import Image
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

_SIDE = 512
_TEXT = "How many of these words does it take until the last of them finds all doors open? "
_POLL_S = 0.02
_TIMEOUT_S = 10.0
_ENOUGH_S = 0.25  # where all is slow, its beginning matters less


class Rehearsal:
    """The requests of one gateway.

    Attributes:
        over: nothing is left to wait for.
        path: where they go.
        address: host and port where the gateway listens; None: not yet.

    Args:
        chat: the chat endpoint, with metrics of its own.
        model_name: what requests call the model.
        may_begin: whether there is an encoder and a decoder.
        rounds: of a text, and of a picture, at most; 0: none.
        pictures: whether pictures are served.
    """

    def __init__(
        self,
        chat: ASGIApp,
        model_name: str,
        may_begin: Callable[[], bool],
        *,
        rounds: int,
        pictures: bool,
    ) -> None:
        self._chat = chat
        self._model_name = model_name
        self._may_begin = may_begin
        self._rounds = rounds
        self._pictures = pictures
        self.over = rounds == 0
        self.path = f"/rehearsal/{secrets.token_urlsafe(16)}"
        self.address: tuple[str, int] | None = None

    @property
    def route(self) -> Route:
        """Where they arrive."""
        return Route(self.path, self, methods=["POST"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves `path`."""
        if self.over:
            raise HTTPException(404)
        await self._chat(scope, receive, send)

    async def run(self) -> None:
        """Waits until it may begin; asks; is over."""
        if self.over:
            return
        while self.address is None or not self._may_begin():  # noqa: ASYNC110 - of several pools
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                start = time.monotonic()
                for number in range(self._rounds):
                    if time.monotonic() - start > _ENOUGH_S:
                        break
                    await self._ask(*self.address, [_text(number)])
                    if self._pictures:
                        await self._ask(*self.address, [_picture(), _text(number)])
        except (OSError, _Refused) as error:  # TimeoutError is an OSError
            log.warning("the rehearsal failed: %s", error)
        except Exception:
            log.exception("the rehearsal failed")
        finally:
            self.over = True

    async def _ask(self, host: str, port: int, content: list[dict[str, object]]) -> None:
        """One request, as a client would send it."""
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
    """The answer was not the one that clients hope for."""


def _text(number: int) -> dict[str, object]:
    # Of its own from the first word on, so that no cache has it.
    return {"type": "text", "text": f"{os.urandom(8).hex()} {_TEXT * (number + 1)}"}


def _picture() -> dict[str, object]:
    file = io.BytesIO()
    size = (_SIDE, _SIDE)
    Image.frombytes("RGB", size, os.urandom(3 * _SIDE * _SIDE)).save(file, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
