"""The ASGI applications around the handlers of requests with a body.

A `GenerationEndpoint` serves a path that generates tokens. It reads the body, holds an admission
slot until the last byte is sent, cancels the work when the client disconnects or the deadline
passes, and counts how the request ended. Its handler does the rest; `chat_endpoint` has the handler
of chat completions, and its sibling files have those of the other surfaces. A `UtilityEndpoint`
serves a path that needs a slot and generates nothing, such as `/tokenize`.

Handlers raise `TriptychError`s. Before the response has started, an error becomes an HTTP error;
afterwards, it becomes the last event of the stream. Any other exception is a bug, which the client
sees as an `InternalError` in the same way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import DeadlineExceeded, InternalError, Overloaded, TriptychError
from services.gateway.endpoints.request_context import RequestContext, ignored_of, renamed
from services.gateway.forms.json_body import Body, free
from services.gateway.forms.responses import error_event
from services.gateway.http.exchange import JSON_TYPES, Exchange, read_body
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.admission import Admission
from services.gateway.tenancy.request_memory import RequestMemory
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import bound_tenant

log = logging.getLogger(__name__)

# Seconds that a client may take to accept the error event of a stream that failed.
_ERROR_EVENT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 30.0  # for the response of a `UtilityEndpoint`
_NOTHING_USED = {"prompt_tokens": 0, "completion_tokens": 0, "images": 0}

# Parses a body and sends the answer, whole or as a stream.
GenerationHandler = Callable[[RequestContext, Body], Awaitable[None]]
# Parses a body and returns the response.
UtilityHandler = Callable[[ChatService, Request, Slot, Body], Awaitable[Response]]


class Admitted:
    """A block for an `async with` that reads a request's body, and then holds an admission slot. It
    is a class for the reason that `SlotBlock` is one.

    The block's value is the slot and the whole body, which is freed at the end of the block.

    Args:
        admission: owner of the slots and of the memory for bodies.
        scope: ASGI scope of the request.
        receive: ASGI channel from which the body is read.
        types: prefixes of the content types that are accepted.

    Raises:
        DeadlineExceeded: the body arrives too slowly.
    """

    def __init__(
        self,
        admission: Admission,
        scope: Scope,
        receive: Receive,
        types: Sequence[str] = JSON_TYPES,
    ) -> None:
        self._admission = admission
        self._scope = scope
        self._receive = receive
        self._types = types
        self._body: Body = b""

    async def __aenter__(self) -> tuple[Slot, Body]:
        self._memory = memory = self._admission.request_memory()
        try:
            self._body = await self._read_body(memory)
            self._slot = self._admission.slot(memory)
            return await self._slot.__aenter__(), self._body
        except BaseException:
            self._free()
            raise

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._slot.__aexit__()
        finally:
            self._free()

    async def _read_body(self, memory: RequestMemory) -> Body:
        limits = self._admission.body_limits
        try:
            async with self._admission.until_ended(limits.start_s) as deadline:
                return await read_body(
                    self._scope, self._receive, memory, limits, deadline, self._types
                )
        except TimeoutError:
            raise DeadlineExceeded("the body did not arrive in time") from None

    def _free(self) -> None:
        free(self._body)
        self._memory.free()


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """An ASGI application that serves one path which generates.

    Attributes:
        service: service that prepares and answers chat requests.
        admission: owner of the admission slots.
        metrics: metrics of the gateway.
        handler: coroutine function that answers a request of this path's surface.
    """

    service: ChatService
    admission: Admission
    metrics: GatewayMetrics
    handler: GenerationHandler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request.

        Raises:
            TriptychError: the request failed before its response started. The middleware answers
                with an HTTP error.
            ClientDisconnect: the client disconnected first.
        """
        timings = Timings()
        outcome, used = "internal_error", _NOTHING_USED
        try:
            async with Admitted(self.admission, scope, receive) as (slot, body):
                exchange = Exchange(scope, receive, send)
                context = RequestContext(self.service, self.metrics, exchange, slot, timings)
                try:
                    with exchange.while_connected():
                        outcome = await self._answer(context, body)
                finally:
                    used = context.settle()
        except TriptychError as error:
            outcome = error.code
            if isinstance(error, Overloaded):
                reason = "draining" if self.admission.draining else "full"
                self.metrics.rejections.labels(reason).inc()
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            scope["state"] |= {"outcome": outcome, "used": used}  # for the middleware's logs
            self.metrics.request_ended(outcome).inc()
            if not bound_tenant().is_background:
                self.metrics.request.observe(timings.since_arrival())

    async def _answer(self, context: RequestContext, body: Body) -> str:
        """Runs the handler until its deadline, and ends a started stream with the handler's error.

        Returns:
            The outcome of the request: the finish reason of its first choice, or an error's code.

        Raises:
            TriptychError: the handler failed before the response started.
            ClientDisconnect: the client disconnected, or the handler failed after it had written
                the whole answer, of which the client has yet to read the end.
            Exception: a bug, before the response started or after the whole answer was written. The
                middleware logs it, and answers if nothing was sent.
        """
        exchange = context.exchange
        remaining_s = self.service.request_timeout_s - context.timings.since_arrival()
        try:
            try:
                async with self.admission.until_ended(remaining_s):
                    await self.handler(context, body)
            except TimeoutError:
                raise DeadlineExceeded("the request took too long") from None
            return context.outcome
        except TriptychError as error:
            context.name_field_as_client(error)
            if not exchange.started:
                raise
            if exchange.finished:
                raise ClientDisconnect from None
            failure = error.without_frames()
        except ClientDisconnect:
            raise
        except Exception as error:
            if not exchange.started or exchange.finished:
                raise
            log.exception("a request failed after its response had started")
            error.__traceback__ = error.__context__ = None  # They refer to the whole request.
            failure = InternalError("internal error")
        with suppress(TimeoutError):
            async with asyncio.timeout(_ERROR_EVENT_TIMEOUT_S):
                await exchange.write(_last_events(context, failure), last=True)
        return failure.code


def _last_events(context: RequestContext, failure: TriptychError) -> bytes:
    """Returns the last events of a stream that failed."""
    try:
        return context.error_events(failure)
    except Exception:
        # The bug that ended the stream may have left the writer of its events in a state from which
        # it cannot write. The client still has to learn that the answer is not whole.
        log.exception("the error of a stream could not be written as its API has it")
        return error_event(failure)


@dataclass(frozen=True, slots=True)
class UtilityEndpoint:
    """An ASGI application that serves one path which takes a body and generates nothing. A request
    holds its admission slot until the client has read the response.

    Attributes:
        service: service that answers chat requests, with the tokenizer and the clients.
        admission: owner of the admission slots.
        handler: coroutine function that makes the response.
        types: prefixes of the content types that are accepted.
    """

    service: ChatService
    admission: Admission
    handler: UtilityHandler
    types: Sequence[str] = JSON_TYPES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Admitted(self.admission, scope, receive, self.types) as (slot, body):
            try:
                async with self.admission.until_ended():
                    response = await self.handler(self.service, Request(scope, receive), slot, body)
            except TriptychError as error:
                if error.param is not None:
                    error.param = renamed(error.param, ignored_of(scope).paths)
                raise
            try:
                async with self.admission.until_ended(_SEND_TIMEOUT_S):
                    await response(scope, receive, send)
            except TimeoutError:
                raise ClientDisconnect from None
