"""Tenants: who is admitted next, and what a flood costs another tenant."""

from collections import Counter

import pytest

from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.schedule.sequence import Sequence
from tests.engine_harness import KEYS, Harness, prompt_of
from tests.fake_runner import add_message
from tests.integrity import check_scheduler
from tests.unit.decoder.test_scheduler import scheduler_of


def add(
    scheduler, number: int, tenant: str, length: int = 8, weight: float = 1.0,
    max_tokens: int = 60, background: bool = False,
) -> Sequence:  # fmt: skip
    message = add_message(
        number, prompt_of(number, length), tenant=tenant, tenant_weight=weight,
        max_tokens=max_tokens, background=background,
    )  # fmt: skip
    sequence = Sequence(message)
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
    check_scheduler(scheduler)
    return tokens


@pytest.mark.parametrize(
    ("length", "max_tokens"), [(8, 60), (8, 1000), (30, 4), (60, 60), (1000, 60)]
)
def test_a_request_beside_a_flood_is_the_first_of_the_next_step(length, max_tokens) -> None:
    """Of short prompts, long ones, and of answers that hold all rows for long."""
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64, length=2048)
    for number in range(300):
        add(scheduler, number, "flood", length=length, max_tokens=max_tokens)
    for _ in range(20):
        run_step(scheduler)
    quiet = add(scheduler, 500, "quiet", length=20)
    tokens = run_step(scheduler)
    assert quiet.num_generated == 1 and tokens["quiet"] == 20
    assert tokens["flood"] > 0 and scheduler.prefills.num_preemptions <= 1


def test_nobody_yields_to_a_request_whose_image_has_not_arrived() -> None:
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64, length=2048)
    for number in range(64):
        add(scheduler, number, "flood")
    for _ in range(20):
        run_step(scheduler)
    assert scheduler.num_running == 32
    quiet = Sequence(
        add_message(500, prompt_of(500, 20), tenant="quiet", images=(ImageSpan(KEYS[0], 0, 8),))
    )
    scheduler.add(quiet)
    run_step(scheduler)
    assert (
        scheduler.prefills.num_preemptions == 0 and len(scheduler.prefills.parked_for_images) == 1
    )
    scheduler.image_ready(quiet, KEYS[0], 0)
    run_step(scheduler)
    assert scheduler.prefills.num_preemptions == 1 and quiet.num_generated == 1


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_a_row_that_is_free_again_is_given_at_once(max_tokens: int) -> None:
    """Also if as many blocks are free as when a sequence that stalled had the last row."""
    scheduler = scheduler_of(blocks=64, rows=2, budget=64, length=256)
    add(scheduler, 1, "", length=4)
    run_step(scheduler)
    image = (ImageSpan(KEYS[0], 4, 4),)
    stalls = Sequence(add_message(2, prompt_of(2, 8), images=image, max_tokens=max_tokens))
    scheduler.add(stalls)
    waits = add(scheduler, 3, "")
    run_step(scheduler)
    scheduler.image_ready(stalls, KEYS[0], 0)
    while stalls.num_generated < max_tokens:
        run_step(scheduler)
    run_step(scheduler)
    assert waits.num_generated == 1


def test_a_prompt_whose_beginning_is_being_computed_is_admitted_once_it_is() -> None:
    """Of two equal prompts that come together, the second needs few blocks behind the first."""
    scheduler = scheduler_of(blocks=12, rows=2, budget=64, length=256)
    first, second = [
        Sequence(add_message(number, prompt_of(1, 30), max_tokens=9)) for number in (1, 2)
    ]
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    assert (first.num_generated, second.num_generated) == (1, 0)  # there are four blocks left
    scheduler.blocks.register(first)  # as the engine does behind a launch
    run_step(scheduler)
    assert (second.num_generated, second.num_cached_tokens) == (1, 28)


def test_blocks_are_shared_too() -> None:
    """One tenant's few long sequences fill the cache; another's prompt needs blocks, not rows."""
    scheduler = scheduler_of(blocks=64, rows=32, budget=64, length=256)
    for number in range(4):
        add(scheduler, number, "long", length=60)
    for _ in range(6):
        run_step(scheduler)
    late = add(scheduler, 500, "late", length=64)
    assert scheduler.blocks.num_free < 64 // 4
    for _ in range(3):  # its prompt is longer than the room in a step
        run_step(scheduler)
    assert late.num_generated >= 1 and scheduler.prefills.num_preemptions >= 1


def test_tenants_that_compete_have_rows_by_weight_and_preempt_once() -> None:
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64)
    for number in range(300):
        add(scheduler, number, "heavy", weight=3.0)
    for _ in range(10):
        run_step(scheduler)
    for number in range(400, 700):
        add(scheduler, number, "light")
    for _ in range(10):
        run_step(scheduler)
    before = scheduler.prefills.num_preemptions
    tokens: Counter[str] = Counter()
    for _ in range(200):
        tokens += run_step(scheduler)
    assert tokens["heavy"] / tokens["light"] == pytest.approx(3, rel=0.15)
    assert before <= 5  # until the other has half of what its weight says
    assert scheduler.prefills.num_preemptions == before


def test_a_tenants_only_sequence_is_not_preempted_for_another() -> None:
    scheduler = scheduler_of(blocks=4096, rows=2, budget=64)
    for number in range(5):
        add(scheduler, number, f"{number}", max_tokens=10)
    while scheduler.has_work:
        run_step(scheduler)
    assert scheduler.prefills.num_preemptions == 0


@pytest.mark.parametrize("rows", [1, 8])
def test_a_heavier_tenant_does_not_preempt_the_same_sequence_again_and_again(rows) -> None:
    scheduler = scheduler_of(blocks=4096, rows=rows, budget=64)
    light = [add(scheduler, number, f"{number}", max_tokens=60) for number in range(rows)]
    for _ in range(5):
        run_step(scheduler)
    heavy = add(scheduler, 500, "heavy", weight=2.0, max_tokens=60)
    for _ in range(55):
        run_step(scheduler)
    assert scheduler.prefills.num_preemptions == 0 and all(s.num_generated == 60 for s in light)
    run_step(scheduler)
    assert heavy.num_generated == 1


def test_a_tenant_yields_beside_a_light_one_that_does_not() -> None:
    scheduler = scheduler_of(blocks=4096, rows=8, budget=64)
    light = add(scheduler, 0, "light", weight=0.1)
    for number in range(1, 8):
        add(scheduler, number, "many")
    for _ in range(5):
        run_step(scheduler)
    head = add(scheduler, 500, "head")
    run_step(scheduler)
    assert head.num_generated == 1 and light.num_preemptions == 0
    assert scheduler.prefills.num_preemptions == 1


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


def test_background_work_runs_only_where_nobody_else_waits() -> None:
    """Two tenants' batches hold all rows. Each request takes a row at once, whosever it is and
    however many rows its tenant has, and no line of a batch is admitted before the last request.
    """
    scheduler = scheduler_of(blocks=4096, rows=8, budget=64, length=2048)
    for number in range(24):
        add(scheduler, number, f"{'ab'[number % 2]}/batch", background=True, weight=1000)
    for _ in range(4):
        run_step(scheduler)
    running = [s for s in scheduler.running() if s.message.background]
    assert Counter(s.tenant for s in running) == {"a/batch": 4, "b/batch": 4}
    online = [add(scheduler, 100 + n, "a", length=4, weight=0.001) for n in range(12)]
    for _ in range(8):
        run_step(scheduler)
    assert {s.tenant for s in scheduler.running()} == {"a"}
    assert sum(s.row >= 0 for s in online) == 8
    while len(scheduler.running()) + scheduler.num_waiting > 0:
        run_step(scheduler)
        waits = any(s.row < 0 and s.num_generated == 0 for s in online)
        assert not (waits and any(s.message.background for s in scheduler.running()))
    assert all(s.num_generated == 60 for s in online)
