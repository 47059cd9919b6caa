"""The simulated engines: times by arithmetic, and nothing lost."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulation.engines import Decoder, Encoder, Gpu
from benchmarks.simulation.events import Clock
from benchmarks.simulation.requests import Request
from benchmarks.simulation.stages import H200_2B

COSTS = replace(H200_2B, request_out=0.0)


class StepByStep(Decoder):
    """The plain twin: no leaps."""

    def _leap_length(self) -> int:
        return 1


def play(
    requests: Sequence[Request], kind: type[Decoder] = Decoder, kv_tokens: int = 1_000_000
) -> Decoder:
    clock = Clock()
    ended: list[Request] = []
    decoder = kind(clock, COSTS, kv_tokens, ended.append)
    for request in requests:
        clock.at(request.arrival, decoder.submit, request)
    clock.run(1e6)
    assert sorted(map(id, ended)) == sorted(map(id, requests))  # each ends, once
    assert decoder.num_running == decoder.num_waiting == decoder.kv_used == 0
    assert not decoder.is_busy
    return decoder


def random_requests(seed: int, number: int = 200, rate: float = 40.0) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, number)).tolist()
    prompts = rng.integers(1, 12_000, number).tolist()
    outputs = rng.integers(1, 300, number).tolist()
    return [Request(*row) for row in zip(arrivals, prompts, outputs, strict=True)]


def test_a_lone_request_takes_its_prompt_and_its_steps() -> None:
    request = Request(1.0, 1008, 3)
    play([request])
    prompt = COSTS.linear_seconds(1008) + 1008**2 / 2 * COSTS.per_pair
    assert request.ttft == pytest.approx(prompt)
    steps = 2 * COSTS.linear_seconds(1) + (1008 + 1009) * COSTS.per_kv_token
    assert request.last_token - request.first_token == pytest.approx(steps)


def test_a_long_prompt_is_computed_in_chunks_and_leaves_room_for_a_short_one() -> None:
    long, short = Request(0.0, 20_000, 1), Request(0.0, 100, 1)
    play([long, short])
    assert short.first_token < long.first_token
    assert long.ttft > 20_000 * COSTS.per_token


@pytest.mark.parametrize("seed", range(5))
def test_leaps_equal_single_steps(seed: int) -> None:
    leaps, steps = random_requests(seed), random_requests(seed)
    play(leaps)
    play(steps, StepByStep)
    for one, other in zip(leaps, steps, strict=True):
        assert one.first_token == pytest.approx(other.first_token, abs=1e-6)
        assert one.last_token == pytest.approx(other.last_token, abs=1e-6)


def test_a_full_pool_preempts_and_loses_nothing() -> None:
    requests = random_requests(0, rate=1000.0)
    decoder = play(requests, kv_tokens=14_000)
    assert decoder.num_preemptions > 0
    assert all(request.first_token <= request.last_token for request in requests)


def test_a_step_has_no_more_rows_than_the_engine() -> None:
    clock = Clock()
    decoder = Decoder(clock, COSTS, 10**9, lambda request: None)
    for _ in range(300):
        decoder.submit(Request(0.0, 10, 1000))
    clock.run(0.1)
    assert (decoder.num_running, decoder.num_waiting) == (256, 44)


def test_the_encoder_fills_batches_oldest_first() -> None:
    clock = Clock()
    order: list[tuple[float, int]] = []
    encoder = Encoder(clock, COSTS, lambda request, patches: order.append((clock.now, patches)))
    for patches in (4096, 10_000, 8192, 4096, 4096):
        request = Request(0.0, 1, 1, (patches,))
        encoder.accept(request, patches)
        encoder.decoded((request, patches))
    assert encoder.num_patches == 30_480
    clock.run(10)
    batches: dict[float, list[int]] = {}
    for at, patches in order:
        batches.setdefault(at, []).append(patches)
    # The first image ran alone: nothing else was there. 10,000 leave no room for a younger one.
    assert list(batches.values()) == [[4096], [10_000], [8192, 4096], [4096]]
    assert (encoder.num_patches, encoder.backlog_s) == (0, 0)
    assert encoder.busy_seconds() == pytest.approx(
        4 * COSTS.encode_fixed + sum(COSTS.image_seconds(patches) for _, patches in order)
    )


def test_engines_on_one_gpu_halve_each_others_rate() -> None:
    clock = Clock()
    gpu = Gpu(sharing=1.0)
    encoded: list[float] = []
    encoder = Encoder(clock, COSTS, lambda request, patches: encoded.append(clock.now), gpu)
    ended: list[Request] = []
    decoder = Decoder(clock, COSTS, 1_000_000, ended.append, gpu)
    prompt, image = Request(0.0, 8000, 1), Request(0.0, 1, 1, (4096,))
    decoder.submit(prompt)
    encoder.accept(image, 4096)
    encoder.decoded((image, 4096))
    clock.run(10)
    alone = COSTS.encode_fixed + COSTS.image_seconds(4096)
    step = COSTS.linear_seconds(8000) + 8000**2 / 2 * COSTS.per_pair
    assert encoded == [pytest.approx(2 * alone)]
    assert prompt.last_token == pytest.approx(step + alone)
    assert decoder.busy_seconds() == pytest.approx(step + alone)
