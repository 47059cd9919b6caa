"""POST /v1/completions: the handler of text completions, which answers in OpenAI's form.

Each prompt becomes a completion of its own of `ChatService`, without a chat template.
"""

import asyncio
import codecs
from collections.abc import Sequence, Set
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile

from services.common.errors import InvalidRequest
from services.gateway.endpoints.direct_tokens import DirectTokens
from services.gateway.endpoints.request_context import RequestContext, now
from services.gateway.forms.json_body import Body
from services.gateway.forms.parts import Text
from services.gateway.forms.responses import (
    DONE,
    LogprobEntry,
    PromptTokensDetails,
    Update,
    Usage,
    encode_json,
)
from services.gateway.forms.text_completions import (
    CompletionRequest,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    parse_completion_request,
)
from services.gateway.gather import gather
from services.gateway.prompts.prompt import Draft
from services.gateway.request.chat import ChatService
from services.gateway.request.completion import Completion
from services.gateway.request.drafts import MAX_CONTEXTS_TO_CUT
from services.gateway.request.sampling import check_room
from services.gateway.tokenizer.tokenizer import ModelTokenizer, token_name


async def text_completions(context: RequestContext, body: Body) -> None:
    """Answers a request for text completions, whole or as a stream. Each prompt is prepared in
    turn. All are then charged at once, and their completions run at the same time.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    service = context.service
    request = await context.parse(parse_completion_request, body)
    prompts, chat = request.prompts, request.to_chat()
    beginnings: list[str] = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        context.paths["messages"] = param
        timings = replace(context.timings, seconds={}) if index else context.timings
        with timings.measure("tokenize"):
            draft = await _draft(service, request, prompt, param)
        completion = await context.prepare_part(chat, timings, draft)
        beginnings.append(_echoed(service, prompt, draft, completion) if request.echo else "")
        await asyncio.sleep(0)  # Each prompt may take some ms, so other requests have a turn.
    # A decoder may still refuse a prompt, and its error does not say which.
    context.paths["messages"] = "prompt"
    await context.charge()
    name = service.name_in_answer(request.model)
    writer = _Writer(request, f"cmpl-{context.answer_id}", beginnings, service.tokenizer, name)
    if request.stream:
        await _stream(context, writer)
    else:
        await _write_whole(context, writer)


async def _draft(
    service: ChatService, request: CompletionRequest, prompt: str | list[int], param: str
) -> Draft:
    """Returns the draft of a prompt without a chat template.

    Args:
        prompt: text, in which names of special tokens become these tokens, or token ids.
        param: field of the prompt, for errors.

    Raises:
        TriptychError: the prompt is empty, longer than the model's context, or contains the
            placeholder of an image.
    """
    decoder = service.decoder(request.model)
    is_cut = request.truncate_prompt_tokens is not None
    if isinstance(prompt, str):
        max_tokens = decoder.max_model_len * (MAX_CONTEXTS_TO_CUT if is_cut else 1)
        service.tokenizer.check_length(prompt, max_tokens, param)
        is_special = request.add_special_tokens is not False
        ids = await service.drafts.encode(prompt, add_special_tokens=is_special)
    else:
        ids = prompt
        if not is_cut:
            check_room(len(ids), decoder.max_model_len, param)
        await service.drafts.check_ids(param, ids, decoder.vocab_size)
    if not ids:
        raise InvalidRequest("the prompt is empty", param=param)
    if service.prompts.has_placeholder(ids):
        raise InvalidRequest("the prompt contains the placeholder of an image", param=param)
    return Draft(ids)


def _echoed(
    service: ChatService, prompt: str | list[int], draft: Draft, completion: Completion
) -> str:
    """Returns a prompt's text, without the tokens that `truncate_prompt_tokens` has cut off."""
    ids, tokenizer = completion.prompt_token_ids(), service.tokenizer
    if isinstance(prompt, str):
        if len(ids) == len(draft.token_ids):
            return prompt
        is_first = ids == draft.token_ids[: len(ids)] and ids[0] in tokenizer.special_ids
        if is_first and not prompt.startswith(tokenizer.token_string(ids[0])):
            ids = ids[1:]  # The first token is a BOS that the tokenizer has added.
    return tokenizer.decode(ids)


async def _stream(context: RequestContext, writer: "_Writer") -> None:
    completions, one_at_a_time = context.completions, asyncio.Lock()
    include_usage, _ = writer.request.stream_usage

    async def stream(place: tuple[int, Completion]) -> None:
        index, completion = place
        chunks = _ChunkWriter(writer, completions, index)
        sink = DirectTokens(completion, context.exchange, chunks)
        async with aclosing(context.service.answer(completion, sink=sink)) as answer:
            async for updates in answer:
                if data := chunks.updates(updates):
                    async with one_at_a_time:
                        await context.exchange.write(data)

    await gather(stream, enumerate(completions), len(completions))
    last = b""
    if include_usage:
        chunk = writer.answer([])
        chunk.usage = writer.usage(completions)
        last = _event(chunk)
    await context.exchange.write(last + DONE, last=True)


async def _write_whole(context: RequestContext, writer: "_Writer") -> None:
    updates_of = await gather(context.collect, context.completions, len(context.completions))
    choices: list[TextChoice] = []
    for index, completion in enumerate(context.completions):
        for updates in updates_of[index]:
            context.slot.memory.add(completion.prompt_scores.num_bytes)
            if (choice := writer.choice(completion, index, updates)) is not None:
                choices.append(choice)
            await asyncio.sleep(0)  # The log-probabilities of a prompt take some ms, too.
    answer = writer.answer(choices)
    for choice in answer.choices:
        choice.fill()
    answer.usage = writer.usage(context.completions)
    await context.exchange.write_json(answer)


class _ChunkWriter:
    """Encodes the streamed answers to one of the request's prompts.

    Args:
        writer: the request's writer.
        completions: completions of all prompts of the request.
        prompt: index of the prompt.
    """

    def __init__(self, writer: "_Writer", completions: Sequence[Completion], prompt: int) -> None:
        self._writer = writer
        self._completions = completions
        self._prompt = prompt
        self._include_usage, self._is_continuous = writer.request.stream_usage

    def updates(self, updates: Sequence[Update]) -> bytes:
        """Returns the events of updates. Empty if they add nothing to the answer."""
        writer, completions, prompt = self._writer, self._completions, self._prompt
        chunks = [
            writer.answer([choice])
            for update in updates
            if (choice := writer.choice(completions[prompt], prompt, [update])) is not None
        ]
        if self._include_usage:
            for chunk in chunks:
                chunk.usage = writer.usage(completions) if self._is_continuous else None
        return b"".join(map(_event, chunks))

    def text(self, choice: int, text: str) -> bytes:
        """Returns the event of a piece of text in the middle of a choice."""
        return self.updates([Update(choice, [Text(text)], None, None)])


class _Writer:
    """Constructs the answers of one request, whole or in pieces.

    Args:
        request: the client's request.
        response_id: id of the answer.
        beginnings: text with which the answers to each prompt begin, by prompt.
        tokenizer: tokenizer of the model.
        model_name: name of the model in the answer.
    """

    def __init__(
        self,
        request: CompletionRequest,
        response_id: str,
        beginnings: Sequence[str],
        tokenizer: ModelTokenizer,
        model_name: str,
    ) -> None:
        self.request = request
        self._generates = request.max_tokens != 0
        self._model_name = model_name
        self._id = response_id
        self._created = now()
        self._beginnings = beginnings
        self._tokenizer = tokenizer
        self._started: set[int] = set()
        self._places: dict[int, _Places] = {}  # by choice, if the request wants logprobs
        is_skipping = request.skip_special_tokens is not False
        added = tokenizer.added.values() if is_skipping else ()
        self._hidden = frozenset(token.content.encode() for token in added if token.special)

    def answer(self, choices: list[TextChoice]) -> TextCompletion:
        return TextCompletion(self._id, self._created, self._model_name, choices)

    def usage(self, completions: Sequence[Completion]) -> Usage:
        """Returns the usage of all prompts together. With `max_tokens` 0, the one token that is
        generated is not counted.
        """
        found = [completion.usage() for completion in completions]
        prompt = sum(usage.prompt_tokens for usage in found)
        generated = sum(usage.completion_tokens for usage in found) if self._generates else 0
        cached = [usage.prompt_tokens_details.cached_tokens for usage in found]
        known = [count for count in cached if count is not None]
        details = PromptTokensDetails(None, sum(known) if known else None)
        return Usage(prompt, generated, prompt + generated, details)

    def choice(
        self, completion: Completion, prompt: int, updates: Sequence[Update]
    ) -> TextChoice | None:
        """Returns what the updates of one choice add to the answer. None if they add nothing."""
        request, last = self.request, updates[-1]
        index = prompt * request.num_choices + last.choice
        is_first = index not in self._started
        self._started.add(index)
        beginning = self._beginnings[prompt] if is_first else ""
        entries: list[LogprobEntry] = []
        text, ids = beginning, list[int]()
        if self._generates:
            entries = [entry for update in updates for entry in update.logprobs or ()]
            text += "".join(
                part.text for u in updates for part in u.parts if isinstance(part, Text)
            )
            ids = [token for update in updates for token in update.token_ids]
        if not (text or entries or ids or last.finish_reason):
            return None
        choice = TextChoice(index, text, None, last.finish_reason, last.stop_reason)
        if last.finish_reason and not self._generates:
            choice.finish_reason, choice.stop_reason = "length", None
        if request.logprobs is not None:
            places = self._places.setdefault(index, _Places())
            choice.logprobs = found = TextLogprobs([], [], [], [])
            if is_first and request.echo:
                self._add_prompt(found, completion, beginning, places)
            _add_logprobs(found, entries, places, self._hidden)
        if is_first and request.prompt_logprobs is not None:
            prompt_ids = completion.prompt_token_ids()
            choice.prompt_logprobs = completion.prompt_scores.by_id(prompt_ids, self._tokenizer)
        if request.return_token_ids:
            choice.token_ids = ids
            if is_first:
                choice.prompt_token_ids = completion.prompt_token_ids()
        return choice

    def _add_prompt(
        self, found: TextLogprobs, completion: Completion, text: str, places: "_Places"
    ) -> None:
        """Adds the log-probabilities of the tokens of a prompt that is echoed as `text`."""
        tokenizer, as_ids = self._tokenizer, bool(self.request.return_tokens_as_token_ids)
        token_ids = completion.prompt_token_ids()
        name, numbers = token_name(tokenizer, token_ids[0], as_ids)
        data = bytes(numbers)
        same = sum(1 for _ in takewhile(lambda token_id: token_id == token_ids[0], token_ids))
        if token_ids[0] in tokenizer.special_ids and not text.encode().startswith(data * same):
            data = b""  # The first token is a BOS that the tokenizer has added.
        places.echo = text if tokenizer.prepends_space else ""
        found.tokens.append(name)
        found.token_logprobs.append(None)
        found.top_logprobs.append(None)
        found.text_offset.append(places.next(data))
        entries = completion.prompt_scores.entries(token_ids, tokenizer, as_ids=as_ids)
        _add_logprobs(found, entries, places, frozenset())
        places.echo = ""


class _Places:
    """The offsets of tokens in a text. All tokens of one character have the character's offset.

    Attributes:
        echo: text of the prompt that the next tokens are of, if the tokenizer puts spaces before
            texts that are not in it: `▁The` is `The` at the beginning of a prompt. Otherwise empty.
    """

    def __init__(self) -> None:
        self.echo = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def next(self, data: bytes) -> int:
        """Returns the offset of the next token, given its bytes. They are empty if the token is not
        in the text.
        """
        place = self._num_characters
        if self.echo and data.startswith(b" ") and not self._is_echoed(data):
            data = data[1:] if self._is_echoed(data[1:]) else data
        self._num_characters += len(self._utf8.decode(data))
        return place

    def _is_echoed(self, data: bytes) -> bool:
        return self.echo.startswith(data.decode(errors="replace"), self._num_characters)


def _add_logprobs(
    found: TextLogprobs, entries: Sequence[LogprobEntry], places: _Places, hidden: Set[bytes]
) -> None:
    """Adds the log-probabilities of tokens. The tokens in `hidden` are not part of the text."""
    for entry in entries:
        data = bytes(entry.bytes)
        found.tokens.append(entry.token)
        found.token_logprobs.append(entry.logprob)
        top = {other.token: other.logprob for other in entry.top_logprobs}
        found.top_logprobs.append({entry.token: entry.logprob, **top})
        found.text_offset.append(places.next(b"" if data in hidden else data))


def _event(chunk: TextCompletion) -> bytes:
    return b"data: " + encode_json(chunk) + b"\n\n"
