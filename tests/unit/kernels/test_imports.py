"""What the kernels may import."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ALLOWED = {"kernels", "numpy", "torch", "triton"} | sys.stdlib_module_names


def imported(path: Path) -> set[str]:
    """Top-level packages that a module imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            found.add((node.module or "").partition(".")[0])
    return found


def test_kernels_import_torch_triton_numpy_and_each_other_alone() -> None:
    paths = sorted((ROOT / "kernels").rglob("*.py"))
    assert len(paths) > 30
    assert {path.name: imported(path) - ALLOWED for path in paths if imported(path) - ALLOWED} == {}


def test_the_plain_twins_need_no_triton() -> None:
    """What a CPU engine imports: the twins, the types and the constants."""
    for name in ("plain", "tuning", "device", "launches", "rows", "gemm/fp8_weight",
                 "attention/attention_tuning", "attention/heads", "attention/segments",
                 "linear_attention/delta_rule", "sampling/sampling", "tower/plain"):  # fmt: skip
        path = ROOT / "kernels" / f"{name}.py"
        assert "triton" not in imported(path), name
