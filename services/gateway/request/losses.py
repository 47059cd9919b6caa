"""The pods that have failed one request. No other file counts lost processes.

A *lost* process has died, or has stopped answering. Perhaps the request has killed it, so that each
further pod would die, too. A request is therefore tried on one more pod after a loss, and ends if
that pod is lost as well: two lost decoders or two lost encoders end it. Other failures exclude a
pod from further attempts, but are not counted: the pod has answered with an error, or was lost
before the request was sent.
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
    """Raised when one pod has failed the request, but the request may succeed on another pod.

    Args:
        error: error of the pod.
        pod: name of the pod, which `Losses` excludes from the next attempts.
    """

    def __init__(self, error: TriptychError, service: Service, pod: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.service: Service = service
        self.pod = pod


class Losses:
    """The pods that have failed one request.

    The name of an encoder is its address. The name of a decoder is its session: a decoder that has
    restarted has a new name, so it is not excluded and may be tried again.

    Attributes:
        excluded: names of the pods that have failed, by service.
        num_lost: number of processes that were lost while they had the request, by service.
        refusal: error that says what is wrong with the request. None unless an encoder has found
            such an error.
    """

    def __init__(self) -> None:
        self.excluded: dict[Service, set[str]] = {"encoder": set(), "decoder": set()}
        self._lost: dict[Service, set[str]] = {"encoder": set(), "decoder": set()}
        self.num_lost: Counter[Service] = Counter()
        # For each image or video, as (place in the request, kind): the encoders whose engines ended
        # while they worked on it.
        self._blamed: dict[tuple[str, Kind], set[str]] = {}
        self.refusal: InvalidRequest | None = None
        self._last_error: TriptychError | None = None

    def add(
        self,
        service: Service,
        pod: str,
        error: TriptychError,
        param: str = "",
        kind: Kind = IMAGE,
    ) -> None:
        """Excludes a pod that has failed, and counts its loss if the error is a `ProcessLost`. A
        pod that is reported as lost several times, by several calls, is counted once.

        Args:
            error: error of the pod.
            param: place in the request of the image or video that the pod worked on, such as
                `messages[0].content[1]`. Empty if the pod worked on no image or video.
            kind: kind of the medium at `param`: an image or a video.
        """
        self._last_error = error
        self.excluded[service].add(pod)
        if param and isinstance(error, EngineLost):
            self._blamed.setdefault((param, kind), set()).add(pod)
        if isinstance(error, ProcessLost) and pod not in self._lost[service]:
            self._lost[service].add(pod)
            self.num_lost[service] += 1

    def readmit_encoders(self) -> None:
        """Allows all encoders again, when no other encoder is left to try.

        `num_lost` keeps its value, and counts an encoder that is lost again a second time.
        """
        self.excluded["encoder"].clear()
        self._lost["encoder"].clear()

    def check(self) -> None:
        """Raises an error if the request may not be tried again.

        Raises:
            InvalidRequest: the request itself is at fault.
            InvalidImage, InvalidVideo: the engines of two encoders ended while they worked on the
                image or the video.
            Unavailable: decoders or encoders were lost twice.
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
        if isinstance(error := self._last_error, Overloaded):
            return Overloaded(error.message, retry_after_s=error.retry_after_s or 1)
        return Unavailable("no healthy service is left for this request", retry_after_s=1)
