"""What `ChatService.prepare` makes of a request, `Attempts` carries out, and endpoints answer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat
from services.gateway.answers.detokenizer import Choice
from services.gateway.answers.prompt_logprobs import PromptScores
from services.gateway.forms.openai import ChatRequest
from services.gateway.forms.responses import (
    CompletionTokensDetails,
    ImageReport,
    PromptTokensDetails,
    Usage,
)
from services.gateway.media.images import Image
from services.gateway.media.videos import Video
from services.gateway.metrics import Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.tenancy.slot import Slot

Medium = Image | Video


@dataclass(slots=True)
class Completion:
    """A valid request, ready for the services, and what has come of it.

    Attributes:
        images: in order, and videos behind them.
        sampling: of the first choice.
        slot: counts memory that the answer takes while it waits for the client, too.
        cache_salt: of the tenant and the request.
        deadline: on the monotonic clock.
        encode_sources: per run of the prompt, the `Source` of its EncodeResponse in lower case;
            None: unknown.
        ignored: fields that change no answer of this model.
        cached_tokens: prompt tokens found in the prefix cache; None until the decoder has said.
    """

    request_id: str
    chat: ChatRequest
    prompt: Prompt
    images: Sequence[Medium]
    sampling: pb.SamplingParams
    slot: Slot
    answer_format: AnswerFormat
    cache_salt: bytes
    deadline: float
    timings: Timings
    encode_sources: list[str | None]
    choices: Sequence[Choice] = ()
    ignored: Sequence[str] = ()
    cached_tokens: int | None = None
    prompt_scores: PromptScores = field(default_factory=PromptScores)

    def remaining_s(self) -> float:
        """Time left; always positive, so that it can be a timeout."""
        return max(self.deadline - time.monotonic(), 0.001)

    def record_start(self, started: pb.Started) -> None:
        """Records how the first choice reached its first token; the others share its prompt."""
        if self.cached_tokens is None:
            self.cached_tokens = started.num_cached_tokens
            self.timings.record("queue", started.queue_s)
            self.timings.record("prefill", started.prefill_s)
            if self.images:
                self.timings.record("transfer", started.transfer_s)

    def usage(self) -> Usage:
        """Tokens up to now."""
        prompt = self.prompt
        prompt_tokens = len(prompt.token_ids)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        details = PromptTokensDetails(prompt.num_image_tokens, self.cached_tokens)
        if videos := [each.usage for each in self.images if isinstance(each, Video)]:
            details.videos = videos
            details.video_tokens = sum(video.tokens for video in videos)
        total_tokens = prompt_tokens + completion_tokens
        usage = Usage(prompt_tokens, completion_tokens, total_tokens, details)
        if self.answer_format.reasoning is not None:
            reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self.choices)
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
        return usage

    def prompt_token_ids(self) -> list[int]:
        """With all tokens of images."""
        return self.prompt.token_ids.tolist()

    def image_reports(self) -> list[ImageReport]:
        """Where each unit's embedding came from."""
        runs = self.prompt.runs
        return [
            ImageReport(source, run.num_tokens, run.unit.grid)
            for source, run in zip(self.encode_sources, runs, strict=True)
        ]
