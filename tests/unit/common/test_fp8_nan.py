"""FP8 files with values that are no numbers are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.common.nn.checkpoint import CheckpointError
from services.common.nn.weights import _Copier
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


def test_a_nan_in_one_of_a_tensors_pieces_is_found() -> None:
    """An expert's part of a fused tensor, say; every other code is a number."""
    copier = _Copier(None, torch.device("cpu"))  # type: ignore[arg-type]
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn)
    assert numbers.float().isfinite().all()
    for name, nan in (("numbers", None), ("first", 0x7F), ("second", 0xFF)):
        piece = codes.clone()
        if nan is not None:
            piece[7] = nan
        pieces = [piece.view(torch.float8_e4m3fn), numbers]
        for each in pieces if name == "first" else reversed(pieces):
            copier._look_for_nan(name, each)
    assert copier.finish() == ["first", "second"]
