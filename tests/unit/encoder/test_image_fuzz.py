"""A few thousand of the fuzzer's cases; `python -m tests.image_fuzz` runs a million."""

from tests.image_fuzz import run


def test_no_case_costs_much_or_ends_a_decoder() -> None:
    found = run(4000, 300)
    assert found["read"] > 400 and found["refused"] > 400
    assert found["decoded"] > 30
