"""The encoders: the choice of a pod for an image, and the call that makes its embedding available.

`EncodeCalls` assigns a pod to each image and calls the pod. The calls to a pod that is lost fail
with `ProcessLost`.
"""

import asyncio
from collections import Counter
from collections.abc import Collection

import grpc.aio

from services.common.errors import Cancelled, InternalError, Overloaded, ProcessLost, Unavailable
from services.common.images.image_key import FRAME_DIGEST_BYTES
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import error_from_rpc, outgoing_metadata
from services.gateway.clients.pods import AnswerT, Method, Pod, PodDialer, Pool, RequestT, pick
from services.gateway.clients.served_model import ServedModel
from services.gateway.tenancy.tenants import Tenant

# Time for the answers of an encoder that has failed a health check.
_LAST_ANSWER_S = 0.5
SOURCES = {n: name[len("SOURCE_") :].lower() for name, n in pb.EncodeResponse.Source.items()}


class EncoderPod(Pod):
    """An encoder pod.

    Attributes:
        description: description of the encoder, without the model's name. Pods with equal
            descriptions are interchangeable. None while the pod is not connected.
    """

    service = "encoder"
    description: pb.DescribeEncoderResponse | None = None

    def __init__(self, address: str, served: ServedModel, dialer: PodDialer) -> None:
        super().__init__(address, served, dialer)
        self._describe = self.unary(
            "Describe", pb.DescribeEncoderRequest, pb.DescribeEncoderResponse
        )
        self._encode = self.unary("Encode", pb.EncodeRequest, pb.EncodeResponse)
        self._probe = self.unary("Probe", pb.ProbeRequest, pb.ProbeResponse)
        self._lost = asyncio.Event()

    @property
    def misfit(self) -> str:
        if self.description is None:
            return ""
        return self.served.misfit_of_protocol(self.description.protocol) or (
            self.served.misfit_of(self.description.fingerprint)
        )

    async def connect(self) -> None:
        found = await self.ask(self._describe, pb.DescribeEncoderRequest())
        found.ClearField("model_name")
        self.description = found
        if self._lost.is_set():
            self._lost = asyncio.Event()

    async def disconnect(self, reason: str) -> None:
        self.description = None
        self._lost.set()

    async def encode(self, request: pb.EncodeRequest, timeout_s: float) -> pb.EncodeResponse:
        """Makes a unit's embedding available at this encoder.

        The call carries the running task's request id and trace context.

        Raises:
            ProcessLost: the encoder was lost during the call.
            VideoNotHeld: the encoder no longer has the video's file.
            Unavailable, DeadlineExceeded: the encoder did not answer.
            TriptychError: the encoder answered with an error.
        """
        return await self.call(self._encode, request, timeout_s)

    async def probe(self, video: bytes, tenant: Tenant, timeout_s: float) -> pb.ProbeResponse:
        """Sends a tenant's video, which the encoder keeps for a while.

        Returns:
            The video's number of frames, rate, size and the digests of its frames.

        Raises:
            InvalidVideo: the file is no video, or cannot be served.
            TriptychError: see `encode`.
        """
        request = pb.ProbeRequest(
            video=video, tenant=tenant.queue_name, tenant_weight=tenant.weight
        )
        found = await self.call(self._probe, request, timeout_s)
        num_frames = found.num_frames
        if not num_frames or len(found.frame_digests) != num_frames * FRAME_DIGEST_BYTES:
            raise InternalError("an encoder returned no digest for each frame of a video")
        return found

    async def call(
        self,
        method: Method[RequestT, AnswerT],
        request: RequestT,
        timeout_s: float,
    ) -> AnswerT:
        """Calls a method of the encoder. The loss of the encoder ends the call.

        Raises:
            TriptychError: see `encode`.
        """
        metadata = outgoing_metadata(request.ByteSize())
        call = method(request, timeout=timeout_s, metadata=metadata)
        lost = asyncio.ensure_future(self._lost.wait())
        answered: asyncio.Future[AnswerT] = asyncio.ensure_future(call)
        self.num_in_flight += 1
        try:
            await asyncio.wait((answered, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():  # The answer may say that the engine has ended.
                await asyncio.wait((answered,), timeout=_LAST_ANSWER_S)
            if not answered.done():
                raise ProcessLost("the encoder does not answer")
            return answered.result()
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure, "the encoder")
            if isinstance(error, Cancelled):  # Not by this gateway.
                error = ProcessLost("the encoder was stopped during the call")
            if isinstance(error, Unavailable) and not isinstance(error, Overloaded):
                self.healthy = False  # Until the next health check.
            raise error from None
        finally:
            self.num_in_flight -= 1
            lost.cancel()
            if not answered.done():
                answered.cancel()
                call.cancel()
            elif not answered.cancelled():
                # Marks it as retrieved: asyncio would report it if the caller was cancelled.
                answered.exception()
            # The future refers to its error, whose traceback refers to this frame.
            del answered


class EncoderPool(Pool[EncoderPod]):
    """All encoders. Empty for a model that takes text alone."""

    pod = EncoderPod

    def description(self) -> pb.DescribeEncoderResponse | None:
        """Returns the most frequent description of the healthy encoders. None if no encoder is
        healthy.

        During a rolling update to a new model there are two descriptions. All images of a request
        go to pods of one description.
        """
        found = [d for pod in self.healthy() if (d := pod.description)]
        if not found:
            return None
        kind_of = pb.DescribeEncoderResponse.SerializeToString
        counts = Counter(map(kind_of, found))
        return max(found, key=lambda d: (counts[kind_of(d)], d.key_prefix))

    def choose(
        self,
        description: pb.DescribeEncoderResponse,
        key: bytes,
        exclude: Collection[str],
        preferred: str = "",
    ) -> EncoderPod:
        """Chooses the encoder for an image.

        Args:
            description: description that the encoder has to have.
            key: key of the image. Equal keys get the same encoder; see `pick`.
            exclude: addresses of encoders that must not be chosen.
            preferred: address of the encoder that is chosen if possible. Empty if there is none.

        Raises:
            Unavailable: no encoder is left.
        """
        pods = [
            pod
            for pod in self.healthy()
            if pod.description == description and pod.address not in exclude
        ]
        if not pods:
            raise Unavailable("no encoder is available")
        return next((pod for pod in pods if pod.address == preferred), None) or pick(pods, key)
