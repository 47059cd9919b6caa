"""Clusters: nothing is lost when pods come and go, GPU time is counted, runs are repeatable."""

import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import encoder_choice
from benchmarks.simulation.cluster import Cluster, FleetPlan, Plan
from benchmarks.simulation.policies import (
    cell_policy,
    cells,
    decoder_policy,
    encoder_policy,
    shipped,
    split,
)
from benchmarks.simulation.requests import Request
from benchmarks.simulation.results import simulate
from benchmarks.simulation.stages import H200_2B
from benchmarks.simulation.traces import DOCUMENT, Trace, synthetic


def jump() -> Trace:
    """Five minutes; after one, documents come eight times as often."""
    rates = np.where(np.arange(30) < 6, 1.0, 8.0)
    return synthetic("jump", {DOCUMENT: rates}, seed=0)


@pytest.mark.parametrize("plan", [shipped(), cells(1, cell_policy())], ids=["split", "cells"])
def test_equal_seeds_give_equal_results(plan: Plan) -> None:
    trace = jump()
    first, again = (simulate(trace, plan, H200_2B, seed=3) for _ in range(2))
    assert first.num_requests == len(trace)
    assert (first.attained, first.gpu_hours, first.ttft_p99, first.pods) == (
        again.attained, again.gpu_hours, again.ttft_p99, again.pods,
    )  # fmt: skip
    assert max(max(pods) for pods in first.pods.values()) > 1  # it grew
    assert (first.attained, first.ttft_p99) != (1.0, 0.0)


def test_encoders_by_seconds_answer_images_of_many_sizes_sooner() -> None:
    """Simulated time; the rule before is the control."""
    before, now = (
        encoder_choice.run("four such images", 1, by_number=old) for old in (True, False)
    )
    assert now[0] < 0.8 * before[0] and now[1] < before[1]


def test_a_leaving_pod_ends_its_work_and_gets_no_more() -> None:
    ended: list[Request] = []
    cluster = Cluster(split(1, 2), H200_2B, ended.append)
    decoders = cluster.fleets[1]
    requests = [Request(0.0, 500, 400, (4096,)) for _ in range(40)]
    for request in requests[:20]:
        cluster.submit(request)
    leaving = decoders.ready[-1]
    decoders.scale(1)
    busy = leaving.num_requests
    assert busy > 0
    assert leaving in decoders.pods
    for request in requests[20:]:
        cluster.submit(request)
    assert leaving.num_requests == busy
    cluster.clock.run(60)
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    assert leaving not in decoders.pods
    assert max(r.last_token for r in requests) >= leaving.ended > 0


def test_gpu_time_runs_from_creation_to_the_end_of_the_drain() -> None:
    cluster = Cluster(split(1, 1), H200_2B, lambda request: None)
    decoders = cluster.fleets[1]
    decoders.scale(2)
    cluster.clock.run(30)
    assert len(decoders.ready) == 1  # starting, and paid for
    cluster.clock.run(60)
    assert len(decoders.ready) == 2
    decoders.scale(1)
    cluster.clock.run(100)
    assert decoders.gpu_seconds() == pytest.approx(100 + 60)


def test_a_pod_that_starts_leaves_first() -> None:
    cluster = Cluster(split(1, 1), H200_2B, lambda request: None)
    decoders = cluster.fleets[1]
    ready = decoders.ready[0]
    decoders.scale(2)
    decoders.scale(1)
    cluster.clock.run(120)
    assert decoders.ready == decoders.pods == [ready]


def test_a_full_cluster_refuses() -> None:
    ended: list[Request] = []
    cluster = Cluster(split(1, 1), H200_2B, ended.append)
    for _ in range(1100):
        cluster.submit(Request(0.0, 100, 100))
    assert sum(request.refused for request in ended) == 1100 - 1024


def test_a_thousand_pods() -> None:
    rng = np.random.default_rng(0)
    cpu = time.process_time()
    fleets = (FleetPlan(("encoder",), 300, encoder_policy()),
              FleetPlan(("decoder",), 700, decoder_policy()))  # fmt: skip
    ended: list[Request] = []
    cluster = Cluster(Plan(fleets), H200_2B, ended.append)
    arrivals = np.sort(rng.uniform(0, 10, 5_000)).tolist()
    for arrival in arrivals:
        cluster.clock.at(arrival, cluster.submit, Request(arrival, 1300, 50, (4096,)))
    cluster.clock.run(30)
    assert len(ended) == 5_000
    assert np.median([request.ttft for request in ended]) < 0.1
    assert time.process_time() - cpu < 30  # a few seconds on an idle machine


def test_both_in_one_pod_interfere() -> None:
    def tpot(plan: Plan) -> float:
        ended: list[Request] = []
        cluster = Cluster(plan, H200_2B, ended.append)
        for n in range(200):
            images = (4096,) * 4 if n % 2 else ()
            request = Request(n * 0.05, 5000 if images else 500, 100, images)
            cluster.clock.at(request.arrival, cluster.submit, request)
        cluster.clock.run(120)
        return float(np.mean([r.tpot for r in ended if not r.images]))

    both = cells(1)
    apart = split(1, 1)
    assert tpot(both) > 1.2 * tpot(apart)


def test_a_slow_start_costs_objectives() -> None:
    trace = jump()
    soon, late = (
        simulate(trace, shipped(start_s=start_s), H200_2B).attained for start_s in (15, 200)
    )
    assert soon > late


def test_plans_are_values() -> None:
    plan = split(1, 2)
    assert plan.with_replicas(3, 4).fleets == tuple(
        replace(fleet, replicas=n) for fleet, n in zip(plan.fleets, (3, 4), strict=True)
    )
