"""Engines of two and four cards answer as those of one; see rank_engine.py for the tolerance."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.rank_engine import CASES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_cards_answer_as_one(case: str, count: int) -> None:
    """In a process of its own: a process joins one group of ranks."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} cards, {found} found")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.rank_engine", case, str(count)],
        cwd=ROOT, text=True, capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.stdout.endswith("agreed\n"), done.stderr[-4000:]
