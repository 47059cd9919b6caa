"""Writes e2m1 checkpoints (NVFP4, MXFP4), value by value; shares no code with `packed_weight`."""

import torch
from torch import Tensor

from tests.quantized_checkpoints import writer

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_IGNORED = ["lm_head", r"re:.*visual\..*"]


def compressed(kind: str, inputs: bool = False, **changes: object) -> dict:
    """compressed-tensors' configuration; `kind`: nvfp4 or mxfp4."""
    numbers = {
        "num_bits": 4, "type": "float", "symmetric": True,
        "strategy": "tensor_group" if kind == "nvfp4" else "group",
        "group_size": 16 if kind == "nvfp4" else 32,
    }  # fmt: skip
    group = {
        "targets": ["Linear"], "weights": numbers | {"dynamic": False},
        "input_activations": numbers | {"dynamic": "local"} if inputs else None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": f"{kind}-pack-quantized",
        "quantization_status": "compressed", "ignore": _IGNORED,
        "config_groups": {"group_0": group},
    } | changes  # fmt: skip


MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
    "kv_cache_quant_algo": None, "ignore": ["lm_head", "model.visual*"],
    "producer": {"name": "modelopt", "version": "0.40"},
}  # fmt: skip
LAYOUTS = {
    "nvfp4": compressed("nvfp4"),
    "nvfp4-inputs": compressed("nvfp4", inputs=True),
    "mxfp4": compressed("mxfp4"),
    "modelopt": MODELOPT,
}


def tensors(weight: Tensor, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The matrix that is meant, and a module's tensors by suffix."""
    size = 32 if name == "mxfp4" else 16
    groups = weight.unflatten(1, (-1, size))
    amax, total = groups.abs().amax(-1), weight.abs().max() / torch.tensor(448 * 6)
    if name == "mxfp4":
        exponents = torch.floor(torch.log2(amax / 6)).clamp(-127, 127)
        scale, stored = 2.0**exponents, (exponents + 127).to(torch.uint8)
        wide = scale
    else:
        stored = (amax / 6 / total).to(torch.float8_e4m3fn)
        scale = stored.float()
        wide = scale * total
    places = (groups / wide[..., None])[..., None] - VALUES
    codes = places.abs().argmin(-1)
    meant = (VALUES[codes] * wide[..., None]).flatten(1)
    codes = codes.flatten(1)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    if name == "modelopt":
        return meant, {
            "weight": packed, "weight_scale": stored, "weight_scale_2": total,
            "input_scale": torch.tensor(0.01),
        }  # fmt: skip
    made = {"weight_packed": packed, "weight_scale": stored}
    if name != "mxfp4":
        made["weight_global_scale"] = (1 / total)[None]
    if name == "nvfp4-inputs":
        made["input_global_scale"] = torch.ones(1)
    return meant, made


write = writer(LAYOUTS, tensors)
