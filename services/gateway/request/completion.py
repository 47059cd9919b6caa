"""A prepared request, which `ChatService.prepare` makes and `Attempts` runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.errors import (
    ContextLengthExceeded,
    InvalidGrammar,
    NoTokenAllowed,
    TriptychError,
)
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
    request_metrics,
)
from services.gateway.media.images import Image
from services.gateway.media.videos import Video
from services.gateway.metrics import Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.tenancy.slot import Slot

Medium = Image | Video

# Events of an answer that nobody reads before its end, per turn of the event loop.
_PORTION = 32


@dataclass(slots=True)
class Completion:
    """A valid request that is ready for the services, and the state of its answer.

    Attributes:
        request_id: id of the request in logs and traces.
        chat: request in the form of the chat API, whatever the endpoint.
        prompt: prompt for the decoder.
        images: images in order, followed by the videos in order.
        sampling: sampling parameters of the first choice.
        slot: admission slot of the request. Its memory also counts the part of the answer that
            waits for the client.
        answer_format: format of the answers, and the grammar that they follow.
        cache_salt: salt of the tenant and the request, for cached prefixes and image keys.
        adapter: the adapter that answers. Its digest is empty for the base model alone.
        deadline: time of the monotonic clock at which the request fails.
        timings: times of the request's stages.
        encode_sources: origin of the embedding of each run of the prompt: the `Source` of its
            EncodeResponse in lower case. None until the encoder has answered.
        choices: choices of the answer, which turn tokens into text.
        ignored: fields of the request that change no answer of this model.
        cached_tokens: number of prompt tokens found in the prefix cache. None until the first
            token.
        prompt_scores: log probabilities of the prompt's tokens.
        prediction: int32 ids of the request's prediction. Empty if there is none.
        predicted: numbers of accepted and rejected tokens of the prediction so far.
        sent_whole: True if the answer is sent when it is complete.
        was_submitted: True if a decoder was sent a sequence. Before that, no tokens are used.
        shares_media: True if other completions of the request have the same images and videos. The
            files of the videos are then closed at the end of the request.
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
    adapter: pb.Adapter = field(default_factory=pb.Adapter)
    ignored: Sequence[str] = ()
    cached_tokens: int | None = None
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    prediction: bytes = b""
    predicted: tuple[int, int] = 0, 0
    sent_whole: bool = False
    was_submitted: bool = False
    shares_media: bool = False

    @property
    def portion(self) -> int:
        """Number of events that are read at a time. It is 1 if somebody waits for each token, or if
        the text of a choice may end it before the decoder does.
        """
        found = self.answer_format
        depends_on_text = bool(self.chat.stop) or found.calls is not None or found.thinks
        return _PORTION if self.sent_whole and not depends_on_text else 1

    def remaining_s(self) -> float:
        """Returns the time in seconds to the deadline. Always positive, for use as a timeout."""
        return max(self.deadline - time.monotonic(), 0.001)

    def param_of(self, error: TriptychError) -> str | None:
        """Returns the field of the chat request that an error of a decoder is about. None if the
        error is not about a field of the client's.
        """
        grammar, sampling = self.answer_format.grammar_param, self.sampling
        if isinstance(error, ContextLengthExceeded):
            return "messages"
        if isinstance(error, InvalidGrammar):
            return grammar
        if isinstance(error, NoTokenAllowed):
            # A grammar alone rarely forbids everything, so the other constraints come first.
            if sampling.allowed_token_ids:
                return "allowed_token_ids"
            return "bad_words" if sampling.bad_words else grammar
        return None

    def record_start(self, started: pb.Started) -> None:
        """Records how the first choice reached its first token. The other choices share its prompt
        and are not recorded.
        """
        if self.cached_tokens is None:
            self.cached_tokens = started.num_cached_tokens
            self.timings.record("queue", started.queue_s)
            self.timings.record("prefill", started.prefill_s)
            if self.images:
                self.timings.record("transfer", started.transfer_s)

    def record_predicted(self, accepted: int, rejected: int) -> None:
        """Adds tokens of the prediction that were accepted and rejected."""
        self.predicted = self.predicted[0] + accepted, self.predicted[1] + rejected

    @property
    def has_ended(self) -> bool:
        """True if all choices have a finish reason."""
        return all([choice.finish_reason for choice in self.choices])

    def usage(self) -> Usage:
        """Returns the numbers of tokens of the prompt and of the answer so far."""
        prompt = self.prompt
        prompt_tokens = len(prompt.token_ids)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        details = PromptTokensDetails(prompt.num_image_tokens, self.cached_tokens)
        if videos := [each.usage for each in self.images if isinstance(each, Video)]:
            details.videos = videos
            details.video_tokens = sum(video.tokens for video in videos)
        total_tokens = prompt_tokens + completion_tokens
        usage = Usage(prompt_tokens, completion_tokens, total_tokens, details)
        thinks, is_predicted = self.answer_format.reasoning is not None, self.chat.prediction
        if thinks or is_predicted is not None:
            reasoning_tokens = sum(choice.num_reasoning_tokens for choice in self.choices)
            found = CompletionTokensDetails(reasoning_tokens)
            if is_predicted is not None:
                found.accepted_prediction_tokens, found.rejected_prediction_tokens = self.predicted
            usage.completion_tokens_details = found
        return usage

    def stage_times(self) -> dict[str, object]:
        """Returns the answer's fields for `include_stage_times`; empty if the request does not ask
        for them.
        """
        if not self.chat.include_stage_times:
            return {}
        times_ms, num_tokens = self.timings.milliseconds(), sum(c.num_tokens for c in self.choices)
        return {
            "stage_times_ms": times_ms,
            "images": self.image_reports(),
            "metrics": request_metrics(times_ms, num_tokens, len(self.choices)),
        }

    def prompt_token_ids(self) -> list[int]:
        """Returns the token ids of the prompt, including all tokens of images."""
        return self.prompt.token_ids.tolist()

    def image_reports(self) -> list[ImageReport]:
        """Returns the origin of each unit's embedding, with its number of tokens and its grid."""
        runs = self.prompt.runs
        return [
            ImageReport(source, run.num_tokens, run.unit.grid)
            for source, run in zip(self.encode_sources, runs, strict=True)
        ]
