"""The Triton kernels in Triton's interpreter, on the CPU, against their plain twins."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cases import first

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]
# Those of a process share three seconds of imports. FP8 is last: it replaces a conversion.
# `make test` leaves out the weight formats.
PROCESSES = [
    ["kernels", "adapters"],
    first(3, ["tower", "delta_rule", "peer_sum", "fp8_cache", "packed", "fp8"]),
]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(660)
@pytest.mark.parametrize("names", PROCESSES, ids="-".join)
def test_kernels_agree_with_their_twins_in_the_interpreter(names: Sequence[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.interpreted", *names],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agreed"] * len(names)
