"""The tour of docs/architecture.md: its files exist and fit an evening."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MAX_PAGE_LINES, MAX_FILES, MAX_LINES = 120, 28, 7_000


def tour() -> list[str]:
    """Returns the paths of the tour, in their order."""
    section = PAGE.partition("\n## The tour\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(services/[\w/]+\.py)` \| .+\? \|$", section, re.MULTILINE)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= MAX_PAGE_LINES


def test_the_tour_fits_an_evening() -> None:
    files = tour()
    assert 20 <= len(files) <= MAX_FILES
    assert len(set(files)) == len(files)
    sizes = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files}
    assert sum(sizes.values()) <= MAX_LINES, sizes


def test_each_row_of_the_tour_names_a_file_and_asks_a_question() -> None:
    section = PAGE.partition("\n## The tour\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(tour())
