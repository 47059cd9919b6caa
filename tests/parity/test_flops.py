"""What `triptych serve` divides cards by: FLOPs beside those that torch counts in Hugging Face's
model.
"""

import pytest
import torch

import tests.parity.torchvision_ops  # noqa: F401 - before transformers

# isort: split
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from services.common.families import read_spec
from triptych.layout import encode_flops, prompt_flops
from triptych.options import DEMONSTRATION_MODEL

# Ours counts neither positions nor rotations; torch counts matrix products alone.
TOLERANCE = 0.02
TOKENS = 512


def test_flops_are_those_of_the_layers() -> None:
    spec = read_spec(DEMONSTRATION_MODEL)
    model = AutoModelForImageTextToText.from_pretrained(DEMONSTRATION_MODEL, dtype=torch.float32)
    model.set_attn_implementation("eager")
    assert spec.vision is not None
    tower, text = spec.vision.tower, spec.text
    side = 16 * tower.spatial_merge_size
    pixels = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.model.visual(torch.zeros(side * side, pixels), torch.tensor([[1, side, side]]))
    ours = encode_flops(tower, side * tower.patch_size)
    assert ours == pytest.approx(counted.get_total_flops(), rel=TOLERANCE)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model.model.language_model(torch.zeros(1, TOKENS, dtype=torch.long))
    # Eager attention multiplies the masked half, too.
    masked = 2 * TOKENS**2 * text.num_heads * text.head_dim * len(text.attention_layers)
    ours = prompt_flops(text, TOKENS) + masked
    assert ours == pytest.approx(counted.get_total_flops(), rel=TOLERANCE)
