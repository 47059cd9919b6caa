"""The FP8 kernels in Triton's interpreter, on the CPU, against their plain twins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(660)
def test_kernels_agree_with_their_twins_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.interpreted_fp8"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "agreed"
