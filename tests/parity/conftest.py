"""Fixtures of the parity tests."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cases import THOROUGH

Values = set[tuple[str, str]]  # of parameters, by their names


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with several parameters, each value of each is in a case; `make nightly` has all
    combinations.
    """
    tests: dict[tuple[Path, str], dict[pytest.Item, Values]] = defaultdict(dict)
    for item in items:
        values = getattr(item, "callspec", None)
        if item.path.parent == Path(__file__).parent and values and len(values.params) > 1:
            name = getattr(item, "originalname", item.name)
            tests[item.path, name][item] = {(k, repr(v)) for k, v in values.params.items()}
    left_out = set[pytest.Item]()
    for cases in tests.values():
        chosen = covering(cases)
        if len(chosen) < len(cases):
            for item in cases:
                item.add_marker("thorough")
            left_out |= cases.keys() - chosen
    if left_out and not THOROUGH:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def covering(cases: dict[pytest.Item, Values]) -> set[pytest.Item]:
    """Some that have together all values, each time the one with most that are new."""
    missing, chosen = Values().union(*cases.values()), set[pytest.Item]()
    while missing:
        best = max(cases, key=lambda item: len(cases[item] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of Hugging Face's model and of ours have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
