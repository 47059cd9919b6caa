"""A few hundred of the fuzzer's cases; `python -m tests.video_fuzz` runs 100,000."""

from tests.video_fuzz import run


def test_no_case_costs_much_or_ends_the_pool() -> None:
    found = run(400)
    assert found["refused"] > 40 and found["decoded"] > 40
    assert found["ended"] == 0
