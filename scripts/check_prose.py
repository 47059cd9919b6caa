"""Fails when too many docstrings cannot be understood without the line above them.

Three forms are counted in services/, kernels/ and triptych/:

- a docstring whose first sentence opens with a word that refers back, such as "of" or "what";
- an entry under Args or Attributes that opens likewise, or that explains None by another negation;
- a sentence with more than two pronouns of the kind "one", "it", "none" or "others".

The counts find forms, not meaning: a text that passes may still be a riddle, so a reader decides.
`python scripts/check_prose.py --list services/gateway` prints the findings below a folder.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("services", "kernels", "triptych")
GENERATED = "services/common/pb/"
# The most that a kind may have, in percent of all its texts.
LIMITS = {"docstrings": 3.0, "entries": 4.0, "sentences": 1.0}

_MAX_PRONOUNS = 2
_SHORTEST_SENTENCE = 20  # characters; a shorter text is a name or a number
_OPENS = re.compile(
    r"(?:of|that|which|whose|whom|what|whether|how|where|when|as|by|for|from|to|with|in|on|at|than"
    r"|then|so|also|else|nor|neither|none|one)\b",
    re.IGNORECASE,
)
_NEGATED_NONE = re.compile(
    r"\bNone: (?:there (?:is|are) none|it (?:is|has|does)(?: not| none)\b|none\b|they)",
    re.IGNORECASE,
)
_PRONOUN = re.compile(
    r"\b(?:one|ones|that|those|it|its|they|them|none|other|others|another)\b", re.IGNORECASE
)
_ENTRY = re.compile(r"\s{2,}\*{0,2}[\w`, /*.|-]{1,60}?(?: \([^)]*\))?: (.+)$")
_SECTION = re.compile(r"\s*(Args|Attributes|Returns|Yields|Raises):\s*$")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Count:
    """Number of texts of one kind, and the fragments among them."""

    total: int = 0
    fragments: list[str] = field(default_factory=list[str])

    def add(self, text: str, *, fragment: bool) -> None:
        self.total += 1
        if fragment:
            self.fragments.append(text)

    @property
    def percent(self) -> float:
        return 100 * len(self.fragments) / max(self.total, 1)


def entries(docstring: str) -> Iterator[str]:
    """Yields the description of each entry under Args and Attributes."""
    section, indent = "", 0
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        if found := _SECTION.match(line):
            section, indent = found[1], depth
        elif section and line.strip() and depth <= indent:
            section = ""
        if section in ("Args", "Attributes") and (entry := _ENTRY.match(line)):
            yield entry[1].strip()


def examine(docstring: str, place: str, counts: dict[str, Count]) -> None:
    """Adds the texts of one docstring to `counts`; `place` names it for people."""
    first = " ".join(docstring.partition("\n\n")[0].split())
    counts["docstrings"].add(f"{place}: {first}", fragment=bool(_OPENS.match(first)))
    for text in entries(docstring):
        wrong = _OPENS.match(text) or _NEGATED_NONE.search(text)
        counts["entries"].add(f"{place}: {text}", fragment=bool(wrong))
    for sentence in re.split(r"(?<=[.;:])\s+", " ".join(docstring.split())):
        if len(sentence) >= _SHORTEST_SENTENCE:
            wrong = len(_PRONOUN.findall(sentence)) > _MAX_PRONOUNS
            counts["sentences"].add(f"{place}: {sentence}", fragment=wrong)


def count(root: Path, folders: list[str]) -> dict[str, Count]:
    """Returns the counts by kind over all Python files below `folders` of `root`."""
    counts = {kind: Count() for kind in LIMITS}
    for folder in folders:
        path = root / folder
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if name.startswith(GENERATED):
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    continue
                if docstring := ast.get_docstring(node):
                    examine(docstring, f"{name}:{getattr(node, 'lineno', 1)}", counts)
    return counts


def main(arguments: list[str]) -> int:
    """Checks the whole tree, or lists the fragments of some folders; returns the exit status."""
    listing = "--list" in arguments
    folders = [name for name in arguments if name != "--list"]
    failed = False
    for kind, found in count(_ROOT, folders or list(FOLDERS)).items():
        if listing:
            print("\n".join(found.fragments))
        print(
            f"{kind}: {len(found.fragments)} of {found.total} are fragments "
            f"({found.percent:.1f} %, at most {LIMITS[kind]:g} %)"
        )
        failed |= found.percent > LIMITS[kind]
    if failed:
        print("Rewrite the new ones as whole sentences: CONTRIBUTING.md, «How we write».")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
