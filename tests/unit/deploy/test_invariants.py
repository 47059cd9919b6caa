"""The map of invariants in CONTRIBUTING.md names test files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def named_files() -> list[Path]:
    """Returns the files of the map; a name without a folder is beside the file before it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = text.partition("| invariant | tests |\n")
    table = section.partition("\n\n")[0]
    found: list[Path] = []
    folder = ROOT
    for name in re.findall(r"`([\w/]+\.py|tests/[\w/]+/)`", table):
        path = ROOT / name if name.startswith("tests/") else folder / name
        folder = path if path.is_dir() else path.parent
        found.append(path)
    return found


def test_each_file_of_the_map_exists() -> None:
    files = named_files()
    assert len(files) > 30
    assert [path for path in files if not path.exists()] == []
