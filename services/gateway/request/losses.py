"""The pods that have failed one request. This is the only place that counts lost processes.

A process may die because of the request that it works on. The request is therefore tried only once
more on another pod: it ends when a second decoder, or a second encoder, is lost while working on
it. Pods that fail without dying are excluded from further attempts, but are not counted. The same
holds for pods that were lost before the request was sent to them.
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
    """A failure of one pod. The request may succeed on another pod.

    Args:
        error: error of the pod.
        pod: name of the pod, which is excluded from the next attempts; see `Losses`.
    """

    def __init__(self, error: TriptychError, service: Service, pod: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.service: Service = service
        self.pod = pod


class Losses:
    """The pods that have failed one request.

    Encoders are named by address. Decoders are named by session, so that a decoder that has
    restarted, which may be the only decoder, can be tried again.

    Attributes:
        excluded: names of the pods that have failed, by service.
        num_lost: number of processes that were lost while they had the request, by service.
        refusal: error of the request if a pod has found the request itself at fault. None if no pod
            has.
    """

    def __init__(self) -> None:
        self.excluded: dict[Service, set[str]] = {"encoder": set(), "decoder": set()}
        self._lost: dict[Service, set[str]] = {"encoder": set(), "decoder": set()}
        self.num_lost: Counter[Service] = Counter()
        # (place in the request, kind) of an image or video -> encoders whose engines ended while
        # they worked on it.
        self._blamed: dict[tuple[str, Kind], set[str]] = {}
        self.refusal: InvalidRequest | None = None
        self._cause: TriptychError | None = None  # error of the last failure

    def add(
        self,
        service: Service,
        pod: str,
        error: TriptychError,
        param: str = "",
        kind: Kind = IMAGE,
    ) -> None:
        """Excludes a pod that has failed. A lost pod is counted once, even if several calls to the
        pod report the loss.

        Args:
            error: error of the pod. `ProcessLost` counts as a loss.
            param: place in the request of the image or video that the pod worked on. Empty if the
                pod did not work on any.
            kind: kind of the medium at `param`.
        """
        self._cause = error
        self.excluded[service].add(pod)
        if param and isinstance(error, EngineLost):
            self._blamed.setdefault((param, kind), set()).add(pod)
        if isinstance(error, ProcessLost) and pod not in self._lost[service]:
            self._lost[service].add(pod)
            self.num_lost[service] += 1

    def readmit_encoders(self) -> None:
        """Allows all encoders again, because the only encoder is to be tried a second time.

        The losses so far stay counted. An encoder that is lost after this call counts once more.
        """
        self.excluded["encoder"].clear()
        self._lost["encoder"].clear()

    def check(self) -> None:
        """Raises an error if the request may not be tried again.

        Raises:
            InvalidRequest: the request itself is at fault.
            InvalidImage, InvalidVideo: the engines of two encoders ended while they worked on the
                image or the video.
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
        """Returns the error of a request for which no pod is left."""
        if isinstance(self._cause, Overloaded):
            return Overloaded(self._cause.message, retry_after_s=self._cause.retry_after_s or 1)
        return Unavailable("no healthy service is left for this request", retry_after_s=1)
