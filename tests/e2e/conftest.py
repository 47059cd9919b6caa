"""What the tests of whole stacks share: one stack for those that change nothing in it, and one
browser for those of pages.
"""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.e2e.chat_page import _stack, browser, loop_thread, page, stack, tab
from tests.e2e.cluster import Cluster
from tests.e2e.serve_command import ServeCommand, serve_command

__all__ = ["_stack", "browser", "loop_thread", "page", "stack", "tab"]

# With `-n` and `--dist loadfile`, the files of a line run in one process: they share `demo`, `pods`
# or an import that takes seconds. The longest lines are first, so that none of them begins last.
_LINES = (
    (
        "test_agent_loop",
        "test_chat_page",
        "test_clients",
        "test_demo_clips",
        "test_examples",
        "test_guides",
        "test_ranks",
        "test_structured_output",
    ),
    ("test_handover", "test_failures"),
    (
        "test_serve_video",
        "test_serve_other_towers",
        "test_text_families",
        "test_text_only_stack",
    ),
    ("test_cache_tiers",),
    (
        "test_page_answers",
        "test_page_accessibility",
        "test_page_clips",
        "test_page_markdown",
        "test_page_tools",
        "test_docs_page",
        "test_site_search",
    ),
    ("test_encoder_process", "test_image_bombs"),
    ("test_serve_command",),
    ("test_attacks",),
    ("test_chaos",),
    ("test_wheel",),
)
_PLACES = {
    file: (place, index) for place, files in enumerate(_LINES) for index, file in enumerate(files)
}


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeCommand]:
    """`triptych serve` with the demonstration model. Nobody may stop or overload it."""
    with serve_command(tmp_path_factory.mktemp("demo")) as command:
        yield command


@pytest.fixture(scope="session")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two of each service but the gateway. Those who end or freeze one restore them first."""
    with Cluster(
        tmp_path_factory.mktemp("pods"), encoders=2, decoders=2, decoder={"shutdown_grace_s": 0.2}
    ) as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the order of the lines; other files come last. A stack may take minutes to start on a busy
    machine: a test has five, unless it says otherwise.
    """
    items.sort(key=_place)
    for item in items:
        if item.path.parent.name == "e2e" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


def _place(item: pytest.Item) -> tuple[int, int]:
    if item.path.parent.name != "e2e":
        return -1, 0
    return _PLACES.get(item.path.stem, (len(_LINES), 0))


class _ByLine(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        place = _PLACES.get(PurePath(file).stem)
        return file if place is None else str(_LINES[place[0]])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _ByLine(config, log) if config.getoption("dist") == "loadfile" else None
