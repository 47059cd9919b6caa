"""The encode calls of one request: the encoder of each unit of its images, and each call's outcome.

A call belongs to the request and not to an attempt: the call continues while another decoder is
tried. Its outcome is always recorded, so that a lost encoder counts even if a decoder has reported
the loss first.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    ProcessLost,
    TriptychError,
    Unavailable,
    VideoNotHeld,
)
from services.common.geometry import Run
from services.common.images.image_key import adapted_salt
from services.common.pb import decoder_pb2 as pb
from services.common.pb.encoder_pb2 import DescribeEncoderResponse, EncodeResponse
from services.gateway.bounds import MEMORY_PER_CALLED_BYTE
from services.gateway.clients.encoder_work import EncoderShares
from services.gateway.clients.encoders import (
    SOURCES,
    EncoderPod,
    EncoderPool,
    for_file,
    holder_of,
)
from services.gateway.clients.pods import pick, rank
from services.gateway.clients.sent_prompts import Coming
from services.gateway.clients.token_event import EmbeddingLost
from services.gateway.media.kinds import VIDEO
from services.gateway.media.videos import Video
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.completion import Completion, Medium
from services.gateway.request.losses import Losses, RetryableFailure
from services.gateway.request.mailbox import Mailbox

log = logging.getLogger(__name__)

# Time to wait for the outcome of calls to an encoder that a decoder, or another call, has found
# lost. An encoder whose engine has ended answers its calls at once.
OUTCOME_TIMEOUT_S = 3.0
# Timeout of a call for a unit of a video, as a multiple of the timeout for an image.
_VIDEO_TIMEOUT_FACTOR = 4
# Number of a request's calls that begin in one iteration of the event loop. gRPC sends them in the
# next iteration, so that encoders begin with the first calls while the others are prepared.
_CALLS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class _Call:
    address: str
    task: asyncio.Task[None]


@dataclass(slots=True)
class EncodeCalls:
    """All encode calls of a request.

    Attributes:
        losses: pods that have failed the request. Failed calls are added.
        mailbox: receiver of each call's failure, which is an `InvalidRequest` if the image is at
            fault.
        timeout_s: timeout of a call in seconds. An encoder that does not answer in time counts as
            lost.
        outcome_timeout_s: time in seconds to wait for the outcome of calls to a lost encoder.
        keys: image key of each run of the prompt, for the encoders of the latest attempt.
        coming: tokens of the prompt whose embeddings are not encoded yet.
    """

    request: Completion
    encoders: EncoderPool
    losses: Losses
    mailbox: Mailbox
    metrics: GatewayMetrics
    timeout_s: float
    outcome_timeout_s: float = OUTCOME_TIMEOUT_S
    keys: list[bytes] = field(default_factory=list[bytes])
    coming: Coming = field(default_factory=Coming)
    # Image key -> the running call.
    _calls: dict[bytes, _Call] = field(default_factory=dict[bytes, _Call])
    # Image key -> address of the encoder that has encoded the unit.
    _encoded: dict[bytes, str] = field(default_factory=dict[bytes, str])
    # Digest of the request's adapter if it changes the vision tower, otherwise empty.
    _adapter: bytes = b""
    # Whether the only encoder may be tried again, because it has evicted an embedding.
    _may_retry_evicted: bool = False

    async def assign(self) -> list[pb.ImageRef]:
        """Assigns an encoder to each unit and starts the missing calls, one per distinct image key.

        Returns:
            The references to the embeddings for the decoder, in order of the prompt's runs.

        Raises:
            TriptychError: no encoder is left.
        """
        request, runs = self.request, self.request.prompt.runs
        if not runs:
            return []
        self._adapter = request.adapter.digest if request.adapter.adapts_tower else b""
        description = self.encoders.description(self._adapter)
        if description is None:
            raise self.losses.no_pod_left()
        if self._adapter and self._adapter not in description.adapters:
            raise Unavailable(
                f"no encoder has the vision tower of the adapter {request.adapter.name} "
                "(ENCODER_ADAPTERS)",
                retry_after_s=1,
            )
        prefix, salt = description.key_prefix, adapted_salt(request.cache_salt, self._adapter)
        self.keys = [await request.images[run.image].key(prefix, run.unit, salt) for run in runs]
        addresses = {key: call.address for key, call in self._calls.items()}
        missing: dict[bytes, int] = {}  # first run of each key that has no running call
        for index, key in enumerate(self.keys):
            if key not in addresses:
                missing.setdefault(key, index)
        chosen = self._choose(description, missing) if missing else {}
        for number, (key, pod) in enumerate(chosen.items()):
            addresses[key] = pod.address
            if self._encoded.get(key) != pod.address:
                self._encoded.pop(key, None)
                turns = number // _CALLS_AT_ONCE
                task = asyncio.create_task(self._encode(key, pod, missing[key], turns))
                self._calls[key] = _Call(pod.address, task)
        self.coming.num_tokens = sum(
            run.num_tokens for key, run in zip(self.keys, runs, strict=True) if key in self._calls
        )
        # The first calls are sent before the prompt, whose decoder waits for them.
        await asyncio.sleep(0)
        return [
            pb.ImageRef(
                image_key=key,
                offset=run.offset,
                num_tokens=run.num_tokens,
                encoder_address=addresses[key],
            )
            for key, run in zip(self.keys, runs, strict=True)
        ]

    async def await_outcomes(self, address: str) -> bool:
        """Waits until the calls to a lost encoder have ended, so that `losses` counts each of them.
        Cancels the calls that have not ended after `outcome_timeout_s`.

        Returns:
            Whether all calls have ended in time.
        """
        calls = {key: call for key, call in self._calls.items() if call.address == address}
        if calls:
            await asyncio.wait(
                [call.task for call in calls.values()], timeout=self.outcome_timeout_s
            )
        late = [key for key in calls if key in self._calls]
        for key in late:
            self._calls.pop(key).task.cancel()
        return not late

    async def record_undelivered(self, lost: EmbeddingLost) -> None:
        """Records that a decoder could not get an embedding from an encoder.

        If the encoder has answered its encode call with an error, that error counts: its engine may
        have ended, or it may be full. Otherwise the encoder counts as lost, because it may have
        died while it encoded the image again for the decoder.
        """
        address = lost.encoder_address
        have_ended = await self.await_outcomes(address)
        if address not in self.losses.excluded["encoder"]:
            self._may_retry_evicted = have_ended and address in self._encoded.values()
            self.losses.add("encoder", address, ProcessLost(lost.message))
        # The encoder must be called again for all images that it has encoded.
        self._encoded = {k: a for k, a in self._encoded.items() if address and a != address}

    async def finish(self, timeout_s: float) -> None:
        """Waits until the running calls have ended, for `timeout_s` seconds at most."""
        if self._calls:
            await asyncio.wait([call.task for call in self._calls.values()], timeout=timeout_s)

    def close(self) -> None:
        """Cancels the running calls, and closes the video files unless other completions of the
        request have them.
        """
        for call in self._calls.values():
            call.task.cancel()
        self._calls.clear()
        if self.request.shares_media:
            return
        for medium in self.request.images:
            if medium.file is not None:
                medium.file.close()

    def _choose(
        self, description: DescribeEncoderResponse, missing: Mapping[bytes, int]
    ) -> dict[bytes, EncoderPod]:
        """Chooses the encoders of units. Returns them in the order in which they are called.

        A unit stays with the encoder that has encoded it. The other units of a clip are divided
        into ranges (`ClipRanges`), and images by their work (`EncoderShares`).

        Args:
            missing: first run of each unit's key.

        Raises:
            TriptychError: no encoder is left.
        """
        request, losses = self.request, self.losses
        pods = self._available(description)
        addresses = {pod.address: pod for pod in pods}
        chosen: dict[bytes, EncoderPod] = {}
        images: list[bytes] = []
        clips: dict[int, list[bytes]] = {}  # `Run.image` -> keys of its units
        for key, index in missing.items():
            medium = request.images[request.prompt.runs[index].image]
            if pod := addresses.get(self._encoded.get(key, "")) or holder_of(pods, key):
                chosen[key] = pod
            elif losses.num_lost["encoder"]:
                # Once an encoder is lost, all further images go to one encoder. It is unknown which
                # image has ended the encoder, and the request ends with the next loss. A clip goes
                # to the encoder that has its file.
                home = addresses.get(medium.address) if isinstance(medium, Video) else None
                chosen[key] = home or pick(pods, self.keys[0])
            elif medium.file is None:
                images.append(key)
            else:
                clips.setdefault(request.prompt.runs[index].image, []).append(key)
        sizes = {key: self._size(missing[key]) for key in images}
        if sizes:
            shares = EncoderShares(pods, list(sizes.values()))
            largest_first = sorted(sizes, key=lambda key: sizes[key], reverse=True)
            taken = {key: shares.take(key, sizes[key]) for key in largest_first}
            chosen |= {key: taken[key] for key in images}
        for image, keys in clips.items():
            chosen |= self._divide(pods, image, {key: missing[key] for key in keys})
        return chosen

    def _divide(
        self, pods: Sequence[EncoderPod], image: int, units: Mapping[bytes, int]
    ) -> dict[bytes, EncoderPod]:
        """Chooses the encoders of a clip's units: the encoder that has probed the file, and idle
        encoders if the clip is long enough. While all encoders are busy, a clip is not divided,
        because each further encoder has to read the whole file. Nor is it divided again after an
        encoder has failed the request. Returns the encoders in the order in which they are called.

        Args:
            image: index of the clip in the request.
            units: run of each unit's key.
        """
        video, runs = self.request.images[image], self.request.prompt.runs
        assert isinstance(video, Video) and video.file and video.ranges
        file, digest = video.file, video.file.digest
        home = next((pod for pod in pods if pod.address == video.address), None)
        home = home or for_file(pods, digest, len(file.data))
        idle = [
            pod
            for pod in pods
            if pod is not home and pod.num_in_flight == file.num_in_flight(pod.address)
        ]
        if self.losses.excluded["encoder"]:
            idle = []
        # An encoder that has been sent the file ahead comes first.
        idle.sort(key=lambda pod: (not file.has_sent(pod.address), rank(pod.address, digest)))
        team, num_sent = [home, *idle], sum(file.has_sent(pod.address) for pod in idle)
        pairs = [runs[index].unit for index in units.values()]
        ranges = video.ranges.divide(pairs, len(team), num_ready=1 + num_sent)
        try:
            num_bytes = len(file.data) * MEMORY_PER_CALLED_BYTE
            self.request.slot.memory.add(max(max(ranges) - num_sent, 0) * num_bytes)
        except Overloaded:  # There is no memory for the calls to further encoders.
            ranges = [0] * len(units)
        keys = list(units)
        return {keys[at]: team[ranges[at]] for at in video.ranges.call_order(pairs, ranges)}

    def _size(self, index: int) -> tuple[int, int]:
        """Returns the number of patches of a run's unit, and the bytes of its encode call."""
        run = self.request.prompt.runs[index]
        return run.unit.num_patches, self.request.images[run.image].num_bytes(run.unit)

    def _available(self, description: DescribeEncoderResponse) -> list[EncoderPod]:
        """Returns the encoders that have not failed the request."""
        losses = self.losses
        try:
            return self.encoders.available(description, losses.excluded["encoder"])
        except Unavailable:
            if not self._may_retry_evicted:
                raise losses.no_pod_left() from None
        # The only encoder evicted an embedding before the decoder fetched it. It is tried again.
        self._may_retry_evicted = False
        losses.readmit_encoders()
        return self._available(description)

    async def _encode(self, key: bytes, pod: EncoderPod, index: int, turns: int) -> None:
        """Calls an encoder for a unit, and records the outcome.

        Args:
            index: first run of the unit.
            turns: number of iterations of the event loop before the call.
        """
        for _ in range(turns):
            await asyncio.sleep(0)
        request, run = self.request, self.request.prompt.runs[index]
        image = request.images[run.image]
        outcome = await self._outcome(pod, key, image, run)
        del self._calls[key]
        if isinstance(outcome, EncodeResponse):
            self._encoded[key] = pod.address
            self.coming.num_tokens -= run.num_tokens * self.keys.count(key)
            source = SOURCES.get(outcome.source, "unknown")
            self.metrics.encodes.labels(source).inc()
            for other_index, other in enumerate(self.keys):
                if other == key:
                    request.encode_sources[other_index] = source
        elif isinstance(outcome, InvalidRequest):
            outcome.param = image.param
            self.losses.refusal = outcome
            self.mailbox.put(outcome)
        else:
            self.losses.add("encoder", pod.address, outcome, image.param, image.kind)
            self._give_up_video(run.image, pod.address, outcome)
            self.mailbox.put(RetryableFailure(outcome, "encoder", pod.address))

    def _give_up_video(self, index: int, address: str, error: TriptychError) -> None:
        """Cancels an encoder's remaining calls for a video file after a call has failed, because
        they would fail for the same reason.

        If the encoder was not lost, all calls are cancelled but those to the encoder that has
        probed the file. Otherwise the others could refuse the file, too, and one after another use
        up the request's attempts.
        """
        video = self.request.images[index]
        if not isinstance(video, Video) or video.file is None:
            return
        home = video.address
        is_refused = address != home and not isinstance(error, ProcessLost)
        keys = {self.keys[i] for i, r in enumerate(self.request.prompt.runs) if r.image == index}
        for key in keys & self._calls.keys():
            found = self._calls[key].address
            if found == address or (is_refused and found != home):
                self._calls.pop(key).task.cancel()

    async def _outcome(
        self, pod: EncoderPod, key: bytes, image: Medium, run: Run
    ) -> EncodeResponse | TriptychError:
        """Returns the response of one call, or its error."""
        request = self.request
        # The units of a video are decoded one after another.
        limit_s = self.timeout_s * (_VIDEO_TIMEOUT_FACTOR if image.kind is VIDEO else 1)
        timeout_s = min(limit_s, request.remaining_s())
        attributes = {"encoder": pod.address, "patches": run.unit.num_patches}
        try:
            with request.timings.measure("encode", span_name="encode call", **attributes):
                done = await self._call(pod, key, image, run, timeout_s)
        except DeadlineExceeded as error:
            if timeout_s < limit_s:
                return error.without_frames()  # The request's own deadline is over.
            return ProcessLost("the encoder did not answer in time")
        except TriptychError as error:
            return error.without_frames()
        except Exception:
            # Without an outcome, the request would wait for its deadline.
            log.exception("the call of the encoder %s failed", pod.address)
            return InternalError("the call of an encoder failed")
        if done.num_tokens != run.num_tokens:
            return InternalError("an encoder returned an embedding of the wrong size")
        return done

    async def _call(
        self, pod: EncoderPod, key: bytes, image: Medium, run: Run, timeout_s: float
    ) -> EncodeResponse:
        """Sends a video's file if the encoder does not have it, and then calls the encoder.

        A further encoder that has encoded the unit before probably still has the file.
        """
        request, tenant = image.encode_request(run.unit), self.request.slot.tenant
        request.image_key, request.cache_salt = key, self.request.cache_salt
        request.adapter = self._adapter
        request.grid.t, request.grid.h, request.grid.w = run.unit.grid
        request.tenant, request.tenant_weight = tenant.queue_name, tenant.weight
        request.background = tenant.is_background
        sent, clip_s = None, image.clip_s(run.unit)
        is_known = pod.has_sent(key) and isinstance(image, Video) and image.address != pod.address
        if image.file and not is_known:
            sent = await image.file.send_to(pod, timeout_s)
        try:
            return await pod.encode(request, timeout_s, clip_s)
        except VideoNotHeld:
            if image.file is None:
                raise
            await image.file.send_to(pod, timeout_s, again=sent)
            return await pod.encode(request, timeout_s, clip_s)
