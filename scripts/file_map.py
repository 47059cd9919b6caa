"""The last section of docs/architecture.md: every file and the first sentence of its docstring."""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = _ROOT / "docs" / "architecture.md"
_FOLDERS = "services", "kernels", "triptych", "benchmarks", "scripts"
_HEAD = "## Every file\n"
_NOTE = """
What each file owns, by the first sentence of its docstring; `scripts/reference.py` writes this \
section, and a test compares it.
"""


def architecture_page() -> str:
    """docs/architecture.md: as it is, with its last section written anew."""
    text = _PAGE.read_text(encoding="utf-8").partition(_HEAD)[0]
    return text + _HEAD + _NOTE + "".join(_folders())


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
