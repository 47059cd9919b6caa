"""The encoder's contract of videos over real gRPC: what is probed, and what units are refused."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common import errors
from services.common.images.image_key import FRAME_DIGEST_BYTES, frames_key, still_digest
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import outgoing_metadata
from tests.contract.encoder_pod import PREFIX, Pod, run_pod
from tests.contract.test_encoder_service import failure
from tests.fake_clips import FakeClips
from tests.noise import PATIENCE_S
from tests.videos import make

GRID = pb.Grid(t=1, h=8, w=8)


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with run_pod() as pod:
        yield pod


async def probe(pod: Pod, **fields: Any) -> pb.ProbeResponse:
    request = pb.ProbeRequest(**fields)
    return await pod.stub.Probe(request, metadata=outgoing_metadata(request.ByteSize()))


def unit_of(video: pb.ProbeResponse, first: int, second: int, **fields: object) -> pb.EncodeRequest:
    def digest(index: int) -> bytes:
        return video.frame_digests[FRAME_DIGEST_BYTES * index :][:FRAME_DIGEST_BYTES]

    key = frames_key(PREFIX, digest(first), digest(second), grid=(1, 8, 8), salt=b"")
    return pb.EncodeRequest(**{
        "image_key": key, "grid": GRID, "video_digest": video.video_digest,
        "frames": pb.FramePair(first=first, second=second), **fields,
    })  # fmt: skip


async def test_a_video_is_probed_once_and_its_units_encoded(pod: Pod) -> None:
    video = await probe(pod, video=make())
    assert (video.num_frames, video.rate, video.height, video.width) == (24, 12.0, 48, 64)
    assert video.duration_s == 2.0
    assert await probe(pod, video=make()) == await probe(pod, video_digest=video.video_digest)
    answer = await pod.stub.Encode(unit_of(video, 0, 5))
    assert answer.source == pb.EncodeResponse.SOURCE_COMPUTED
    assert (await pod.stub.Encode(unit_of(video, 0, 5))).source == pb.EncodeResponse.SOURCE_MEMORY
    (job,) = pod.engine.jobs
    assert job.unit.frames == (0, 5) and job.source.video and job.source.video.size == (48, 64)
    assert job.source.num_bytes == 0  # the file has travelled once
    for request, kind in (
        (unit_of(video, 0, 6, image_key=bytes(32)), errors.WrongImageKey),
        (unit_of(video, 0, 24), errors.InvalidRequest),
        (unit_of(video, 0, 6, grid=pb.Grid(t=2, h=8, w=8)), errors.InvalidRequest),
        (unit_of(video, 0, 6, image=b"image"), errors.InvalidRequest),
        (unit_of(video, 0, 6, frames=None), errors.InvalidRequest),
        (unit_of(video, 0, 6, video_digest=bytes(32)), errors.VideoNotHeld),
    ):
        assert type(await failure(pod.stub.Encode(request))) is kind
    assert len(pod.engine.jobs) == 1


async def test_frames_that_are_images(pod: Pod) -> None:
    def request(*images: bytes, frames: tuple[int, int], **fields: object) -> pb.EncodeRequest:
        first, second = map(still_digest, (images[0], images[-1]))
        key = frames_key(PREFIX, first, second, grid=(1, 8, 8), salt=b"")
        pair = pb.FramePair(first=frames[0], second=frames[1])
        more = dict(zip(("image", "second_image"), images, strict=False))
        return pb.EncodeRequest(image_key=key, grid=GRID, frames=pair, **more, **fields)

    await pod.stub.Encode(request(b"red", b"blue", frames=(0, 1)))
    await pod.stub.Encode(request(b"red", frames=(0, 0)))
    sources = [job.source for job in pod.engine.jobs]
    assert [(each.image, each.second) for each in sources] == [(b"red", b"blue"), (b"red", b"")]
    wrong = request(b"red", b"green", frames=(0, 1))
    wrong.second_image = b"blue"
    assert isinstance(await failure(pod.stub.Encode(wrong)), errors.WrongImageKey)
    wrong.ClearField("frames")
    assert isinstance(await failure(pod.stub.Encode(wrong)), errors.InvalidRequest)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, errors.InvalidRequest),
        ({"video": b"x", "video_digest": bytes(32)}, errors.InvalidRequest),
        ({"video_digest": bytes(32)}, errors.VideoNotHeld),
        ({"video_digest": b"short"}, errors.VideoNotHeld),
        ({"video": b"#EXTM3U"}, errors.InvalidVideo),
        ({"video": make()[:1000]}, errors.InvalidVideo),
    ],
    ids=["nothing", "both", "not held", "no digest", "a playlist", "cut"],
)
async def test_what_is_not_probed(pod: Pod, fields: dict[str, bytes], kind: type) -> None:
    assert type(await failure(probe(pod, **fields))) is kind


async def test_a_model_without_videos_refuses_them() -> None:
    async with run_pod(takes_videos=False) as pod:
        assert isinstance(await failure(probe(pod, video=make())), errors.InvalidVideo)
        request = pb.EncodeRequest(
            image_key=bytes(32), image=b"x", grid=GRID, frames=pb.FramePair(first=0, second=1)
        )
        assert isinstance(await failure(pod.stub.Encode(request)), errors.InvalidVideo)


async def begun(clips: FakeClips) -> bytes:
    """The file whose reading begins next."""
    return await asyncio.to_thread(clips.begun.get, timeout=PATIENCE_S)


async def test_a_tenants_probe_waits_for_no_other_tenants() -> None:
    clips = FakeClips(waits=True)
    async with run_pod(clips=clips, max_probes=2) as pod:
        files = [b"crowd %d" % number for number in range(12)]
        crowd = [asyncio.create_task(probe(pod, video=file, tenant="crowd")) for file in files]
        assert await begun(clips) in files
        clips.finish(b"guest")
        assert (await probe(pod, video=b"guest", tenant="guest", tenant_weight=2.0)).num_frames == 2
        assert await begun(clips) == b"guest" and not any(call.done() for call in crowd)
        for file in files:
            clips.finish(file)
        await asyncio.gather(*crowd)


async def test_videos_that_wait_refuse_no_image() -> None:
    """A call's bytes are counted while they arrive, and then as those of a video that waits."""
    clips, large = FakeClips(waits=True), bytes(100_000)
    async with run_pod(clips=clips, max_read_bytes=150_000) as pod:
        call = asyncio.create_task(probe(pod, video=large, tenant="crowd"))
        assert await begun(clips) == large
        assert await pod.encode(bytes(100_000), grid=(1, 8, 8))
        clips.finish(large)
        assert (await call).num_frames == 2


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
async def test_a_weight_is_positive(pod: Pod, weight: float) -> None:
    error = await failure(probe(pod, video=make(), tenant="a", tenant_weight=weight))
    assert isinstance(error, errors.InvalidRequest) and "weight" in error.message
