"""Fairness among tenants: who is admitted, who gives way, and that nobody's answer changes."""

from collections import Counter

import pytest

from services.decoder.engine.sequence import Sequence
from services.decoder.engine.short_steps import ShortSteps
from tests.engine_harness import Harness, prompt_of
from tests.fake_runner import add_message
from tests.unit.decoder.test_scheduler import scheduler_of


def add(scheduler, number: int, tenant: str, length: int = 8, weight: float = 1.0) -> Sequence:
    message = add_message(
        number, prompt_of(number, length), tenant=tenant, tenant_weight=weight, max_tokens=60
    )
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


def test_a_flood_delays_another_tenants_first_token_by_a_step():
    """Forty requests of eight completions each hold all rows; the ninth tenant's waits no longer
    than one step for a row, and its prompt goes first.
    """
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64)
    for number in range(320):
        add(scheduler, number, "flood")
    for _ in range(20):
        run_step(scheduler)
    assert scheduler.num_running == 32
    late = add(scheduler, 1000, "late", length=20)
    run_step(scheduler)
    assert late.num_generated == 1
    assert scheduler.num_preemptions == 1


def test_rows_are_shared_by_weight_and_nobody_is_preempted_twice_for_it():
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64)
    for number in range(200):
        add(scheduler, number, "heavy", weight=3.0)
    for _ in range(10):
        run_step(scheduler)
    for number in range(200, 400):
        add(scheduler, number, "light")
    for _ in range(10):
        run_step(scheduler)
    before = scheduler.num_preemptions
    tokens: Counter[str] = Counter()
    for _ in range(200):
        tokens += run_step(scheduler)
    assert 2.4 <= tokens["heavy"] / tokens["light"] <= 3.6
    assert before == 4  # then the counters see to the rest
    assert scheduler.num_preemptions == before


def test_blocks_are_shared_too():
    """One tenant's few long sequences fill the cache; another's prompt needs blocks, not rows."""
    scheduler = scheduler_of(blocks=64, rows=32, budget=64, length=256)
    for number in range(4):
        add(scheduler, number, "long", length=60)
    for _ in range(6):
        run_step(scheduler)
    late = add(scheduler, 1000, "late", length=64)
    assert scheduler.blocks.num_free < 64 // 4
    for _ in range(3):  # its prompt is longer than the room in a step
        run_step(scheduler)
    assert late.num_generated >= 1 and scheduler.num_preemptions >= 1


def test_a_tenant_beyond_its_share_waits_for_its_own():
    scheduler = scheduler_of(blocks=4096, rows=8, budget=64)
    for number in range(4):
        add(scheduler, number, "a")
    for number in range(10, 20):
        add(scheduler, number, "b")
    for _ in range(10):
        run_step(scheduler)
    assert scheduler.num_running == 8 and scheduler.num_preemptions == 0


def test_time_without_requests_earns_nothing():
    """A tenant that was idle is served as the others from then on, not until it has caught up."""
    scheduler = scheduler_of(blocks=4096, rows=4, budget=32)
    for number in range(100):
        add(scheduler, number, "busy")
    for _ in range(60):
        run_step(scheduler)
    for number in range(200, 300):
        add(scheduler, number, "idle")
    tokens: Counter[str] = Counter()
    for _ in range(120):
        tokens += run_step(scheduler)
    assert 0.8 <= tokens["idle"] / tokens["busy"] <= 1.25


def test_a_long_prompt_of_one_tenant_leaves_room_for_anothers():
    scheduler = scheduler_of(blocks=4096, rows=16, budget=32, length=2048)
    for number in range(5):
        add(scheduler, number, "long", length=1000)
    run_step(scheduler)
    late = add(scheduler, 1000, "late", length=16)
    run_step(scheduler)
    assert late.num_generated == 1


def test_the_end_of_a_long_prompt_takes_no_room_from_anothers_turn():
    scheduler = scheduler_of(blocks=4096, rows=16, budget=32, length=2048)
    add(scheduler, 0, "long", length=60)
    run_step(scheduler)  # 28 tokens are left
    late = add(scheduler, 1000, "late", length=16)
    assert run_step(scheduler) == Counter(late=16, long=16)
    assert late.num_generated == 1


def test_first_chunks_of_other_tenants_have_every_second_step_for_themselves():
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64, short_steps=ShortSteps(1 << 20))
    for number in range(100):
        add(scheduler, number, "flood")
    for _ in range(10):
        tokens = run_step(scheduler)
        assert set(tokens) == {"flood"} and tokens["flood"] >= 32  # alone, nothing is held back
    for number, tenant in enumerate(("a", "b", "c"), 1000):
        add(scheduler, number, tenant, length=10)
    assert run_step(scheduler) == Counter(a=10, b=10, c=10)
    for number in range(2000, 2008):
        add(scheduler, number, f"{number}", length=5)
        tokens = run_step(scheduler)
        assert ("flood" in tokens) == (number % 2 == 0)


def test_a_flood_without_a_row_is_no_newcomer():
    scheduler = scheduler_of(blocks=4096, rows=32, budget=64, short_steps=ShortSteps(1 << 20))
    add(scheduler, 1000, "late", length=10)
    for number in range(10):
        add(scheduler, number, "flood", length=40)  # as of images that are all ready at once
    assert [run_step(scheduler) for _ in range(2)] == [Counter(late=10), Counter(late=1, flood=16)]


def test_prompts_have_fewer_tokens_while_tenants_share_a_cpu():
    scheduler = scheduler_of(
        blocks=4096, rows=4, budget=64, length=4096, short_steps=ShortSteps(1 << 20)
    )
    add(scheduler, 0, "flood", length=4000)
    assert run_step(scheduler) == Counter(flood=64)
    late = add(scheduler, 1, "late", length=10)
    assert [run_step(scheduler) for _ in range(2)] == [Counter(late=10), Counter(late=1, flood=16)]
    scheduler.finish(late)
    assert [run_step(scheduler)["flood"] for _ in range(100)][-2:] == [16, 64]


def test_decodes_that_share_a_cpu_read_so_much_context_and_take_turns():
    scheduler = scheduler_of(blocks=4096, rows=16, budget=64, short_steps=ShortSteps(100))
    for number in range(10):
        add(scheduler, number, "flood", length=24)
    while scheduler.num_running < 10 or scheduler._prefilling:
        run_step(scheduler)
    assert run_step(scheduler) == Counter(flood=10)  # alone
    add(scheduler, 1000, "late", length=10)
    assert run_step(scheduler) == Counter(late=10)
    before = {s.sequence_id: s.num_generated for s in scheduler._decoding.values()}
    for _ in range(16):
        tokens = run_step(scheduler)
        assert tokens["late"] == 1  # its turn is in every step
        assert 1 <= tokens["flood"] <= 4
    after = {s.sequence_id: s.num_generated for s in scheduler._decoding.values()}
    shares = [after[number] - before[number] for number in range(10)]
    assert max(shares) - min(shares) <= 1 and sum(shares) >= 32


def test_chunks_behind_long_contexts_are_small_and_all_prompts_go_on():
    short = ShortSteps(600)
    scheduler = scheduler_of(blocks=4096, rows=8, budget=256, length=2048, short_steps=short)
    sequences = [add(scheduler, number, "long", length=1500) for number in range(4)]
    assert run_step(scheduler) == Counter(long=256)  # at the beginning
    num_steps = 0
    while any(s.num_generated == 0 for s in sequences):
        batch = scheduler.schedule()
        assert batch.num_tokens == sum(chunk.length for chunk in batch.chunks)
        assert all(chunk.length > 0 for chunk in batch.chunks)
        for chunk in batch.chunks:
            if chunk.samples:
                chunk.sequence.num_in_flight -= 1
                chunk.sequence.token_ids.append(1)
            if chunk.start > 1200:
                assert chunk.length <= 256 // 7
        num_steps += 1
    assert num_steps < 200


def test_a_context_longer_than_a_step_is_decoded_all_the_same():
    scheduler = scheduler_of(blocks=4096, rows=4, budget=64, short_steps=ShortSteps(0))
    sequences = [add(scheduler, number, f"{number}", length=20) for number in range(3)]
    for _ in range(60):
        run_step(scheduler)
    assert all(s.num_generated >= 15 for s in sequences)


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_for_another_tenant_changes_no_token(overlap: bool):
    harness = Harness(overlap=overlap, max_num_sequences=4, max_batched_tokens=16, num_blocks=64)
    for number in range(12):
        harness.add(add_message(number, prompt_of(number, 10), max_tokens=20, tenant="flood"))
    for number in range(12, 18):
        for _ in range(4):
            harness.step()
        harness.add(add_message(number, prompt_of(number, 10), max_tokens=9, tenant="late"))
    harness.run()
    assert harness.engine._scheduler.num_preemptions > 0
    harness.assert_all_as_alone()
    harness.assert_empty()
