"""Adapters of the vision tower: each has embeddings of its own, and no hit crosses adapters."""

from collections.abc import Iterator

import grpc.aio
import pytest

from services.common import errors
from services.common.geometry import Unit
from services.common.images.image_key import adapted_salt, image_key
from services.common.pb import decoder_pb2
from services.common.pb import encoder_pb2 as pb
from services.common.transport.rpc import error_from_rpc, outgoing_metadata
from tests.contract.encoder_pod import PREFIX, Pod, run_pod
from tests.gateway_fixtures import asking, image_url
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import PATIENCE_S
from tests.redis_server import RedisServer, redis_server  # noqa: F401

GUI, SQL = (name.ljust(32).encode() for name in ("gui", "sql"))
GRID = (1, 8, 8)


async def encode(pod: Pod, adapter: bytes, salt: bytes = b"", keyed: bytes | None = None):
    """Encodes one image. `keyed` is the adapter of the key, if it is not the request's."""
    keyed = adapter if keyed is None else keyed
    key = image_key(PREFIX, b"image", unit=Unit(GRID), salt=adapted_salt(salt, keyed))
    request = pb.EncodeRequest(
        image_key=key, image=b"image", grid=pb.Grid(t=1, h=8, w=8), adapter=adapter,
        cache_salt=salt,
    )  # fmt: skip
    said = outgoing_metadata(request.ByteSize())
    return await pod.stub.Encode(request, timeout=PATIENCE_S, metadata=said)


async def refused(pod: Pod, adapter: bytes, keyed: bytes) -> errors.TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await encode(pod, adapter, keyed=keyed)
    return error_from_rpc(caught.value, "encoder")


async def test_an_embedding_of_one_adapter_is_never_that_of_another(
    redis_server: RedisServer,  # noqa: F811
) -> None:
    """Neither in this encoder's memory nor in Redis, and tenants stay apart as well."""
    computed, memory = pb.EncodeResponse.SOURCE_COMPUTED, pb.EncodeResponse.SOURCE_MEMORY
    redis = pb.EncodeResponse.SOURCE_REDIS
    wanted = [(b"", b""), (GUI, b""), (SQL, b""), (GUI, b"tenant"), (b"", b"tenant")]
    async with run_pod(redis_server.url) as pod:
        pod.servicer._description.adapters.extend([GUI, SQL])
        for expected in (computed, memory):
            assert [(await encode(pod, *each)).source for each in wanted] == [expected] * 5
        assert [job.tower for job in pod.engine.jobs] == [0, 1, 2, 1, 0]
        await pod.flush_writes()
    async with run_pod(redis_server.url) as other:
        other.servicer._description.adapters.extend([SQL, GUI])  # in another order
        assert [(await encode(other, *each)).source for each in wanted] == [redis] * 5
        assert not other.engine.jobs


async def test_a_key_of_another_tower_is_refused() -> None:
    async with run_pod() as pod:
        pod.servicer._description.adapters.extend([GUI])
        for adapter, keyed in ((GUI, b""), (b"", GUI), (GUI, SQL)):
            assert isinstance(await refused(pod, adapter, keyed), errors.WrongImageKey)
        lacking = await refused(pod, SQL, SQL)
        assert isinstance(lacking, errors.Unavailable) and "ENCODER_ADAPTERS" in lacking.message
        assert not pod.engine.waiting and not pod.engine.jobs


@pytest.fixture
def adapted(stack: GatewayStack) -> Iterator[GatewayStack]:
    """A stack whose decoder has two adapters of the tower, and one of the language model."""
    decoder, encoder = stack.decoder, stack.encoder
    for name in ("gui", "sql", "text"):
        decoder.adapters[name] = decoder_pb2.Adapter(
            name=name, digest=name.ljust(32).encode(), adapts_tower=name != "text"
        )
    encoder.description.adapters.extend([GUI, SQL])
    pods = stack.gateway.service
    stack.wait(lambda: any(len(pod.adapters) == 3 for pod in pods.decoders.healthy()))

    def is_described() -> bool:
        found = pods.encoders.description()
        return found is not None and len(found.adapters) == 2

    stack.wait(is_described)
    yield stack
    # The gateway has to forget them before another test lists its models.
    del encoder.description.adapters[:]
    decoder.adapters.clear()
    stack.wait(lambda: not is_described())
    stack.wait(lambda: not any(pod.adapters for pod in pods.decoders.healthy()))


def ask(stack: GatewayStack, model: str) -> tuple[int, str]:
    answer = stack.chat(model=model, messages=asking(image_url()))
    return answer.status_code, answer.text


def test_requests_of_adapters_get_images_of_their_towers(adapted: GatewayStack) -> None:
    for model in (MODEL, "gui", "sql", "text", "gui"):
        assert ask(adapted, model)[0] == 200
    requests = adapted.encoder.requests
    assert [each.adapter for each in requests] == [b"", GUI, SQL, b"", GUI]
    keys = [each.image_key for each in requests]
    assert keys[0] == keys[3] and keys[1] == keys[4] and len(set(keys)) == 3
    submitted = [submit.images[0].image_key for submit in adapted.decoder.submits]
    assert submitted == keys


def test_a_tower_that_no_encoder_has_is_an_error_and_no_other_tower(
    adapted: GatewayStack,
) -> None:
    decoder = adapted.decoder
    decoder.adapters["new"] = decoder_pb2.Adapter(
        name="new", digest=b"new".ljust(32), adapts_tower=True
    )
    pods = adapted.gateway.service.decoders
    adapted.wait(lambda: any(len(pod.adapters) == 4 for pod in pods.healthy()))
    status, text = ask(adapted, "new")
    assert status == 503 and "ENCODER_ADAPTERS" in text
    assert not adapted.encoder.requests
    assert adapted.chat(model="new").status_code == 200  # without an image


def test_encoders_that_have_the_tower_are_found_among_others(loop_thread, tmp_path) -> None:
    """As while encoders get an adapter one after another."""
    stack = GatewayStack(loop_thread, tmp_path, num_encoders=3, log_level="ERROR")
    try:
        having = stack.encoders[2]
        having.description.adapters.append(GUI)
        stack.decoder.adapters["gui"] = decoder_pb2.Adapter(
            name="gui", digest=GUI, adapts_tower=True
        )
        pods = stack.gateway.service
        stack.wait(lambda: any(pod.adapters for pod in pods.decoders.healthy()))
        stack.wait(lambda: any(pod.description.adapters for pod in pods.encoders.healthy()))
        stack.wait(lambda: len(pods.encoders.healthy()) == 3)
        assert ask(stack, "gui")[0] == 200
        assert [each.adapter for each in having.requests] == [GUI]
        assert ask(stack, MODEL)[0] == 200
        assert [each.adapter for e in stack.encoders[:2] for each in e.requests] == [b""]
    finally:
        stack.close()
