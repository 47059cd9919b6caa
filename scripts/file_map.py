"""The page docs/files.md: every file and the first sentence of its docstring."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = "services", "kernels", "triptych", "benchmarks", "scripts"
_HEAD = """# Every file

This page lists what each file owns, by the first sentence of its docstring. \
`scripts/reference.py` writes the page, and a test compares it with the code. \
[The architecture](architecture.md) has a reading order of the most important files.
"""


def files_page() -> str:
    """Returns the text of docs/files.md."""
    return _HEAD + "".join(_folders())


def _folders() -> Iterator[str]:
    files = [path for name in _FOLDERS for path in (_ROOT / name).rglob("*.py")]
    described = [
        (path.relative_to(_ROOT), sentence)
        for path in sorted(files, key=lambda path: (path.parent, path.name))
        if "pb" not in path.parts and (sentence := _first_sentence(path))
    ]
    for folder, group in groupby(described, key=lambda found: found[0].parent):
        rows = [f"- `{path.name}`: {sentence}\n" for path, sentence in group]
        yield f"\n`{folder}/`\n\n{''.join(rows)}"


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`(])", paragraph, maxsplit=1)[0].replace("|", "\\|")
