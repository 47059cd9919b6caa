"""What `ChatService.prepare` makes of a request, and `Attempts` carries out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.pb import decoder_pb2 as pb
from services.gateway.media.images import Image, uncounted
from services.gateway.media.videos import Video
from services.gateway.metrics import Timings
from services.gateway.prompts.prompt import Prompt
from services.gateway.slot import Tenant

Medium = Image | Video


@dataclass(slots=True)
class PreparedRequest:
    """A valid request, ready for the services.

    Attributes:
        images: in order, and videos behind them.
        sampling: of the first choice.
        cache_salt: of the tenant and the request.
        deadline: on the monotonic clock.
        grammar: what the answer has to be; None: any text.
        grammar_param: the field that an error of the grammar names.
        priority: lower ones run first.
        hold: counts memory that the answer takes while it waits for the client; may refuse.
        wait_for_sources: the response has `encode_sources`, so wait briefly for late encode calls.
        encode_sources: per run of the prompt, the `Source` of its EncodeResponse in lower case;
            None: unknown.
    """

    request_id: str
    prompt: Prompt
    images: Sequence[Medium]
    sampling: pb.SamplingParams
    num_choices: int
    tenant: Tenant
    cache_salt: bytes
    deadline: float
    timings: Timings
    hold: Callable[[int], None] = uncounted
    grammar: pb.Grammar | None = None
    grammar_param: str | None = None
    priority: int = 0
    wait_for_sources: bool = False
    encode_sources: list[str | None] = field(default_factory=list[str | None])

    def remaining_s(self) -> float:
        """Time left; always positive, so that it can be a timeout."""
        return max(self.deadline - time.monotonic(), 0.001)
