"""`peer_sum` between cards of this machine, see peer_sum_rank.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_sum_as_the_twin_does(tmp_path: Path, count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} cards, {found} found")
    env = os.environ | {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.peer_sum_rank",
             str(tmp_path / "store"), str(rank), str(count)],
            cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        for rank in ranks:
            printed, errors = rank.communicate(timeout=120)
            assert printed.strip() == "agreed", errors[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
