"""The pool's threads take the lowest rank, and never all work on videos of one tenant."""

import threading
from concurrent.futures import ThreadPoolExecutor

from services.encoder.engine.preparation_queue import PreparationQueue
from tests.noise import PATIENCE_S


def test_the_lowest_rank_is_next_whatever_it_is() -> None:
    queue = PreparationQueue(4)
    queue.put((3.0, 1))
    queue.put((1.0, 2), "a")
    queue.put((2.0, 3), "b")
    queue.put((0.5, 4))
    queue.put((4.0, 5), "a")
    assert len(queue) == 5
    taken = [queue.get() for _ in range(5)]
    assert taken == [(4, None), (2, "a"), (3, "b"), (1, None), (5, "a")] and len(queue) == 0


def test_of_equal_ranks_the_earlier_job_is_next() -> None:
    queue = PreparationQueue(4)
    for job_id in (3, 1, 2):
        queue.put((1.0, job_id), "a" if job_id == 2 else None)
    assert [queue.get() for _ in range(3)] == [(1, None), (2, "a"), (3, None)]


def test_a_turn_that_is_moved_has_its_new_place() -> None:
    queue = PreparationQueue(4)
    for job_id in range(6):
        queue.put((float(job_id), job_id), "a" if job_id % 2 else None)
    queue.move((4.0, 4), 0.5)
    queue.move((5.0, 5), -1.0)
    queue.move((0.0, 0), 9.0)
    assert queue.get() == (5, "a")
    queue.move((-1.0, 5), -2.0)  # was taken
    assert [queue.get() for _ in range(5)] == [(4, None), (1, "a"), (2, None), (3, "a"), (0, None)]
    assert len(queue) == 0


def test_videos_of_one_tenant_never_have_all_threads() -> None:
    """Not even if nothing else waits: their units are not interrupted when something comes."""
    queue = PreparationQueue(2)
    for job_id in range(3):
        queue.put((0.0, job_id), "crowd")
    assert [queue.get(), queue.get()] == [(0, "crowd"), (1, "crowd")]
    with ThreadPoolExecutor(1) as threads:
        third = threads.submit(queue.get)
        queue.put((9.0, 10))
        assert third.result(PATIENCE_S) == (10, None)
        third = threads.submit(queue.get)
        queue.put((9.0, 11), "guest")
        assert third.result(PATIENCE_S) == (11, "guest")
        third = threads.submit(queue.get)
        queue.done("guest")
        queue.done("crowd")
        assert third.result(PATIENCE_S) == (2, "crowd")


def test_close_ends_all_that_wait() -> None:
    queue = PreparationQueue(1)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(queue.get) for _ in range(3)]
        queue.close()
        assert [each.result(PATIENCE_S) for each in waiting] == [None] * 3


def test_each_turn_is_taken_once_by_many_threads() -> None:
    queue, taken, lock = PreparationQueue(2), list[int](), threading.Lock()
    most = running = 0

    def work() -> None:
        nonlocal most, running
        while (turn := queue.get()) is not None:
            job_id, tenant = turn
            with lock:
                taken.append(job_id)
                is_last = len(taken) == 2000
                running += tenant == "a"
                most = max(most, running)
            if tenant is not None:
                with lock:
                    running -= tenant == "a"
                queue.done(tenant)
            if is_last:
                queue.close()

    with ThreadPoolExecutor(4) as threads:
        ended = [threads.submit(work) for _ in range(4)]
        for job_id in range(2000):
            queue.put((float(job_id), job_id), (None, "a", "b")[job_id % 3])
        try:
            for each in ended:
                each.result(PATIENCE_S)
        finally:
            queue.close()  # a turn that was lost would leave the threads waiting
    assert sorted(taken) == list(range(2000)) and most <= 2
