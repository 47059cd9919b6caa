"""The service behind the endpoints of search: it runs prompts and returns their vectors or scores.

A prompt of a model for search is a sequence that ends with its last prompt token. `Attempts` runs
it like a chat request's: with the same encoders and decoders, limits, retries and deadlines.
`SearchService` shares these parts with the `ChatService` of the same gateway. All its methods raise
`TriptychError`s.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common.errors import InternalError, InvalidRequest
from services.common.model_spec import ModelSpec, Task
from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.search import SearchFields, text_of
from services.gateway.media.images import Image
from services.gateway.media.videos import Video
from services.gateway.metrics import Timings
from services.gateway.prompts.search_prompts import SearchDraft, SearchPrompts
from services.gateway.request.attempts import Attempts
from services.gateway.request.chat import ChatService
from services.gateway.request.completion import Completion
from services.gateway.request.drafts import MAX_CONTEXTS_TO_CUT
from services.gateway.request.sampling import check_room
from services.gateway.request.shared_media import SharedMedia
from services.gateway.tenancy.slot import Slot

FloatArray = npt.NDArray[np.float32]
# Longer text is tokenized in a thread.
_INLINE_CHARS = 8192


@dataclass(frozen=True, slots=True)
class SearchPrompt:
    """A prompt whose images and videos are loaded, with what it takes of the tenant's limits.

    The tokens of its images are yet to be placed, because a request may have thousands of prompts.

    Attributes:
        draft: tokenized prompt, cut if it was too long.
        images: images in order.
        videos: videos in order.
        num_tokens: number of tokens, with those of images and videos.
        num_pixels: number of pixels of all images and frames after resizing.
    """

    draft: SearchDraft
    images: Sequence[Image]
    videos: Sequence[Video]
    num_tokens: int
    num_pixels: int


@dataclass(frozen=True, slots=True)
class SearchService:
    """The parts of the gateway that serve a model for search.

    Attributes:
        spec: specification of the model.
        chat: service with the clients of encoders and decoders, and the readers of media.
        prompts: maker of the model's prompts.
    """

    spec: ModelSpec
    chat: ChatService
    prompts: SearchPrompts

    @property
    def task(self) -> Task:
        """Task of the model: `embed`, `rank` or `token_embed`."""
        return self.spec.task

    @property
    def takes_images(self) -> bool:
        """True if an input may have images."""
        return self.spec.vision is not None

    @property
    def num_values(self) -> int:
        """Length of a vector, or of a token's vector."""
        search = self.spec.search
        return (search and search.dimensions) or self.spec.text.hidden_size

    async def draft(
        self,
        request: SearchFields,
        chat: ChatRequest,
        instruction: str | None,
        max_document_tokens: int | None = None,
    ) -> SearchDraft:
        """Makes the prompt of an input or of a pair, before its images are loaded.

        Args:
            request: the client's request.
            chat: messages of the prompt, see `SearchPrompts.draft`.
            instruction: task of the search. None for the model's own.
            max_document_tokens: see `SearchPrompts.draft`.

        Raises:
            TriptychError: the messages do not fit the model or its context.
        """
        max_tokens = self.chat.decoder(request.model).max_model_len
        is_cut = request.truncate_prompt_tokens is not None
        text = "".join(map(text_of, chat.messages))
        is_whole = max_document_tokens is None and not is_cut
        most = max_tokens * (1 if is_whole else MAX_CONTEXTS_TO_CUT)
        self.chat.tokenizer.check_length(text, most)
        make, threads = self.prompts.draft, self.chat.drafts.threads
        if len(text) <= _INLINE_CHARS:
            draft = make(chat, instruction, max_document_tokens)
        else:
            draft = await threads.run(make, chat, instruction, max_document_tokens)
        if not is_cut:
            check_room(len(draft.draft.token_ids), max_tokens)
        return draft

    async def draft_of_ids(
        self, request: SearchFields, token_ids: list[int], param: str
    ) -> SearchDraft:
        """Makes the prompt of an input that the client has tokenized.

        Raises:
            TriptychError: the ids do not fit the model or its context.
        """
        decoder = self.chat.decoder(request.model)
        await self.chat.drafts.check_ids(param, token_ids, decoder.vocab_size)
        if self.chat.prompts.has_placeholder(token_ids):
            raise InvalidRequest("the input contains the placeholder of an image", param=param)
        if request.truncate_prompt_tokens is None:
            check_room(len(token_ids), decoder.max_model_len, param)
        return self.prompts.of_ids(token_ids)

    def fit(self, request: SearchFields, draft: SearchDraft, media: SharedMedia) -> SearchPrompt:
        """Cuts a prompt if the request asks for it, and counts its tokens.

        Args:
            media: images and videos of all prompts, which are loaded.

        Raises:
            TriptychError: the prompt is too long.
        """
        prompts, max_tokens = self.chat.prompts, self.chat.decoder(request.model).max_model_len
        images, videos = media.of(draft.draft)
        units = [image.units for image in images]
        num_tokens = prompts.num_tokens(draft.draft, units, videos)
        if (limit := request.truncate_prompt_tokens) is not None:
            excess = num_tokens - (max_tokens - 1 if limit < 0 else limit)
            if excess > 0:
                draft = draft.shortened(excess, self.prompts.placeholders)
                num_tokens -= excess
        check_room(num_tokens, max_tokens)
        num_pixels = prompts.num_pixels(unit for each in (*images, *videos) for unit in each.units)
        return SearchPrompt(draft, images, videos, num_tokens, num_pixels)

    def completion(
        self,
        request: SearchFields,
        chat: ChatRequest,
        prompt: SearchPrompt,
        request_id: str,
        timings: Timings,
        slot: Slot,
    ) -> Completion:
        """Returns a prompt in the form that `run` takes.

        Raises:
            ModelNotFound: the adapter that the request names is no longer served.
        """
        service, images, videos = self.chat, prompt.images, prompt.videos
        expanded = service.prompts.expand(
            prompt.draft.draft, [image.units for image in images], videos
        )
        return Completion(
            request_id=request_id,
            chat=chat,
            prompt=expanded,
            images=[*images, *videos],
            sampling=pb.SamplingParams(
                top_p=1.0,
                repetition_penalty=1.0,
                max_tokens=1,
                # The vectors of the tokens before the last come with the prompt's logprobs.
                prompt_logprobs=0 if self.task == "token_embed" else None,
            ),
            slot=slot,
            answer_format=AnswerFormat(),
            cache_salt=slot.tenant.cache_salt(request.cache_salt or ""),
            adapter=service.adapter(request.model),
            deadline=timings.arrived + service.request_timeout_s,
            timings=timings,
            encode_sources=[None] * len(expanded.runs),
            shares_media=True,
        )

    async def run(self, completion: Completion) -> FloatArray:
        """Runs a prepared prompt on encoders and a decoder.

        Returns:
            `[n]` float32. With `embed`, the hidden state of the last token, not normalized. With
            `rank`, one number, the logit of the answer "yes" minus that of "no". With
            `token_embed`, `[tokens, n]`, the normalized vectors of the prompt's tokens.

        Raises:
            TriptychError: the prompt failed on all pods that it may be tried on.
        """
        service, timings, vector = self.chat, completion.timings, b""
        attempts = Attempts(
            completion,
            service.encoders,
            service.decoders,
            service.metrics,
            service.encode_timeout_s,
        )
        async with aclosing(attempts.events()) as batches:
            async for events in batches:
                for event in events:
                    if event.started is not None:
                        completion.record_start(event.started)
                    vector = event.vector or vector
                    if event.prompt_logprobs:
                        completion.prompt_scores.add(event.prompt_logprobs)
        if not vector:
            raise InternalError("the decoder has ended a sequence without its result")
        timings.record("total", timings.since_arrival())
        if self.task != "token_embed":
            return np.frombuffer(vector, "<f4")
        parts = [part.top_logprobs for part in completion.prompt_scores.parts]
        completion.prompt_scores.parts.clear()
        found = np.frombuffer(b"".join((*parts, vector)), "<f4")
        num_tokens = len(completion.prompt.token_ids)
        if found.size != num_tokens * len(vector) // 4:
            raise InternalError("the decoder has sent vectors of some tokens only")
        if not np.isfinite(found).all():
            raise InternalError("the model's output is not finite")
        return found.reshape(num_tokens, -1)
