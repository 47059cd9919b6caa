"""Where a request's time went, measured with one clock of this process and the decoder's own."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stages:
    """Seconds per stage of one request; a stage that did not run is absent.

    `fetch` (pictures to bytes and headers) and `tokenize` run in the gateway; `encode` is the
    longest encode call; `queue`, `transfer` and `prefill` are the decoder's; `first_token` and
    `total` count from the request's arrival.
    """

    arrived: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def since_arrival(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self.arrived

    def record(self, stage: str, seconds: float) -> None:
        """Notes a stage; of several, the longest counts."""
        self.seconds[stage] = max(seconds, self.seconds.get(stage, 0.0))

    def milliseconds(self) -> dict[str, float]:
        """For the response."""
        return {stage: round(seconds * 1e3, 3) for stage, seconds in self.seconds.items()}
