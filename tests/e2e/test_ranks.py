"""A decoder of two ranks, over gloo: its answers are those of one process, and it ends as a whole.

Answers are greedy and float32. Log-probabilities agree within 5e-4, as in test_text_families.py.
"""

import asyncio
import math
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.e2e.cluster import Cluster, Service, message, png, wait_until
from tests.e2e.serve_command import ServeCommand
from tests.noise import PATIENCE_S
from triptych.probes import gateway_ready

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOLERANCE = 5e-4
KV_BYTES = 1_700_000  # 640 tokens: fewer than all of `STORIES` need
STORIES = [f"{name}, tell me what you see in the picture. " * 4 for name in "ABCDEF"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"messages": [message("Who are you?")], "logprobs": True, "top_logprobs": 3},
    "image": {"messages": [message("Describe the picture.", png(801))], "logprobs": True},
    "chunks": {"messages": [message("How many? " * 60, png(802), png(803))]},
    "masks": {"messages": [message("What do you see?", png(804))], "response_format": FORMAT},
    "prompt_logprobs": {"messages": [message("The red circle. " * 9)], "prompt_logprobs": 2},
    "sampled": {"messages": [message("Who?")], "temperature": 0.7, "seed": 5},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Its first decoder has two ranks. The second one, of one, starts when a test restores it."""
    cluster = Cluster(Path(tmp_path_factory.mktemp("ranks")), decoders=2)
    cluster.decoders[0].set(tensor_parallel=2, kv_cache_bytes=KV_BYTES, step_ms=5)
    cluster.redis.start()
    try:
        for service in (*cluster.encoders, cluster.decoders[0], cluster.gateway):
            service.start()
        address = cluster.gateway.host, cluster.gateway.port
        wait_until(lambda: asyncio.run(gateway_ready(*address)), 120, "it is ready", period_s=0.1)
        yield cluster
    finally:
        cluster.__exit__()


@pytest.fixture
def ranks(cluster: Cluster) -> Service:
    """The decoder of two, and another one beside it."""
    cluster.restore()
    return cluster.decoders[0]


def ask(url: str, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": 24, **fields}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """Of the answer's tokens and their alternatives, and of the prompt's."""
    of_answer = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    found = [each["logprob"] for token in of_answer for each in (token, *token["top_logprobs"])]
    for place in answer.get("prompt_logprobs") or []:
        found += [each["logprob"] for each in (place or {}).values()]
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_are_those_of_one_rank(cluster: Cluster, demo: ServeCommand, name: str) -> None:
    found, expected = (ask(url, **REQUESTS[name]) for url in (cluster.url, demo.url))
    assert text_of(found) == text_of(expected) != ""
    found, expected = logprobs_of(found), logprobs_of(expected)
    assert len(found) == len(expected) and (len(found) > 20) == ("logprobs" in str(REQUESTS[name]))
    assert all(math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(found, expected, strict=True))


def test_a_prefix_that_is_known_changes_nothing(cluster: Cluster) -> None:
    asked = {"messages": [message("A house and a tree. " * 9, png(805))]}
    first, second = (ask(cluster.url, **asked) for _ in range(2))
    assert text_of(first) == text_of(second)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.nightly  # tests/parity/test_ranks.py has preemption over ranks
def test_preempted_sequences_go_on(cluster: Cluster, demo: ServeCommand) -> None:
    def all_of(url: str) -> list[str]:
        # Together they need 1.7 times the cache: those that begin late are there in time.
        asked = {"max_tokens": 120, "ignore_eos": True}
        with ThreadPoolExecutor(len(STORIES)) as pool:
            answers = pool.map(lambda s: ask(url, messages=[message(s)], **asked), STORIES)
            return list(map(text_of, answers))

    assert all_of(cluster.url) == all_of(demo.url)
    assert cluster.decoders[0].metric("triptych_decoder_preemptions_total") > 0


def rank_of(decoder: Service) -> psutil.Process:
    """The process of rank 1."""
    (rank,) = (
        child for child in psutil.Process(decoder.engine_pid()).children()
        if "services.decoder.ranks.main" in child.cmdline()
    )  # fmt: skip
    return rank


def ended(decoder: Service, trouble: Callable[[psutil.Process], object]) -> float:
    """Troubles a rank that works; returns the seconds until the front has ended."""
    wait_until(
        lambda: decoder.metric("triptych_decoder_sequences_running") > 0, PATIENCE_S, "it works"
    )
    trouble(rank_of(decoder))
    seconds = wait_until(lambda: not decoder.is_running(), PATIENCE_S, "it has ended")
    assert decoder.wait() == 1
    wait_until(lambda: decoder.session() == [], PATIENCE_S, "nothing of it is left")
    return seconds


def test_a_stopped_rank_ends_the_decoder(cluster: Cluster) -> None:
    """Alone, so that what it answered fails."""
    long = {"max_tokens": 500, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(cluster.ask, "Who are you?", **long)
        # After eight seconds of silence, if the machine does nothing else.
        assert ended(cluster.decoders[0], psutil.Process.suspend) < PATIENCE_S / 2
        assert isinstance(answer.exception(), openai.APIStatusError)


def goes_on_elsewhere(
    cluster: Cluster, decoder: Service, trouble: Callable[[psutil.Process], object]
) -> float:
    """`ended`, while another decoder goes on with the answers."""
    asked = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    expected = [cluster.ask(story, **asked) for story in STORIES] * 2
    with ThreadPoolExecutor(len(expected)) as pool:
        answers = [pool.submit(cluster.ask, story, **asked) for story in STORIES * 2]
        seconds = ended(decoder, trouble)
        assert [answer.result() for answer in answers] == expected
    return seconds


@pytest.mark.nightly
def test_a_rank_without_memory_ends_the_decoder(cluster: Cluster, ranks: Service) -> None:
    def without_memory(rank: psutil.Process) -> None:
        most = rank.memory_info().vms
        rank.rlimit(resource.RLIMIT_AS, (most, most))
        # Longer prompts than before, of which the decoder gets some.
        with ThreadPoolExecutor(4) as pool:
            for name in "GHIJ":
                pool.submit(cluster.ask, f"{name}, a tree and a house. " * 30, max_tokens=1)

    goes_on_elsewhere(cluster, ranks, without_memory)
    assert "allocate memory" in ranks.log.read_text()


@pytest.mark.nightly
def test_a_killed_rank_ends_the_decoder(cluster: Cluster, ranks: Service) -> None:
    seconds = goes_on_elsewhere(cluster, ranks, psutil.Process.kill)
    assert seconds < PATIENCE_S / 2 and "rank 1 has ended (status -9)" in ranks.log.read_text()


@pytest.mark.nightly
def test_the_answers_of_a_stopped_rank_go_on(cluster: Cluster, ranks: Service) -> None:
    assert goes_on_elsewhere(cluster, ranks, psutil.Process.suspend) < PATIENCE_S / 2


@pytest.mark.nightly
def test_ranks_end_with_the_engine(cluster: Cluster, ranks: Service) -> None:
    rank = rank_of(ranks)
    psutil.Process(ranks.engine_pid()).send_signal(signal.SIGKILL)
    rank.wait(PATIENCE_S)
    assert ranks.wait() == 1
