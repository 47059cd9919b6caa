"""The encoder's contract of uploads and embeddings of clients over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

from services.common import errors
from services.common.geometry import Unit
from services.common.images.image_key import embedding_key, image_key, still_digest
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import outgoing_metadata
from tests.contract.encoder_pod import PREFIX, Pod, run_pod
from tests.contract.test_encoder_service import failure
from tests.noise import until
from tests.redis_server import RedisServer, redis_server  # noqa: F401

GRID = Unit((1, 8, 8))  # 16 tokens of 2 features of 64
TENSOR = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with run_pod() as pod:
        yield pod


async def upload(pod: Pod, file: bytes, tenant: str) -> bytes:
    request = pb.UploadRequest(file=file, tenant=tenant)
    answer = await pod.stub.Upload(request, metadata=outgoing_metadata(request.ByteSize()))
    assert answer.kept_s == 3600
    return answer.digest


async def download(pod: Pod, digest: bytes, tenant: str, *, forget: bool = False) -> bytes:
    request = pb.DownloadRequest(digest=digest, tenant=tenant, forget=forget)
    return (await pod.stub.Download(request)).file


def brought(file: bytes, **fields: object) -> pb.EncodeRequest:
    key = embedding_key(PREFIX, file, unit=GRID, salt=b"")
    return pb.EncodeRequest(**{
        "image_key": key, "image": file, "grid": pb.Grid(t=1, h=8, w=8), "is_embedding": True,
        **fields,
    })  # fmt: skip


async def fetched(pod: Pod, key: bytes) -> bytes:
    data = bytearray()
    async for part in pod.stub.Fetch(pb.FetchRequest(image_key=key)):
        if part.WhichOneof("part") == "chunk":
            data[part.chunk.offset : part.chunk.offset + len(part.chunk.data)] = part.chunk.data
    return bytes(data)


async def test_files_are_their_tenants(pod: Pod) -> None:
    digest = await upload(pod, b"file", "one")
    assert digest == still_digest(b"file")
    assert await download(pod, digest, "one") == b"file"
    for tenant, name in (("two", digest), ("", digest), ("one", bytes(32))):
        assert isinstance(await failure(download(pod, name, tenant)), errors.NotFound)
    assert isinstance(await failure(download(pod, digest, "two", forget=True)), errors.NotFound)
    assert await download(pod, digest, "one", forget=True) == b""
    assert isinstance(await failure(download(pod, digest, "one")), errors.NotFound)


async def test_a_file_that_leaves_is_counted_until_it_has_left() -> None:
    async with run_pod(max_read_bytes=100 << 10) as pod:
        file = bytes(60 << 10)
        digest = await upload(pod, file, "one")
        pod.servicer.messages.count(60 << 10)
        assert isinstance(await failure(download(pod, digest, "one")), errors.Overloaded)
        pod.servicer.messages.uncount(60 << 10)
        assert await download(pod, digest, "one") == file
        await until(lambda: not pod.servicer.messages.num_bytes)
        pod.servicer.messages.count(100 << 10)
        assert isinstance(await failure(download(pod, digest, "one")), errors.Overloaded)


async def test_files_outlive_their_encoder_in_redis(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url) as first:
        digest = await upload(first, b"file" * 1000, "one")
    async with run_pod(redis_server.url) as second:
        assert isinstance(await failure(download(second, digest, "two")), errors.NotFound)
        assert await download(second, digest, "one") == b"file" * 1000


async def test_an_embedding_is_what_its_client_has_brought(pod: Pod) -> None:
    request = brought(save({"e": TENSOR}))
    early = asyncio.create_task(fetched(pod, request.image_key))  # waits for it
    answer = await pod.stub.Encode(request)
    assert answer.num_tokens == 16
    expected = TENSOR.reshape(16, 2, 64).movedim(1, 0).contiguous().numpy().tobytes()
    assert await early == expected == await fetched(pod, request.image_key)
    assert (await pod.stub.Encode(request)).source == pb.EncodeResponse.SOURCE_MEMORY
    assert not pod.engine.jobs


async def test_an_embedding_is_counted_until_it_is_written() -> None:
    async with run_pod(max_read_bytes=100 << 10) as pod:
        spec = replace(pod.embeddings.spec_of(GRID), num_tokens=1 << 14)
        everything = pod.store.arena.try_reserve(b"r" * 32, spec)
        assert everything is not None
        request = brought(save({"e": TENSOR}))
        size = outgoing_metadata(request.ByteSize())
        waiting = asyncio.ensure_future(pod.stub.Encode(request, metadata=size))
        await until(lambda: pod.store.arena.has_claims)
        assert pod.servicer.messages.num_bytes == request.ByteSize()
        pod.store.arena.release(everything)
        assert (await waiting).num_tokens == 16
        await until(lambda: not pod.servicer.messages.num_bytes)


async def test_an_embedding_stands_under_no_images_name(pod: Pod) -> None:
    file, nan = save({"e": TENSOR}), save({"e": TENSOR * float("nan")})
    name = image_key(PREFIX, file, unit=GRID, salt=b"")
    for request, kind in (
        (brought(file, image_key=name), errors.WrongImageKey),
        (brought(file, is_embedding=False), errors.WrongImageKey),
        (brought(nan), errors.InvalidRequest),
        (brought(save({"e": TENSOR * 0 + 3e38})), errors.InvalidRequest),
        (brought(save({"e": TENSOR * 0 - 3e38})), errors.InvalidRequest),
        (brought(save({"e": TENSOR[:8].contiguous()})), errors.InvalidRequest),
        (brought(b"no tensor"), errors.InvalidRequest),
        (brought(file, frames=pb.FramePair()), errors.InvalidRequest),
    ):
        assert isinstance(await failure(pod.stub.Encode(request)), kind)
    assert pod.store.arena.used_bytes == 0
