"""Redis and the caches: an image is encoded once, and a bad Redis changes no answer."""

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from services.common.embeddings.embedding import STORED_HEADER_BYTES, pack_header, unpack_header
from services.common.geometry import Unit
from services.common.images.image_key import KEY_BYTES, image_key
from services.common.pb import encoder_pb2
from services.common.security.seals import NO_SEAL, SEAL_BYTES
from tests.e2e.cluster import Cluster, message, png, wait_until
from tests.noise import PATIENCE_S, least
from tests.stubs import EncoderStub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
QUESTION = "Describe the picture."
TIMEOUT_S = 0.3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(Path(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@pytest.fixture
def hasty(cluster: Cluster) -> Cluster:
    """With a short timeout of Redis, and with Redis in use."""
    if make_hasty(cluster):
        cluster.restart(*cluster.encoders, *cluster.decoders)
    seeds = itertools.count(200)

    def is_used() -> bool:
        before = num_events(cluster, "skipped")
        for _ in range(4):
            cluster.ask(QUESTION, png(next(seeds)), max_tokens=1)
        return num_events(cluster, "skipped") == before

    wait_until(is_used, PATIENCE_S, "the services use Redis")
    return cluster


def make_hasty(cluster: Cluster) -> bool:
    """From the next start on; returns whether the services are not yet. A timeout is ten of the
    default's, so that one differs from two by more than what a busy machine adds.
    """
    services = *cluster.encoders, *cluster.decoders
    urls = {s: f"{cluster.redis.url_of(s.kind)}?socket_timeout={TIMEOUT_S}" for s in services}
    return any([service.set(redis_url=url) for service, url in urls.items()])


def test_second_request_with_the_same_image_encodes_nothing(cluster: Cluster) -> None:
    first = cluster.ask(QUESTION, png(1))
    encodes = cluster.num_encodes()
    assert cluster.ask(QUESTION, png(1)) == first
    assert cluster.ask("What is it?", png(1))
    assert cluster.num_encodes() == encodes


def test_100_simultaneous_requests_for_a_new_image_encode_it_once(cluster: Cluster) -> None:
    encodes = cluster.num_encodes()
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: cluster.ask(QUESTION, png(3), max_tokens=8), range(100)))
    assert len(set(answers)) == 1
    assert cluster.num_encodes() - encodes == 1


def test_neither_neighbours_nor_streaming_change_an_answer(cluster: Cluster) -> None:
    def ask(number: int, *, stream: bool) -> str:
        images = [png(1000 + number + i, 160 + 32 * (number % 3)) for i in range(number % 3)]
        asked = message(QUESTION if images else "What can you do?", *images)
        fields = {"model": "demo", "messages": [asked], "max_tokens": 40}
        if number % 4 == 0:
            fields |= {"temperature": 0.8, "seed": number}
        with cluster.client() as client:
            if not stream:
                answer = client.chat.completions.create(**fields)
                return answer.choices[0].message.content or ""
            chunks = client.chat.completions.create(**fields, stream=True)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    alone = [ask(number, stream=False) for number in range(16)]
    cluster.redis.flush()
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda number: ask(number, stream=True), range(16)))
    assert together == alone


def test_restarted_services_encode_again_what_redis_has_garbled(cluster: Cluster) -> None:
    """One entry is another image's, as good as one can be made without our keys; one is whole."""
    images = [png(seed) for seed in (10, 11, 12, 13, 14)]
    keys: list[bytes] = []
    expected: list[str] = []
    for image in images:
        before = set(stored_keys(cluster))
        expected.append(cluster.ask(QUESTION, image))
        wait_until(lambda b=before: len(set(stored_keys(cluster)) - b) == 1, PATIENCE_S, "stored")
        keys += set(stored_keys(cluster)) - before
    assert expected[3] != expected[0]
    with cluster.redis.client() as client:
        values = [bytearray(client.get(key) or b"") for key in keys]
        header_bytes = STORED_HEADER_BYTES + SEAL_BYTES
        spec, digest = unpack_header(bytes(values[0][:STORED_HEADER_BYTES]), keys[0][-KEY_BYTES:])
        body = values[0][header_bytes:]
        flipped = values[2].copy()
        flipped[-7] ^= 0xFF
        client.set(keys[0], b"garbage")
        client.set(keys[1], bytes(values[1][: len(values[1]) // 2]))
        client.set(keys[2], bytes(flipped))
        client.set(keys[3], pack_header(keys[3][-KEY_BYTES:], spec, digest) + NO_SEAL + body)
    num_lines = {s: len(s.log.read_text().splitlines()) for s in cluster.services}
    cluster.restart(*cluster.encoders, *cluster.decoders)  # only Redis could answer now
    assert cluster.ask(QUESTION, images[4]) == expected[4]
    assert cluster.num_encodes() == 0  # counters restart with the process
    assert [cluster.ask(QUESTION, image) for image in images[:4]] == expected[:4]
    assert cluster.num_encodes() == 4
    assert num_events(cluster, "corrupt") >= 3 and num_events(cluster, "forged") >= 1
    for service in (*cluster.encoders, *cluster.decoders):
        lines = service.log.read_text().splitlines()[num_lines[service] :]
        assert sum("an entry in Redis is not used" in line for line in lines) <= 1


def test_no_caller_of_an_encoder_names_its_image_as_anothers(cluster: Cluster) -> None:
    """Who reaches an encoder cannot answer for a victim's image before the victim asks."""
    victims, mine = png(30), png(31)
    apart = cluster.ask(QUESTION, victims, extra_body={"cache_salt": "another key"})
    assert apart != cluster.ask(QUESTION, mine)
    for encoder in cluster.encoders:
        with grpc.insecure_channel(encoder.address) as channel:
            stub = EncoderStub(channel)
            prefix = stub.Describe(encoder_pb2.DescribeEncoderRequest()).key_prefix
            grid = (1, 12, 12)
            forged = encoder_pb2.EncodeRequest(
                image_key=image_key(prefix, victims, unit=Unit(grid), salt=b""),
                image=mine,
                grid=encoder_pb2.Grid(t=1, h=12, w=12),
            )
            with pytest.raises(grpc.RpcError) as caught:
                stub.Encode(forged, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert encoder.metric("triptych_encoder_failures_total", code="wrong_image_key") == 1
    assert cluster.ask(QUESTION, victims) == apart
    forged.image = victims  # so the key was the victim's
    with grpc.insecure_channel(encoder.address) as channel:
        EncoderStub(channel).Encode(forged, timeout=PATIENCE_S)


def test_flushed_and_stopped_redis_change_no_answer(cluster: Cluster) -> None:
    expected = cluster.ask(QUESTION, png(20))
    cluster.redis.flush()
    assert cluster.ask(QUESTION, png(20)) == expected
    cluster.redis.stop()
    try:
        make_hasty(cluster)  # which the next test needs, too
        cluster.restart(*cluster.encoders, *cluster.decoders)
        assert cluster.ask(QUESTION, png(20)) == expected
        assert cluster.ask(QUESTION, png(21))
    finally:
        cluster.redis.start()


def test_a_frozen_redis_costs_one_timeout(hasty: Cluster) -> None:
    seeds = itertools.count(100)

    def seconds() -> float:
        image = png(next(seeds))
        start = time.perf_counter()
        assert hasty.ask(QUESTION, image, max_tokens=1)
        return time.perf_counter() - start

    seconds()
    usual = [seconds() for _ in range(12)]

    def first_and_others() -> float:
        """What the freeze costs the request that finds it out, which is the worst off."""
        stored = num_stored(hasty)
        hasty.redis.freeze()
        try:
            first = seconds()
            others = [seconds() for _ in range(4)]
        finally:
            hasty.redis.thaw()
        wait_until(lambda: bool(seconds()) and num_stored(hasty) > stored, PATIENCE_S, "in use")
        return max(first, min(others)) - statistics.median(usual)

    assert least(first_and_others, 1.7 * TIMEOUT_S) <= 1.7 * TIMEOUT_S


def num_stored(cluster: Cluster) -> int:
    """Embeddings in Redis; they are written behind the answer."""
    return len(stored_keys(cluster))


def stored_keys(cluster: Cluster) -> list[bytes]:
    found = cluster.redis.keys()
    return [key for key in found if key.startswith(b"triptych:embedding:")]


def num_events(cluster: Cluster, event: str) -> float:
    """Of Redis, in all services that use it."""
    return sum(
        service.metric(f"{service.kind}_redis_events_total", event=event)
        for service in (*cluster.encoders, *cluster.decoders)
    )
