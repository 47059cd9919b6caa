"""The context of a request that generates, and the steps that the handlers of all surfaces share:
parsing, preparing, collecting and accounting.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Scope

from services.common.errors import TriptychError
from services.gateway.endpoints.answer_writer import AnswerWriter
from services.gateway.forms.ignored import Ignored
from services.gateway.forms.json_body import Body
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import Update, Usage, error_event
from services.gateway.http.exchange import Exchange
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.prompt import Draft
from services.gateway.request.chat import ChatService
from services.gateway.request.completion import Completion
from services.gateway.tenancy.slot import Slot

_MAX_INLINE_JSON_BYTES = 64 << 10  # parsing them takes some milliseconds at most

Parsed = TypeVar("Parsed")
# The parser of one kind of request. It adds the fields that it leaves out to the second argument.
Parse = Callable[[Body, Ignored], Parsed]


@dataclass(slots=True)
class RequestContext:
    """A request that generates tokens, while the gateway serves it.

    Attributes:
        service: service that prepares and answers chat requests.
        metrics: metrics of the gateway.
        exchange: the HTTP request and its response.
        slot: admission slot of the request, with its tenant.
        timings: times of the request's stages.
        completions: completions that have been prepared for the request, in order. Text completions
            have one for each prompt, the other surfaces have one.
        paths: names of the client's fields by the names of the chat request's fields, if the
            client's request was converted into a chat request; see `renamed`. An example is
            `{"messages[1]": "input[2]"}`.
        writer: writer of the stream's events, which also writes the events of an error. None if the
            stream consists of OpenAI's chunks, whose error event is always the same.
    """

    service: ChatService
    metrics: GatewayMetrics
    exchange: Exchange
    slot: Slot
    timings: Timings
    completions: list[Completion] = field(default_factory=list[Completion])
    paths: dict[str, str] = field(default_factory=dict[str, str])
    writer: AnswerWriter[Any] | None = None

    @property
    def answer_id(self) -> str:
        """The part of the answer's id that comes from the request's id."""
        return self.exchange.request_id.removeprefix("req-")

    @property
    def outcome(self) -> str:
        """Outcome of an answered request: the finish reason of its first choice, or `stop` if its
        model generates no text.
        """
        choices = self.completions[0].choices
        return (choices[0].finish_reason or "internal_error") if choices else "stop"

    async def parse(self, parse: Parse[Parsed], body: Body) -> Parsed:
        """Returns the parsed body.

        Raises:
            InvalidRequest: the body is not a request of this kind.
        """
        return await parse_body(self.service, parse, body, self.exchange.scope)

    async def prepare(
        self, chat: ChatRequest, timings: Timings | None = None, draft: Draft | None = None
    ) -> Completion:
        """Prepares a completion of a chat request, see `ChatService.prepare`.

        Args:
            chat: chat request of the client, or the one that the client's request was converted to.
            timings: times of this completion's stages. Defaults to the request's.
            draft: prompt without its images. None if the chat request is yet to be rendered.
        """
        completion = await self.service.prepare(
            chat, self.exchange.request_id, timings or self.timings, self.slot, draft
        )
        self.completions.append(completion)
        for name in completion.ignored:
            ignored_of(self.exchange.scope).add(renamed(name, self.paths))
            self.metrics.ignored_field(name).inc()
        return completion

    async def collect(self, completion: Completion) -> list[list[Update]]:
        """Runs a completion to its end; returns the updates of each choice."""
        completion.sent_whole = True
        updates_of: list[list[Update]] = [[] for _ in completion.choices]
        async with aclosing(self.service.answer(completion, holds_updates=True)) as answer:
            async for updates in answer:
                for update in updates:
                    updates_of[update.choice].append(update)
        return updates_of

    def error_events(self, error: TriptychError) -> bytes:
        """Returns the last events of a stream that ends with an error."""
        return error_event(error) if self.writer is None else self.writer.error_events(error)

    def name_field_as_client(self, error: TriptychError) -> None:
        """Gives an error the client's own name of the field that is wrong."""
        if error.param is not None:
            param = renamed(error.param, self.paths)
            error.param = renamed(param, ignored_of(self.exchange.scope).paths)

    def settle(self) -> dict[str, int]:
        """Ends the accounting of a request: exports the metrics of its completions and returns
        unused tokens to its tenant.

        Returns:
            The numbers of tokens and images of the request, for the audit log.
        """
        usages = [completion.usage() for completion in self.completions]
        for completion, usage in zip(self.completions, usages, strict=True):
            _observe(self.metrics, completion, usage, waits=not self.slot.tenant.is_background)
        self.slot.usage.correct([usage.prompt_tokens + usage.completion_tokens for usage in usages])
        return {
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "images": sum(len(completion.images) for completion in self.completions),
        }


def _observe(metrics: GatewayMetrics, completion: Completion, usage: Usage, *, waits: bool) -> None:
    """Exports the metrics of a completion. Its times are exported only if a client waits for it,
    because the lines of batches wait for gaps.
    """
    seconds = completion.timings.seconds if waits else {}
    for stage, value in seconds.items():
        metrics.stage(stage).observe(value)
    metrics.prompt_tokens.inc(usage.prompt_tokens)
    metrics.completion_tokens.inc(usage.completion_tokens)
    metrics.prompt_length.observe(usage.prompt_tokens)
    metrics.answer_length.observe(usage.completion_tokens)
    if num_image_tokens := completion.prompt.num_image_tokens:
        metrics.image_tokens.inc(num_image_tokens)
    if completion.cached_tokens:
        metrics.cached_tokens.inc(completion.cached_tokens)
    if "first_token" in seconds:
        metrics.ttft.observe(seconds["first_token"])
        num_later = usage.completion_tokens - len(completion.choices)
        if "total" in seconds and num_later > 0:
            metrics.tpot.observe((seconds["total"] - seconds["first_token"]) / num_later)


def renamed(param: str, paths: Mapping[str, str]) -> str:
    """Returns a field's path with its longest prefix that is in `paths` replaced.

    For example, `{"messages": "input"}` renames `messages[3].content` to `input[3].content`.
    """
    end, longest = len(param), max(map(len, paths), default=0)
    while end > 0:
        if end <= longest and param[:end] in paths:
            return paths[param[:end]] + param[end:]
        # A key of a schema may have any length, and nothing but dots.
        end = min(end, longest + 1)
        end = max(param.rfind(".", 0, end), param.rfind("[", 0, end))
    return param


def ignored_of(scope: Scope) -> Ignored:
    """Returns the fields of a request's body that are ignored. The middleware names them in a
    header of the response.
    """
    return scope["state"].setdefault("ignored", Ignored())


async def parse_body(
    service: ChatService, parse: Parse[Parsed], body: Body, scope: Scope
) -> Parsed:
    """Parses a body, in a thread if the body is long.

    Args:
        service: owner of the one parser thread. A parser holds the interpreter lock, so the event
            loop would wait behind each of several threads.
        parse: parser of this kind of request.
        body: the whole body.
        scope: ASGI scope of the request, to which the ignored fields are added.
    """
    ignored = scope["state"]["ignored"] = Ignored(all_unknown=service.ignores_unknown_fields)
    try:
        if len(body) <= _MAX_INLINE_JSON_BYTES:
            return parse(body, ignored)
        return await service.parsers.run(parse, body, ignored)
    finally:
        for name in set(ignored.names.values()):
            service.metrics.ignored_field(name).inc()


def now() -> int:
    """Returns the Unix time in whole seconds, as answers have it."""
    return int(time.time())
