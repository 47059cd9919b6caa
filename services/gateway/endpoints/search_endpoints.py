"""POST /v1/embeddings, /pooling, /v1/rerank, /v2/rerank and /v1/score: the handlers of search.

All prompts of a request are tokenized first, so that a wrong one is refused before any work. Then
their images are loaded, and the tokens of all prompts are charged at once. The prompts then run at
the same time, up to a limit. A failure of one prompt ends the request with its error.
"""

import asyncio
import base64
import math
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pybase64
from msgspec import UNSET, Raw

from services.common.errors import InvalidRequest, Overloaded, TriptychError
from services.common.model_spec import Task
from services.gateway.bounds import MEMORY_PER_CALLED_BYTE
from services.gateway.endpoints.request_context import Account, RequestContext, now, renamed
from services.gateway.forms.json_body import Body
from services.gateway.forms.openai import ChatRequest, Part
from services.gateway.forms.responses import encode_json
from services.gateway.forms.search import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    Input,
    PairFields,
    RankedDocument,
    Ranking,
    Score,
    ScoreList,
    SearchFields,
    SearchItem,
    SearchUsage,
    TokenVectors,
    TokenVectorsList,
    is_image,
    parse_embedding_request,
    parse_pooling_request,
    parse_rerank_request,
    parse_score_request,
    text_of,
)
from services.gateway.gather import gather
from services.gateway.prompts.search_prompts import SearchDraft
from services.gateway.request.search import FloatArray, SearchPrompt, SearchService
from services.gateway.request.shared_media import SharedMedia, Source
from services.gateway.tenancy.quota import SEQUENCES

# Most prompts of a request that run at a time.
_MAX_RUNNING = 128
# Most bytes that copies of an image in the calls to encoders may take, beyond the first copy, when
# several prompts of a request have the image.
_MAX_CALLED_BYTES = 64 << 20
_FITTED_AT_ONCE = 16  # prompts whose tokens are counted between two turns of other requests
# Bytes that a number of a vector takes: as float32, and twice in the answer, as JSON or base64.
_JSON_BYTES, _BASE64_BYTES, _FLOAT_BYTES = 52, 16, 8
_MAX_SIM_ROWS = 64
_NAMED = ("video", "image", "text")  # fields of a `SearchItem`, in the order of its parts
_SCORING = ("rank", "token_embed")
_REMEDIES: Mapping[Task, str] = {
    "generate": "it generates text: POST /v1/chat/completions",
    "embed": "it makes the vectors of a search: POST /v1/embeddings",
    "rank": "it ranks documents: POST /v1/rerank or /v1/score",
    "token_embed": "it makes a vector of each token: POST /pooling, /v1/rerank or /v1/score",
}


@contextmanager
def _naming(paths: Mapping[str, str]) -> Generator[None]:
    """Gives an error of the block the client's own name of the field that is wrong."""
    try:
        yield
    except TriptychError as error:
        if error.param is not None:
            error.param = renamed(error.param, paths)
        raise


async def wrong_task(task: Task, context: RequestContext, body: Body) -> None:
    """Refuses a request to an endpoint that the model is not for.

    Raises:
        InvalidRequest: always; the message names the endpoints of the model's task.
    """
    name = context.service.model_name
    raise InvalidRequest(
        f"the model {name} does not serve this endpoint; {_REMEDIES[task]}", param="model"
    )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt of a request.

    Attributes:
        draft: the tokenized prompt.
        chat: its messages.
        paths: client's fields by the fields of `chat`, for errors.
    """

    draft: SearchDraft
    chat: ChatRequest
    paths: Mapping[str, str]


@dataclass(slots=True)
class _Runs:
    """The prompts of one request, while they run.

    Attributes:
        search: service that runs the prompts.
        context: the request.
        request: the parsed body.
        truncated: indices of the prompts that were cut.
        bytes_per_token: memory that a token of a prompt takes until the answer is written.
    """

    search: SearchService
    context: RequestContext
    request: SearchFields
    truncated: set[int] = field(default_factory=set[int])
    bytes_per_token: int = 0

    async def results(self, prompts: Sequence[_Prompt]) -> list[FloatArray]:
        """Runs prompts, and returns their results in order.

        All images are loaded and all tokens are counted before the request is charged, once for all
        prompts, and no prompt runs before that. A prompt's positions exist only while it runs.
        """
        media = SharedMedia(self.context.service, self.context.slot)
        try:
            await self._load(media, prompts)
            fitted = await self._fit(media, prompts)
            limit = await self._charge(media, fitted)

            async def run(place: tuple[int, _Prompt]) -> FloatArray:
                index, prompt = place
                with _naming(prompt.paths):
                    return await self._run(index, prompt, fitted[index])

            return await gather(run, enumerate(prompts), limit)
        finally:
            media.close()

    async def _load(self, media: SharedMedia, prompts: Sequence[_Prompt]) -> None:
        """Loads the distinct images and videos of all prompts."""
        firsts: dict[Hashable, tuple[Source, _Prompt]] = {}
        for prompt in prompts:
            for source in (*prompt.draft.draft.images, *prompt.draft.draft.videos):
                firsts.setdefault(source.key, (source, prompt))

        async def load(first: tuple[Source, _Prompt]) -> None:
            source, prompt = first
            with _naming(prompt.paths):
                await media.load(source)

        if firsts:
            await gather(load, firsts.values(), _MAX_RUNNING)

    async def _fit(self, media: SharedMedia, prompts: Sequence[_Prompt]) -> list[SearchPrompt]:
        fitted: list[SearchPrompt] = []
        for index, prompt in enumerate(prompts):
            with _naming(prompt.paths):
                found = self.search.fit(self.request, prompt.draft, media)
            if found.draft.is_cut:
                self.truncated.add(index)
            fitted.append(found)
            if index % _FITTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # Other requests have a turn.
        return fitted

    async def _charge(self, media: SharedMedia, prompts: Sequence[SearchPrompt]) -> int:
        """Charges all prompts to the limits of the tenant and of the memory.

        Returns:
            The number of prompts that may run at a time.
        """
        slot = self.context.slot
        most = slot.usage.quota.limits[SEQUENCES]
        limit = _MAX_RUNNING if most is None else max(1, min(_MAX_RUNNING, int(most)))
        limit = min(limit, len(prompts))
        num_bytes = media.called_bytes(prompt.draft.draft for prompt in prompts)
        if num_bytes:
            # One call of each image is counted where its bytes are. Each further prompt that runs
            # at the same time copies the bytes into a call of its own.
            num_bytes *= MEMORY_PER_CALLED_BYTE
            limit = max(1, min(limit, 1 + _MAX_CALLED_BYTES // num_bytes))
            try:
                slot.memory.add((limit - 1) * num_bytes)
            except Overloaded:  # There is no memory for further copies.
                limit = 1
        num_tokens = sum(prompt.num_tokens for prompt in prompts)
        slot.memory.add(num_tokens * self.bytes_per_token)
        num_pixels = sum(prompt.num_pixels for prompt in prompts)
        # The sequences that run at a time are charged, not those of all prompts.
        await slot.usage.charge(num_tokens, limit, num_pixels)
        return limit

    async def _run(self, index: int, prompt: _Prompt, fitted: SearchPrompt) -> FloatArray:
        context, timings = self.context, self.context.timings
        if index:
            timings = replace(timings, seconds={})
        completion = self.search.completion(
            self.request,
            prompt.chat,
            fitted,
            context.exchange.request_id,
            timings,
            context.slot,
        )
        try:
            return await self.search.run(completion)
        finally:
            context.ended.append(Account.of(completion))

    def usage(self) -> SearchUsage:
        """Returns the tokens of all prompts, which have ended."""
        found = [account.usage for account in self.context.ended]
        num_tokens = sum(usage.prompt_tokens for usage in found)
        details: dict[str, int] = {}
        for name in ("cached_tokens", "image_tokens", "video_tokens"):
            counts = [getattr(usage.prompt_tokens_details, name) or 0 for usage in found]
            details[name] = sum(counts)
        return SearchUsage(num_tokens, num_tokens, details)

    def was_cut(self, index: int) -> Any:  # noqa: ANN401 - True or UNSET
        return True if index in self.truncated else UNSET


async def embeddings(search: SearchService, context: RequestContext, body: Body) -> None:
    """Answers a request for the vectors of inputs.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    if search.task != "embed":
        await wrong_task(search.task, context, body)
    request = await context.parse(parse_embedding_request, body)
    context.service.check_model(request.model)
    width = search.spec.text.hidden_size
    if request.dimensions is not None and request.dimensions > width:
        raise InvalidRequest(
            f"the model's vectors have {width} dimensions, not {request.dimensions}",
            param="dimensions",
        )
    with context.timings.measure("tokenize"):
        prompts = await _embedding_prompts(search, request)
    as_text = request.encoding_format == "base64"
    num_values = len(prompts) * (request.dimensions or width)
    context.slot.memory.add(num_values * (_BASE64_BYTES if as_text else _JSON_BYTES))
    runs = _Runs(search, context, request)
    vectors = await runs.results(prompts)
    data: list[Embedding] = []
    for index, vector in enumerate(vectors):
        unit = _normalized(vector[: request.dimensions])
        shown: Any
        if as_text:
            shown = base64.b64encode(unit.tobytes()).decode()
        else:
            # As JSON, a vector takes a quarter of the memory that its Python numbers take.
            shown = Raw(encode_json(unit.tolist()))
        data.append(Embedding(index, shown, truncated=runs.was_cut(index)))
        await asyncio.sleep(0)  # Each vector takes up to a millisecond; other requests have a turn.
    name = context.service.name_in_answer(request.model)
    answer = EmbeddingList(f"embd-{context.answer_id}", now(), name, data, runs.usage())
    await context.exchange.write_json(answer)


async def pooling(search: SearchService, context: RequestContext, body: Body) -> None:
    """Answers a request for the vectors of all tokens of inputs, as vLLM does.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    if search.task != "token_embed":
        await wrong_task(search.task, context, body)
    request = await context.parse(parse_pooling_request, body)
    context.service.check_model(request.model)
    with context.timings.measure("tokenize"):
        prompts = await _embedding_prompts(search, request)
    as_text = request.encoding_format == "base64"
    bytes_per_token = search.num_values * (_BASE64_BYTES if as_text else _JSON_BYTES)
    runs = _Runs(search, context, request, bytes_per_token=bytes_per_token)
    data: list[bytes] = []
    for index, vectors in enumerate(await runs.results(prompts)):
        shown: Any
        if as_text:
            shown = Raw(b'"%s"' % pybase64.b64encode(vectors.data.cast("B")))
        else:
            rows: list[Any] = []
            for vector in vectors:
                rows.append(Raw(encode_json(vector.tolist())))
                await asyncio.sleep(0)  # Other requests have a turn.
            shown = rows
        data.append(encode_json(TokenVectors(index, shown, truncated=runs.was_cut(index))))
        await asyncio.sleep(0)
    name = context.service.name_in_answer(request.model)
    answer = TokenVectorsList(f"pool-{context.answer_id}", now(), name, [], runs.usage())
    await context.exchange.write_long_json(answer, data)


async def rerank(version: str, search: SearchService, context: RequestContext, body: Body) -> None:
    """Answers a request to rank documents. Cohere's version 2 returns no documents by default.

    Args:
        version: version of Cohere's API, `1` or `2`.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    if search.task not in _SCORING:
        await wrong_task(search.task, context, body)
    request = await context.parse(parse_rerank_request, body)
    pairs = [(request.query, document) for document in request.documents]
    places = [("query", f"documents[{index}]") for index in range(len(pairs))]
    runs = _Runs(search, context, request)
    scores = await _scores(runs, pairs, places)
    shows = version == "1" if request.return_documents is None else request.return_documents
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results: list[RankedDocument] = []
    for index in order[: request.top_n or len(order)]:
        found = RankedDocument(index, scores[index], truncated=runs.was_cut(index))
        text = _text(request.documents[index])
        if shows and text is not None:
            found.document = {"text": text}
        results.append(found)
    usage = runs.usage()
    meta = {
        "api_version": {"version": version},
        "tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": 0},
    }
    name = context.service.name_in_answer(request.model)
    answer = Ranking(f"rerank-{context.answer_id}", name, results, usage, meta)
    await context.exchange.write_json(answer)


async def score(search: SearchService, context: RequestContext, body: Body) -> None:
    """Answers a request for the scores of pairs, as vLLM does.

    Raises:
        TriptychError: the request is invalid, or it cannot be served.
    """
    if search.task not in _SCORING:
        await wrong_task(search.task, context, body)
    request = await context.parse(parse_score_request, body)
    (left, firsts), (right, seconds) = request.sides()
    if len(firsts) == 1:
        pairs = [(firsts[0], second) for second in seconds]
        places = [(left, f"{right}[{index}]") for index in range(len(pairs))]
    else:
        pairs = list(zip(firsts, seconds, strict=True))
        places = [(f"{left}[{index}]", f"{right}[{index}]") for index in range(len(pairs))]
    runs = _Runs(search, context, request)
    scores = await _scores(runs, pairs, places)
    data = [Score(index, found, runs.was_cut(index)) for index, found in enumerate(scores)]
    name = context.service.name_in_answer(request.model)
    answer = ScoreList(f"score-{context.answer_id}", now(), name, data, runs.usage())
    await context.exchange.write_json(answer)


async def _embedding_prompts(search: SearchService, request: EmbeddingRequest) -> list[_Prompt]:
    if request.messages is not None:
        system, user = request.instruction, request.messages[0]
        if user.role != "user":
            system, user = text_of(user), request.messages[1]
        index = request.messages.index(user)
        paths = {"messages[0]": f"messages[{index}]"}
        chat = request.chat(user.content or "")
        return [await _prompt(search, request, chat, system, paths)]
    prompts: list[_Prompt] = []
    inputs = request.inputs
    is_list = isinstance(request.input, list) and request.input is not inputs[0]
    for index, given in enumerate(inputs):
        path = f"input[{index}]" if is_list else "input"
        if isinstance(given, list):
            draft = await search.draft_of_ids(request, given, path)
            paths = {"messages": path}
            prompts.append(_Prompt(draft, request.chat(""), paths))
        else:
            if isinstance(given, str) and search.takes_images and is_image(given):
                given = SearchItem(image=given)
            content, paths = _content(given, 0, path)
            own = given.instruction if isinstance(given, SearchItem) else None
            instruction = request.instruction if own is None else own
            chat = request.chat(content)
            prompts.append(await _prompt(search, request, chat, instruction, paths))
        await asyncio.sleep(0)  # Each input may take some ms, so other requests have a turn.
    return prompts


async def _scores(
    runs: _Runs, pairs: Sequence[tuple[Input, Input]], places: Sequence[tuple[str, str]]
) -> list[float]:
    """Returns the probability of "yes" for each pair of a query and a document, or the MaxSim of
    the vectors of their tokens.

    Args:
        pairs: queries and documents.
        places: the client's fields of each pair.
    """
    runs.context.service.check_model(runs.request.model)
    if runs.search.task == "token_embed":
        return await _max_sims(runs, pairs, places)
    prompts: list[_Prompt] = []
    most = _max_document_tokens(runs.request)
    with runs.context.timings.measure("tokenize"):
        for pair, (left, right) in zip(pairs, places, strict=True):
            query, paths = _content(pair[0], 0, left)
            document, further = _content(pair[1], 1, right)
            paths |= further
            paths["messages"] = right
            for item, path in zip(pair, (left, right), strict=True):
                if isinstance(item, SearchItem) and item.instruction is not None:
                    raise InvalidRequest(
                        "a pair has the request's instruction", param=f"{path}.instruction"
                    )
            chat = runs.request.chat(query, document)
            instruction = runs.request.instruction
            prompt = await _prompt(runs.search, runs.request, chat, instruction, paths, most)
            prompts.append(prompt)
            await asyncio.sleep(0)  # Other requests have a turn.
    return [_sigmoid(float(result[0])) for result in await runs.results(prompts)]


async def _max_sims(
    runs: _Runs, pairs: Sequence[tuple[Input, Input]], places: Sequence[tuple[str, str]]
) -> list[float]:
    """Returns the MaxSim of each pair: the sum over the query's tokens of the largest product with
    a token of the document. The vectors of a query that several pairs have are computed once.

    Args: see `_scores`.
    """
    most, number = _max_document_tokens(runs.request), dict[str, int]()
    prompts: list[_Prompt] = []
    with runs.context.timings.measure("tokenize"):
        for pair, place in zip(pairs, places, strict=True):
            for item, path, cut in zip(pair, place, (None, most), strict=True):
                if path in number:
                    continue
                number[path] = len(prompts)
                content, paths = _content(item, 0, path)
                own = item.instruction if isinstance(item, SearchItem) else None
                instruction = runs.request.instruction if own is None else own
                chat = runs.request.chat(content)
                made = await _prompt(runs.search, runs.request, chat, instruction, paths, cut)
                prompts.append(made)
                await asyncio.sleep(0)  # Other requests have a turn.
    runs.bytes_per_token = runs.search.num_values * _FLOAT_BYTES
    vectors = await runs.results(prompts)
    threads = runs.context.service.drafts.threads
    scores: list[float] = []
    cut_prompts, runs.truncated = runs.truncated, set()
    for index, (left, right) in enumerate(places):
        query, document = number[left], number[right]
        scores.append(await threads.run(_max_sim, vectors[query], vectors[document]))
        if not cut_prompts.isdisjoint((query, document)):
            runs.truncated.add(index)
    return scores


async def _prompt(
    search: SearchService,
    request: SearchFields,
    chat: ChatRequest,
    instruction: str | None,
    paths: Mapping[str, str],
    max_document_tokens: int | None = None,
) -> _Prompt:
    with _naming(paths):
        draft = await search.draft(request, chat, instruction, max_document_tokens)
    return _Prompt(draft, chat, paths)


def _content(given: Input, message: int, path: str) -> tuple[str | list[Part], dict[str, str]]:
    """Returns the content of an input's message, and the client's fields by those of the message.

    Args:
        message: index of the message.
        path: place of the input in the request.
    """
    own = f"messages[{message}]"
    paths = {"messages": path, own: path, f"{own}.content": path}
    if isinstance(given, str):
        return given, paths
    content = given.parts(path)
    if given.content is not None:
        paths[f"{own}.content"] = f"{path}.content"
    else:
        named = [name for name in _NAMED if getattr(given, name) is not None]
        for index, name in enumerate(named):
            paths[f"{own}.content[{index}]"] = f"{path}.{name}"
    return content, paths


def _max_document_tokens(request: SearchFields) -> int | None:
    return (request.max_tokens_per_doc or None) if isinstance(request, PairFields) else None


def _max_sim(query: FloatArray, document: FloatArray) -> float:
    """Returns the MaxSim of vectors `[q, n]` and `[d, n]`, in float32 as in the card's code."""
    total = np.float32(0)
    for start in range(0, len(query), _MAX_SIM_ROWS):  # bounds the memory of the products
        total += (query[start : start + _MAX_SIM_ROWS] @ document.T).max(1).sum()
    return float(total)


def _text(given: Input) -> str | None:
    return given if isinstance(given, str) else given.text


def _normalized(vector: FloatArray) -> FloatArray:
    """Returns a vector of length 1, as torch's `normalize` computes it."""
    length = np.float32(np.linalg.norm(vector))
    return vector / max(length, np.float32(1e-12))


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    grown = math.exp(value)
    return grown / (1 + grown)
