"""The map of invariants in CONTRIBUTING.md names files that hold tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def rows() -> dict[str, list[Path]]:
    """Returns the files of each invariant; a name without a folder is beside the file before it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = text.partition("| invariant | tests |\n|---|---|\n")
    found: dict[str, list[Path]] = {}
    for line in section.partition("\n\n")[0].splitlines():
        invariant, tests = line.strip("| ").split(" | ")
        folder, files = ROOT, found.setdefault(invariant, [])
        for name in re.findall(r"`([\w/]+\.py|tests/[\w/]+/)`", tests):
            path = ROOT / name if name.startswith("tests/") else folder / name
            folder = path if path.is_dir() else path.parent
            files.append(path)
    return found


ROWS = rows()


def test_the_map_is_whole() -> None:
    assert len(ROWS) > 15
    assert sum(map(len, ROWS.values())) > 50


@pytest.mark.parametrize("invariant", ROWS)
def test_each_file_of_the_map_holds_tests(invariant: str) -> None:
    """A module of helpers is named beside files that use it, themselves or through a harness."""
    files = ROWS[invariant]
    assert files
    assert len(files) == len(set(files))
    for path in files:
        if path.is_dir():
            assert list(path.glob("test_*.py")), path
        elif path.name.startswith("test_"):
            assert re.search(r"^(async )?def test_", path.read_text(encoding="utf-8"), re.M), path
        else:
            assert path.exists(), path
