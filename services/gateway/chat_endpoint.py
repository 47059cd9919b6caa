"""POST /v1/chat/completions: one ASGI endpoint for the stream and for the whole answer.

It is not a Starlette view, for it must see the client go while it works: the work runs in a task of
its own, which ends when the connection does.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from services.common.errors import DeadlineExceeded, Overloaded, TriptychError
from services.common.threads import INLINE_BYTES
from services.gateway.admission import Admission, Slot
from services.gateway.chat import ChatService, Job
from services.gateway.choice import Update
from services.gateway.edge import ClientGone, JsonResponse, read_body
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import ChatRequest, parse_chat_request
from services.gateway.responses import (
    AssistantMessage,
    ChatCompletion,
    LogprobEntry,
    Logprobs,
    ResponseChoice,
)
from services.gateway.sse import DONE, ChunkWriter, error_event
from services.gateway.stages import Stages

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# How long a client may take to accept the last event of a stream that broke off.
_FAREWELL_S = 5.0


@dataclass(slots=True)
class _Exchange:
    """One request on its connection.

    Attributes:
        started: the status line is out; errors are events from here on.
        answered: the last byte is out; a closed connection is no loss.
    """

    scope: Scope
    receive: Receive
    send: Send
    slot: Slot
    stages: Stages = field(default_factory=Stages)
    started: bool = False
    answered: bool = False

    @property
    def request_id(self) -> str:
        """As the edge gave it."""
        return self.scope["state"]["request_id"]

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Sends a piece of the stream; waits while the client is behind."""
        if not self.started:
            self.started = True
            start = {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
            await self.send(start)
        self.answered = self.answered or last
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


class ChatEndpoint:
    """The chat route."""

    def __init__(self, service: ChatService, admission: Admission, metrics: GatewayMetrics) -> None:
        self._service = service
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; raises what is to be an HTTP error."""
        outcome = "internal_error"
        stages = Stages()
        try:
            with self._admission.slot() as slot, self._metrics.running.track_inprogress():
                exchange = _Exchange(scope, receive, send, slot, stages)
                body = await read_body(scope, receive, slot.hold)
                outcome = await _while_connected(exchange, self._serve(exchange, body))
        except TriptychError as error:
            outcome = error.code
            if isinstance(error, Overloaded):
                reason = "draining" if self._admission.draining else "full"
                self._metrics.rejections.labels(reason).inc()
            raise
        except (ClientGone, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()
            self._metrics.request.observe(stages.since_arrival())

    async def _serve(self, exchange: _Exchange, body: bytes) -> str:
        """Answers; returns the outcome for the metrics."""
        deadline = exchange.stages.arrived + self._service.request_timeout_s
        job: Job | None = None
        try:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    request = await _parse(body)
                    del body
                    job = await self._service.prepare(
                        request, exchange.request_id, exchange.stages, exchange.slot.hold
                    )
                    if request.stream:
                        await self._stream(exchange, job)
                    else:
                        await self._whole(exchange, job)
                return job.choices[0].finish_reason or "internal_error"
            except TimeoutError:
                raise DeadlineExceeded("the request took too long") from None
        except TriptychError as error:
            if not exchange.started:
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await exchange.write(error_event(error), last=True)
            return error.code
        finally:
            if job is not None:
                self._observe(job)

    async def _stream(self, exchange: _Exchange, job: Job) -> None:
        options = job.request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        include_usage = bool(options and options.include_usage) or continuous
        writer = ChunkWriter(_response_id(exchange), _now(), job.request.model, include_usage)
        pieces = [writer.role(choice) for choice in range(job.work.num_choices)]
        async with aclosing(self._service.answer(job)) as answer:
            async for updates in answer:
                usage = job.usage() if continuous else None
                pieces += [writer.update(update, usage) for update in updates]
                if data := b"".join(pieces):
                    await exchange.write(data)
                pieces.clear()
        times = bool(job.request.include_stage_times)
        if include_usage or times:
            pieces.append(
                writer.closing(
                    job.usage() if include_usage else None,
                    job.stages.milliseconds() if times else None,
                    job.image_reports() if times else None,
                )
            )
        await exchange.write(b"".join((*pieces, DONE)), last=True)

    async def _whole(self, exchange: _Exchange, job: Job) -> None:
        parts: list[list[Update]] = [[] for _ in job.choices]

        def forget() -> None:
            for part in parts:
                part.clear()

        async with aclosing(self._service.answer(job, forget)) as answer:
            async for updates in answer:
                for update in updates:
                    parts[update.choice].append(update)
        with_logprobs = bool(job.request.logprobs)
        completion = ChatCompletion(
            id=_response_id(exchange),
            created=_now(),
            model=job.request.model,
            choices=[_response_choice(i, found, with_logprobs) for i, found in enumerate(parts)],
            usage=job.usage(),
        )
        if job.request.include_stage_times:
            completion.stage_times_ms = job.stages.milliseconds()
            completion.images = job.image_reports()
        exchange.started = exchange.answered = True
        await JsonResponse(completion)(exchange.scope, exchange.receive, exchange.send)

    def _observe(self, job: Job) -> None:
        metrics, usage, seconds = self._metrics, job.usage(), job.stages.seconds
        for stage, value in seconds.items():
            metrics.stage.labels(stage).observe(value)
        metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        metrics.tokens.labels("image").inc(job.work.prompt.num_image_tokens)
        metrics.tokens.labels("completion").inc(usage.completion_tokens)
        metrics.tokens.labels("cached").inc(job.cached_tokens or 0)
        if "first_token" in seconds:
            metrics.ttft.observe(seconds["first_token"])
            later = usage.completion_tokens - job.work.num_choices
            if "total" in seconds and later > 0:
                metrics.inter_token.observe((seconds["total"] - seconds["first_token"]) / later)


async def _while_connected(exchange: _Exchange, serving: Awaitable[str]) -> str:
    """Runs `serving` until it ends or the client goes.

    Raises:
        ClientGone: the client went first; the work has been cancelled and has ended.
    """
    work = asyncio.ensure_future(serving)
    watch = asyncio.ensure_future(_disconnected(exchange.receive))
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if work.done() or exchange.answered:
            return await work
        raise ClientGone
    finally:
        watch.cancel()
        work.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _parse(body: bytes) -> ChatRequest:
    if len(body) <= INLINE_BYTES:
        return parse_chat_request(body)
    return await asyncio.to_thread(parse_chat_request, body)


def _response_choice(index: int, updates: list[Update], with_logprobs: bool) -> ResponseChoice:
    entries: list[LogprobEntry] = [e for update in updates for e in update.logprobs or ()]
    return ResponseChoice(
        index,
        AssistantMessage("".join(update.text for update in updates)),
        updates[-1].finish_reason or "stop",
        Logprobs(entries) if with_logprobs else None,
    )


def _response_id(exchange: _Exchange) -> str:
    return f"chatcmpl-{exchange.request_id.removeprefix('req-')}"


def _now() -> int:
    return int(time.time())
