"""What all endpoints that generate have in common, as an ASGI application.

An `Endpoint` holds one admission slot from after the body to the last byte, watches for the
client's disconnect, and counts how a request ended. What a request and its answer look like is a
subclass's: `chat_endpoint` for chat completions, one more for each other surface. Errors are
`TriptychError`s: an HTTP error before the response has started, the stream's last event afterwards.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import DeadlineExceeded, Overloaded, TriptychError
from services.gateway.forms.ignored import Ignored
from services.gateway.forms.json_body import Body, free
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import Update, Usage, error_event
from services.gateway.http.exchange import JSON_TYPES, Exchange, read_body
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.prompt import Draft
from services.gateway.request.chat import ChatService
from services.gateway.request.completion import Completion
from services.gateway.slot import Slot
from services.gateway.tenancy.admission import Admission

# How long a client may take to accept the error event of a stream that failed.
_ERROR_EVENT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 30.0  # for the answer of a view
_MAX_INLINE_JSON_BYTES = 64 << 10  # takes at most some ms to parse

Result = TypeVar("Result")


@dataclass(slots=True)
class Work:
    """One request that is being served.

    Attributes:
        slot: that the request holds, with its tenant.
        completions: what has been prepared for it, in order: for the metrics.
        usages: of the completions, once the request has ended.
        paths: how the client calls fields of the chat request that its own was made into; see
            `renamed`.
        writer: of the answer's events, for `Endpoint.error_event`.
    """

    exchange: Exchange
    timings: Timings
    slot: Slot
    completions: list[Completion] = field(default_factory=list[Completion])
    usages: list[Usage] = field(default_factory=list[Usage])
    paths: dict[str, str] = field(default_factory=dict[str, str])
    writer: object = None

    @property
    def answer_id(self) -> str:
        """What the answer's id holds of the request's."""
        return self.exchange.request_id.removeprefix("req-")


@dataclass(frozen=True, eq=False)
class Endpoint(ABC):
    """Not a Starlette view: it watches for the client's disconnect while it works."""

    _service: ChatService
    _admission: Admission
    _metrics: GatewayMetrics

    @abstractmethod
    async def answer(self, work: Work, body: Body) -> None:
        """Parses the body and sends the answer, whole or streamed.

        Raises:
            TriptychError: the request cannot be served.
        """

    def error_event(self, work: Work, error: TriptychError) -> bytes:
        """The last events of a stream that failed."""
        return error_event(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request.

        Raises:
            TriptychError: before the response has started; becomes an HTTP error.
        """
        outcome = "internal_error"
        timings = Timings()
        work: Work | None = None
        try:
            async with received(self._admission, scope, receive) as (slot, body):
                exchange = Exchange(scope, receive, send)
                work = Work(exchange, timings, slot)
                outcome = await exchange.while_connected(self._serve(work, body))
        except TriptychError as error:
            outcome = error.code
            if isinstance(error, Overloaded):
                reason = "draining" if self._admission.draining else "full"
                self._metrics.rejections.labels(reason).inc()
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            scope["state"] |= {"outcome": outcome, "used": _used(work)}
            self._metrics.request_ended(outcome).inc()
            self._metrics.request.observe(timings.since_arrival())

    async def parse(
        self, work: Work, parse: Callable[[Body, Ignored], Result], body: Body
    ) -> Result:
        return await parse_body(self._service, parse, body, work.exchange.scope)

    async def prepare(
        self, work: Work, chat: ChatRequest, timings: Timings | None = None,
        draft: Draft | None = None,
    ) -> Completion:  # fmt: skip
        """`ChatService.prepare` for this request; `timings` are the request's by default."""
        completion = await self._service.prepare(
            chat, work.exchange.request_id, timings or work.timings, work.slot, draft
        )
        work.completions.append(completion)
        for name in completion.ignored:
            ignored_of(work.exchange.scope).add(renamed(name, work.paths))
            self._metrics.ignored_field(name).inc()
        return completion

    async def collect(self, completion: Completion) -> list[list[Update]]:
        """Runs a completion to its end; returns the updates of each choice."""
        updates_of: list[list[Update]] = [[] for _ in completion.choices]
        async with aclosing(self._service.answer(completion, is_kept=True)) as answer:
            async for updates in answer:
                for update in updates:
                    updates_of[update.choice].append(update)
        return updates_of

    async def _serve(self, work: Work, body: Body) -> str:
        """Answers; returns the outcome for the metrics."""
        remaining_s = self._service.request_timeout_s - work.timings.since_arrival()
        try:
            try:
                async with self._admission.until_ended(remaining_s):
                    await self.answer(work, body)
                return work.completions[0].choices[0].finish_reason or "internal_error"
            except TimeoutError:
                raise DeadlineExceeded("the request took too long") from None
        except TriptychError as error:
            if error.param is not None:
                param = renamed(error.param, work.paths)
                error.param = renamed(param, ignored_of(work.exchange.scope).paths)
            if not work.exchange.started:
                raise
            if work.exchange.finished:
                raise ClientDisconnect from None
            error.without_frames()
            with suppress(TimeoutError):
                async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                    await work.exchange.write(self.error_event(work, error), last=True)
            return error.code
        finally:
            work.usages = [completion.usage() for completion in work.completions]
            for completion, usage in zip(work.completions, work.usages, strict=True):
                self._observe(completion, usage)
            work.slot.correct([u.prompt_tokens + u.completion_tokens for u in work.usages])

    def _observe(self, completion: Completion, usage: Usage) -> None:
        metrics, seconds = self._metrics, completion.timings.seconds
        for stage, value in seconds.items():
            metrics.stage(stage).observe(value)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.completion_tokens.inc(usage.completion_tokens)
        if num_image_tokens := completion.prompt.num_image_tokens:
            metrics.image_tokens.inc(num_image_tokens)
        if completion.cached_tokens:
            metrics.cached_tokens.inc(completion.cached_tokens)
        if "first_token" in seconds:
            metrics.ttft.observe(seconds["first_token"])
            num_later = usage.completion_tokens - len(completion.choices)
            if "total" in seconds and num_later > 0:
                metrics.tpot.observe((seconds["total"] - seconds["first_token"]) / num_later)


def _used(work: Work | None) -> dict[str, int]:
    """How much a request has used, for the audit log; the middleware writes it."""
    completions, usages = (work.completions, work.usages) if work else ([], [])
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "images": sum(len(completion.images) for completion in completions),
    }


def renamed(param: str, paths: Mapping[str, str]) -> str:
    """The path of a field with its longest beginning replaced that `paths` has."""
    end, longest = len(param), max(map(len, paths), default=0)
    while end > 0:
        if end <= longest and param[:end] in paths:
            return paths[param[:end]] + param[end:]
        # A key of a schema may have any length, and nothing but dots.
        end = min(end, longest + 1)
        end = max(param.rfind(".", 0, end), param.rfind("[", 0, end))
    return param


@asynccontextmanager
async def received(
    admission: Admission, scope: Scope, receive: Receive, types: Sequence[str] = JSON_TYPES
) -> AsyncGenerator[tuple[Slot, Body]]:
    """A slot and the whole body, of such a type, which is freed at the end."""
    with admission.holding() as hold:
        async with admission.until_ended():
            body = await read_body(scope, receive, hold, admission.max_body_bytes, types)
        try:
            async with admission.slot(hold) as slot:
                yield slot, body
        finally:
            free(body)


@dataclass(frozen=True, slots=True)
class View:
    """A request with a body that generates nothing, as an ASGI application: it keeps its slot until
    the answer is read.

    Attributes:
        answer: makes it; `TriptychError`s become HTTP errors.
        types: how the content type may begin.
    """

    service: ChatService
    admission: Admission
    answer: Callable[[ChatService, Request, Slot, Body], Awaitable[Response]]
    types: Sequence[str] = JSON_TYPES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with received(self.admission, scope, receive, self.types) as (slot, body):
            try:
                async with self.admission.until_ended():
                    response = await self.answer(self.service, Request(scope, receive), slot, body)
            except TriptychError as error:
                if error.param is not None:
                    error.param = renamed(error.param, ignored_of(scope).paths)
                raise
            try:
                async with self.admission.until_ended(_SEND_TIMEOUT_S):
                    await response(scope, receive, send)
            except TimeoutError:
                raise ClientDisconnect from None


def ignored_of(scope: Scope) -> Ignored:
    """What was left out of a request's body; the middleware names it in the response's header."""
    return scope["state"].setdefault("ignored", Ignored())


async def parse_body(
    service: ChatService, parse: Callable[[Body, Ignored], Result], body: Body, scope: Scope
) -> Result:
    """`parse(body)`; in a thread, if the body is long.

    Args:
        service: its one parser thread, because the parser keeps the interpreter lock, for which the
            event loop would wait behind each of several.
        scope: gets what was left out.
    """
    ignored = scope["state"]["ignored"] = Ignored(all_unknown=service.ignores_unknown_fields)
    try:
        if len(body) <= _MAX_INLINE_JSON_BYTES:
            return parse(body, ignored)
        return await service.parsers.run(parse, body, ignored)
    finally:
        for field in set(ignored.names.values()):
            service.metrics.ignored_field(field).inc()


def now() -> int:
    """Unix time in whole seconds, as answers have it."""
    return int(time.time())
