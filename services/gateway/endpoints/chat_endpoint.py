"""POST /v1/chat/completions: the handler of chat requests, which answers in OpenAI's form.

`endpoint.GenerationEndpoint` calls the handler after it has admitted a request, and turns a
`TriptychError` of the handler into an HTTP error or an error event.
"""

from contextlib import aclosing

from services.gateway.endpoints.request_context import RequestContext, now
from services.gateway.forms.json_body import Body
from services.gateway.forms.openai import ChatRequest, parse_chat_request
from services.gateway.forms.parts import Text
from services.gateway.forms.responses import (
    DONE,
    ChatCompletion,
    ChunkWriter,
    LogprobEntry,
    Logprobs,
    ResponseChoice,
    Update,
    assistant_message,
    request_metrics,
)
from services.gateway.request.completion import Completion


async def chat_completions(context: RequestContext, body: Body) -> None:
    """Answers a chat request, whole or as a stream.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    request = await context.parse(parse_chat_request, body)
    completion = await context.prepare(request)
    if request.stream:
        await _stream(context, completion)
    else:
        await _write_whole(context, completion)


async def _stream(context: RequestContext, completion: Completion) -> None:
    """Sends the answer's chunks while the decoder generates its tokens.

    The first chunks, which only name the role, are held until the first batch of updates. An error
    before that batch can therefore still be answered with an HTTP status.
    """
    service, exchange, request = context.service, context.exchange, completion.chat
    # `include_usage` adds the usage at the end of the stream, `continuous` also to each chunk.
    include_usage, continuous = request.stream_usage
    writer = ChunkWriter(f"chatcmpl-{context.answer_id}", now(), service.model_name, include_usage)
    usage = completion.usage() if continuous else None
    prompt_ids = completion.prompt_token_ids() if request.return_token_ids else None
    pieces: list[bytes] = []
    for choice in range(len(completion.choices)):
        # All choices have the same prompt, so only the chunk of choice 0 carries the prompt's ids.
        pieces.append(writer.role(choice, usage, None if choice else prompt_ids))
        # With `echo`, the answer begins with the text of the last message, an assistant's.
        if echoed := request.echoed:
            pieces.append(writer.update(Update(choice, [Text(echoed)], None, None), usage))
    async with aclosing(service.answer(completion)) as answer:
        async for updates in answer:
            usage = completion.usage() if continuous else None
            pieces += [writer.update(update, usage) for update in updates]
            if data := b"".join(pieces):
                await exchange.write(data)
            pieces.clear()
    times = _stage_times(completion)
    if include_usage or times:
        usage = completion.usage() if include_usage else None
        pieces.append(writer.closing({"usage": usage, **times}))
    await exchange.write(b"".join((*pieces, DONE)), last=True)


async def _write_whole(context: RequestContext, completion: Completion) -> None:
    """Runs the completion to its end and sends the answer as one JSON object."""
    service, request = context.service, completion.chat
    updates_of = await context.collect(completion)
    response = ChatCompletion(
        id=f"chatcmpl-{context.answer_id}",
        created=now(),
        model=service.model_name,
        choices=[
            _response_choice(index, updates, request) for index, updates in enumerate(updates_of)
        ],
        usage=completion.usage(),
    )
    if request.prompt_logprobs is not None:
        # The logprobs become many Python objects, so they are counted before they are built. If
        # they do not fit in the gateway's memory, the request is refused here.
        context.slot.memory.add(completion.prompt_scores.num_bytes)
        response.prompt_logprobs = completion.prompt_scores.by_id(
            completion.prompt_token_ids(), service.tokenizer
        )
    if request.return_token_ids:
        response.prompt_token_ids = completion.prompt_token_ids()
    for name, value in _stage_times(completion).items():
        setattr(response, name, value)
    await context.exchange.write_json(response)


def _stage_times(completion: Completion) -> dict[str, object]:
    """Returns the answer's fields for `include_stage_times`; empty if the request does not ask for
    them.
    """
    if not completion.chat.include_stage_times:
        return {}
    choices, times_ms = completion.choices, completion.timings.milliseconds()
    num_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "stage_times_ms": times_ms,
        "images": completion.image_reports(),
        "metrics": request_metrics(times_ms, num_tokens, len(choices)),
    }


def _response_choice(index: int, updates: list[Update], request: ChatRequest) -> ResponseChoice:
    """Returns a whole choice, made of all its updates."""
    entries: list[LogprobEntry] = [e for update in updates for e in update.logprobs or ()]
    parts = [part for update in updates for part in update.parts]
    if request.echoed:
        parts.insert(0, Text(request.echoed))
    choice = ResponseChoice(
        index,
        assistant_message(parts),
        # `answer` has checked that each choice has a finish reason; "stop" satisfies the type.
        updates[-1].finish_reason or "stop",
        Logprobs(entries) if request.logprobs else None,
        updates[-1].stop_reason,
    )
    if request.return_token_ids:
        choice.token_ids = [token for update in updates for token in update.token_ids]
    return choice
