"""The pods that have failed one request: the one place where lost processes are counted.

What was in work when a process died may be why it died. So it is tried once more, on another pod:
a request ends with the second decoder, or the second encoder, that is lost with it. Pods that fail
without dying, or before they were sent anything, are excluded and not counted.
"""

from collections import Counter
from typing import Literal

from services.common.errors import (
    EngineLost,
    InvalidRequest,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
)
from services.gateway.media.kinds import IMAGE, Kind

Service = Literal["encoder", "decoder"]
MAX_LOST = 2


class RetryableFailure(Exception):
    """A failure that another pod may not have."""

    def __init__(self, error: TriptychError, service: Service, pod: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.service: Service = service
        self.pod = pod  # to be excluded


class Losses:
    """Of one request. Encoders are named by address, decoders by session: one that has restarted
    may be the only one.

    Attributes:
        excluded: that have failed.
        num_lost: that were lost with the request.
        refusal: the request itself is at fault.
    """

    def __init__(self) -> None:
        self.excluded: dict[Service, set[str]] = {"encoder": set(), "decoder": set()}
        self._lost: dict[Service, set[str]] = {"encoder": set(), "decoder": set()}
        self.num_lost: Counter[Service] = Counter()
        # Encoders lost while it was in work, by `Image.param`.
        self._blamed: dict[tuple[str, Kind], set[str]] = {}
        self.refusal: InvalidRequest | None = None
        self._cause: TriptychError | None = None  # of the last failure

    def add(
        self,
        service: Service,
        pod: str,
        error: TriptychError,
        param: str = "",
        kind: Kind = IMAGE,
    ) -> None:
        """Excludes a pod that has failed; counts it if it was lost, however often that is said.

        Args:
            param, kind: of the image or the video that was the work, if it was one.
        """
        self._cause = error
        self.excluded[service].add(pod)
        if param and isinstance(error, EngineLost):
            self._blamed.setdefault((param, kind), set()).add(pod)
        if isinstance(error, ProcessLost) and pod not in self._lost[service]:
            self._lost[service].add(pod)
            self.num_lost[service] += 1

    def readmit_encoders(self) -> None:
        """They may be tried again; those that were lost stay counted."""
        self.excluded["encoder"].clear()
        self._lost["encoder"].clear()

    def check(self) -> None:
        """Raises if the request may not be tried again.

        Raises:
            InvalidImage, InvalidVideo: two encoders say that their engines ended while they worked
                on it.
            Unavailable: two decoders or two encoders were lost.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.num_lost["encoder"] >= MAX_LOST:
            for (param, kind), pods in self._blamed.items():
                if len(pods) >= MAX_LOST:
                    message = f"two encoders ended while they worked on the {kind.noun}"
                    raise kind.error(message, param=param)
        for service, num_lost in self.num_lost.items():
            if num_lost >= MAX_LOST:
                message = f"two {service}s were lost while they had the request"
                raise Unavailable(message, retry_after_s=1)

    def no_pod_left(self) -> TriptychError:
        """The error of a request that no pod is left for."""
        if isinstance(self._cause, Overloaded):
            return Overloaded(self._cause.message, retry_after_s=self._cause.retry_after_s or 1)
        return Unavailable("no healthy service is left for this request", retry_after_s=1)
