"""Fails when a hand-written file or function is longer than the limits.

A longer file or function often has a second purpose. The lines of a function are those of its body:
neither its signature nor its docstring counts, so that neither is shortened to meet the limit.
Exceptions are listed here, each with its reason.
"""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
FOLDERS = (
    *("services", "kernels", "triptych", "demo"),
    *("benchmarks", "scripts", "examples", "tests"),
)
GENERATED = "services/common/pb/"

# Reason why a file or a function may be longer, by "path" or "path::function".
ALLOWED: dict[str, str] = {
    "kernels/adapters/shrink_expand.py::_expand_kernel": "one kernel",
    "kernels/attention/fused_decode_attention.py::_fused_decode_kernel": "one kernel",
    "kernels/attention/hopper_attention.py::_attend": "one kernel's main loop",
    "kernels/attention/hopper_attention.py::ragged_attention_kernel": "one kernel",
    "kernels/attention/paged_decode_attention.py::_attend": "one loop",
    "kernels/attention/paged_decode_attention.py::_paged_decode_kernel": "one kernel",
    "kernels/attention/prefill_kernel.py::_attend_pass": "one kernel's main part",
    "kernels/gemm/gemv.py::_gemv_kernel": "one kernel",
    "kernels/linear_attention/delta_rule_prefill.py::prefill": "the launches of three kernels",
}

_ROOT = Path(__file__).resolve().parents[1]


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Line of the first statement after the docstring."""
    statements = function.body
    if ast.get_docstring(function) is not None and len(statements) > 1:
        return statements[1].lineno
    return statements[0].lineno


def findings(path: Path, name: str) -> list[str]:
    """Messages about what is too long in a file."""
    text = path.read_text(encoding="utf-8")
    found: list[str] = []
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES and name not in ALLOWED:
        found.append(f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - _first_line(node) + 1
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
