"""The use case: a chat request to text.

`prepare` does all that can refuse a request: limits, pictures, prompt, sampling. `answer` then runs
it on an encoder and a decoder and yields text as it comes. Both run inside one admission slot.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from services.common.errors import InternalError, ModelNotFound, Unavailable
from services.gateway.attempts import Attempts, Work
from services.gateway.choice import Choice, Update
from services.gateway.clients.decoders import DecoderDescription, DecoderPool
from services.gateway.clients.encoders import EncoderPool
from services.gateway.conversation import Conversation, read_conversation
from services.gateway.detokenizer import Detokenizer
from services.gateway.generation import Started
from services.gateway.images import Image, ImageReader
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import ChatRequest
from services.gateway.prompt import Prompt, PromptBuilder
from services.gateway.responses import ImageReport, PromptTokensDetails, Usage
from services.gateway.sampling import SamplingDefaults, resolve_sampling
from services.gateway.stages import Stages
from services.gateway.tokenizer import ModelTokenizer

# Text up to this many characters is tokenized at once; longer in a thread.
_INLINE_TOKENIZE_CHARS = 8192
_TOKENIZE_THREADS = 4

Result = TypeVar("Result")


@dataclass(slots=True)
class Job:
    """A request that will be answered, and what is known of its answer so far."""

    request: ChatRequest
    work: Work
    choices: list[Choice]
    cached_tokens: int | None = None

    @property
    def stages(self) -> Stages:
        """Its times."""
        return self.work.stages

    def usage(self) -> Usage:
        """Tokens up to now."""
        prompt_tokens = len(self.work.prompt.token_ids)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(self.work.prompt.num_image_tokens, self.cached_tokens),
        )

    def image_reports(self) -> list[ImageReport]:
        """Where each image's embedding came from."""
        work = self.work
        return [
            ImageReport(source, length, image.grid)
            for source, length, image in zip(
                work.encode_sources, work.prompt.image_lengths, work.images, strict=True
            )
        ]


@dataclass(slots=True)
class ChatService:
    """Everything that a chat request needs, wired once.

    Attributes:
        model_name: what requests must call the model.
        encode_timeout_s: of one encode call; a slower encoder is given up for another.
    """

    model_name: str
    tokenizer: ModelTokenizer
    prompts: PromptBuilder
    images: ImageReader
    defaults: SamplingDefaults
    encoders: EncoderPool
    decoders: DecoderPool
    metrics: GatewayMetrics
    max_images: int
    request_timeout_s: float
    encode_timeout_s: float = 60.0
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_TOKENIZE_THREADS, "tokenize")
    )

    async def prepare(
        self, request: ChatRequest, request_id: str, stages: Stages, hold: Callable[[int], None]
    ) -> Job:
        """Everything up to the point where work is sent out.

        Args:
            request: already checked field by field.
            request_id: for logs and the other services.
            stages: the request's clock.
            hold: told of bytes that pictures take; may refuse.

        Raises:
            TriptychError: the request cannot be served.
        """
        decoder = self._decoder_for(request)
        conversation = read_conversation(request, self.max_images)
        start = time.monotonic()
        ids = await self._render(conversation, decoder.max_model_len)
        stages.record("tokenize", time.monotonic() - start)
        # Each image is at least a token, and the template holds one placeholder for each.
        resolve_sampling(
            request, self.defaults,
            prompt_tokens=len(ids),
            max_model_len=decoder.max_model_len,
            vocab_size=decoder.vocab_size,
        )  # fmt: skip
        start = time.monotonic()
        images = await self._read_images(conversation, hold)
        if images:
            stages.record("fetch", time.monotonic() - start)
        prompt = self.prompts.expand(ids, [image.grid for image in images])
        sampling = resolve_sampling(
            request, self.defaults,
            prompt_tokens=len(prompt.token_ids),
            max_model_len=decoder.max_model_len,
            vocab_size=decoder.vocab_size,
        )  # fmt: skip
        work = Work(
            request_id, prompt, images, sampling,
            num_choices=request.n or 1,
            cache_salt=(request.cache_salt or "").encode(),
            deadline=stages.arrived + self.request_timeout_s,
            stages=stages,
            wait_for_sources=bool(request.include_stage_times),
            encode_sources=[None] * len(images),
        )  # fmt: skip
        return Job(request, work, [self._choice(request, i) for i in range(work.num_choices)])

    async def answer(
        self, job: Job, forget: Callable[[], None] | None = None
    ) -> AsyncGenerator[list[Update], None]:
        """Runs a job; yields what is new until all choices have a finish reason.

        Args:
            job: as prepared.
            forget: as for `Attempts.events`; given by who shows the client nothing before the end.

        Raises:
            TriptychError: the answer cannot be begun or, after the first update, not be finished.
        """
        attempts = Attempts(
            job.work, self.encoders, self.decoders, self.metrics, self.encode_timeout_s
        )
        started = False

        def begin_anew() -> None:
            nonlocal started
            started = False
            job.cached_tokens = None
            job.choices = [self._choice(job.request, i) for i in range(job.work.num_choices)]
            assert forget is not None
            forget()

        async with aclosing(attempts.events(begin_anew if forget else None)) as batches:
            async for events in batches:
                if not started:
                    started = True
                    job.stages.record("first_token", job.stages.since_arrival())
                updates: list[Update] = []
                for event in events:
                    choice = job.choices[event.choice]
                    if choice.finish_reason is not None:
                        continue
                    if event.start is not None:
                        _note_start(job, event.start)
                    updates.append(choice.feed(event))
                    if choice.finish_reason is not None and event.end is None:
                        attempts.stop(event.choice)
                yield updates
        if any(choice.finish_reason is None for choice in job.choices):
            raise InternalError("an answer ended without a reason")
        job.stages.record("total", job.stages.since_arrival())

    async def tokenize(self, request: ChatRequest, hold: Callable[[int], None]) -> list[int]:
        """Ids of a request's messages, pictures included, as `prepare` would send them.

        Raises:
            TriptychError: the messages do not fit template or context, or a picture is none.
        """
        decoder = self._decoder_for(request)
        conversation = read_conversation(request, self.max_images)
        ids = await self._render(conversation, decoder.max_model_len)
        images = await self._read_images(conversation, hold)
        return self.prompts.expand(ids, [image.grid for image in images]).token_ids.tolist()

    async def tokenize_text(self, text: str) -> list[int]:
        """Ids of plain text.

        Raises:
            TriptychError: it is longer than the model's context.
        """
        decoder = self._decoder()
        self.tokenizer.check_length(text, decoder.max_model_len)
        return await self._off_loop(len(text), lambda: self.tokenizer.encode_text(text))

    def ready(self) -> bool:
        """Whether a decoder and an encoder are there that fit each other."""
        decoder, encoder = self.decoders.description(), self.encoders.description()
        return (
            decoder is not None
            and encoder is not None
            and (decoder.dtype, decoder.num_features, decoder.hidden)
            == (encoder.dtype, encoder.num_features, encoder.hidden)
        )

    async def start(self) -> None:
        """Starts watching the services."""
        await self.encoders.start()
        await self.decoders.start()

    async def close(self) -> None:
        """Ends everything."""
        await self.decoders.close()
        await self.encoders.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound where `name` is not served."""
        if name != self.model_name:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist", param="model")

    def max_model_len(self) -> int | None:
        """The context of the decoders; None without one."""
        found = self.decoders.description()
        return found.max_model_len if found else None

    def _decoder_for(self, request: ChatRequest) -> DecoderDescription:
        self.check_model(request.model)
        return self._decoder()

    def _decoder(self) -> DecoderDescription:
        found = self.decoders.description()
        if found is None:
            raise Unavailable("no decoder is available", retry_after_s=1)
        return found

    async def _render(self, conversation: Conversation, max_tokens: int) -> list[int]:
        size = sum(_text_size(message["content"]) for message in conversation.messages)
        return await self._off_loop(
            size,
            lambda: self.prompts.render(
                conversation.messages, conversation.template_options, max_tokens
            ),
        )

    async def _read_images(
        self, conversation: Conversation, hold: Callable[[int], None]
    ) -> list[Image]:
        encoder = self.encoders.description()
        if conversation.images and encoder is None:
            raise Unavailable("no encoder is available", retry_after_s=1)
        max_patches = encoder.max_image_patches if encoder else 0
        return await self.images.read(conversation.images, hold, max_patches)

    async def _off_loop(self, size: int, call: Callable[[], Result]) -> Result:
        if size <= _INLINE_TOKENIZE_CHARS:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _choice(self, request: ChatRequest, index: int) -> Choice:
        include_stop = bool(request.include_stop_str_in_output)
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        detokenizer = Detokenizer(
            self.tokenizer,
            stops=stops,
            include_stop=include_stop,
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=request.min_tokens or 0,
        )
        return Choice(index, self.tokenizer, detokenizer, include_stop)


def _note_start(job: Job, start: Started) -> None:
    """The first choice to start speaks for the request: the others share its prompt."""
    if job.cached_tokens is None:
        job.cached_tokens = start.num_cached_tokens
        job.stages.record("queue", start.queue_s)
        job.stages.record("prefill", start.prefill_s)
        if job.work.images:
            job.stages.record("transfer", start.transfer_s)


def _text_size(content: str | list[dict[str, str]]) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)


__all__ = ["ChatService", "Job", "Prompt", "Update"]
