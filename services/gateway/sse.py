"""Chunks of a streamed answer as server-sent events.

A token costs one small JSON string between two runs of bytes made once per request.
"""

from collections.abc import Sequence

import msgspec

from services.common.errors import TriptychError
from services.gateway.choice import Update
from services.gateway.responses import ImageReport, Logprobs, Usage, encode_json, error_of

DONE = b"data: [DONE]\n\n"
_raw = msgspec.Raw


def error_event(error: TriptychError) -> bytes:
    """The last event of a stream that broke off; no `[DONE]` follows."""
    return b"data: " + encode_json(error_of(error)) + b"\n\n"


class ChunkWriter:
    """Writes one response's chunks.

    Args:
        response_id: `chatcmpl-...`.
        created: Unix time.
        model: as served.
        usage_field: whether each chunk has a `usage`; null but where it is given.
    """

    def __init__(self, response_id: str, created: int, model: str, usage_field: bool) -> None:
        head = encode_json(
            {
                "id": response_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
                "system_fingerprint": None,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if usage_field else b"}\n\n"
        self._text_end = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._text_starts: dict[int, bytes] = {}

    def role(self, choice: int) -> bytes:
        """A choice's first event."""
        return (
            self._head
            + b'{"index":%d,"delta":{"role":"assistant","content":""},' % choice
            + b'"logprobs":null,"finish_reason":null}]'
            + self._tail
        )

    def update(self, update: Update, usage: Usage | None = None) -> bytes:
        """What is new in a choice; nothing where nothing is."""
        if update.finish_reason is None and not update.logprobs:
            if not update.text:
                return b""
            if usage is None:
                start = self._text_starts.get(update.choice)
                if start is None:
                    start = self._head + b'{"index":%d,"delta":{"content":' % update.choice
                    self._text_starts[update.choice] = start
                return start + encode_json(update.text) + self._text_end
        logprobs = Logprobs(update.logprobs) if update.logprobs else None
        choice = {
            "index": update.choice,
            "delta": {"content": update.text} if update.text else {},
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
        }
        tail = self._tail if usage is None else b',"usage":' + encode_json(usage) + b"}\n\n"
        return self._head + encode_json(choice) + b"]" + tail

    def closing(
        self,
        usage: Usage | None,
        stage_times_ms: dict[str, float] | None,
        images: Sequence[ImageReport] | None,
    ) -> bytes:
        """The event after the last choice: no choices, but the whole request's figures."""
        fields: dict[str, object] = {"usage": usage}
        if stage_times_ms is not None:
            fields |= {"stage_times_ms": stage_times_ms, "images": list(images or ())}
        return self._head + b"]," + encode_json(fields)[1:] + b"\n\n"
