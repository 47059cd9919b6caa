"""The encoder's contract over real gRPC, with a real Redis and a fake engine."""

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from services.common import errors
from services.common.geometry import Unit
from services.common.images.image_key import image_key
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import error_from_rpc
from tests.contract.encoder_pod import LIKE, PREFIX, Pod, key_of, run_pod
from tests.noise import PATIENCE_S, async_least, timed, until
from tests.redis_server import RedisServer, redis_server  # noqa: F401
from tests.store_state import num_waiters

Response, GRID = pb.EncodeResponse, (1, 8, 8)


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    async with run_pod() as pod:
        yield pod


async def failure(call: Awaitable[object]) -> errors.TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value, "encoder")


async def test_describe(pod: Pod) -> None:
    found = await pod.stub.Describe(pb.DescribeEncoderRequest())
    assert (found.model_name, found.key_prefix) == ("tiny", PREFIX)
    assert (found.dtype, found.num_features, found.hidden) == (pb.DTYPE_FLOAT32, 2, 64)
    assert found.max_image_patches == 4096


async def test_encode_then_fetch(pod: Pod) -> None:
    first = await pod.encode(b"image")
    assert (first.source, first.num_tokens) == (Response.SOURCE_COMPUTED, 16)
    name, sample = "triptych_encoder_stage_seconds_sum", pod.metrics.registry.get_sample_value
    took = [sample(name, {"stage": stage}) for stage in ("queue", "preprocess", "forward")]
    assert took == [0.1, 0.2, 0.3]
    assert await pod.fetch(b"image") == pod.expected(b"image")
    second = await pod.encode(b"image")
    assert second.source == Response.SOURCE_MEMORY
    assert len(pod.engine.jobs) == 1


async def test_a_large_embedding_comes_in_chunks(pod: Pod) -> None:
    grid = (1, 64, 64)  # 1024 tokens: 512 KiB a feature
    await asyncio.gather(pod.encode(b"large", grid), pod.encode(b"other", grid))
    assert await pod.fetch(b"large", grid) == pod.expected(b"large", grid)


async def test_fetch_before_encode_waits(pod: Pod) -> None:
    fetching = asyncio.create_task(pod.fetch(b"image"))
    await asyncio.sleep(0.1)
    assert not fetching.done()
    await pod.encode(b"image")
    assert await fetching == pod.expected(b"image")


async def test_fetch_of_an_image_without_encode_ends_at_its_deadline(pod: Pod) -> None:
    async def fails() -> None:
        error = await failure(pod.fetch(b"never", timeout_s=0.3))
        assert isinstance(error, errors.EmbeddingUnavailable | errors.DeadlineExceeded)

    assert await async_least(lambda: timed(fails()), 2) < 2
    await until(lambda: not pod.embeddings._awaited)


async def test_a_reader_that_asks_is_told_whether_its_embedding_is_in_work() -> None:
    async with run_pod(report_s=0.02) as pod:
        await told_whether_in_work(pod)


async def told_whether_in_work(pod: Pod) -> None:
    grid = (1, 64, 64)
    request = pb.FetchRequest(image_key=key_of(b"image", grid), tell_waiting=True)
    call = pod.stub.Fetch(request, timeout=PATIENCE_S)

    async def next_part(*but: str) -> pb.FetchResponse:
        while isinstance(part := await call.read(), pb.FetchResponse):
            if part.WhichOneof("part") not in but:
                return part
        raise AssertionError("the call has ended")

    part = await next_part()
    assert part.HasField("waiting") and not part.waiting.in_work
    pod.engine.gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image", grid))
    assert (await next_part("waiting")).HasField("header")
    assert (await next_part()).waiting.in_work
    pod.engine.gate.set()
    assert (await next_part("waiting", "chunk")).HasField("trailer")
    await encoding
    assert await pod.fetch(b"image", grid) == pod.expected(b"image", grid)


async def test_many_callers_one_job(pod: Pod) -> None:
    pod.engine.gate.clear()
    calls = [asyncio.ensure_future(pod.encode(b"image")) for _ in range(100)]
    fetches = [asyncio.create_task(pod.fetch(b"image")) for _ in range(5)]
    await until(lambda: pod.engine.jobs)
    pod.engine.gate.set()
    sources = sorted(answer.source for answer in await asyncio.gather(*calls))
    assert sources.count(Response.SOURCE_COMPUTED) == 1
    # A call that arrives after the job's end finds the embedding in memory.
    assert set(sources) <= {
        Response.SOURCE_COMPUTED, Response.SOURCE_JOINED, Response.SOURCE_MEMORY,
    }  # fmt: skip
    assert len(set(await asyncio.gather(*fetches))) == 1
    assert len(pod.engine.jobs) == 1


async def test_draining_waits_for_running_encodes_and_their_fetches(pod: Pod, monkeypatch) -> None:
    monkeypatch.setattr("services.encoder.front.service._QUIET_S", 5.0)
    pod.engine.gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"image"))
    await until(lambda: pod.engine.jobs)
    draining = asyncio.create_task(pod.servicer.drain(PATIENCE_S))
    await asyncio.sleep(0.5)
    assert not draining.done()
    pod.engine.gate.set()
    await encoding
    assert await pod.fetch(b"image") == pod.expected(b"image")
    assert not draining.done()
    await draining
    await pod.servicer.drain(PATIENCE_S)  # an idle encoder ends at once
    pod.engine.gate.clear()
    encoding = asyncio.ensure_future(pod.encode(b"another"))
    await until(lambda: len(pod.engine.jobs) == 2)
    await pod.servicer.drain(0.1)
    pod.engine.gate.set()
    await encoding


async def test_followers_outlive_the_leader(pod: Pod) -> None:
    pod.engine.gate.clear()
    leader = pod.encode(b"image")
    await until(lambda: pod.engine.jobs)
    follower = asyncio.ensure_future(pod.encode(b"image"))
    await until(lambda: num_waiters(pod.store, key_of(b"image")) == 2)
    leader.cancel()
    await until(lambda: num_waiters(pod.store, key_of(b"image")) == 1)
    pod.engine.gate.set()
    assert (await follower).source == Response.SOURCE_JOINED
    assert len(pod.engine.jobs) == 1 and not pod.engine.cancelled


async def test_a_job_without_waiters_is_cancelled(pod: Pod) -> None:
    pod.engine.gate.clear()
    calls = [pod.encode(b"image"), pod.encode(b"image")]
    fetching = asyncio.create_task(pod.fetch(b"image"))
    await until(lambda: bool(pod.engine.jobs))
    await until(lambda: num_waiters(pod.store, key_of(b"image")) == 3)
    for call in calls:
        call.cancel()
    fetching.cancel()
    await until(lambda: pod.engine.cancelled == {pod.engine.jobs[0].job_id})
    await until(lambda: pod.store.arena.used_bytes == 0)
    # A new caller starts a new encode.
    pod.engine.gate.set()
    assert (await pod.encode(b"image")).source == Response.SOURCE_COMPUTED
    assert await pod.fetch(b"image") == pod.expected(b"image")


async def test_a_bad_image_fails_alone(pod: Pod) -> None:
    pod.engine.errors[b"bad"] = ("invalid_image", "the image is truncated or corrupt")
    bad, good = await asyncio.gather(failure(pod.encode(b"bad")), pod.encode(b"good"))
    assert isinstance(bad, errors.InvalidImage)
    assert good.source == Response.SOURCE_COMPUTED
    assert (
        pod.store.arena.used_bytes
        == pod.store.arena.view(  # the bad one's room is free
            pod.store.arena.get(key_of(b"good"))  # type: ignore[arg-type]
        ).nbytes
    )


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_image", errors.InvalidImage),  # no encoder can do it
        ("overloaded", errors.EmbeddingUnavailable),  # another one may
        ("internal_error", errors.EmbeddingUnavailable),
    ],
)
async def test_fetch_of_a_failing_image_fails(
    pod: Pod, code: str, kind: type[errors.TriptychError]
) -> None:
    pod.engine.gate.clear()
    pod.engine.errors[b"bad"] = (code, "no")
    encoding = asyncio.ensure_future(failure(pod.encode(b"bad")))
    await until(lambda: pod.engine.jobs)
    fetching = asyncio.ensure_future(failure(pod.fetch(b"bad")))
    await until(lambda: num_waiters(pod.store, key_of(b"bad")) == 2)
    pod.engine.gate.set()
    assert (await encoding).code == code
    assert type(await fetching) is kind


@pytest.mark.parametrize(
    ("key", "grid"),
    [
        (b"short", (1, 8, 8)),
        (b"k" * 32, (1, 0, 8)),
        (b"k" * 32, (2, 8, 8)),
        (b"k" * 32, (1, 7, 8)),
        (b"k" * 32, (1, 4294967294, 4294967294)),
    ],
)
async def test_malformed_requests_are_refused(
    pod: Pod, key: bytes, grid: tuple[int, int, int]
) -> None:
    request = pb.EncodeRequest(
        image_key=key, image=b"x", grid=pb.Grid(t=grid[0], h=grid[1], w=grid[2])
    )
    assert isinstance(await failure(pod.stub.Encode(request)), errors.InvalidRequest)
    assert not pod.engine.jobs


async def test_a_forged_key_is_refused_counted_and_logged_once(
    pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller that names its image as another's would answer for that image to everybody."""
    caplog.set_level("INFO")
    forged = pb.EncodeRequest(
        image_key=key_of(b"blue", GRID), image=b"red", grid=pb.Grid(t=1, h=8, w=8)
    )
    others = [pb.EncodeRequest() for _ in range(3)]
    for other in others:
        other.CopyFrom(forged)
    others[0].image = b"blue"
    others[0].cache_salt = b"another tenant's"
    others[1].image = b"blue"
    others[1].grid.h = 16
    others[2].image = b"b" * (2 << 20)  # hashed in a thread
    for request in (forged, *others):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pod.stub.Encode(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error_from_rpc(caught.value, "encoder"), errors.WrongImageKey)
    assert not pod.engine.jobs
    failures = pod.metrics.failures.labels("encode", "wrong_image_key")
    assert failures._value.get() == 4
    (record,) = (record for record in caplog.records if "not that of this image" in record.message)
    assert record.levelname == "WARNING"
    await pod.encode(b"blue")
    assert await pod.fetch(b"blue") == pod.expected(b"blue")
    # Nor with an embedding that is there: its file would be kept for the next encode of the key.
    assert isinstance(await failure(pod.stub.Encode(forged)), errors.WrongImageKey)


async def test_a_salt_is_bounded_and_part_of_the_key(pod: Pod) -> None:
    grid = pb.Grid(t=1, h=8, w=8)
    key = image_key(PREFIX, b"image", unit=Unit(GRID), salt=b"s" * 256)
    request = pb.EncodeRequest(image_key=key, image=b"image", grid=grid, cache_salt=b"s" * 256)
    assert (await pod.stub.Encode(request)).source == Response.SOURCE_COMPUTED
    request.cache_salt += b"s"
    assert isinstance(await failure(pod.stub.Encode(request)), errors.InvalidRequest)


async def test_overload_is_refused_before_any_work() -> None:
    async with run_pod(max_queued_patches=200) as pod:
        pod.engine.gate.clear()
        running = [asyncio.ensure_future(pod.encode(bytes([n]))) for n in range(3)]  # 192 patches
        await until(lambda: len(pod.engine.jobs) == 3)
        # The engine's gate is closed: a refusal that waited for work would never come.
        assert isinstance(await failure(pod.encode(b"fourth")), errors.Overloaded)
        assert len(pod.engine.jobs) == 3
        assert (await pod.stub.Describe(pb.DescribeEncoderRequest())).model_name == "tiny"
        joined = asyncio.ensure_future(pod.encode(bytes([0])))  # costs nothing: it is in work
        pod.engine.gate.set()
        await asyncio.gather(*running, joined)
        assert (await pod.encode(b"fourth")).source == Response.SOURCE_COMPUTED


async def test_calls_that_wait_for_an_encode_keep_no_message(pod: Pod) -> None:
    """Neither the first nor those who join: nothing would count them."""

    def messages() -> int:
        return sum(isinstance(each, pb.EncodeRequest) for each in gc.get_objects())

    image, joins = bytes(1 << 20), 5
    gc.collect()
    others = messages()  # of earlier tests
    pod.engine.gate.clear()
    first = asyncio.ensure_future(pod.encode(image))
    await until(lambda: pod.engine.jobs)
    tracemalloc.start()
    try:
        joined = [asyncio.ensure_future(pod.encode(image)) for _ in range(joins)]
        await until(lambda: num_waiters(pod.store, key_of(image)) == 1 + joins)
        # The clients keep what they have sent.
        assert tracemalloc.get_traced_memory()[0] < (1 + joins) * len(image)
    finally:
        tracemalloc.stop()
    assert not pod.servicer.messages.num_bytes
    assert messages() - others <= 1 + joins  # the clients', which are in this process, too
    pod.engine.gate.set()
    assert (await first).source == Response.SOURCE_COMPUTED
    assert {(await call).source for call in joined} == {Response.SOURCE_JOINED}


async def test_a_message_is_counted_before_it_is_read() -> None:
    async with run_pod(max_read_bytes=100 << 10) as pod:
        begin = pod.channel.stream_unary(
            "/triptych.v1.Encoder/Encode",
            request_serializer=pb.EncodeRequest.SerializeToString,
            response_deserializer=Response.FromString,
        )
        said = (("triptych-message-bytes", str(90 << 10)),)
        silent = begin(metadata=said, timeout=PATIENCE_S)  # its message never comes
        await until(lambda: pod.servicer.messages.num_bytes == 90 << 10)
        small = (("triptych-message-bytes", str(10 << 10)),)
        request = pb.EncodeRequest(
            image_key=key_of(b"x", GRID), image=b"x", grid=pb.Grid(t=1, h=8, w=8)
        )
        assert (await pod.stub.Encode(request, metadata=small)).num_tokens
        assert isinstance(await failure(pod.stub.Encode(request, metadata=said)), errors.Overloaded)
        # A caller that does not say counts as the largest message.
        assert isinstance(await failure(pod.stub.Encode(request)), errors.Overloaded)
        lie = (("triptych-message-bytes", "1"),)
        assert isinstance(
            await failure(pod.stub.Encode(request, metadata=lie)), errors.InvalidRequest
        )
        silent.cancel()
        await until(lambda: not pod.servicer.messages.num_bytes)
        assert (await pod.stub.Encode(request)).num_tokens  # alone, whatever its size


async def test_a_part_of_the_queue_is_for_tenants_with_less_than_their_share() -> None:
    async with run_pod(max_queued_patches=200) as pod:
        pod.engine.gate.clear()
        running = [asyncio.ensure_future(pod.encode(bytes([n]), tenant="a")) for n in range(2)]
        await until(lambda: len(pod.engine.jobs) == 2)
        assert isinstance(await failure(pod.encode(b"third", tenant="a")), errors.Overloaded)
        running.append(asyncio.ensure_future(pod.encode(b"other", tenant="b")))
        await until(lambda: len(pod.engine.jobs) == 3)
        pod.engine.gate.set()
        await asyncio.gather(*running)
        assert (await pod.encode(b"third", tenant="a")).source == Response.SOURCE_COMPUTED
        assert pod.admission.num_patches == 0
        request = pb.EncodeRequest(
            image_key=key_of(b"x", GRID), image=b"x", grid=pb.Grid(t=1, h=8, w=8),
            tenant_weight=-1.0,
        )  # fmt: skip
        assert isinstance(await failure(pod.stub.Encode(request)), errors.InvalidRequest)


async def test_no_tenant_waits_behind_anothers_queue() -> None:
    async with run_pod() as pod:
        pod.engine.gate.clear()

        async def ranks(tenant: str, *images: bytes) -> list[float]:
            """Of images that are asked for one after the other."""
            for image in images:
                before = len(pod.engine.jobs)
                running.append(asyncio.ensure_future(pod.encode(image, tenant=tenant)))
                await until(lambda before=before: len(pod.engine.jobs) == before + 1)
            return [job.rank for job in pod.engine.jobs[-len(images) :]]

        running: list[asyncio.Future[Any]] = []
        flood = await ranks("flood", *[b"f%d" % n for n in range(6)])
        assert flood == sorted(set(flood))
        (quiet,) = await ranks("quiet", b"q")
        assert quiet < flood[1]
        pod.engine.gate.set()
        await asyncio.gather(*running)
        pod.engine.gate.clear()
        (late,) = await ranks("late", b"l")
        assert late == flood[-1]  # what it has not asked for gives it no credit
        pod.engine.gate.set()
        await asyncio.gather(*running)


async def test_a_refusal_says_how_long_the_queued_work_takes() -> None:
    async with run_pod(max_queued_patches=200) as pod:

        async def refused(images: list[bytes]) -> float | None:
            pod.engine.gate.clear()
            running = [asyncio.ensure_future(pod.encode(image)) for image in images]
            before = len(pod.engine.jobs)
            await until(lambda: len(pod.engine.jobs) == before + len(images))
            error = await failure(pod.encode(b"one more"))
            backlog_s = pod.metrics.registry.get_sample_value("triptych_encoder_backlog_seconds")
            pod.engine.gate.set()
            await asyncio.gather(*running)
            assert isinstance(error, errors.Overloaded)
            assert backlog_s is not None
            assert error.retry_after_s == pytest.approx(max(1.0, backlog_s), rel=1e-3)
            assert pod.metrics.registry.get_sample_value("triptych_encoder_backlog_seconds") == 0
            return error.retry_after_s

        assert await refused([b"1", b"2", b"3"]) == 1  # nothing is known yet
        pod.engine.gate.clear()
        slow = asyncio.ensure_future(pod.encode(b"slow"))
        await until(lambda: len(pod.engine.jobs) == 4)
        await asyncio.sleep(0.6)
        pod.engine.gate.set()
        await slow  # 64 patches in 0.6 s or more
        assert (await refused([b"4", b"5", b"6"]) or 0) >= 1.8


async def test_an_evicted_embedding_is_made_again() -> None:
    async with run_pod(arena_bytes=1 << 20) as pod:  # room for eight of 128 KiB
        grid = (1, 32, 32)
        for n in range(20):
            await pod.encode(bytes([n]), grid)
        for n in range(20):
            assert await pod.fetch(bytes([n]), grid) == pod.expected(bytes([n]), grid)


async def test_a_full_arena_waits_for_room() -> None:
    async with run_pod(arena_bytes=1 << 20) as pod:
        grid = (1, 32, 32)
        pod.engine.gate.clear()
        calls = [asyncio.ensure_future(pod.encode(bytes([n]), grid)) for n in range(12)]
        await until(lambda: len(pod.engine.jobs) == 8)
        pod.engine.gate.set()
        answers = await asyncio.gather(*calls)
        assert {answer.source for answer in answers} == {Response.SOURCE_COMPUTED}


async def test_the_engines_death_fails_waiting_calls(pod: Pod) -> None:
    pod.engine.gate.clear()
    encoding = asyncio.ensure_future(failure(pod.encode(b"image")))
    await until(lambda: pod.engine.jobs)
    pod.engine.die()
    assert isinstance(await encoding, errors.Unavailable)
    assert isinstance(await failure(pod.encode(b"other")), errors.Unavailable)


async def test_health(pod: Pod) -> None:
    health: Any = health_pb2_grpc.HealthStub(pod.channel)
    for name in ("", "triptych.v1.Encoder"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_metrics_say_what_happened(pod: Pod) -> None:
    await pod.encode(b"image")
    await pod.encode(b"image")
    await pod.fetch(b"image")
    text = generate_latest(pod.metrics.registry).decode()
    for line in (
        "triptych_encoder_images_encoded_total 1.0",
        'triptych_encoder_requests_total{source="computed"} 1.0',
        'triptych_encoder_requests_total{source="memory"} 1.0',
        "triptych_encoder_fetches_total 1.0",
        "triptych_encoder_queue_patches 0.0",
        'triptych_encoder_stage_seconds_count{stage="forward"} 1.0',
    ):
        assert line in text


# With Redis.


async def test_a_restarted_encoder_encodes_nothing_again(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url) as pod:
        await pod.encode(b"image")
        await pod.flush_writes()
    async with run_pod(redis_server.url) as pod:
        assert (await pod.encode(b"image")).source == Response.SOURCE_REDIS
        assert await pod.fetch(b"image") == pod.expected(b"image")
        assert not pod.engine.jobs
        assert (await pod.encode(b"image")).source == Response.SOURCE_MEMORY


async def test_a_file_is_decoded_during_the_lookup_in_redis(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url) as pod:
        await pod.encode(b"warm")
        await pod.flush_writes()
        redis_server.freeze()
        encoding = asyncio.ensure_future(pod.encode(b"image"))
        await until(lambda: pod.engine.waiting)
        assert len(pod.engine.jobs) == 1  # the warm one's
        redis_server.thaw()
        assert (await encoding).source == Response.SOURCE_COMPUTED
        assert len(pod.engine.jobs) == 2 and not pod.engine.waiting
        # Where Redis has it, the file is dropped.
        await pod.flush_writes()
    async with run_pod(redis_server.url) as pod:
        assert (await pod.encode(b"image")).source == Response.SOURCE_REDIS
        await until(lambda: pod.engine.ended)
        assert not pod.engine.jobs and not pod.engine.waiting and not pod.engine.cancelled


async def test_two_encoders_encode_an_image_once_each_at_most(redis_server: RedisServer) -> None:  # noqa: F811
    """No lock between them: gateways send equal images to one pod."""
    async with run_pod(redis_server.url) as a, run_pod(redis_server.url) as b:
        for pod in (a, b):
            pod.engine.gate.clear()  # so that no pod can find the other's entry in Redis
        calls = [asyncio.ensure_future(pod.encode(b"image")) for pod in (a, b) * 50]
        await until(lambda: a.engine.jobs and b.engine.jobs)
        for pod in (a, b):
            pod.engine.gate.set()
        await asyncio.gather(*calls)
        assert (len(a.engine.jobs), len(b.engine.jobs)) == (1, 1)
        await a.flush_writes()
        await b.flush_writes()
        assert await a.fetch(b"image") == await b.fetch(b"image") == a.expected(b"image")
    async with run_pod(redis_server.url) as c:
        assert (await c.encode(b"image")).source == Response.SOURCE_REDIS


async def test_a_corrupt_entry_costs_one_encode(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url) as pod:
        await pod.encode(b"image")
        await pod.flush_writes()
    name = b"triptych:embedding:" + key_of(b"image")
    with redis_server.client() as client:
        client.setrange(name, 5000, b"\xff\xff\x00")
    async with run_pod(redis_server.url) as pod:
        # The header is whole, so Encode answers from it; the body is not, which Fetch finds out.
        assert (await pod.encode(b"image")).source == Response.SOURCE_REDIS
        assert await pod.fetch(b"image") == pod.expected(b"image")
        assert len(pod.engine.jobs) == 1
        assert pod.cache is not None and pod.cache.counters["corrupt"] == 1


async def test_what_is_read_from_redis_is_there_for_its_reader(redis_server: RedisServer) -> None:  # noqa: F811
    """Though others wait for its room: it was evicted before, and read again and again."""
    async with run_pod(redis_server.url, arena_bytes=8 << 10) as pod:  # room for one
        claims = pod.store.arena._claims
        await pod.encode(b"evicted")
        await pod.flush_writes()
        pod.engine.gate.clear()
        in_work = asyncio.ensure_future(pod.encode(b"in work"))
        await until(lambda: len(pod.engine.jobs) == 2)
        fetching = asyncio.ensure_future(pod.fetch(b"evicted"))
        await until(lambda: len(claims) == 1)
        waiting = asyncio.ensure_future(pod.encode(b"waiting"))
        await until(lambda: len(claims) == 2)
        pod.engine.gate.set()
        assert await fetching == pod.expected(b"evicted")
        await asyncio.gather(in_work, waiting)
        assert pod.cache is not None and pod.cache.counters["hits"] == 1


async def test_an_entry_of_another_shape_is_refused(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url) as pod:
        assert pod.cache is not None
        spec = pod.embeddings.spec_of(Unit((1, 4, 4)))
        await pod.cache.write(key_of(b"image"), spec, b"d" * 32, bytes(spec.size_bytes))
        assert (await pod.encode(b"image")).source == Response.SOURCE_COMPUTED
        assert spec.hidden == LIKE.hidden


async def test_a_frozen_redis_costs_little(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url, redis_timeout_s=0.2) as pod:
        await pod.encode(b"warm")
        await pod.flush_writes()
        cache = pod.cache
        assert cache is not None
        images = (b"image %d" % n for n in itertools.count())

        async def first_encode() -> float:
            redis_server.freeze()
            image = next(images)
            seconds = await timed(pod.encode(image))
            assert not cache.available
            assert (await pod.encode(next(images))).source == Response.SOURCE_COMPUTED
            assert await pod.fetch(image) == pod.expected(image)
            redis_server.thaw()
            async with asyncio.timeout(PATIENCE_S):
                while not cache.available:
                    await pod.encode(next(images))
            return seconds

        assert await async_least(first_encode, 0.35) < 0.35  # one timeout, not two


async def test_a_stopped_redis_is_done_without(redis_server: RedisServer) -> None:  # noqa: F811
    async with run_pod(redis_server.url) as pod:
        redis_server.stop()
        assert (await pod.encode(b"image")).source == Response.SOURCE_COMPUTED
        assert await pod.fetch(b"image") == pod.expected(b"image")
        await pod.flush_writes()
        assert pod.metrics.redis_writes_dropped._value.get() >= 1
