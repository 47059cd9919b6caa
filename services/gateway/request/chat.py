"""The service behind all endpoints that generate text: it turns requests into updates of answers.

`ChatService.prepare` does everything that can refuse a request: limits, images, prompt, sampling.
`ChatService.answer` then runs the request on an encoder and a decoder, and yields text as it
arrives. The classes of `endpoints/` call both methods and speak HTTP to the client. Errors are
`TriptychError`s. Work on long text runs in threads, so that the event loop stays free.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from services.common.errors import (
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from services.common.pb import decoder_pb2 as pb
from services.common.threads import WorkerThreads
from services.gateway.answers.answer_reader import AnswerReader
from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.thinking_budget import thinking_budget
from services.gateway.clients.decoders import DecoderPool, TokenEvent
from services.gateway.clients.encoders import EncoderPool
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import Update
from services.gateway.media.images import Image, ImageReader
from services.gateway.media.videos import Video, VideoReader
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.conversation import ConversationReader
from services.gateway.prompts.prompt import Draft, PromptBuilder
from services.gateway.request.attempts import Attempts
from services.gateway.request.bounded_thinking import BoundedThinking
from services.gateway.request.completion import Completion
from services.gateway.request.sampling import SamplingReader, check_ids
from services.gateway.tenancy.slot import Slot
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# Text up to this many characters is tokenized in the event loop, longer text in a thread. The same
# number of token ids is checked in the event loop.
_INLINE_TOKENIZE_CHARS = 8192
_TEXT_THREADS = 4
# A prompt that is longer than the context may be cut by `truncate_prompt_tokens`. A prompt longer
# than this multiple of the context is refused, because tokenizing it would take too long.
MAX_TRUNCATED = 8


@dataclass(slots=True)
class ChatService:
    """All parts that serve a chat request. `create_gateway` makes the only instance.

    Attributes:
        model_name: name of the served model, which requests may give.
        answers: reader of the format that a request's answers have.
        images: reader of a request's images. None if the model takes only text; there are no
            encoders then.
        videos: reader of a request's videos. None if the model takes no videos.
        sampling: reader of a request's sampling parameters.
        parsers: thread pool of one thread, which parses long bodies.
        request_timeout_s: time in seconds that a request may take from its arrival.
        encode_timeout_s: timeout in seconds of one encode call. A slower encoder is replaced.
        ignores_unknown_fields: True if unknown fields of bodies are ignored instead of refused.
        threads: threads that render and tokenize long text.
    """

    model_name: str
    tokenizer: ModelTokenizer
    conversations: ConversationReader
    prompts: PromptBuilder
    answers: AnswerReader
    images: ImageReader | None
    videos: VideoReader | None
    sampling: SamplingReader
    encoders: EncoderPool
    decoders: DecoderPool
    metrics: GatewayMetrics
    parsers: WorkerThreads
    request_timeout_s: float
    encode_timeout_s: float = 60.0
    ignores_unknown_fields: bool = False
    threads: WorkerThreads = field(default_factory=lambda: WorkerThreads(_TEXT_THREADS, "text"))

    async def prepare(
        self,
        request: ChatRequest,
        request_id: str,
        timings: Timings,
        slot: Slot,
        draft: Draft | None = None,
    ) -> Completion:
        """Makes a request ready for the services, without calling a decoder.

        Args:
            request: request whose fields have been checked one by one.
            request_id: id of the request in logs and traces.
            timings: times of the request's stages, which are recorded here.
            slot: admission slot of the request. The slot counts the memory of images, and what the
                tenant uses of its limits. It refuses the request if a limit is exceeded.
            draft: prompt of the request. None if the request's messages have to be rendered.

        Raises:
            TriptychError: the request cannot be served.
        """
        decoder = self.decoder(request.model)
        if draft is None:
            with timings.measure("tokenize"):
                draft = await self.draft(request, decoder.max_model_len)
        draft = self._truncated(draft, request, decoder.max_model_len)
        answer_format = await self.answers.format_of(request, draft.tail)
        sampling = self.sampling.read(request, decoder.vocab_size)
        # The length is checked twice. Here each image counts as one token, so that a text that is
        # too long is refused before any image is loaded. Below, each image has all its tokens.
        self.sampling.limit(sampling, request, len(draft.token_ids), decoder.max_model_len)
        images: list[Image] = []
        videos: list[Video] = []
        if draft.images or draft.videos:
            with timings.measure("fetch"):
                images, videos = await self.read_media(draft, slot)
        prompt = self.prompts.expand(draft, [image.units for image in images], videos)
        self.sampling.limit(sampling, request, len(prompt.token_ids), decoder.max_model_len)
        completion = Completion(
            request_id=request_id,
            chat=request,
            prompt=prompt,
            images=[*images, *videos],
            sampling=sampling,
            slot=slot,
            answer_format=answer_format,
            cache_salt=slot.tenant.cache_salt(request.cache_salt or ""),
            deadline=timings.arrived + self.request_timeout_s,
            timings=timings,
            encode_sources=[None] * len(prompt.runs),
            choices=[
                Choice(index, request, self.tokenizer, answer_format.parser())
                for index in range(request.num_choices)
            ],
            ignored=draft.ignored,
        )
        # Refuses a prompt that is too long for the prompt logprobs that the request wants.
        completion.prompt_scores.check(request, len(prompt.token_ids))
        num_tokens = len(prompt.token_ids) + request.num_choices * sampling.max_tokens
        num_pixels = self.prompts.num_pixels(prompt)
        await slot.usage.charge(num_tokens, request.num_choices, num_pixels)
        return completion

    async def answer(
        self, completion: Completion, *, is_kept: bool = False
    ) -> AsyncGenerator[list[Update]]:
        """Runs a prepared request, and yields updates until every choice has a finish reason.

        Args:
            is_kept: True if the caller keeps the updates or their text, which then count as memory
                of the request.

        Raises:
            TriptychError: the request failed.
        """
        timings, has_started = completion.timings, False
        attempts = Attempts(
            completion, self.encoders, self.decoders, self.metrics, self.encode_timeout_s
        )
        async with aclosing(self._events(completion, attempts)) as batches:
            async for events in batches:
                if not has_started and any(event.token_ids for event in events):
                    has_started = True
                    timings.record("first_token", timings.since_arrival())
                updates: list[Update] = []
                for event in events:
                    choice = completion.choices[event.choice]
                    if choice.finish_reason is not None:
                        continue  # The choice has ended early, and the batch has later events.
                    if event.started is not None:
                        completion.record_start(event.started)
                    if event.prompt_logprobs:
                        completion.prompt_scores.add(event.prompt_logprobs)
                        if not event.token_ids:
                            continue  # The event has no part of the answer's text.
                    updates.append(choice.feed(event))
                    if choice.finish_reason is not None and not event.is_last:
                        attempts.stop(event.choice)
                if is_kept:
                    completion.slot.memory.add(sum(update.num_bytes for update in updates))
                yield updates
        if any(choice.finish_reason is None for choice in completion.choices):
            raise InternalError("a choice ended without a finish reason")
        timings.record("total", timings.since_arrival())

    def _events(
        self, completion: Completion, attempts: Attempts
    ) -> AsyncGenerator[list[TokenEvent]]:
        """Returns the events of a request. If the request limits its reasoning, `BoundedThinking`
        ends the reasoning at the limit.
        """
        budget = thinking_budget(
            completion.chat, completion.answer_format, completion.choices, self.tokenizer
        )
        if budget is None:
            return attempts.events()
        return BoundedThinking(completion, attempts, budget).events()

    def ready(self) -> bool:
        """Returns whether a decoder is healthy and, for a model with vision, an encoder whose
        embeddings fit the decoder.
        """
        decoder = self.decoders.description()
        if decoder is None or self.images is None:
            return decoder is not None
        encoder = self.encoders.description()
        return (
            encoder is not None
            and decoder.dtype == encoder.dtype
            and decoder.num_features == encoder.num_features
            and decoder.hidden == encoder.hidden
        )

    @property
    def input_modalities(self) -> list[str]:
        """Modalities that messages may contain: `text`, and `image` and `video` for models that
        take them.
        """
        readers = (("image", self.images), ("video", self.videos))
        return ["text", *(name for name, reader in readers if reader is not None)]

    async def start(self) -> None:
        """Connects to the pods."""
        await self.encoders.start()
        await self.decoders.start()

    async def close(self) -> None:
        """Closes the connections to the pods and ends the threads."""
        await self.decoders.close()
        await self.encoders.close()
        self.threads.close()
        self.parsers.close()

    def check_model(self, name: str | None) -> None:
        """Checks the model that a request names. None names whichever model is served.

        Raises:
            ModelNotFound: the name is another model's.
        """
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist", param="model")

    def max_model_len(self) -> int | None:
        """Returns the context length of the decoders. None if no decoder is healthy."""
        found = self.decoders.description()
        return found.max_model_len if found else None

    def decoder(self, model: str | None = None) -> pb.DescribeDecoderResponse:
        """Returns the description of the healthy decoder with the shortest context.

        Args:
            model: name of the model in a request. None if the request names no model.

        Raises:
            ModelNotFound: `model` is not the served model.
            Unavailable: no decoder is healthy.
        """
        self.check_model(model)
        found = self.decoders.description()
        if found is None:
            raise Unavailable("no decoder is available", retry_after_s=1)
        return found

    async def draft(self, request: ChatRequest, max_tokens: int, cut: range = range(0)) -> Draft:
        """Renders and tokenizes the messages of a request.

        Args:
            max_tokens: number of tokens of the context.
            cut: indices of messages that are left out.

        Raises:
            TriptychError: the messages do not fit the chat template or the context.
        """
        if request.truncate_prompt_tokens is not None:
            max_tokens *= MAX_TRUNCATED
        if request.num_characters <= _INLINE_TOKENIZE_CHARS:
            return self._render(request, max_tokens, cut)
        return await self.threads.run(self._render, request, max_tokens, cut)

    def _render(self, request: ChatRequest, max_tokens: int, cut: range) -> Draft:
        return self.prompts.draft(self.conversations.read(request, cut), max_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool | None) -> list[int]:
        """Tokenizes text that is not rendered, in a thread if the text is long.

        Args:
            add_special_tokens: True if the tokenizer adds its special tokens, such as BOS. None if
                the text is plain text, in which even the name of a special token is only text.
        """
        if len(text) <= _INLINE_TOKENIZE_CHARS:
            return self._encode(text, add_special_tokens)
        return await self.threads.run(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        if add_special_tokens is None:
            return self.tokenizer.encode_text(text)
        return self.tokenizer.encode_prompt(text, add_special_tokens)

    async def check_ids(self, name: str, ids: Sequence[int], vocab_size: int) -> None:
        """Checks the token ids of a field. Many ids are checked in a thread.

        Args:
            name: name of the field, for the error.
            ids: token ids of the field.
            vocab_size: number of tokens that the model has.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        if len(ids) <= _INLINE_TOKENIZE_CHARS:
            check_ids(name, ids, vocab_size)
        else:
            await self.threads.run(check_ids, name, ids, vocab_size)

    def _truncated(self, draft: Draft, request: ChatRequest, max_tokens: int) -> Draft:
        """Returns the prompt, cut to the number of tokens that `truncate_prompt_tokens` names.

        If the field is -1, the cut leaves room for the answer: as many tokens as the request wants
        at most, but no more than a quarter of the context.
        """
        limit = request.truncate_prompt_tokens
        if limit is None:
            return draft
        if limit < 0:
            wanted = self.sampling.max_completion_tokens(request)
            limit = max_tokens - min(wanted, max_tokens // 4)
        if len(draft.token_ids) <= limit:
            return draft
        if draft.images or draft.videos:
            raise InvalidRequest("a prompt with images is not cut", param="truncate_prompt_tokens")
        # As in tokenizers, the side is the end of the prompt that is cut off.
        is_right = request.truncation_side == "right"
        ids = draft.token_ids[:limit] if is_right else draft.token_ids[-limit:]
        return replace(draft, token_ids=ids)

    async def read_media(self, draft: Draft, slot: Slot) -> tuple[list[Image], list[Video]]:
        """Loads the images and videos of a draft, each in order.

        Raises:
            TriptychError: an image or a video is unreadable, or no encoder is healthy.
        """
        if self.images is None or not (draft.images or draft.videos):
            return [], []
        encoder = self.encoders.description()
        if encoder is None:
            raise Unavailable("no encoder is available", retry_after_s=1)
        images = await self.images.read(draft.images, slot, encoder.max_image_patches)
        videos: list[Video] = []
        if self.videos is not None and draft.videos:
            videos = await self.videos.read(draft.videos, slot, encoder, self.encode_timeout_s)
        return images, videos
