"""Batches keep the budget, starve no image and lose none."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.tenancy.fair_order import Share
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


def test_a_removed_image_is_in_no_batch() -> None:
    batcher = Batcher(100)
    batcher.add(1, 10)
    batcher.add(2, 10)
    assert batcher.remove(1) and not batcher.remove(1)
    assert batcher.next_batch() == [2] and not batcher.remove(2)


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


def test_no_tenant_waits_behind_anothers_queue() -> None:
    batcher = Batcher(100)
    for job_id in range(1, 200):
        batcher.add(job_id, 50, Share("a"))
    assert batcher.next_batch() == [1, 2]
    batcher.add(1000, 50, Share("b"))
    assert 1000 in batcher.next_batch()
    for job_id in range(2000, 2010):
        batcher.add(job_id, 50, Share("b"))
        batcher.add(job_id + 100, 50, Share("c", weight=2.0))
    batches = [batcher.next_batch() for _ in range(10)]
    taken = [job_id for batch in batches for job_id in batch]
    assert sum(2000 <= job_id < 2100 for job_id in taken) in (4, 5, 6)
    assert sum(job_id >= 2100 for job_id in taken) in (9, 10, 11)
    assert len(set(taken)) == 20


def test_small_images_of_others_overtake_a_large_one_until_they_are_as_much_work() -> None:
    batcher = Batcher(1)
    for job_id in (1, 2, 3):
        batcher.add(job_id, 100, Share("a"))
    assert batcher.next_batch() == [1]
    batcher.add(10, 51, Share("b"))  # not small
    for job_id in range(20, 26):
        batcher.add(job_id, 30, Share("c"))
    overtaking = [batcher.next_overtaking() for _ in range(5)]
    assert overtaking == [20, 21, 22, 23, None]  # of 0, 30, 60 and 90 before; 120 is too late
    assert batcher.next_batch() == [10]
    assert len(batcher) == 4


def test_weight_counts_among_those_that_overtake() -> None:
    batcher = Batcher(1)
    batcher.add(1, 100, Share("a"))
    assert batcher.next_batch() == [1]
    for job_id in range(20, 30):
        batcher.add(job_id, 30, Share("c", weight=2.0))
    overtaking = [batcher.next_overtaking() for _ in range(8)]
    assert overtaking == [20, 21, 22, 23, 24, 25, 26, None]


def test_nothing_overtakes_its_own_tenants_images() -> None:
    for share in (Share("a"), Share("a", weight=3.0), Share()):
        batcher = Batcher(1)
        batcher.add(1, 100, share)
        assert batcher.next_batch() == [1]
        batcher.add(2, 4, share)
        assert batcher.next_overtaking() is None
        assert batcher.next_batch() == [2]


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

    @rule()
    def overtake(self) -> None:
        assert self.batcher.next_overtaking() is None  # all are one tenant's

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.batcher) == len(self.queued)
        assert self.batcher.queued_patches == sum(self.queued.values())


TestBatcherMachine = BatcherMachine.TestCase
