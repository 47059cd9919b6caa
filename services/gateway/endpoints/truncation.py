"""`truncation: auto` of the Responses API: a long conversation loses its oldest turns."""

from collections.abc import Sequence
from contextlib import suppress

from msgspec import structs

from services.common.errors import ContextLengthExceeded
from services.gateway.forms.openai import ChatRequest, Message
from services.gateway.forms.tools import FunctionDefinition, Tool
from services.gateway.prompts.prompt import Draft
from services.gateway.request.chat import ChatService

_TOOL = Tool("function", FunctionDefinition("f"))


async def draft_with_room(service: ChatService, request: ChatRequest) -> Draft:
    """Returns the prompt of a request's messages. If the prompt does not fit the model's context,
    the oldest turns are left out: as few as make room for the requested answer, or for a quarter of
    the context if the answer may be longer.

    Raises:
        ContextLengthExceeded: the last turn alone does not fit.
    """
    max_tokens = service.decoder(request.model).max_model_len
    room = min(service.sampling.max_completion_tokens(request), max_tokens // 4)
    with suppress(ContextLengthExceeded):
        whole = await service.drafts.read(request, max_tokens)
        if len(whole.token_ids) < max_tokens:
            return whole
    turns = _oldest_turns(request.messages)
    last = await service.drafts.read(request, max_tokens, turns[-1] if turns else range(0))
    if not turns or len(last.token_ids) + room > max_tokens:
        return last
    # Tools take as many tokens beside few messages as beside many, and long to render.
    light = structs.replace(request, tools=[_TOOL]) if request.tools else request
    lightest = await service.drafts.read(light, max_tokens, turns[-1])
    room += len(last.token_ids) - len(lightest.token_ids)
    low, high = 0, len(turns) - 1
    while low < high:  # fewer messages never have more tokens
        middle = (low + high) // 2
        try:
            draft = await service.drafts.read(light, max_tokens, turns[middle])
            num_tokens = len(draft.token_ids)
        except ContextLengthExceeded:
            num_tokens = max_tokens
        if num_tokens + room <= max_tokens:
            high = middle
        else:
            low = middle + 1
    if high == len(turns) - 1:
        return last
    return await service.drafts.read(request, max_tokens, turns[high])


def _oldest_turns(messages: Sequence[Message]) -> list[range]:
    """Returns the ranges of messages that may be left out of a conversation, the shortest range
    first. A range covers the oldest turns. A turn is a user's message with the messages that follow
    it. System messages at the beginning and the last turn always stay.
    """
    roles = ["system" if m.role == "developer" else m.role for m in messages]
    first = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    starts = [i for i, role in enumerate(roles) if role == "user" and i > first]
    return [range(first, start) for start in starts]
