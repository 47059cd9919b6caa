"""The use case of all endpoints that generate: from a checked request to text, as it arrives; what
of it takes long runs in threads.

`ChatService.prepare` does everything that can refuse a request: limits, images, prompt, sampling.
`ChatService.answer` then runs it on an encoder and a decoder and yields text as it arrives.
`endpoint` is the HTTP side of both. Errors are `TriptychError`s.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeVar

from services.common.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.threads import WorkerThreads
from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.thinking_budget import thinking_budget
from services.gateway.clients.decoders import DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import Update
from services.gateway.media.images import Image, ImageReader
from services.gateway.media.videos import Video, VideoReader, probe_once
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.conversation import ConversationReader
from services.gateway.prompts.prompt import Draft, PromptBuilder
from services.gateway.request.attempts import Attempts
from services.gateway.request.completion import Completion
from services.gateway.request.sampling import (
    limit_completion,
    max_completion_tokens,
    resolve_sampling,
)
from services.gateway.slot import Slot
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# Text up to this many characters is tokenized in the event loop; longer text in a thread.
_INLINE_TOKENIZE_CHARS = 8192
_TEXT_THREADS = 4
_MAX_KEPT_WORDS = 1024
# A prompt that `truncate_prompt_tokens` cuts may be as many times as long as the context.
MAX_TRUNCATED = 8

Result = TypeVar("Result")


@dataclass(slots=True)
class ChatService:
    """Everything that a chat request needs, wired once.

    Attributes:
        answer_format: of a request whose prompt ends in a text; see `AnswerReader`.
        images: None: the model takes text alone, and there are no encoders.
        videos: None: the model takes no videos.
        threads: tokenize what is long.
        parsers: one thread, for long bodies.
        encode_timeout_s: of one encode call; a slower encoder is replaced by another.
        ignores_unknown_fields: of bodies, instead of refusing them.
    """

    model_name: str
    tokenizer: ModelTokenizer
    conversations: ConversationReader
    prompts: PromptBuilder
    answer_format: Callable[[ChatRequest, str | None], Awaitable[AnswerFormat]]
    images: ImageReader | None
    videos: VideoReader | None
    defaults: pb.SamplingParams
    encoders: EncoderPool
    decoders: DecoderPool
    metrics: GatewayMetrics
    parsers: WorkerThreads
    request_timeout_s: float
    encode_timeout_s: float = 60.0
    ignores_unknown_fields: bool = False
    threads: WorkerThreads = field(default_factory=lambda: WorkerThreads(_TEXT_THREADS, "text"))
    # Of words that must not be sampled, which many prompts of one request share.
    _encode_word: Callable[[str], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        encode = partial(self.tokenizer.encode_prompt, add_special_tokens=False)
        self._encode_word = lru_cache(_MAX_KEPT_WORDS)(encode)

    async def prepare(
        self,
        request: ChatRequest,
        request_id: str,
        timings: Timings,
        slot: Slot,
        draft: Draft | None = None,
    ) -> Completion:
        """Everything that happens before the services are called.

        Args:
            request: already checked field by field.
            slot: counts the bytes of images and what the tenant uses; may refuse.
            draft: the prompt; None: the request's messages are rendered.

        Raises:
            TriptychError: the request cannot be served.
        """
        decoder = self.decoder(request.model)
        if draft is None:
            with timings.measure("tokenize"):
                draft = await self.draft(request, decoder.max_model_len)
        draft = self._with_tokens_cut(draft, request, decoder.max_model_len)
        answer_format = await self.answer_format(request, draft.tail)
        sampling = resolve_sampling(
            request, self.defaults,
            vocab_size=decoder.vocab_size,
            encode=self._encode_word,
        )  # fmt: skip
        limit = partial(
            limit_completion, sampling, request, self.defaults, max_model_len=decoder.max_model_len
        )
        # Before images are loaded. Each has at least one token, as its placeholder here.
        limit(len(draft.token_ids))
        images: list[Image] = []
        videos: list[Video] = []
        if draft.images or draft.videos:
            with timings.measure("fetch"):
                images, videos = await self.read_media(draft, slot)
        prompt = self.prompts.expand(draft, [image.units for image in images], videos)
        limit(len(prompt.token_ids))
        choices = [
            Choice(index, request, self.tokenizer, answer_format.parser())
            for index in range(request.num_choices)
        ]
        completion = Completion(
            request_id, request, prompt, [*images, *videos], sampling, slot, answer_format,
            cache_salt=slot.tenant.cache_salt(request.cache_salt or ""),
            deadline=timings.arrived + self.request_timeout_s,
            timings=timings,
            encode_sources=[None] * len(prompt.runs),
            choices=choices,
            ignored=draft.ignored,
        )  # fmt: skip
        completion.prompt_scores.check(request, len(prompt.token_ids))
        num_tokens = len(prompt.token_ids) + request.num_choices * sampling.max_tokens
        num_pixels = self.prompts.num_pixels(prompt)
        await slot.charge(num_tokens, request.num_choices, num_pixels)
        return completion

    async def answer(
        self, completion: Completion, *, is_kept: bool = False
    ) -> AsyncGenerator[list[Update]]:
        """Runs a prepared request; yields updates until every choice has a finish reason.

        Args:
            is_kept: the caller keeps the updates, or what they say: they count as memory.

        Raises:
            TriptychError: the request failed.
        """
        budget = thinking_budget(
            completion.chat, completion.answer_format, completion.choices, self.tokenizer
        )
        attempts = Attempts(
            completion, self.encoders, self.decoders, self.metrics, self.encode_timeout_s, budget
        )
        timings, started = completion.timings, False
        async with aclosing(attempts.events()) as batches:
            async for events in batches:
                if not started and any(event.token_ids for event in events):
                    started = True
                    timings.record("first_token", timings.since_arrival())
                updates: list[Update] = []
                for event in events:
                    choice = completion.choices[event.choice]
                    if choice.finish_reason is not None:
                        continue
                    if event.started is not None:
                        completion.record_start(event.started)
                    if event.prompt_logprobs:
                        completion.prompt_scores.add(event.prompt_logprobs)
                        if not event.token_ids:
                            continue
                    updates.append(choice.feed(event))
                    if choice.finish_reason is not None and not event.is_last:
                        attempts.stop(event.choice)
                if is_kept:
                    completion.slot.hold(sum(update.num_bytes for update in updates))
                yield updates
        if any(choice.finish_reason is None for choice in completion.choices):
            raise InternalError("a choice ended without a finish reason")
        timings.record("total", timings.since_arrival())

    def ready(self) -> bool:
        """Whether a decoder is healthy and, for a model with vision, an encoder that fits it."""
        decoder = self.decoders.description()
        if decoder is None or self.images is None:
            return decoder is not None
        encoder = self.encoders.description()
        return encoder is not None and (decoder.dtype, decoder.num_features, decoder.hidden) == (
            encoder.dtype, encoder.num_features, encoder.hidden,
        )  # fmt: skip

    @property
    def input_modalities(self) -> list[str]:
        """What messages may hold: `text`, and `image` and `video` for models that see them."""
        seen = (("image", self.images), ("video", self.videos))
        return ["text", *(name for name, reader in seen if reader is not None)]

    async def start(self) -> None:
        await self.encoders.start()
        await self.decoders.start()

    async def close(self) -> None:
        await self.decoders.close()
        await self.encoders.close()
        self.threads.close()
        self.parsers.close()

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound if `name` is not the served model; None: whatever is served."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist", param="model")

    def max_model_len(self) -> int | None:
        """The context length of the decoders; None if no decoder is healthy."""
        found = self.decoders.description()
        return found.max_model_len if found else None

    def decoder(self, model: str | None = None) -> pb.DescribeDecoderResponse:
        """What all decoders serve, in the shortest context.

        Raises:
            ModelNotFound: `model` is another.
            Unavailable: no decoder is healthy.
        """
        self.check_model(model)
        found = self.decoders.description()
        if found is None:
            raise Unavailable("no decoder is available", retry_after_s=1)
        return found

    async def draft(self, request: ChatRequest, max_tokens: int, cut: range = range(0)) -> Draft:
        """The prompt of a request's messages, but those of `cut`.

        Raises:
            TriptychError: they do not fit the template, or a context of `max_tokens`.
        """
        if request.truncate_prompt_tokens is not None:
            max_tokens *= MAX_TRUNCATED
        return await self.off_loop(
            request.num_characters,
            lambda: self.prompts.draft(self.conversations.read(request, cut), max_tokens),
        )

    def _with_tokens_cut(self, draft: Draft, request: ChatRequest, max_tokens: int) -> Draft:
        """As `truncate_prompt_tokens` says; -1: so that the answer that is wanted has room."""
        limit = request.truncate_prompt_tokens
        if limit is None:
            return draft
        if limit < 0:
            wanted = max_completion_tokens(request, self.defaults)
            limit = max_tokens - min(wanted, max_tokens // 4)
        if len(draft.token_ids) <= limit:
            return draft
        if draft.images or draft.videos:
            raise InvalidRequest("a prompt with images is not cut", param="truncate_prompt_tokens")
        is_right = request.truncation_side == "right"
        ids = draft.token_ids[:limit] if is_right else draft.token_ids[-limit:]
        return replace(draft, token_ids=ids)

    async def read_media(self, draft: Draft, slot: Slot) -> tuple[list[Image], list[Video]]:
        """A draft's images and videos, in order.

        Raises:
            TriptychError: one is unreadable, or there is no encoder.
        """
        if self.images is None or not (draft.images or draft.videos):
            return [], []
        encoder = self.encoders.description()
        if encoder is None:
            raise Unavailable("no encoder is available", retry_after_s=1)
        most = encoder.max_image_patches
        images = await self.images.read(draft.images, slot.hold, most, slot.tenant.name)
        videos: list[Video] = []
        if self.videos is not None and draft.videos:
            choose = partial(self.encoders.choose, encoder)
            probe = partial(probe_once, choose=choose, timeout_s=self.encode_timeout_s)
            videos = await self.videos.read(draft.videos, slot, most, probe)
        return images, videos

    async def off_loop(self, num_characters: int, call: Callable[[], Result]) -> Result:
        """`call()`; in a thread, if it is about long text."""
        if num_characters <= _INLINE_TOKENIZE_CHARS:
            return call()
        return await self.threads.run(call)
