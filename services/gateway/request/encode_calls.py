"""The encode calls of one request: which encoder has each unit of its images, and what came of it.

A call belongs to the request and not to an attempt: it goes on while another decoder is tried, and
its end is always heard, so that a lost encoder is counted whichever message comes first.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ProcessLost,
    TriptychError,
    Unavailable,
    VideoNotHeld,
)
from services.common.geometry import Run
from services.common.pb import decoder_pb2 as pb
from services.common.pb.encoder_pb2 import DescribeEncoderResponse, EncodeResponse
from services.gateway.clients.decoders import EmbeddingLost
from services.gateway.clients.encoders import SOURCES, EncoderPod, EncoderPool
from services.gateway.media.kinds import VIDEO
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.completion import Completion, Medium
from services.gateway.request.losses import Losses, RetryableFailure

# For the end of a call to an encoder that a decoder, or another call, has found lost. A front whose
# engine has ended answers at once.
VERDICT_S = 3.0
# How many times as long as an image's call a video's may take.
_VIDEO_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class _Call:
    address: str
    task: asyncio.Task[None]


@dataclass(slots=True)
class EncodeCalls:
    """All encode calls of a request.

    Attributes:
        losses: of the request; failed calls are added.
        report: called with each call's failure, `InvalidRequest` if the image is at fault.
        timeout_s: of a call; a slower encoder counts as lost.
        keys: of each run of the prompt, for the encoders of the latest attempt.
    """

    request: Completion
    encoders: EncoderPool
    losses: Losses
    report: Callable[[RetryableFailure | InvalidRequest], None]
    metrics: GatewayMetrics
    timeout_s: float
    keys: list[bytes] = field(default_factory=list[bytes])
    # Under way, by image key.
    _calls: dict[bytes, _Call] = field(default_factory=dict[bytes, _Call])
    # Image key -> address of the encoder that has it.
    _encoded: dict[bytes, str] = field(default_factory=dict[bytes, str])
    # For all units of a file, by `Run.image`.
    _of_videos: dict[int, EncoderPod] = field(default_factory=dict[int, EncoderPod])
    _may_readmit: bool = False

    async def assign(self) -> list[pb.ImageRef]:
        """Assigns an encoder to each unit and starts the calls that are missing, at most one per
        distinct key.

        Raises:
            TriptychError: no encoder is left.
        """
        request, runs = self.request, self.request.prompt.runs
        if not runs:
            return []
        description = self.encoders.description()
        if description is None:
            raise self.losses.no_pod_left()
        prefix, salt = description.key_prefix, request.cache_salt
        self.keys = [await request.images[run.image].key(prefix, run.unit, salt) for run in runs]
        self._of_videos.clear()
        addresses: dict[bytes, str] = {}
        for index, key in enumerate(self.keys):
            if key in addresses:
                continue
            if (call := self._calls.get(key)) is not None:
                addresses[key] = call.address
                continue
            pod = self._choose(description, key, runs[index].image)
            addresses[key] = pod.address
            if self._encoded.get(key) != pod.address:
                self._encoded.pop(key, None)
                task = asyncio.create_task(self._encode(key, pod, index))
                self._calls[key] = _Call(pod.address, task)
        return [
            pb.ImageRef(
                image_key=key,
                offset=run.offset,
                num_tokens=run.num_tokens,
                encoder_address=addresses[key],
            )
            for key, run in zip(self.keys, runs, strict=True)
        ]

    async def hear(self, address: str) -> bool:
        """Waits, for a while, until the calls to an encoder that was lost have ended, so that each
        adds to the losses; gives up the others.

        Returns:
            Whether all have ended.
        """
        calls = {key: call for key, call in self._calls.items() if call.address == address}
        if calls:
            await asyncio.wait([call.task for call in calls.values()], timeout=VERDICT_S)
        late = [key for key in calls if key in self._calls]
        for key in late:
            self._calls.pop(key).task.cancel()
        return not late

    async def not_delivered(self, lost: EmbeddingLost) -> None:
        """A decoder could not get an embedding. The encoder's own answer counts, if there is one:
        it may have said that its engine has ended, or that it is full. Else it is lost: it may have
        ended while it worked on the image once more, for the decoder.
        """
        address = lost.encoder_address
        have_ended = await self.hear(address)
        if address not in self.losses.excluded["encoder"]:
            self._may_readmit = have_ended and address in self._encoded.values()
            self.losses.add("encoder", address, ProcessLost(lost.message))
        # That encoder must be called again for all its images.
        self._encoded = {k: a for k, a in self._encoded.items() if address and a != address}

    async def finish(self, timeout_s: float) -> None:
        """Waits for calls that are under way, briefly."""
        if self._calls:
            await asyncio.wait([call.task for call in self._calls.values()], timeout=timeout_s)

    def close(self) -> None:
        for call in self._calls.values():
            call.task.cancel()
        self._calls.clear()
        for medium in self.request.images:
            if medium.file is not None:
                medium.file.close()

    def _choose(self, description: DescribeEncoderResponse, key: bytes, index: int) -> EncoderPod:
        medium = self.request.images[index]
        if medium.file is None:
            return self._choose_for(description, key, self._encoded.get(key, ""))
        # One encoder decodes a file, in one pass: that which was asked what is in it.
        pod = self._of_videos.get(index)
        if pod is None:
            pod = self._choose_for(description, medium.file.digest, medium.address)
            self._of_videos[index] = pod
        return pod

    def _choose_for(
        self, description: DescribeEncoderResponse, key: bytes, preferred: str
    ) -> EncoderPod:
        losses = self.losses
        # With one encoder lost, all further images go to one encoder: which of them was at fault is
        # unknown, and another loss is the last.
        place = self.keys[0] if losses.num_lost["encoder"] else key
        try:
            return self.encoders.choose(description, place, losses.excluded["encoder"], preferred)
        except Unavailable:
            if not self._may_readmit:
                raise losses.no_pod_left() from None
        # The only encoder evicted an embedding before the decoder fetched it: try it once more.
        self._may_readmit = False
        losses.readmit_encoders()
        return self._choose_for(description, key, preferred)

    async def _encode(self, key: bytes, pod: EncoderPod, index: int) -> None:
        request, run = self.request, self.request.prompt.runs[index]
        image = request.images[run.image]
        outcome = await self._outcome(pod, key, image, run)
        del self._calls[key]
        if isinstance(outcome, EncodeResponse):
            self._encoded[key] = pod.address
            source = SOURCES.get(outcome.source, "unknown")
            self.metrics.encodes.labels(source).inc()
            for other_index, other in enumerate(self.keys):
                if other == key:
                    request.encode_sources[other_index] = source
        elif isinstance(outcome, InvalidRequest):
            outcome.param = image.param
            self.losses.refusal = outcome
            self.report(outcome)
        else:
            self.losses.add("encoder", pod.address, outcome, image.param, image.kind)
            self._give_up_video(run.image, pod.address)
            self.report(RetryableFailure(outcome, "encoder", pod.address))

    def _give_up_video(self, index: int, address: str) -> None:
        """The other calls for a file's units fail as one has: they say nothing new."""
        medium = self.request.images[index]
        if medium.file is None:
            return
        of_video = {
            self.keys[i] for i, r in enumerate(self.request.prompt.runs) if r.image == index
        }
        for key in of_video & self._calls.keys():
            if self._calls[key].address == address:
                self._calls.pop(key).task.cancel()

    async def _outcome(
        self, pod: EncoderPod, key: bytes, image: Medium, run: Run
    ) -> EncodeResponse | TriptychError:
        """Of one call."""
        request = self.request
        # A video's units are decoded one after the other.
        limit_s = self.timeout_s * (_VIDEO_PATIENCE if image.kind is VIDEO else 1)
        timeout_s = min(limit_s, request.remaining_s())
        attributes = {"encoder": pod.address, "patches": run.unit.num_patches}
        try:
            with request.timings.measure("encode", span_name="encode call", **attributes):
                done = await self._call(pod, key, image, run, timeout_s)
        except DeadlineExceeded as error:
            if timeout_s < limit_s:
                return error.without_frames()  # the request's own deadline
            return ProcessLost("the encoder did not answer in time")
        except TriptychError as error:
            return error.without_frames()
        if done.num_tokens != run.num_tokens:
            return InternalError("an encoder returned an embedding of the wrong size")
        return done

    async def _call(
        self, pod: EncoderPod, key: bytes, image: Medium, run: Run, timeout_s: float
    ) -> EncodeResponse:
        """Sends a video's file before, if the encoder has not been sent it, or has forgotten it."""
        request, tenant = image.sent(run.unit), self.request.slot.tenant
        request.image_key, request.cache_salt = key, self.request.cache_salt
        request.grid.t, request.grid.h, request.grid.w = run.unit.grid
        request.tenant, request.tenant_weight = tenant.name, tenant.weight
        sent = await image.file.leave_at(pod, timeout_s) if image.file else None
        try:
            return await pod.encode(request, timeout_s)
        except VideoNotHeld:
            if image.file is None:
                raise
            await image.file.leave_at(pod, timeout_s, again=sent)
            return await pod.encode(request, timeout_s)
