"""Prints the size of the core, in lines: `python scripts/core_size.py`.

The core is what the contract "core imports no extra" of pyproject.toml names; docs/architecture.md
says what belongs to it and what to an extra.
"""

import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = "core imports no extra"
GOAL = 11_000


def contract() -> dict[str, Any]:
    """The contract, as written."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    return next(found for found in contracts if found["name"] == CONTRACT)


def path_of(module: str) -> Path:
    """The file of a module."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def num_lines(module: str) -> int:
    """Lines of a module's file, comments and empty ones included."""
    return path_of(module).read_text(encoding="utf-8").count("\n")


def main() -> int:
    """Prints; returns the exit status."""
    found = contract()
    lines: Counter[str] = Counter()
    for module in found["source_modules"]:
        lines[module.split(".")[1]] += num_lines(module)
    for name, count in lines.items():
        print(f"{name:8} {count:6}")
    print(f"core     {lines.total():6} lines, the goal is {GOAL}")
    print(f"core imports extras in {len(found['ignore_imports'])} places")
    return 0


if __name__ == "__main__":
    sys.exit(main())
