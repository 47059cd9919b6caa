"""The Triton kernels in Triton's interpreter, on the CPU, against their plain twins."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    "name", ["interpreted_tower", "interpreted_kernels", "interpreted_fp8_cache"]
)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_fused_kernels_agree_with_their_twins_in_the_interpreter(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.kernels.{name}"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agreed"
