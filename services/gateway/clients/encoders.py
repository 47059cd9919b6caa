"""The clients of the encoder pods, and what this gateway has sent to each.

`EncodeCalls` assigns a pod to each image and calls the pod, which makes the image's embedding
available. The calls to a pod that is lost fail with `ProcessLost`.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from typing import TypeAlias

import grpc.aio
from google.protobuf.message import Message

from services.common.errors import Cancelled, InternalError, Overloaded, ProcessLost, Unavailable
from services.common.images.image_key import FRAME_DIGEST_BYTES
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import error_from_rpc, outgoing_metadata
from services.gateway.clients.encoder_work import EncoderShares, EncoderWork
from services.gateway.clients.pods import (
    AnswerT,
    Pod,
    PodDialer,
    Pool,
    rank,
    within_bound,
)
from services.gateway.clients.served_model import ServedModel
from services.gateway.tenancy.tenants import Tenant

# Time for the answers of an encoder that has failed a health check.
_LAST_ANSWER_S = 0.5
# A method that takes a serialized message, so that it is serialized once.
Bulk: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[bytes, AnswerT]
_MAX_KEYS = 16384  # keys that are remembered of an encoder, some 3 MB
SOURCES = {n: name[len("SOURCE_") :].lower() for name, n in pb.EncodeResponse.Source.items()}


class EncoderPod(Pod):
    """An encoder pod.

    Attributes:
        description: description of the encoder, without the model's name. Pods with equal
            descriptions are interchangeable. None while the pod is not connected.
        work: work that this gateway has under way at the encoder.
    """

    service = "encoder"
    description: pb.DescribeEncoderResponse | None = None

    def __init__(self, address: str, served: ServedModel, dialer: PodDialer) -> None:
        super().__init__(address, served, dialer)
        self._describe = self.unary(
            "Describe", pb.DescribeEncoderRequest, pb.DescribeEncoderResponse
        )
        self._encode = self.bulk("Encode", pb.EncodeResponse)
        self._probe = self.bulk("Probe", pb.ProbeResponse)
        self._lost = asyncio.Event()
        self.work = EncoderWork()
        # Keys of the units that this gateway has sent here, the least recently used first.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

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
        self._keys.clear()
        self._lost.set()

    def has_sent(self, key: bytes) -> bool:
        """Returns whether this gateway has sent the unit of a key here. The encoder then has the
        embedding, unless it was evicted, or is computing it.
        """
        return key in self._keys

    async def encode(
        self, request: pb.EncodeRequest, timeout_s: float, clip_s: float = 0.0
    ) -> pb.EncodeResponse:
        """Makes a unit's embedding available at this encoder.

        The call carries the running task's request id and trace context.

        Args:
            timeout_s: timeout of the call in seconds.
            clip_s: seconds in which the unit's frames are decoded. 0 if the unit is no clip's.

        Raises:
            ProcessLost: the encoder was lost during the call.
            VideoNotHeld: the encoder no longer has the video's file.
            Unavailable, DeadlineExceeded: the encoder did not answer.
            TriptychError: the encoder answered with an error.
        """
        key, grid = request.image_key, request.grid
        num_patches = math.prod((grid.t, grid.h, grid.w))
        if self.has_sent(key):
            num_patches, clip_s = 0, 0.0  # The encoder looks the embedding up, or is computing it.
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > _MAX_KEYS:
            self._keys.popitem(last=False)
        try:
            answer = await self.call(self._encode, request, timeout_s, num_patches, clip_s)
        except BaseException:
            self._keys.pop(key, None)
            raise
        self.work.patch_s = answer.patch_s or self.work.patch_s
        return answer

    async def probe(self, video: bytes, tenant: Tenant, timeout_s: float) -> pb.ProbeResponse:
        """Sends a tenant's video, which the encoder keeps for a while.

        Returns:
            The video's number of frames, rate, size and the digests of its frames.

        Raises:
            InvalidVideo: the file is no video, or cannot be served.
            TriptychError: see `encode`.
        """
        found = await self.call(
            self._probe,
            # `call` frees the message, a copy of the file, because nothing else refers to it.
            pb.ProbeRequest(video=video, tenant=tenant.queue_name, tenant_weight=tenant.weight),
            timeout_s,
        )
        num_frames = found.num_frames
        if not num_frames or len(found.frame_digests) != num_frames * FRAME_DIGEST_BYTES:
            raise InternalError("an encoder returned no digest for each frame of a video")
        if len(found.key_frames) % 4:
            raise InternalError("an encoder returned key frames that are no int32")
        return found

    def bulk(self, method: str, answer: type[AnswerT]) -> Bulk[AnswerT]:
        """Returns a method for `call`, whose messages may have a file."""
        return self.channel.unary_unary(
            f"/triptych.v1.Encoder/{method}", response_deserializer=answer.FromString
        )

    async def call(
        self,
        method: Bulk[AnswerT],
        request: Message,
        timeout_s: float,
        num_patches: int = 0,
        clip_s: float = 0.0,
    ) -> AnswerT:
        """Calls a method of the encoder. The loss of the encoder ends the call.

        Args:
            timeout_s: timeout of the call in seconds.
            num_patches, clip_s: work of the call, see `EncoderWork.under_way`.

        Raises:
            TriptychError: see `encode`.
        """
        # Serialized once: `ByteSize` takes as long, which is 0.2 s for 60 MB, and nothing else of
        # the gateway runs in that time.
        data = request.SerializeToString()
        num_bytes = len(data)
        call = method(data, timeout=timeout_s, metadata=outgoing_metadata(num_bytes))
        del data, request
        lost = asyncio.ensure_future(self._lost.wait())
        answered: asyncio.Future[AnswerT] = asyncio.ensure_future(call)
        self.num_in_flight += 1
        try:
            with self.work.under_way(num_patches, num_bytes, clip_s):
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

    def description(self, adapter: bytes = b"") -> pb.DescribeEncoderResponse | None:
        """Returns the most frequent description of the healthy encoders. None if no encoder is
        healthy.

        During a rolling update to a new model there are two descriptions. All images of a request
        go to pods of one description.

        Args:
            adapter: digest of an adapter. Descriptions of encoders that have its tower come first.
                Empty for the tower of the base model.
        """
        found = [d for pod in self.healthy() if (d := pod.description)]
        found = [d for d in found if adapter in d.adapters] or found
        if not found:
            return None
        kind_of = pb.DescribeEncoderResponse.SerializeToString
        counts = Counter(map(kind_of, found))
        return max(found, key=lambda d: (counts[kind_of(d)], d.key_prefix))

    def available(
        self, description: pb.DescribeEncoderResponse, exclude: Collection[str]
    ) -> list[EncoderPod]:
        """Returns the healthy encoders of a description. At least one.

        Args:
            exclude: addresses of encoders that must not be chosen.

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
        return pods


def holder_of(pods: Sequence[EncoderPod], key: bytes) -> EncoderPod | None:
    """Returns the encoder that has been sent the unit of a key. None if there is no such encoder,
    or if it is much busier than the mean.
    """
    holders = [pod for pod in pods if pod.has_sent(key)]
    if not holders:
        return None
    calm = [pod for pod in within_bound(pods) if pod in holders]
    return min(calm, key=lambda pod: rank(pod.address, key), default=None)


def for_file(pods: Sequence[EncoderPod], digest: bytes, num_bytes: int) -> EncoderPod:
    """Returns the encoder that probes a video file."""
    unit = 0, num_bytes
    return EncoderShares(pods, [unit], with_clips=True).take(digest, unit)
