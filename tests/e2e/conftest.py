"""What the tests of whole stacks share: one stack for those that change nothing in it."""

from collections.abc import Iterator

import pytest

from tests.e2e.serve_command import ServeCommand, serve_command

# Which tests take longest, so that no process begins them last.
_LONGEST = ("rollout", "test_handover", "test_cache_tiers", "test_soak", "demo", "test_failures")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    """`triptych serve` with the demonstration model. Nobody may stop or overload it."""
    with serve_command(tmp_path_factory.mktemp("demo")) as command:
        yield command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups tests that share a stack: with `-n`, a group runs in one process. Those that share
    `demo` are one, other tests of a file are one unless they are marked otherwise.
    """
    own = [item for item in items if item.path.parent.name == "e2e"]
    for item in own:
        if item.get_closest_marker("xdist_group") is None:
            uses_demo = "demo" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("demo" if uses_demo else item.path.stem))
    own.sort(key=_place)
    items[:] = [item for item in items if item not in set(own)] + own


def _place(item: pytest.Item) -> tuple[int, str]:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    (group,) = marker.args
    return _LONGEST.index(group) if group in _LONGEST else len(_LONGEST), group
