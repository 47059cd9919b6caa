"""A call's file goes at the call's end, not with the next run of the garbage collector.

What calls have under way is bounded, and so are the files that are kept for another use. What a
cycle keeps is held but not counted, and an encoder that collects rarely holds gigabytes of it.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import outgoing_metadata
from services.encoder.front.source_store import Work
from services.encoder.front.uploaded_files import UploadedFiles
from tests.contract.encoder_pod import Pod, run_pod
from tests.decoder_service_harness import until

FILE = b"a file" * 1000
HELD = Work, pb.EncodeRequest, pb.ProbeRequest, pb.UploadRequest


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with run_pod(max_sources_bytes=0, files=UploadedFiles(None, max_bytes=1)) as pod:
        yield pod


async def encoded(pod: Pod) -> None:
    await asyncio.gather(pod.encode(FILE), pod.encode(FILE))


async def fetched(pod: Pod) -> None:
    reading = asyncio.create_task(pod.fetch(FILE))
    await asyncio.gather(pod.encode(FILE), reading)


async def unreadable(pod: Pod) -> None:
    pod.engine.errors[FILE] = "invalid_image", "no image"
    reading = asyncio.create_task(pod.fetch(FILE, timeout_s=2))
    await refused(pod.encode(FILE))
    await refused(reading)


async def cancelled(pod: Pod) -> None:
    pod.engine.gate.clear()
    call = pod.encode(FILE)
    await until(lambda: bool(pod.engine.jobs))
    call.cancel()
    await until(lambda: bool(pod.engine.ended))


async def lost(pod: Pod) -> None:
    pod.engine.gate.clear()
    call = pod.encode(FILE)
    await until(lambda: bool(pod.engine.jobs))
    pod.engine.die()
    await refused(call)


async def of_another_key(pod: Pod) -> None:
    request = pb.EncodeRequest(image_key=bytes(32), image=FILE, grid=pb.Grid(t=1, h=8, w=8))
    await refused(pod.stub.Encode(request, metadata=outgoing_metadata(request.ByteSize())))


async def no_video(pod: Pod) -> None:
    request = pb.ProbeRequest(video=FILE)
    await refused(pod.stub.Probe(request, metadata=outgoing_metadata(request.ByteSize())))


async def too_large(pod: Pod) -> None:
    request = pb.UploadRequest(file=FILE)
    await refused(pod.stub.Upload(request, metadata=outgoing_metadata(request.ByteSize())))


async def refused(call: Awaitable[object]) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await call


CALLS = encoded, fetched, unreadable, cancelled, lost, of_another_key, no_video, too_large


@pytest.mark.parametrize("ask", CALLS, ids=lambda ask: ask.__name__)
async def test_nothing_has_the_file_at_the_end(
    pod: Pod, ask: Callable[[Pod], Awaitable[None]]
) -> None:
    gc.collect()
    gc.disable()
    try:
        await ask(pod)
        await until(lambda: num_held() == 0)
    finally:
        gc.enable()


def num_held() -> int:
    """Objects that hold the file: work on it, and messages that bring it.

    Messages with other files are those of other tests, whose fakes keep them.
    """
    held = (each for each in gc.get_objects() if isinstance(each, HELD))
    return sum(FILE in files_of(each) for each in held)


def files_of(held: Any) -> tuple[bytes, ...]:
    if isinstance(held, Work):
        return (held.source.image,)
    return tuple(getattr(held, name, b"") for name in ("image", "video", "file"))
