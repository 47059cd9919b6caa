"""Batches keep the budget, starve no image and lose none."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.encoder.engine.batcher import Batcher


def test_a_lone_image_runs_at_once() -> None:
    batcher = Batcher(100)
    batcher.add(1, 4)
    assert batcher.next_batch() == [1]
    assert batcher.next_batch() == []


def test_an_image_over_the_budget_runs_alone() -> None:
    batcher = Batcher(100)
    for job_id, size in ((1, 500), (2, 10), (3, 500)):
        batcher.add(job_id, size)
    assert [batcher.next_batch() for _ in range(4)] == [[1], [2], [3], []]


def test_younger_images_fill_what_an_older_one_leaves() -> None:
    batcher = Batcher(100)
    for job_id, size in ((1, 60), (2, 60), (3, 40)):
        batcher.add(job_id, size)
    assert [batcher.next_batch() for _ in range(2)] == [[1, 3], [2]]


def test_images_of_different_towers_run_apart() -> None:
    batcher = Batcher(100)
    for job_id, tower in ((1, 0), (2, 1), (3, 0), (4, 2), (5, 1)):
        batcher.add(job_id, 4, tower=tower)
    batcher.add(6, 4, tower=1, is_pair=True)
    assert [batcher.next_batch() for _ in range(4)] == [[1, 3], [2, 5], [4], [6]]


def test_a_removed_image_is_in_no_batch() -> None:
    batcher = Batcher(100)
    batcher.add(1, 10)
    batcher.add(2, 10)
    assert batcher.remove(1) and not batcher.remove(1)
    assert batcher.next_batch() == [2] and not batcher.remove(2)


def test_a_smaller_budget_leaves_larger_images_in_the_queue() -> None:
    batcher = Batcher(100)
    for job_id, size in ((1, 500), (2, 60), (3, 30), (4, 30), (5, 5)):
        batcher.add(job_id, size)
    assert batcher.next_batch(50) == [3, 5]
    assert batcher.next_batch(20) == []
    assert [batcher.next_batch() for _ in range(3)] == [[1], [2, 4], []]


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 200))
def test_an_image_waits_for_as_many_batches_as_there_are_older_ones(
    sizes: list[int], budget: int
) -> None:
    batcher = Batcher(budget)
    for job_id, size in enumerate(sizes):
        batcher.add(job_id, size)
    turn = 0
    while batch := batcher.next_batch():
        assert all(job_id >= turn for job_id in batch)
        assert len(batch) == 1 or sum(sizes[job_id] for job_id in batch) <= budget
        assert batch == sorted(batch)
        turn += 1
    assert turn <= len(sizes)


def test_the_lowest_rank_is_first_and_of_equal_ones_the_earlier() -> None:
    batcher = Batcher(1)
    for job_id, rank in ((1, 50.0), (2, 100.0), (3, 0.0), (4, 50.0)):
        batcher.add(job_id, 50, rank)
    assert [batcher.next_batch() for _ in range(5)] == [[3], [1], [4], [2], []]


def test_an_image_that_is_moved_has_its_new_place() -> None:
    batcher = Batcher(1)
    for job_id in range(4):
        batcher.add(job_id, 50, float(job_id))
    batcher.move(3, 0.5)
    batcher.move(0, 9.0)
    batcher.move(7, 0.0)  # is not queued
    assert batcher.next_batch() == [3]
    batcher.move(3, 0.0)  # runs
    assert batcher.remove(2)
    assert [batcher.next_batch() for _ in range(3)] == [[1], [0], []]


class BatcherMachine(RuleBasedStateMachine):
    """Adds, removes and batches in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher(64)
        self.queued: dict[int, int] = {}
        self.next_id = 0

    @rule(size=st.integers(1, 100))
    def add(self, size: int) -> None:
        self.batcher.add(self.next_id, size)
        self.queued[self.next_id] = size
        self.next_id += 1

    @rule(job_id=st.integers(0, 40))
    def remove(self, job_id: int) -> None:
        assert self.batcher.remove(job_id) == (self.queued.pop(job_id, None) is not None)

    @rule()
    def batch(self) -> None:
        batch = self.batcher.next_batch()
        if self.queued:
            assert batch[0] == min(self.queued)  # the oldest, always
        sizes = [self.queued.pop(job_id) for job_id in batch]
        assert len(batch) <= 1 or sum(sizes) <= 64

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.batcher) == len(self.queued)


TestBatcherMachine = BatcherMachine.TestCase


def test_stills_and_pairs_of_frames_run_apart() -> None:
    batcher = Batcher(100)
    for job_id, is_pair in enumerate((False, True, False, True, False)):
        batcher.add(job_id, 20, is_pair=is_pair)
    assert batcher.next_batch() == [0, 2, 4]
    assert batcher.next_batch() == [1, 3]
    assert batcher.next_batch() == []
