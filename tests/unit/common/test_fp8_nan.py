"""FP8 files with values that are no numbers are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.common.nn.checkpoint import CheckpointError
from tests.unit.common.test_fp8 import load, make


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (255, 255), (100, 130)])
def test_codes_of_nan_are_refused_by_name(
    tmp_path: Path, code: int, place: tuple[int, int]
) -> None:
    """Kernels for few tokens would multiply by 480 instead."""
    rows = {"q": 256, "k": 256}
    files = make(tmp_path, rows, 256, "block")
    load(tmp_path, rows, 256, "block", torch.float32)
    assert files["k.weight"].float().abs().max() == 448  # the neighbouring code is a number
    files["k.weight"].view(torch.uint8)[place] = code
    assert files["k.weight"][place].float().isnan()
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no numbers \(NaN\): k\.weight;"):
        load(tmp_path, rows, 256, "block", torch.float32)
