"""What a gateway does before it says that it is ready: a few requests of its own.

The first requests through a process pay for what later ones find done: connections, the first calls
of libraries, what the interpreter and the processor learn. These run through the chat endpoint and
all that is behind it, texts and pictures in turn, and nobody waits for them. Encoders and decoders
count them, the gateway's metrics do not. Failures are logged and change nothing: who is ready is
for the health checks to say.
"""

import asyncio
import base64
import io
import json
import logging
import os
import time
from collections.abc import Callable

from PIL import Image
from starlette.types import ASGIApp, Message, Scope

from services.common.errors import TriptychError

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

    async def run(self) -> None:
        """Waits until it may begin; asks; is over."""
        if self.over:
            return
        while not self._may_begin():  # noqa: ASYNC110 - of several pools
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                start = time.monotonic()
                for number in range(self._rounds):
                    if time.monotonic() - start > _ENOUGH_S:
                        break
                    await self._ask(f"rehearsal-{number}", [_text(number)])
                    if self._pictures:
                        await self._ask(f"rehearsal-{number}", [_picture(), _text(number)])
        except TriptychError as error:
            log.warning("the rehearsal failed: %s", error)
        except Exception:
            log.exception("the rehearsal failed")
        finally:
            self.over = True

    async def _ask(self, request_id: str, content: list[dict[str, object]]) -> None:
        """One request, as a client would send it."""
        body = json.dumps(
            {
                "model": self._model_name, "messages": [{"role": "user", "content": content}],
                "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
            }
        ).encode()  # fmt: skip
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return pending.pop() if pending else await asyncio.Future[Message]()

        async def send(message: Message) -> None:
            pass

        scope: Scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [],
            "state": {"request_id": request_id},
        }  # fmt: skip
        await self._chat(scope, receive, send)


def _text(number: int) -> dict[str, object]:
    # Of its own from the first word on, so that no cache has it.
    return {"type": "text", "text": f"{os.urandom(8).hex()} {_TEXT * (number + 1)}"}


def _picture() -> dict[str, object]:
    file = io.BytesIO()
    size = (_SIDE, _SIDE)
    Image.frombytes("RGB", size, os.urandom(3 * _SIDE * _SIDE)).save(file, "JPEG")
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
