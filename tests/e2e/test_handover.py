"""Decoders are killed, hang and go; answers go on elsewhere, equal to undisturbed ones."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e import handover
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.handover import Answer
from tests.noise import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MAX_TOKENS = 80


@pytest.fixture(scope="module")
def cluster(pods: Cluster) -> Cluster:
    pods.restore()
    return pods


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> dict[int, Answer]:
    """Of one seed for each kind of request."""
    return handover.Asker(lambda: cluster.url, MAX_TOKENS).ask_alone(range(5))


def test_decoders_killed_in_mid_stream_are_not_noticed(
    cluster: Cluster, undisturbed: dict[int, Answer]
) -> None:
    result = handover.run(cluster, 1, range(5), undisturbed=undisturbed, max_tokens=MAX_TOKENS)
    assert not result.mistakes, result.mistakes[0]
    assert result.num_kills == 1


@pytest.mark.parametrize(
    "how", [pytest.param("SIGTERM", marks=pytest.mark.nightly), "engine stands still"]
)
def test_a_decoder_that_goes_or_hangs_hands_its_answers_over(
    cluster: Cluster, undisturbed: dict[int, Answer], how: str
) -> None:
    cluster.restore()
    asker = handover.Asker(lambda: cluster.url, MAX_TOKENS)
    engines = {decoder: decoder.engine_pid() for decoder in cluster.decoders}
    with ThreadPoolExecutor(len(undisturbed)) as pool:
        asked = {seed: pool.submit(asker.ask, seed) for seed in undisturbed}
        wait_until(lambda: sum(asker.num_chunks.values()) > 20, PATIENCE_S, "streams run")
        for engine in engines.values():  # nothing ends while we look for the busiest
            os.kill(engine, signal.SIGSTOP)
        busiest = max(engines, key=lambda d: d.metric("triptych_decoder_sequences_running"))
        for decoder, engine in engines.items():
            if how == "SIGTERM" or decoder is not busiest:
                os.kill(engine, signal.SIGCONT)
        if how == "SIGTERM":  # the grace is shorter than the answers
            assert busiest.terminate() == 0
        else:
            assert busiest.wait() == 1
        answers = {seed: future.result() for seed, future in asked.items()}
    for seed, answer in answers.items():
        assert not (difference := answer.differs_from(undisturbed[seed])), difference
    assert any(answer.handover_ms is not None for answer in answers.values())
    if how == "SIGTERM":  # offered while the decoder was still there
        assert "the decoder drains" in cluster.gateway.log.read_text()
    assert cluster.gateway.metric("triptych_gateway_handovers_total") > 0
