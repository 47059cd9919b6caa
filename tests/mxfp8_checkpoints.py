"""Writes MXFP8 checkpoints by a table of e4m3's values; shares no code with `packed_weight`."""

import torch
from torch import Tensor

from tests.quantized_checkpoints import writer

GROUP = 32  # columns of a scale
# Of the codes 0 to 126: 127 is NaN. Four bits of exponent with a bias of 7, three of mantissa.
VALUES = torch.tensor(
    [c / 8 * 2.0**-6 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)]
)
_NUMBERS = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP,
    "scale_dtype": "torch.uint8",
}  # fmt: skip


def compressed(inputs: bool = False, **changes: object) -> dict:
    """compressed-tensors' configuration of MXFP8A16, with `inputs` of MXFP8."""
    group = {
        "targets": ["Linear"], "weights": _NUMBERS | {"dynamic": False},
        "input_activations": _NUMBERS | {"dynamic": True} if inputs else None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "mxfp8-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head", r"re:.*visual\..*"],
        "config_groups": {"group_0": group},
    } | changes  # fmt: skip


MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "model.visual*"],
}  # fmt: skip
LAYOUTS = {
    "mxfp8": compressed(), "mxfp8-inputs": compressed(inputs=True), "modelopt": MODELOPT
}  # fmt: skip


def tensors(weight: Tensor, _: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The matrix that is meant, and a module's tensors by suffix; the last group may be narrow."""
    codes, meant = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(weight.shape)
    stored = []
    for first in range(0, weight.shape[1], GROUP):
        at = slice(first, first + GROUP)
        amax = weight[:, at].abs().amax(1, keepdim=True)
        exponent = (torch.floor(torch.log2(amax)) - 8).clamp(-127, 127)
        found = torch.bucketize(weight[:, at].abs() / 2.0**exponent, (VALUES[1:] + VALUES[:-1]) / 2)
        meant[:, at] = VALUES[found].copysign(weight[:, at]) * 2.0**exponent
        codes[:, at] = found + 128 * (weight[:, at] < 0)
        stored.append((exponent + 127).to(torch.uint8))
    return meant, {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.cat(stored, 1)}


write = writer(LAYOUTS, tensors)
