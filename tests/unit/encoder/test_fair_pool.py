"""The threads that decode take images of tenants in turn."""

import threading

from services.common.tenancy.fair_order import Share
from services.encoder.engine.fair_pool import FairPool

A, B = Share("a"), Share("b")


def test_jobs_of_tenants_take_turns_and_none_is_lost() -> None:
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()
    done: list[str] = []

    def work(job: str) -> None:
        if job == "first":
            begun.set()
            release.wait(30)
        done.append(job)
        if len(done) == 102:
            ended.set()

    pool = FairPool(work, 1, "test")
    pool.submit("first", A, 1.0)
    assert begun.wait(30)
    for number in range(100):
        pool.submit(f"a{number}", A, 1.0)
    pool.submit("b", B, 1.0)
    release.set()
    assert ended.wait(30)
    pool.shutdown()
    assert done.index("b") <= 2
    assert [job for job in done if job != "b"] == ["first"] + [f"a{n}" for n in range(100)]
