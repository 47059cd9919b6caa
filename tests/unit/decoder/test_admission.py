"""Tenants: who is admitted next, and what a flood costs another tenant."""

from collections import Counter

import pytest

from services.decoder.engine.sequence import Sequence
from tests.engine_harness import Harness, prompt_of
from tests.fake_runner import add_message
from tests.unit.decoder.test_scheduler import scheduler_of


def add(
    scheduler, number: int, tenant: str, length: int = 8, weight: float = 1.0, max_tokens: int = 60
) -> Sequence:
    message = add_message(
        number, prompt_of(number, length), tenant=tenant, tenant_weight=weight,
        max_tokens=max_tokens,
    )  # fmt: skip
    sequence = Sequence.from_message(message)
    scheduler.add(sequence)
    return sequence


def run_step(scheduler) -> Counter[str]:
    """One step whose ids come back at once; tokens computed by tenant."""
    tokens: Counter[str] = Counter()
    for chunk in scheduler.schedule().chunks:
        sequence = chunk.sequence
        tokens[sequence.tenant] += chunk.length
        if chunk.samples:
            sequence.num_in_flight -= 1
            sequence.token_ids.append(1)
            if len(sequence.token_ids) >= sequence.max_length:
                scheduler.finish(sequence)
    scheduler.check_integrity()
    return tokens


def flooded(*, length: int, max_tokens: int = 60, rows: int = 32, budget: int = 64):
    """A scheduler with a flood of one tenant, after another was there for a moment."""
    scheduler = scheduler_of(blocks=4096, rows=rows, budget=budget, length=2048)
    scheduler.finish(add(scheduler, 999, "quiet"))
    for number in range(300):
        add(scheduler, number, "flood", length=length, max_tokens=max_tokens)
    for _ in range(20):
        run_step(scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("length", "max_tokens"), [(8, 60), (8, 1000), (30, 4), (60, 60), (1000, 60)]
)
def test_a_request_beside_a_flood_is_the_first_of_the_next_step(length, max_tokens) -> None:
    """Of short prompts, long ones, and of answers that hold all rows for long."""
    scheduler = flooded(length=length, max_tokens=max_tokens)
    quiet = add(scheduler, 500, "quiet", length=20)
    tokens = run_step(scheduler)
    assert quiet.num_generated == 1 and tokens["quiet"] == 20
    assert tokens["flood"] > 0 and scheduler.num_preemptions == 0


def test_a_part_of_the_rows_and_blocks_is_kept_for_others() -> None:
    scheduler = flooded(length=60, max_tokens=1000)
    assert scheduler.num_running <= 30
    while scheduler.num_waiting and run_step(scheduler)["flood"] > 32:
        pass
    assert 29 <= scheduler.num_running <= 31

    scheduler = scheduler_of(blocks=320, rows=32, budget=64, length=400)
    scheduler.finish(add(scheduler, 999, "quiet"))
    for number in range(20):
        add(scheduler, number, "flood", length=199)
    for _ in range(30):
        run_step(scheduler)
    assert scheduler.num_running == 5  # a sixth fits, with no block left
    add(scheduler, 1000, "quiet", length=60)
    assert run_step(scheduler)["quiet"] > 0


def test_a_lone_tenant_has_all_rows_and_blocks() -> None:
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64)
    for number in range(100):
        add(scheduler, number, "flood")
    for _ in range(10):
        run_step(scheduler)
    assert scheduler.num_running == 32


def test_prompts_are_admitted_by_weight() -> None:
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64)
    for number in range(300):
        add(scheduler, number, "heavy", length=10, weight=3.0, max_tokens=4)
        add(scheduler, 400 + number, "light", length=20, max_tokens=4)
    tokens: Counter[str] = Counter()
    for _ in range(40):
        tokens += run_step(scheduler)
    # Prompt tokens are three to one; each prompt comes with three computed tokens of its answer.
    assert tokens["heavy"] / tokens["light"] == pytest.approx(3 * 1.3 / 1.15, rel=0.1)


def test_time_without_requests_earns_nothing() -> None:
    """A tenant that was idle is served as the others from then on, not until it has caught up."""
    scheduler = scheduler_of(blocks=4096, rows=4, budget=32)
    for number in range(300):
        add(scheduler, number, "busy", max_tokens=10)
    for _ in range(60):
        run_step(scheduler)
    for number in range(400, 700):
        add(scheduler, number, "idle", max_tokens=10)
    tokens: Counter[str] = Counter()
    for _ in range(120):
        tokens += run_step(scheduler)
    assert tokens["idle"] / tokens["busy"] == pytest.approx(1, rel=0.2)


def test_within_a_tenant_the_order_is_that_of_arrival() -> None:
    scheduler = scheduler_of(blocks=4096, rows=2, budget=64)
    sequences = [add(scheduler, number, "a", max_tokens=3) for number in range(10)]
    while scheduler.has_work:
        run_step(scheduler)
    admissions = [s.admission for s in sequences]
    assert admissions == sorted(admissions)


@pytest.mark.parametrize("overlap", [True, False])
def test_tenants_change_no_token(overlap: bool) -> None:
    harness = Harness(overlap=overlap, max_num_sequences=4, max_batched_tokens=16, num_blocks=64)
    for number in range(12):
        harness.add(add_message(number, prompt_of(number, 10), max_tokens=20, tenant="flood"))
    for number in range(12, 18):
        for _ in range(4):
            harness.step()
        harness.add(add_message(number, prompt_of(number, 10), max_tokens=9, tenant="late"))
    harness.run()
    harness.assert_all_as_alone()
    harness.assert_empty()
