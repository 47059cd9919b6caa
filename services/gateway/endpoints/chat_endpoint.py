"""POST /v1/chat/completions: the handler of chat requests, which answers in OpenAI's form.

`endpoint.GenerationEndpoint` calls the handler once the request has an admission slot. If the
handler raises a `TriptychError`, `GenerationEndpoint` answers with an HTTP error, or, if the stream
has begun, ends the stream with an error event.
"""

from contextlib import aclosing

from services.gateway.endpoints.direct_tokens import DirectTokens
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
)
from services.gateway.request.completion import Completion


async def chat_completions(context: RequestContext, body: Body) -> None:
    """Answers a chat request, whole or as a stream.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    request = await context.parse(parse_chat_request, body)
    completion = await context.prepare(request)
    answer = _stream if request.stream else _write_whole
    await answer(context, completion)


async def _stream(context: RequestContext, completion: Completion) -> None:
    """Sends the answer's chunks while the decoder generates its tokens.

    The first chunk of a choice has its role (`assistant`) and no text. It is sent together with the
    first batch of updates, in which the text begins. If an error comes before that batch, nothing
    has been sent, so the client gets an HTTP error instead of an error event.
    """
    service, exchange, request = context.service, context.exchange, completion.chat
    # With `include_usage`, the numbers of tokens are in the last chunk; with `usage_in_chunks`,
    # each chunk has the numbers so far.
    include_usage, usage_in_chunks = request.stream_usage
    name = service.name_in_answer(request.model)
    writer = ChunkWriter(f"chatcmpl-{context.answer_id}", now(), name, include_usage)
    usage = completion.usage() if usage_in_chunks else None
    prompt_ids = completion.prompt_token_ids() if request.return_token_ids else None
    chunks: list[bytes] = []
    for choice in range(len(completion.choices)):
        # All choices have the same prompt, so only the chunk of choice 0 carries the prompt's ids.
        chunks.append(writer.role(choice, usage, None if choice else prompt_ids))
        # With `echo`, the model continues the last message of the request, an assistant message.
        # The answer begins with the text of that message.
        if echoed := request.echoed:
            chunks.append(writer.update(Update(choice, [Text(echoed)], None, None), usage))
    sink = None if usage_in_chunks else DirectTokens(completion, exchange, writer)
    async with aclosing(service.answer(completion, sink=sink)) as answer:
        async for updates in answer:
            usage = completion.usage() if usage_in_chunks else None
            chunks += [writer.update(update, usage) for update in updates]
            if updates and updates[-1].finish_reason and completion.has_ended:
                continue  # The end of the stream follows, and is sent with the last tokens.
            if data := b"".join(chunks):
                await exchange.write(data)
            chunks.clear()
    times = completion.stage_times()
    if include_usage or times:
        usage = completion.usage() if include_usage else None
        chunks.append(writer.closing({"usage": usage, **times}))
    await exchange.write(b"".join((*chunks, DONE)), last=True)


async def _write_whole(context: RequestContext, completion: Completion) -> None:
    """Runs the completion to its end and sends the answer as one JSON object."""
    service, request = context.service, completion.chat
    updates_by_choice = await context.collect(completion)
    response = ChatCompletion(
        id=f"chatcmpl-{context.answer_id}",
        created=now(),
        model=service.name_in_answer(request.model),
        choices=[
            _response_choice(index, updates, request)
            for index, updates in enumerate(updates_by_choice)
        ],
        usage=completion.usage(),
    )
    if request.prompt_logprobs is not None:
        # The prompt's logprobs become many Python objects. Their bytes are counted before the
        # objects are made: if the gateway has too little memory left, `add` refuses the request.
        context.slot.memory.add(completion.prompt_scores.num_bytes)
        response.prompt_logprobs = completion.prompt_scores.by_id(
            completion.prompt_token_ids(), service.tokenizer
        )
    if request.return_token_ids:
        response.prompt_token_ids = completion.prompt_token_ids()
    for name, value in completion.stage_times().items():
        setattr(response, name, value)
    await context.exchange.write_json(response)


def _response_choice(index: int, updates: list[Update], request: ChatRequest) -> ResponseChoice:
    """Returns one choice of the response, made of all updates of the choice."""
    entries: list[LogprobEntry] = [e for update in updates for e in update.logprobs or ()]
    parts = [part for update in updates for part in update.parts]
    if request.echoed:
        parts.insert(0, Text(request.echoed))
    choice = ResponseChoice(
        index,
        assistant_message(parts),
        # There always is a finish reason: `or "stop"` is for the type checker alone.
        updates[-1].finish_reason or "stop",
        Logprobs(entries) if request.logprobs else None,
        updates[-1].stop_reason,
    )
    if request.return_token_ids:
        choice.token_ids = [token for update in updates for token in update.token_ids]
    return choice
