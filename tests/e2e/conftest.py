"""What the tests of whole stacks share: one stack for those that change nothing in it."""

from collections.abc import Iterator

import pytest

from tests.e2e.serve_command import ServeCommand, serve_command

# Files that take longest, so that no process begins them last; then those that share `demo`, of
# which a process has one.
_FIRST = (
    "test_trials", "test_handover", "test_cache_tiers", "test_attacks", "test_failures",
    "test_text_families", "test_chaos", "test_serve_command", "test_encoder_process",
    "test_structured_output", "test_clients", "test_chat_page", "test_agent_loop",
)  # fmt: skip


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    """`triptych serve` with the demonstration model. Nobody may stop or overload it."""
    with serve_command(tmp_path_factory.mktemp("demo")) as command:
        yield command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest first. With `-n`, the tests of a file run in one process."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    if item.path.parent.name != "e2e":
        return -1
    return _FIRST.index(item.path.stem) if item.path.stem in _FIRST else len(_FIRST)
