"""Writes int8 checkpoints (W8A8), row by row; shares no code with `kernels.gemm.int8_weight`."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.quantized_checkpoints import is_of_layers, unchanged, write_quantized

_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head", r"re:.*visual\..*"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": _NUMBERS | {"dynamic": False, "strategy": "channel"},
        "input_activations": _NUMBERS | {"dynamic": True, "strategy": "token"},
    }},
}  # fmt: skip


def write(
    source: Path,
    directory: Path,
    name: str = "int8",
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    modules: Callable[[str], bool] = is_of_layers,
    change: Callable[[str, Tensor], Tensor | None] = unchanged,
    config: dict | None = None,
) -> dict[str, Tensor]:
    """Quantizes a checkpoint, see `write_quantized`."""

    def quantized(_: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scale = (weight.abs().amax(1, keepdim=True) / 127).to(scale_dtype)
        values = torch.clamp(torch.round(weight / scale.float()), -128, 127).to(torch.int8)
        return values * scale.float(), {"weight": values, "weight_scale": scale}

    chosen = INT8 if config is None else config
    return write_quantized(source, directory, chosen, quantized, modules, change)
