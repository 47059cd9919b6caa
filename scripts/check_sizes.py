"""Fails when a hand-written file or function outgrows the house's limits.

A longer one may hold a second noun. Exceptions are listed here, each with its reason.
"""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
FOLDERS = ("services", "kernels", "triptych", "demo", "benchmarks", "scripts", "tests")
GENERATED = "services/common/pb/"

# "path" or "path::function" -> why it may be longer.
ALLOWED: dict[str, str] = {
    "kernels/attention/fused_decode_attention.py::_fused_decode_kernel": "one kernel",
    "kernels/attention/hopper_attention.py::_attend": "one kernel's main loop",
}

_ROOT = Path(__file__).resolve().parents[1]


def findings(path: Path, name: str) -> list[str]:
    """What is too long in one file, as lines for people."""
    text = path.read_text(encoding="utf-8")
    found: list[str] = []
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES and name not in ALLOWED:
        found.append(f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{name}::{node.name}" not in ALLOWED:
                found.append(
                    f"{name}:{node.lineno}: {node.name} has {length} lines, "
                    f"at most {MAX_FUNCTION_LINES}"
                )
    return found


def main() -> int:
    """Checks the whole tree; returns the exit status."""
    found: list[str] = []
    num_files = 0
    for folder in FOLDERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            name = path.relative_to(_ROOT).as_posix()
            if not name.startswith(GENERATED):
                num_files += 1
                found += findings(path, name)
    print("\n".join(found) if found else f"{num_files} files within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
