"""The scheduler alone: the chunks of a step, and what preemption and rollback leave."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.block_manager import BlockManager
from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.scheduler import CannotSchedule, Scheduler
from services.decoder.engine.sequence import Sequence, SequenceState
from services.decoder.engine.short_steps import ShortSteps
from tests.fake_runner import add_message

KEY = b"k" * 32


def scheduler_of(
    *,
    blocks: int = 64,
    rows: int = 8,
    budget: int = 32,
    length: int = 256,
    partial: int = 1,
    short_steps: ShortSteps | None = None,
):
    return Scheduler(
        BlockManager(blocks, 4),
        max_num_sequences=rows,
        max_batched_tokens=budget,
        max_model_len=length,
        short_steps=short_steps,
        min_partial_tokens=partial,
    )


def add(
    scheduler: Scheduler,
    number: int,
    length: int,
    *images: ImageSpan,
    max_tokens: int = 20,
    priority: int = 0,
):
    tokens = [(number * 31 + i) % 97 for i in range(length)]
    sequence = Sequence.from_message(
        add_message(number, tokens, images=images, max_tokens=max_tokens, priority=priority)
    )
    scheduler.add(sequence)
    return sequence


def step(scheduler: Scheduler, *, arrive: bool = True) -> list[tuple[int, int, int]]:
    """One step; with `arrive`, its sampled ids come back at once."""
    batch = scheduler.schedule()
    for chunk in batch.chunks:
        scheduler.blocks.register(chunk.sequence)
        if chunk.samples and arrive:
            sequence = chunk.sequence
            sequence.num_in_flight -= 1
            sequence.token_ids.append(1)
            if len(sequence.token_ids) >= sequence.max_length:
                scheduler.finish(sequence)
    scheduler.check_integrity()
    assert batch.num_tokens == sum(c.length for c in batch.chunks)
    return [(c.sequence.sequence_id, c.start, c.length) for c in batch.chunks]


def test_decode_comes_first_and_prompts_share_the_rest():
    scheduler = scheduler_of(budget=16)
    add(scheduler, 1, 4)
    add(scheduler, 2, 20)
    assert step(scheduler) == [(1, 0, 4), (2, 0, 12)]
    assert step(scheduler) == [(1, 4, 1), (2, 12, 8)]
    assert step(scheduler) == [(1, 5, 1), (2, 20, 1)]


def test_chunks_say_what_was_generated_before():
    scheduler = scheduler_of()
    sequence = add(scheduler, 1, 4)
    seen = []
    for _ in range(3):
        (chunk,) = scheduler.schedule().chunks
        seen.append((chunk.samples, chunk.from_device, chunk.generated))
        sequence.num_in_flight -= 1
        sequence.token_ids.append(1)
    assert seen == [(True, False, 0), (True, True, 1), (True, True, 2)]


def test_a_step_ahead_of_sampling():
    scheduler = scheduler_of()
    sequence = add(scheduler, 1, 4, max_tokens=3)
    for expected in ([(1, 0, 4)], [(1, 4, 1)], [(1, 5, 1)], []):
        assert step(scheduler, arrive=False) == expected
    assert sequence.num_in_flight == 3


def test_rows_are_released():
    scheduler = scheduler_of(rows=2)
    sequences = [add(scheduler, n, 4) for n in range(4)]
    step(scheduler)
    assert sorted(s.row for s in sequences) == [-1, -1, 0, 1]
    scheduler.finish(sequences[0])
    row = sequences[1].row
    step(scheduler)
    assert sequences[2].row == 1 - row
    assert sequences[0].state is SequenceState.FINISHED


def test_the_latest_admitted_is_preempted_and_comes_back_first():
    scheduler = scheduler_of(blocks=8, budget=32)
    first, second = add(scheduler, 1, 12), add(scheduler, 2, 12)
    while second.state is not SequenceState.WAITING or second.num_preemptions == 0:
        step(scheduler)
    assert first.num_preemptions == 0 and second.num_preemptions == 1
    third = add(scheduler, 3, 2)
    while not second.block_table:
        step(scheduler)
        assert not third.block_table or second.block_table, "the earlier arrival is admitted first"
    assert second.num_computed_tokens > 0


def test_a_preempted_sequence_waits_for_its_ids_in_flight():
    scheduler = scheduler_of(blocks=6)
    first, second = (add(scheduler, n, 11, max_tokens=12) for n in (1, 2))
    for _ in range(2):
        step(scheduler, arrive=False)
    for sequence in (first, second):
        sequence.num_in_flight -= 1
        sequence.token_ids.append(1)
    step(scheduler, arrive=False)  # both need a block; there is none
    assert second.state is SequenceState.WAITING and second.num_in_flight == 1
    scheduler.finish(first)
    assert step(scheduler, arrive=False) == []
    second.num_in_flight -= 1
    second.token_ids.append(1)
    # Its first blocks are found in the prefix cache; the rest is computed again.
    assert step(scheduler, arrive=False) == [(2, 8, len(second.token_ids) - 8)]


def test_has_work_only_while_something_can_be_computed():
    scheduler = scheduler_of()
    assert not scheduler.has_work
    sequence = add(scheduler, 1, 12, ImageSpan(KEY, 4, 4))
    assert scheduler.has_work
    assert step(scheduler) == [(1, 0, 4)]
    assert not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    scheduler.image_ready(sequence, KEY, 0)
    assert scheduler.has_work
    assert step(scheduler) == [(1, 4, 8)]


def test_a_few_tokens_before_a_missing_image_wait_for_it():
    scheduler = scheduler_of(partial=8, budget=12)
    few = add(scheduler, 1, 16, ImageSpan(KEY, 7, 4))
    many = add(scheduler, 2, 28, ImageSpan(KEY, 20, 4))
    assert step(scheduler) == [(2, 0, 12)]
    assert step(scheduler) == [(2, 12, 8)]  # just enough
    assert not scheduler.has_work
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    for sequence in (few, many):
        scheduler.image_ready(sequence, KEY, 0)
    assert step(scheduler) == [(2, 20, 8), (1, 0, 4)]
    assert step(scheduler) == [(2, 28, 1), (1, 4, 11)]


def test_what_a_small_budget_leaves_before_a_missing_image_waits():
    scheduler = scheduler_of(partial=8, budget=12)
    sequence = add(scheduler, 1, 24, ImageSpan(KEY, 16, 4))
    assert step(scheduler) == [(1, 0, 12)]
    assert not scheduler.has_work  # four tokens more could be computed
    scheduler.image_ready(sequence, KEY, 0)
    assert step(scheduler) == [(1, 12, 12)]


def test_rolling_back_leaves_no_trace():
    scheduler = scheduler_of(budget=16)
    add(scheduler, 1, 4)
    step(scheduler)
    add(scheduler, 2, 8, ImageSpan(KEY, 4, 4))
    add(scheduler, 3, 4)
    batch = scheduler.schedule()
    before = [(c.sequence.sequence_id, c.start, c.length) for c in batch.chunks]
    scheduler.roll_back(batch)
    scheduler.check_integrity()
    assert step(scheduler) == before


@pytest.mark.parametrize(
    ("length", "words"), [(0, "empty"), (256, "256 together"), (300, "300 tokens")]
)
def test_what_can_never_run_is_refused(length, words):
    with pytest.raises(CannotSchedule, match=words):
        add(scheduler_of(), 1, length)


def test_what_needs_more_blocks_than_there_are_is_refused():
    with pytest.raises(CannotSchedule, match="need 9 KV blocks; there are 8"):
        add(scheduler_of(blocks=8), 1, 20, max_tokens=16)
    add(scheduler_of(blocks=8), 1, 20, max_tokens=13)


def test_a_budget_below_the_rows_is_a_mistake():
    with pytest.raises(ValueError, match="less than max_num_sequences"):
        scheduler_of(rows=8, budget=7)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    rows=st.integers(1, 5),
    budget=st.integers(5, 40),
    blocks=st.integers(20, 40),
)
def test_all_finish_in_bounded_time(lengths, rows, budget, blocks):
    scheduler = scheduler_of(blocks=blocks, rows=rows, budget=budget)
    sequences = [add(scheduler, n, length) for n, length in enumerate(lengths)]
    for _ in range(100 * len(sequences)):
        if not scheduler.has_work:
            break
        assert step(scheduler), "a step without work"
    assert all(s.state is SequenceState.FINISHED for s in sequences)
    assert scheduler.blocks.num_free == blocks


def test_lower_priorities_are_admitted_first_and_preempted_last():
    scheduler = scheduler_of(rows=2, blocks=8, budget=64)
    add(scheduler, 1, 8)
    assert step(scheduler) == [(1, 0, 8)]
    for number, priority in ((2, 5), (3, -1), (4, 0), (5, -1)):
        add(scheduler, number, 4, priority=priority)
    assert step(scheduler) == [(1, 8, 1), (3, 0, 4)]
    waiting = [s.sequence_id for s in scheduler._tenants]
    assert waiting == [5, 4, 2]
    # Eight blocks are not enough for both: the one of priority 0 gives way, though it came first.
    while scheduler.num_preemptions == 0:
        step(scheduler)
    assert 3 in {s.sequence_id for s in scheduler._all_running()}
    assert 1 in {s.sequence_id for s in scheduler._tenants}
