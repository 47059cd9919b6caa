"""Redis and the caches: an image is encoded once, and a bad Redis changes no answer."""

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, message, png, wait_until
from tests.noise import PATIENCE_S, least

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
QUESTION = "Describe the picture."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(Path(tmp_path_factory.mktemp("cluster")), encoders=2) as cluster:
        yield cluster


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Cluster]:
    """With the default of Redis's timeout."""
    usual: dict[str, object] = {"redis_timeout_s": 0.03}
    with Cluster(tmp_path, encoder=usual, decoder=usual) as cluster:
        yield cluster


def test_second_request_with_the_same_image_encodes_nothing(cluster: Cluster) -> None:
    first = cluster.ask(QUESTION, png(1))
    encodes = cluster.num_encodes()
    assert cluster.ask(QUESTION, png(1)) == first
    assert cluster.ask("What is it?", png(1))
    assert cluster.num_encodes() == encodes


def test_restarted_services_encode_nothing_again(cluster: Cluster) -> None:
    stored = num_stored(cluster)
    first = cluster.ask(QUESTION, png(2))
    wait_until(lambda: num_stored(cluster) > stored, PATIENCE_S, "the entry is in Redis")
    cluster.restart(*cluster.encoders, *cluster.decoders)
    assert cluster.ask(QUESTION, png(2)) == first
    assert cluster.num_encodes() == 0  # counters restart with the process


def test_100_simultaneous_requests_for_a_new_image_encode_it_once(cluster: Cluster) -> None:
    encodes = cluster.num_encodes()
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda _: cluster.ask(QUESTION, png(3)), range(100)))
    assert len(set(answers)) == 1
    assert cluster.num_encodes() == encodes + 1


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

    alone = [ask(number, stream=False) for number in range(64)]
    cluster.redis.flush()
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda number: ask(number, stream=True), range(64)))
    assert together == alone


def test_garbage_in_redis_changes_no_answer(cluster: Cluster) -> None:
    images = [png(seed) for seed in (10, 11, 12)]
    stored = num_stored(cluster)
    expected = [cluster.ask(QUESTION, image) for image in images]
    wait_until(lambda: num_stored(cluster) == stored + 3, PATIENCE_S, "the entries are in Redis")
    with cluster.redis.client() as client:
        keys = list(client.scan_iter())
        for n, key in enumerate(keys):
            value = bytearray(client.get(key) or b"")
            if n % 3 == 0:
                value = bytearray(b"garbage")
            elif n % 3 == 1:
                value = value[: len(value) // 2]
            else:
                value[-7] ^= 0xFF
            client.set(key, bytes(value))
    cluster.restart(*cluster.encoders, *cluster.decoders)  # only Redis could answer now
    assert [cluster.ask(QUESTION, image) for image in images] == expected


def test_flushed_and_stopped_redis_change_no_answer(cluster: Cluster) -> None:
    expected = cluster.ask(QUESTION, png(20))
    cluster.redis.flush()
    assert cluster.ask(QUESTION, png(20)) == expected
    cluster.redis.stop()
    try:
        cluster.restart(*cluster.encoders, *cluster.decoders)
        assert cluster.ask(QUESTION, png(20)) == expected
        assert cluster.ask(QUESTION, png(21))
    finally:
        cluster.redis.start()


def test_frozen_redis_adds_at_most_50_ms(hasty: Cluster) -> None:
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

    assert least(first_and_others, 0.050) <= 0.050


def num_stored(cluster: Cluster) -> int:
    """Embeddings in Redis; they are written behind the answer."""
    found = cluster.redis.keys()
    return sum(key.startswith(b"triptych:embedding:") for key in found)
