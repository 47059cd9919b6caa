"""Responses to chat requests in OpenAI's shapes: whole responses and chunks of streams.

A streamed token costs one small JSON string between two byte strings made once per request.
`chat` and `exchange` send what is made here; nothing here sends, waits or fails.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.common.errors import TriptychError
from services.gateway.forms.error_answers import error_of
from services.gateway.forms.parts import Call, Part, Reasoning, Text, join

encode_json = msgspec.json.encode

# JSON has no -inf; OpenAI and vLLM send this value for a probability of zero.
MIN_LOGPROB = -9999.0


class TopLogprob(Struct):
    """An alternative to a token."""

    token: str
    bytes: list[int]
    logprob: float


class LogprobEntry(TopLogprob):
    """A token of the text."""

    top_logprobs: list[TopLogprob]


class Logprobs(Struct):
    """Logprobs of a choice, or of one chunk of it."""

    content: list[LogprobEntry]
    refusal: None = None


class VideoUsage(Struct):
    """The frames that the model sees of a video, and their number of tokens.

    Attributes:
        frames: number of sampled frames.
        fps: sampled frames per second. Null if the video does not say how long it is.
        tokens: number of the frames' tokens, without the tokens of the text between the frames.
        size: height and width in pixels to which each frame is resized.
        times: time of each pair of frames in seconds, as written in the prompt.
        cap_pixels_per_frame: true if the video processor's cap on the pixels of a frame applied.
    """

    frames: int
    fps: float
    tokens: int
    size: tuple[int, int]
    times: list[float]
    cap_pixels_per_frame: bool


class PromptTokensDetails(Struct, omit_defaults=True):
    """Parts of the prompt's tokens. `cached_tokens` is absent until the decoder has reported the
    number, and `video_tokens` and `videos` are absent if the prompt has no video.
    """

    image_tokens: int | None = None
    cached_tokens: int | None = None
    video_tokens: int | None = None
    videos: list[VideoUsage] | None = None


class CompletionTokensDetails(Struct):
    """Parts of the answer's tokens.

    `reasoning_tokens` counts the reasoning with its tags. The other fields are present if the
    request has a prediction. They count the tokens of the prediction that the decoder has compared
    with the answer, and that were equal or not.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct):
    """Tokens of a request, summed over its choices.

    `completion_tokens_details` is present if the model thinks or the request has a prediction.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ImageReport(Struct):
    """The source of an image's embedding, for `include_stage_times`.

    `encode_source` is `computed`, `memory`, `redis` or `joined`. The source is null if the decoder
    had the embedding before the encoder answered.
    """

    encode_source: str | None
    num_tokens: int
    grid_thw: tuple[int, int, int]


class RequestMetrics(Struct):
    """Times of a request under vLLM's names, for `include_stage_times`. A time is null if the
    request did not come to the stage that the time measures.

    The time to the first token starts at the arrival of the request, as in `stage_times_ms`.
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | UnsetType = UNSET
    tokens_per_second: float | None = None


def request_metrics(
    times_ms: Mapping[str, float], num_tokens: int, num_choices: int
) -> RequestMetrics:
    """Returns metrics of a request, from stage times in ms and the tokens of all choices."""
    found = RequestMetrics(queue_time_ms=times_ms.get("queue"))
    first, total = times_ms.get("first_token"), times_ms.get("total")
    if first is None or total is None:
        return found
    found.time_to_first_token_ms = first
    found.generation_time_ms = round(total - first, 3)
    if (num_later := num_tokens - num_choices) > 0:
        found.mean_itl_ms = round((total - first) * num_choices / num_later, 3)
    if total > 0:
        found.tokens_per_second = round(num_tokens / total * 1e3, 3)
    return found


class CalledFunction(Struct):
    """The function of a call. In a stream the name comes once and the arguments come in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallAnswer(Struct):
    """A tool call, or in a stream (`index` is set) a piece of one."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(Struct):
    """The parts of a choice. `content` is null if the choice has only reasoning or calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # vLLM's newer name of `reasoning_content`
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class PromptLogprob(Struct):
    """The log-probability of a token at one place of a prompt. Rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


class ResponseChoice(Struct):
    """A choice of a whole response."""

    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: Logprobs | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    """The response to a request without `stream`."""

    id: str
    created: int
    model: str
    choices: list[ResponseChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    stage_times_ms: dict[str, float] | UnsetType = UNSET
    images: list[ImageReport] | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class ChunkDelta(Struct, omit_defaults=True):
    """The addition of a chunk to a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChunkChoice(Struct):
    """A choice in a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    """An event of a stream, as `ChunkWriter` writes it. The last chunk has no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    stage_times_ms: dict[str, float] | UnsetType = UNSET
    images: list[ImageReport] | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class Update(Struct, frozen=True):
    """New parts of one choice.

    Attributes:
        choice: index of the choice.
        parts: pieces of the answer, in order.
        logprobs: log-probabilities of the update's tokens. None if the request asks for none.
        finish_reason: `stop`, `length` or `tool_calls`, in the last update of the choice.
        stop_reason: the stop string or the requested stop token's id that ended the choice.
        token_ids: ids of the update's tokens, with the token that ended the choice. Empty unless
            the request asks for token ids.
    """

    choice: int
    parts: Sequence[Part]
    logprobs: list[LogprobEntry] | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] = ()

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the update in bytes. Each logprob counts as if it had the largest
        number of alternatives.
        """
        return 512 + 4096 * len(self.logprobs or ()) + 40 * len(self.token_ids)


def assistant_message(pieces: Sequence[Part]) -> AssistantMessage:
    """Returns the message of a whole choice, made from all pieces of the choice."""
    parts = join(pieces)
    text = _text(parts, Text)
    reasoning = _text(parts, Reasoning) or UNSET
    calls = [_call(part, whole=True) for part in parts if isinstance(part, Call)]
    content = None if not text and (reasoning or calls) else text
    return AssistantMessage(
        content, reasoning_content=reasoning, reasoning=reasoning, tool_calls=calls or UNSET
    )


def _delta(pieces: Sequence[Part]) -> ChunkDelta:
    parts = join(pieces)
    reasoning = _text(parts, Reasoning) or UNSET
    calls = [_call(part, whole=False) for part in parts if isinstance(part, Call)]
    return ChunkDelta(UNSET, _text(parts, Text) or UNSET, reasoning, reasoning, calls or UNSET)


def _text(parts: Sequence[Part], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _call(call: Call, *, whole: bool) -> ToolCallAnswer:
    answer = ToolCallAnswer(CalledFunction(call.arguments))
    if not whole:
        answer.index = call.index
    if call.call_id:
        answer.id, answer.type, answer.function.name = call.call_id, "function", call.name
    return answer


DONE = b"data: [DONE]\n\n"


def error_event(error: TriptychError) -> bytes:
    """Returns the last event of a stream that failed. No `[DONE]` follows."""
    return b"data: " + encode_json(error_of(error)) + b"\n\n"


class ChunkWriter:
    """Serializes the chunks of one streamed response as server-sent events.

    Args:
        response_id: `chatcmpl-...`.
        created: Unix time.
        model: name of the model.
        usage_field: true if each chunk has a `usage` field. The field is null in chunks whose
            `update` call has no usage.
    """

    def __init__(self, response_id: str, created: int, model: str, usage_field: bool) -> None:
        head = encode_json(
            {
                "id": response_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
                "system_fingerprint": None,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if usage_field else b"}\n\n"
        self._text_end = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._text_starts: dict[int, bytes] = {}

    def role(
        self, choice: int, usage: Usage | None = None, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """Returns the first event of a choice."""
        ids = b""
        if prompt_token_ids is not None:
            ids = b',"prompt_token_ids":' + encode_json(prompt_token_ids)
        return self._chunk(ChunkChoice(choice, ChunkDelta("assistant", ""), None, None), usage, ids)

    def update(self, update: Update, usage: Usage | None = None) -> bytes:
        """Returns the event of an update. The bytes are empty if the update is empty."""
        parts = update.parts
        if update.finish_reason is None and not update.logprobs and not update.token_ids:
            if not parts:
                return b""
            if usage is None and len(parts) == 1 and isinstance(text := parts[0], Text):
                return self.text(update.choice, text.text)
        logprobs = Logprobs(update.logprobs) if update.logprobs else None
        choice = ChunkChoice(update.choice, _delta(parts), logprobs, update.finish_reason)
        if update.finish_reason is not None:
            choice.stop_reason = update.stop_reason
        if update.token_ids:
            choice.token_ids = list(update.token_ids)
        return self._chunk(choice, usage)

    def text(self, choice: int, text: str) -> bytes:
        """Returns the event of a piece of text in the middle of a choice."""
        start = self._text_starts.get(choice)
        if start is None:
            start = self._head + b'{"index":%d,"delta":{"content":' % choice
            self._text_starts[choice] = start
        return start + encode_json(text) + self._text_end

    def _chunk(self, choice: ChunkChoice, usage: Usage | None, more: bytes = b"") -> bytes:
        tail = self._tail if usage is None else b',"usage":' + encode_json(usage) + b"}\n\n"
        return self._head + encode_json(choice) + b"]" + more + tail

    def closing(self, fields: Mapping[str, object]) -> bytes:
        """Returns the event after the last choice, with the usage and the times of the request."""
        return self._head + b"]," + encode_json(fields)[1:] + b"\n\n"
