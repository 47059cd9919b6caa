"""What `ChatService.prepare` makes of a request, and `Attempts` carries out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pb import decoder_pb2 as pb
from services.gateway.answers.answer import AnswerFormat
from services.gateway.forms.openai import ChatRequest
from services.gateway.media.images import Image
from services.gateway.media.videos import Video
from services.gateway.metrics import Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.slot import Slot

Medium = Image | Video


@dataclass(slots=True)
class PreparedRequest:
    """A valid request, ready for the services.

    Attributes:
        images: in order, and videos behind them.
        sampling: of the first choice.
        slot: counts memory that the answer takes while it waits for the client, too.
        cache_salt: of the tenant and the request.
        deadline: on the monotonic clock.
        encode_sources: per run of the prompt, the `Source` of its EncodeResponse in lower case;
            None: unknown.
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

    def remaining_s(self) -> float:
        """Time left; always positive, so that it can be a timeout."""
        return max(self.deadline - time.monotonic(), 0.001)
