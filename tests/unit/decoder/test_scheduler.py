"""The scheduler alone: the chunks of a step, and what preemption and rollback leave."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.decoder.engine.messages import ImageSpan
from services.decoder.engine.schedule.block_manager import BlockManager
from services.decoder.engine.schedule.scheduler import Scheduler
from services.decoder.engine.schedule.sequence import Sequence, SequenceState
from services.decoder.engine.schedule.speculation import Speculation
from services.decoder.engine.schedule.step_cost import StepCost, StepLoad
from tests.fake_runner import add_message, runner_info
from tests.integrity import check_scheduler, waiting

KEY = b"k" * 32


def scheduler_of(
    *,
    blocks: int = 64,
    rows: int = 8,
    budget: int = 32,
    length: int = 256,
    partial: int = 1,
    step_ms: float = math.inf,
    cost: StepCost | None = None,
    task: str = "generate",
):
    info = runner_info(
        num_blocks=blocks, max_num_sequences=rows, max_batched_tokens=budget, max_model_len=length,
        task=task,
    )  # fmt: skip
    cost = cost or StepCost()
    scheduler = Scheduler(
        info, BlockManager(blocks, 4), late_masks=False, step_ms=step_ms, step_cost=cost,
        speculation=Speculation(info, 0, cost, step_ms=step_ms, overlap=False),
    )  # fmt: skip
    scheduler.prefills.min_partial_tokens = partial
    return scheduler


def cost_of(token_ms: float) -> StepCost:
    """Of a device that computes each token in that time, and little else."""
    cost = StepCost(10**9)
    loads = [StepLoad(0, n) for n in (1, 16, 64, 256, 512, 1024)]
    cost.fit([(load, 0.5 + token_ms * load.tokens) for load in loads])
    return cost


def add(
    scheduler: Scheduler,
    number: int,
    length: int,
    *images: ImageSpan,
    max_tokens: int = 20,
    priority: int = 0,
    background: bool = False,
):
    tokens = [(number * 31 + i) % 97 for i in range(length)]
    sequence = Sequence(
        add_message(
            number,
            tokens,
            images=images,
            max_tokens=max_tokens,
            priority=priority,
            background=background,
        )
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
    check_scheduler(scheduler)
    assert batch.num_tokens == sum(c.length for c in batch.chunks)
    return [(c.sequence.sequence_id, c.start, c.length) for c in batch.chunks]


def test_decode_comes_first_and_prompts_share_the_rest():
    scheduler = scheduler_of(budget=16)
    add(scheduler, 1, 4)
    add(scheduler, 2, 20)
    assert step(scheduler) == [(1, 0, 4), (2, 0, 12)]
    assert step(scheduler) == [(1, 4, 1), (2, 12, 8)]
    assert step(scheduler) == [(1, 5, 1), (2, 20, 1)]


def test_chunks_say_where_their_token_is():
    scheduler = scheduler_of()
    sequence = add(scheduler, 1, 4)
    seen = []
    for _ in range(3):
        (chunk,) = scheduler.schedule().chunks
        seen.append((chunk.samples, chunk.from_device, chunk.start))
        sequence.num_in_flight -= 1
        sequence.token_ids.append(1)
    assert seen == [(True, False, 0), (True, True, 4), (True, True, 5)]


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
    add(scheduler, 2, 3)
    step(scheduler)
    batch = scheduler.schedule()
    assert all(chunk.from_device for chunk in batch.chunks)
    before = [(c.sequence.sequence_id, c.start, c.length) for c in batch.chunks]
    scheduler.roll_back(batch)
    check_scheduler(scheduler)
    assert step(scheduler) == before


def test_sequences_of_a_batch_that_was_abandoned_begin_again():
    scheduler = scheduler_of(budget=16)
    add(scheduler, 1, 4)
    step(scheduler)
    waiting = add(scheduler, 2, 8, ImageSpan(KEY, 4, 4))
    add(scheduler, 3, 4)
    scheduler.abandon(scheduler.schedule())
    check_scheduler(scheduler)
    assert scheduler.num_running == 0 and scheduler.num_waiting == 3
    assert step(scheduler) == [(1, 4, 1), (3, 0, 4)]  # behind a block that is known
    scheduler.image_ready(waiting, KEY, 0)
    assert step(scheduler)[-1] == (2, 0, 8)


@pytest.mark.parametrize(
    ("length", "words"), [(0, "empty"), (256, "256 tokens > 255"), (300, "300 tokens > 255")]
)
def test_what_can_never_run_is_refused(length, words):
    with pytest.raises(InvalidRequest, match=words):
        add(scheduler_of(), 1, length)


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


def test_prompts_are_cut_to_fit_the_steps_time():
    """100 µs a token: 40 ms are 395 tokens, and four times as long 1,595. Steps of more than 256
    tokens have a multiple of 64, for which graphs are captured.
    """
    scheduler = scheduler_of(blocks=2000, budget=4096, length=4000, step_ms=40.0, cost=cost_of(0.1))
    add(scheduler, 1, 2000)
    assert step(scheduler) == [(1, 0, 1536)]  # alone
    add(scheduler, 2, 400)
    assert step(scheduler) == [(2, 0, 197), (1, 1536, 187)]  # too long: half for those behind
    while scheduler.prefills.prefilling:
        found = step(scheduler)
        assert sum(length for _, _, length in found) <= 384
    add(scheduler, 3, 1000)
    assert step(scheduler)[-1] == (3, 0, 382)


def test_a_long_prompt_waits_for_a_long_prompt_that_needs_no_more_tokens():
    """Two halves of long prompts would take longer than two whole steps, and both would end late.
    Shorter prompts, and long prompts that need fewer tokens, do not wait.
    """
    scheduler = scheduler_of(blocks=2000, budget=4096, length=4000, step_ms=40.0, cost=cost_of(0.1))
    add(scheduler, 1, 3000)
    add(scheduler, 2, 3000)
    assert step(scheduler) == [(1, 0, 384)]
    add(scheduler, 3, 100)
    assert step(scheduler) == [(1, 384, 384)]  # the short prompt is behind both
    for start in range(768, 2688, 384):
        assert step(scheduler) == [(1, start, 384)]
    # The rest of the first prompt fits into a step, so the second prompt is the long one.
    assert step(scheduler) == [(1, 2688, 312), (3, 0, 8), (2, 0, 64)]
    other = scheduler_of(blocks=2000, budget=4096, length=4000, step_ms=40.0, cost=cost_of(0.1))
    add(other, 1, 3000)
    add(other, 2, 1000)
    assert step(other) == [(2, 0, 197), (1, 0, 187)]


def crowd_of(cost: StepCost, decodes: int, waiting: int, *, background: bool = False) -> Scheduler:
    """Returns a scheduler with running decodes and with waiting prompts of 100 tokens."""
    scheduler = scheduler_of(
        blocks=20_000, rows=400, budget=4096, length=400, step_ms=40.0, cost=cost
    )
    for number in range(decodes):
        add(scheduler, number, 4, max_tokens=200)
    while scheduler.prefills.has_work:
        step(scheduler)
    for number in range(decodes, decodes + waiting):
        add(scheduler, number, 100, background=background)
    return scheduler


@pytest.mark.parametrize(
    ("decodes", "waiting", "is_default", "tokens"),
    [
        (80, 120, True, 448),  # prompts of 1.2 s beside more decodes than sizes are timed with
        (80, 90, True, 320),  # prompts of 0.9 s
        (60, 120, True, 320),
        (80, 120, False, 320),  # the bound that an operator sets holds
    ],
)
def test_steps_beside_a_crowd_may_be_larger_than_is_efficient(
    decodes: int, waiting: int, is_default: bool, tokens: int
) -> None:
    cost = cost_of(0.1)
    cost.efficient_tokens, cost.may_stretch = 320, is_default
    scheduler = crowd_of(cost, decodes, waiting)
    batch = scheduler.schedule()
    assert batch.num_tokens == tokens and batch.load is not None
    assert cost.predict(batch.load) <= 50.0


def test_lines_of_a_batch_are_no_crowd() -> None:
    cost = cost_of(0.1)
    cost.efficient_tokens, cost.may_stretch = 320, True
    scheduler = crowd_of(cost, 80, 120, background=True)
    assert not scheduler.prefills.has_more_than(0)
    assert scheduler.schedule().num_tokens <= 320


def test_a_step_is_as_long_as_its_graph_even_if_little_is_left_for_the_last_chunk():
    """A step of 265 tokens would be padded to 320, which takes a fifth longer."""
    scheduler = scheduler_of(
        blocks=2000, rows=4, budget=4096, length=4000, step_ms=27.0, cost=cost_of(0.1)
    )
    for number in range(3):
        add(scheduler, number, 1000 - number)
    assert step(scheduler) == [(1, 0, 132), (0, 0, 124)]


def test_a_lone_prompt_is_one_step():
    scheduler = scheduler_of(blocks=1000, budget=4096, length=4000, step_ms=40.0, cost=cost_of(0.1))
    add(scheduler, 1, 1008)
    assert step(scheduler) == [(1, 0, 1008)]


def test_steps_have_a_size_that_is_efficient_but_of_a_lone_prompt():
    cost = cost_of(0.01)
    cost.efficient_tokens = 1024
    scheduler = scheduler_of(blocks=3000, budget=4096, length=4000, step_ms=20.0, cost=cost)
    add(scheduler, 1, 1100)
    assert step(scheduler) == [(1, 0, 1100)]
    add(scheduler, 2, 1100)
    add(scheduler, 3, 100)
    assert step(scheduler) == [(1, 1100, 1), (2, 0, 1023)]
    assert step(scheduler) == [(1, 1101, 1), (2, 1023, 77), (3, 0, 100)]


def test_prompts_go_on_where_decodes_alone_take_longer_than_a_step():
    scheduler = scheduler_of(
        blocks=1000, rows=4, budget=4096, length=4000, step_ms=1.0, cost=cost_of(1.0)
    )
    for number in range(3):
        add(scheduler, number, 20)
    while scheduler.prefills.prefilling or len(scheduler.prefills.waiting):
        step(scheduler)
    add(scheduler, 9, 100)
    assert [step(scheduler)[-1] for _ in range(3)] == [(9, 0, 32), (9, 32, 32), (9, 64, 32)]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=14),
    delays=st.lists(st.integers(0, 30), min_size=14, max_size=14),
    image=st.lists(st.booleans(), min_size=14, max_size=14),
    tenants=st.lists(st.sampled_from(["", "a", "b"]), min_size=14, max_size=14),
    token_ms=st.floats(0.01, 5.0),
    step_ms=st.floats(1.0, 60.0),
    rows=st.integers(1, 6),
    blocks=st.integers(190, 600),
    efficient=st.integers(1, 600),
)
def test_steps_keep_their_time_and_every_prompt_goes_on(
    lengths, delays, image, tenants, token_ms, step_ms, rows, blocks, efficient
):
    """A step that takes longer than it may, or has more tokens than is efficient, has at most the
    least chunk of prompts; as long as there are prompts that can go on, each step with room has
    some of their tokens; all finish.
    """
    cost = cost_of(token_ms)
    cost.efficient_tokens = efficient
    scheduler = scheduler_of(
        rows=rows, blocks=blocks, budget=512, length=750, step_ms=step_ms, cost=cost
    )
    sequences, late = [], []
    for number, length in enumerate(lengths):
        spans = (ImageSpan(KEY, length // 2, 1),) if image[number] and length > 2 else ()
        tokens = [(number * 31 + i) % 97 for i in range(length)]
        message = add_message(number, tokens, images=spans, max_tokens=20, tenant=tenants[number])
        sequences.append(Sequence(message))
        if spans:
            late.append((delays[number], sequences[-1]))
    arrivals = sorted(
        zip(delays, range(len(lengths)), sequences, strict=False), key=lambda a: a[:2]
    )
    for now in range(4000):
        while arrivals and arrivals[0][0] <= now:
            scheduler.add(arrivals.pop(0)[2])
        for due, sequence in late:
            if due + 3 == now:
                scheduler.image_ready(sequence, KEY, 0)
        if not scheduler.has_work:
            if not arrivals and now > 40:
                break
            continue
        waiting, before = bool(scheduler.prefills.prefilling), scheduler.prefills.num_preemptions
        num_prompts = len(scheduler.prefills.prefilling) + len(scheduler.prefills.waiting)
        batch = scheduler.schedule()
        num_decodes = sum(chunk.from_device for chunk in batch.chunks)
        prompt_tokens = batch.num_tokens - num_decodes
        factor = 4 if num_decodes == 0 and num_prompts == 1 else 1
        is_long = batch.load and cost.predict(batch.load) > factor * step_ms * 1.0001
        if is_long or (factor == 1 and batch.num_tokens > efficient):
            assert prompt_tokens <= factor * cost.min_chunk
        assert prompt_tokens or not waiting or scheduler.prefills.num_preemptions > before
        for chunk in batch.chunks:
            scheduler.blocks.register(chunk.sequence)
            if chunk.samples:
                chunk.sequence.num_in_flight -= 1
                chunk.sequence.token_ids.append(1)
                if len(chunk.sequence.token_ids) >= chunk.sequence.max_length:
                    scheduler.finish(chunk.sequence)
        check_scheduler(scheduler)
    assert all(s.state is SequenceState.FINISHED for s in sequences)


def test_lower_priorities_are_admitted_first_and_preempted_last():
    scheduler = scheduler_of(rows=2, blocks=8, budget=64)
    add(scheduler, 1, 8)
    assert step(scheduler) == [(1, 0, 8)]
    for number, priority in ((2, 5), (3, -1), (4, 0), (5, -1)):
        add(scheduler, number, 4, priority=priority)
    assert step(scheduler) == [(1, 8, 1), (3, 0, 4)]
    numbers = [s.sequence_id for s in waiting(scheduler)]
    assert numbers == [5, 4, 2]
    # Eight blocks are not enough for both: the one of priority 0 gives way, though it came first.
    while scheduler.prefills.num_preemptions == 0:
        step(scheduler)
    assert 3 in {s.sequence_id for s in scheduler.running()}
    assert 1 in {s.sequence_id for s in waiting(scheduler)}


def test_the_queue_of_a_tenant_is_one_of_priority_and_arrival():
    scheduler = scheduler_of(rows=1)
    for number, priority in enumerate([1, 0, 0, -1]):
        message = add_message(number, [1, 2, 3, 4], tenant="a", priority=priority, max_tokens=1)
        scheduler.add(Sequence(message))
    assert [step(scheduler)[0][0] for _ in range(4)] == [3, 1, 2, 0]
