"""POST /v1/chat/completions: chat requests in, OpenAI's answers and chunks out."""

from contextlib import aclosing

from services.gateway.endpoints.endpoint import Endpoint, Work, now
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


class ChatEndpoint(Endpoint):
    """The endpoint."""

    async def answer(self, work: Work, body: Body) -> None:
        request = await self.parse(work, parse_chat_request, body)
        completion = await self.prepare(work, request)
        if request.stream:
            await self._stream(work, completion)
        else:
            await self._whole(work, completion)

    async def _stream(self, work: Work, completion: Completion) -> None:
        request, exchange = completion.chat, work.exchange
        include_usage, continuous = request.stream_usage
        writer = ChunkWriter(
            f"chatcmpl-{work.answer_id}", now(), self._service.model_name, include_usage
        )
        usage = completion.usage() if continuous else None
        prompt_ids = completion.prompt_token_ids() if request.return_token_ids else None
        pieces: list[bytes] = []
        for choice in range(len(completion.choices)):
            pieces.append(writer.role(choice, usage, None if choice else prompt_ids))
            if echoed := request.echoed:
                pieces.append(writer.update(Update(choice, [Text(echoed)], None, None), usage))
        async with aclosing(self._service.answer(completion)) as answer:
            async for updates in answer:
                usage = completion.usage() if continuous else None
                pieces += [writer.update(update, usage) for update in updates]
                if data := b"".join(pieces):
                    await exchange.write(data)
                pieces.clear()
        times = _times(completion)
        if include_usage or times:
            usage = completion.usage() if include_usage else None
            pieces.append(writer.closing({"usage": usage, **times}))
        await exchange.write(b"".join((*pieces, DONE)), last=True)

    async def _whole(self, work: Work, completion: Completion) -> None:
        request = completion.chat
        updates_of = await self.collect(completion)
        response = ChatCompletion(
            id=f"chatcmpl-{work.answer_id}",
            created=now(),
            model=self._service.model_name,
            choices=[
                _response_choice(index, updates, request)
                for index, updates in enumerate(updates_of)
            ],
            usage=completion.usage(),
        )
        if request.prompt_logprobs is not None:
            work.slot.hold(completion.prompt_scores.num_bytes)
            response.prompt_logprobs = completion.prompt_scores.by_id(
                completion.prompt_token_ids(), self._service.tokenizer
            )
        if request.return_token_ids:
            response.prompt_token_ids = completion.prompt_token_ids()
        for name, value in _times(completion).items():
            setattr(response, name, value)
        await work.exchange.write_json(response)


def _times(completion: Completion) -> dict[str, object]:
    """The fields of an answer for `include_stage_times`; none without it."""
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
    entries: list[LogprobEntry] = [e for update in updates for e in update.logprobs or ()]
    parts = [part for update in updates for part in update.parts]
    if request.echoed:
        parts.insert(0, Text(request.echoed))
    choice = ResponseChoice(
        index,
        assistant_message(parts),
        updates[-1].finish_reason or "stop",
        Logprobs(entries) if request.logprobs else None,
        updates[-1].stop_reason,
    )
    if request.return_token_ids:
        choice.token_ids = [token for update in updates for token in update.token_ids]
    return choice
