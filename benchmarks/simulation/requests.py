"""A simulated request and what became of it."""


class Request:
    """One request.

    Attributes:
        arrival: seconds from the start of the trace.
        kind: which class of the trace it belongs to, an index.
        prompt_tokens: with those of its images.
        images: those to encode, in patches; known images are left out.
        first_token, last_token: times at the client; 0: not yet.
        refused: every pod was full.
        pending_images: not encoded yet.
        computed: prompt tokens whose keys and values are there.
        generated: tokens that a preemption turned into prompt.
        finish_step: the step of its decoder that yields its last token; -1: it holds no row.
    """

    __slots__ = (
        "admission", "arrival", "computed", "finish_step", "first_token", "gateway", "generated",
        "images", "kind", "last_token", "output_tokens", "pending_images", "prompt_tokens",
        "refused",
    )  # fmt: skip

    def __init__(
        self, arrival: float, prompt_tokens: int, output_tokens: int,
        images: tuple[int, ...] = (), kind: int = 0,
    ) -> None:  # fmt: skip
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.images = images
        self.kind = kind
        self.first_token = 0.0
        self.last_token = 0.0
        self.refused = False
        self.pending_images = len(images)
        self.computed = 0
        self.generated = 0
        self.finish_step = -1
        self.admission = 0
        self.gateway = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 for one token."""
        gaps = self.output_tokens - 1
        return (self.last_token - self.first_token) / gaps if gaps else 0.0
