"""The decisions of docs/adr: few enough to read, each with its status, all in the index."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "docs/adr"
RECORDS = sorted(FOLDER.glob("0*.md"))
MAX_RECORDS = 40


def test_there_are_at_most_forty_records() -> None:
    assert 20 < len(RECORDS) <= MAX_RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name[:4])
def test_a_record_has_its_number_its_title_and_its_status(path: Path) -> None:
    first, second, *_ = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# {path.name[:4]} \S.+", first)
    assert re.match(r"Status: (accepted|superseded by \d{4})\.", second)


def test_the_index_lists_each_record_once_by_its_title() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\((0\d{3}[\w-]*\.md)\)$", index, re.MULTILINE)
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0][2:] for path in RECORDS}
    assert len(listed) == len(RECORDS)
    assert {name: title for title, name in listed} == titles
