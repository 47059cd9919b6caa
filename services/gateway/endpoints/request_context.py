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
        completions: completions that have been prepared for the request, in order. A request for
            text completions has as many as prompts, a request for search has none, and every other
            request has a single completion.
        ended: accounts of completions that are not in `completions`. Search, which may have
            thousands of prompts, adds an account when a prompt ends, so that the prompt is freed.
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
    ended: list["Account"] = field(default_factory=list["Account"])
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
        if not self.completions:
            return "stop"
        return self.completions[0].choices[0].finish_reason or "internal_error"

    async def parse(self, parse: Parse[Parsed], body: Body) -> Parsed:
        """Returns the parsed body.

        Raises:
            InvalidRequest: the body is not a request of this kind.
        """
        return await parse_body(self.service, parse, body, self.exchange.scope)

    async def prepare(self, chat: ChatRequest, draft: Draft | None = None) -> Completion:
        """Prepares and charges the only completion of a request. See `prepare_part`."""
        completion = await self.prepare_part(chat, draft=draft)
        await self.charge()
        return completion

    async def charge(self) -> None:
        """Charges all prepared completions to the tenant's limits, at once, see `Usage.charge`.

        Raises:
            TriptychError: the request exceeds a limit of its tenant.
        """
        num_tokens = num_choices = 0
        for each in self.completions:
            most = each.chat.num_choices * each.sampling.max_tokens
            num_tokens += len(each.prompt.token_ids) + most
            num_choices += each.chat.num_choices
        units = [run.unit for each in self.completions for run in each.prompt.runs]
        num_pixels = self.service.prompts.num_pixels(units)
        await self.slot.usage.charge(num_tokens, num_choices, num_pixels)

    async def prepare_part(
        self, chat: ChatRequest, timings: Timings | None = None, draft: Draft | None = None
    ) -> Completion:
        """Prepares a completion of a chat request, see `ChatService.prepare`. When all completions
        of the request are prepared, `charge` has to be called.

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
        accounts = [*self.ended, *map(Account.of, self.completions)]
        for account in accounts:
            _observe(self.metrics, account, waits=not self.slot.tenant.is_background)
        usages = [account.usage for account in accounts if account.was_submitted]
        num_prompt_tokens = sum(usage.prompt_tokens for usage in usages)
        num_completion_tokens = sum(usage.completion_tokens for usage in usages)
        self.slot.usage.correct(num_prompt_tokens + num_completion_tokens)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "images": sum(account.num_images for account in accounts),
        }


@dataclass(frozen=True, slots=True)
class Account:
    """The numbers that are kept of a completion that has ended, for the limits of its tenant, the
    metrics and the audit log.

    Attributes:
        usage: numbers of tokens of the prompt and of the answer.
        num_images: number of images and videos of the prompt.
        num_choices: number of choices of the answer. 0 if the model generates no text.
        timings: times of the completion's stages.
        was_submitted: True if a decoder was sent the prompt. Otherwise no tokens were used.
    """

    usage: Usage
    num_images: int
    num_choices: int
    timings: Timings
    was_submitted: bool

    @classmethod
    def of(cls, completion: Completion) -> "Account":
        """Returns the account of a completion that has ended."""
        return cls(
            completion.usage(),
            len(completion.images),
            len(completion.choices),
            completion.timings,
            completion.was_submitted,
        )


def _observe(metrics: GatewayMetrics, account: Account, *, waits: bool) -> None:
    """Exports the metrics of a completion. Its times are exported only if a client waits for it,
    because the lines of batches wait for gaps.
    """
    usage, seconds = account.usage, account.timings.seconds if waits else {}
    for stage, value in seconds.items():
        metrics.stage(stage).observe(value)
    if not account.was_submitted:
        return
    metrics.prompt_tokens.inc(usage.prompt_tokens)
    metrics.completion_tokens.inc(usage.completion_tokens)
    metrics.prompt_length.observe(usage.prompt_tokens)
    metrics.answer_length.observe(usage.completion_tokens)
    if num_image_tokens := usage.prompt_tokens_details.image_tokens:
        metrics.image_tokens.inc(num_image_tokens)
    if num_cached_tokens := usage.prompt_tokens_details.cached_tokens:
        metrics.cached_tokens.inc(num_cached_tokens)
    if "first_token" in seconds:
        metrics.ttft.observe(seconds["first_token"])
        num_later = usage.completion_tokens - account.num_choices
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
