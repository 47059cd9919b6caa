"""The service behind all endpoints that generate text: it turns a request into an answer.

`ChatService.prepare` checks the request, loads its images and makes its prompt. If the gateway has
to refuse the request, `prepare` raises the error. `ChatService.answer` then runs the request on an
encoder and a decoder, and yields `Update`s: new text, tokens or tool calls of one choice. The
handlers in `endpoints/` call both methods and speak HTTP. Both methods raise `TriptychError`s.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from services.common.errors import InternalError, Unavailable
from services.common.pb import decoder_pb2 as pb
from services.common.threads import WorkerThreads
from services.gateway.answers.answer_reader import AnswerReader
from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.thinking_budget import thinking_budget
from services.gateway.clients.decoders import DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.clients.served_adapters import check_adapter, served_adapters
from services.gateway.clients.token_event import TokenEvent
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import Update
from services.gateway.media.images import Image, ImageReader
from services.gateway.media.videos import Video, VideoReader
from services.gateway.metrics import GatewayMetrics, Timings
from services.gateway.prompts.prompt import Draft, PromptBuilder
from services.gateway.request.attempts import Attempts
from services.gateway.request.bounded_thinking import BoundedThinking
from services.gateway.request.completion import Completion
from services.gateway.request.drafts import DraftReader
from services.gateway.request.sampling import SamplingReader
from services.gateway.request.token_sink import TokenSink
from services.gateway.tenancy.slot import Slot
from services.gateway.tokenizer.tokenizer import ModelTokenizer


@dataclass(slots=True)
class ChatService:
    """The parts of the gateway that serve a request. `create_gateway` makes the only instance.

    Attributes:
        model_names: names by which requests may call the model. Answers contain the first name.
        drafts: maker of a draft, which is the tokenized prompt before its images are loaded.
        prompts: maker of the prompt from its draft and its images.
        answers: reader of the answer's format. The format says whether the answer begins with
            reasoning, which tool calls are allowed, and which grammar holds.
        images: reader of a request's images. None if the model takes only text, in which case there
            are no encoders.
        videos: reader of a request's videos. None if the model takes no videos.
        sampling: reader of a request's sampling parameters.
        encoders: clients of the encoder pods.
        decoders: clients of the decoder pods.
        parsers: a single thread, which parses long request bodies.
        request_timeout_s: time in seconds that a request may take from its arrival.
        encode_timeout_s: timeout in seconds of one encode call. A slower encoder is replaced.
        ignores_unknown_fields: True if unknown fields of bodies are ignored instead of refused.
    """

    model_names: Sequence[str]
    tokenizer: ModelTokenizer
    drafts: DraftReader
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

    async def prepare(
        self,
        request: ChatRequest,
        request_id: str,
        timings: Timings,
        slot: Slot,
        draft: Draft | None = None,
    ) -> Completion:
        """Checks a request, loads its images and makes its prompt. No decoder is called, and the
        tokens are not charged yet: see `RequestContext.charge`.

        Args:
            request: parsed request. The parser has checked each field alone; contradictions between
                fields are found here.
            request_id: id of the request in logs and traces.
            timings: recorder of the times that the request's stages take.
            slot: admission slot of the request, which counts the memory of the images.
            draft: tokenized prompt, before images are loaded. None if the prompt is yet to be
                rendered from the request's messages.

        Raises:
            TriptychError: the request is invalid, or cannot be served now.
        """
        decoder = self.decoder(request.model)
        if draft is None:
            with timings.measure("tokenize"):
                draft = await self.drafts.read(request, decoder.max_model_len)
        num_answer_tokens = self.sampling.max_completion_tokens(request)
        draft = self.drafts.cut(draft, request, decoder.max_model_len, num_answer_tokens)
        answer_format = await self.answers.format_of(request, draft.tail)
        sampling = self.sampling.read(request, decoder.vocab_size)
        # The number of tokens is checked here and below. In the draft, each image is a single
        # token, so this check refuses a text that is too long before any image is loaded. The
        # check below is made when each image has all its tokens.
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
            adapter=self.adapter(request.model),
            deadline=timings.arrived + self.request_timeout_s,
            timings=timings,
            encode_sources=[None] * len(prompt.runs),
            choices=[
                Choice(index, request, self.tokenizer, answer_format.parser())
                for index in range(request.num_choices)
            ],
            ignored=draft.ignored,
            prediction=await self.drafts.prediction(request, sampling.max_tokens),
        )
        # If the request wants logprobs of its prompt, the prompt must not be too long for that.
        completion.prompt_scores.check(request, len(prompt.token_ids))
        return completion

    async def answer(
        self,
        completion: Completion,
        *,
        holds_updates: bool = False,
        sink: TokenSink | None = None,
    ) -> AsyncGenerator[list[Update]]:
        """Runs a prepared request, and yields updates until every choice has a finish reason.

        Args:
            holds_updates: True if the caller holds all updates, or their text, until the answer is
                complete. Their bytes then count towards the memory of the request.
            sink: object that takes tokens for which no update is yielded, see `Attempts`.

        Raises:
            TriptychError: the request failed.
        """
        timings, has_started = completion.timings, False
        attempts = Attempts(
            completion, self.encoders, self.decoders, self.metrics, self.encode_timeout_s,
            sink=sink,
        )  # fmt: skip
        async with aclosing(self._events(completion, attempts)) as batches:
            async for events in batches:
                if not has_started and any(event.token_ids for event in events):
                    has_started = True
                    timings.record("first_token", timings.since_arrival())
                updates: list[Update] = []
                for event in events:
                    choice = completion.choices[event.choice]
                    if choice.finish_reason is not None:
                        continue  # A stop string has ended the choice earlier in this batch.
                    if event.started is not None:
                        completion.record_start(event.started)
                    if event.predicted is not None:
                        completion.record_predicted(*event.predicted)
                    if event.prompt_logprobs:
                        completion.prompt_scores.add(event.prompt_logprobs)
                        if not event.token_ids:
                            continue  # The event has logprobs of the prompt and no new tokens.
                    updates.append(choice.feed(event))
                    if choice.finish_reason is not None and not event.is_last:
                        attempts.stop(event.choice)  # The decoder would generate more tokens.
                if holds_updates:
                    completion.slot.memory.add(sum(update.num_bytes for update in updates))
                yield updates
        if any(choice.finish_reason is None for choice in completion.choices):
            raise InternalError("a choice ended without a finish reason")
        timings.record("total", timings.since_arrival())

    def _events(
        self, completion: Completion, attempts: Attempts
    ) -> AsyncGenerator[list[TokenEvent]]:
        """Returns the token events of a request. If the request has a thinking budget, they pass
        through `BoundedThinking`, which closes the reasoning when the budget is used up.
        """
        budget = thinking_budget(
            completion.chat, completion.answer_format, completion.choices, self.tokenizer
        )
        if budget is None:
            return attempts.events()
        return BoundedThinking(completion, attempts, budget).events()

    def ready(self) -> bool:
        """Returns whether the gateway can serve requests: a decoder is healthy, and, if the model
        takes images, an encoder is healthy whose embeddings have the shape that the decoder needs.
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
    def model_name(self) -> str:
        """Name of the model in answers."""
        return self.model_names[0]

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
        self.drafts.close()
        self.parsers.close()

    def check_model(self, name: str | None) -> None:
        """Checks the model that a request names.

        Args:
            name: name in the request. A request without a name (None) is accepted.

        Raises:
            ModelNotFound: the request names a model that is not served.
            Unavailable: the request names an adapter that decoders may have, none of which is
                healthy.
        """
        if name is None or name in self.model_names:
            return
        check_adapter(self.decoders, name, self.model_names)

    def adapter(self, name: str | None) -> pb.Adapter:
        """Returns the adapter that a request names. It is without digest for the base model."""
        if name is None or name in self.model_names:
            return pb.Adapter()
        self.check_model(name)
        return served_adapters(self.decoders)[name]

    def name_in_answer(self, name: str | None) -> str:
        """Returns the name of the model in the answer to a checked request that names `name`."""
        return name if name and name not in self.model_names else self.model_name

    def max_model_len(self) -> int | None:
        """Returns the context length of the decoders. None if no decoder is healthy."""
        found = self.decoders.description()
        return found.max_model_len if found else None

    def decoder(self, model: str | None = None) -> pb.DescribeDecoderResponse:
        """Returns the description of the healthy decoder with the shortest context.

        Args:
            model: name of the model in a request. None if the request names no model.

        Raises:
            ModelNotFound: `model` is neither the served model nor one of its adapters.
            Unavailable: no decoder is healthy, or none that has the adapter.
        """
        self.check_model(model)
        found = self.decoders.description()
        if found is None:
            raise Unavailable("no decoder is available", retry_after_s=1)
        return found

    async def read_media(self, draft: Draft, slot: Slot) -> tuple[list[Image], list[Video]]:
        """Loads the images and the videos of a draft. Returns both in the order of the prompt.

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
