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
        values, scales = torch.empty(weight.shape, dtype=torch.int8), []
        meant = torch.empty(weight.shape)
        for index, row in enumerate(weight):
            scale = (row.abs().max() / 127).to(scale_dtype)
            values[index] = torch.clamp(torch.round(row / scale.float()), -128, 127)
            meant[index] = values[index] * scale.float()
            scales.append(scale)
        return meant, {"weight": values, "weight_scale": torch.stack(scales)[:, None]}

    chosen = INT8 if config is None else config
    return write_quantized(source, directory, chosen, quantized, modules, change)
