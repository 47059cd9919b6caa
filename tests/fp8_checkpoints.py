"""Writes FP8 checkpoints from unquantized ones, and reads them back by other means than ours.

The quantizer and `unpack` share no code with `services.common.nn.fp8`: they look up the scale of
each element by its row and column.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.quantized_checkpoints import is_of_layers, unchanged, write_quantized

E4M3 = torch.float8_e4m3fn

FP8_BLOCK = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.visual"],
}  # fmt: skip


def compressed(strategy: str = "channel", **changes: object) -> dict:
    """compressed-tensors' configuration of FP8_DYNAMIC ("channel"), FP8_BLOCK ("block") or FP8
    ("tensor").
    """
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = numbers | {"dynamic": False, "strategy": strategy}
    inputs = numbers | {"dynamic": True, "strategy": "token"}
    if strategy == "block":
        weights |= {"block_structure": [128, 128]}
        inputs |= {"strategy": "group", "group_size": 128}
    if strategy == "tensor":
        inputs |= {"strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*visual\..*"],
    } | changes  # fmt: skip


AUTO_FP8 = {
    "quant_method": "fp8", "activation_scheme": "static",
    "ignored_layers": ["lm_head", "model.visual"],
}  # fmt: skip


def weights_alone(strategy: str) -> dict:
    """compressed-tensors' configuration without that of activations."""
    config = compressed(strategy, format="naive-quantized")
    config["config_groups"]["group_0"]["input_activations"] = None
    return config


Block = tuple[int | None, int | None]
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.visual*"],
    "producer": {"name": "modelopt", "version": "0.40"},
}  # fmt: skip
FORMATS: dict[str, tuple[dict, str, Block]] = {
    "fp8-block": (FP8_BLOCK, "weight_scale_inv", (128, 128)),
    "compressed-block": (compressed("block"), "weight_scale", (128, 128)),
    "compressed-channel": (compressed(), "weight_scale", (1, None)),
    "compressed-tensor": (compressed("tensor"), "weight_scale", (None, None)),
    "compressed-weights": (weights_alone("tensor"), "weight_scale", (None, None)),
    "auto-fp8": (AUTO_FP8, "weight_scale", (None, None)),
    "auto-fp8-dynamic": (
        AUTO_FP8 | {"activation_scheme": "dynamic"}, "weight_scale", (None, None)
    ),
    "modelopt": (MODELOPT, "weight_scale", (None, None)),
    "modelopt-block": (MODELOPT | {"quant_algo": "FP8_PB_WO"}, "weight_scale", (128, 128)),
    "modelopt-block-inv": (  # as MTP layers of NVIDIA's builds have it
        MODELOPT | {"quant_algo": "fp8_pb_wo"}, "weight_scale_inv", (128, 128)
    ),
    "modelopt-channel": (
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "weight_scale", (1, None)
    ),
}  # fmt: skip
_UNSEEN = ("compressed-weights", "auto-fp8-dynamic")


def quantize(weight: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """e4m3 values and float32 scales, one per block (None: of a whole row or column)."""
    rows, columns = weight.shape
    high, wide = block[0] or rows, block[1] or columns
    padded = F.pad(weight, (0, -columns % wide, 0, -rows % high))
    scale = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).abs().amax((1, 3)) / 448
    return (weight / _of_each(scale, weight.shape, block)).to(E4M3), scale


def unpack(values: Tensor, scale: Tensor, block: Block) -> Tensor:
    """The float32 matrix that values and scales stand for."""
    return values.float() * _of_each(scale, values.shape, block)


def _of_each(scale: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """Each element's scale."""
    rows, columns = torch.arange(shape[0]), torch.arange(shape[1])
    return scale[rows[:, None] // (block[0] or shape[0]), columns // (block[1] or shape[1])]


def write(
    source: Path,
    directory: Path,
    name: str,
    *,
    scale_dtype: torch.dtype = torch.float32,
    modules: Callable[[str], bool] = is_of_layers,
    change: Callable[[str, Tensor], Tensor | None] = unchanged,
    config: dict | None = None,
) -> dict[str, Tensor]:
    """Quantizes a checkpoint, see `write_quantized`.

    Args:
        source: an unquantized checkpoint in one file.
        directory: to be made.
        name: of `FORMATS`.
        scale_dtype: of the scales in the file; they are rounded to it before values are made.
        modules: which are quantized, of those with a matrix for a weight.
        change: a last change of each tensor, by name; None: it is left out.
        config: instead of the format's `quantization_config`.

    Returns:
        The float32 tensors that the checkpoint stands for, by name; without `change`.
    """
    standard, suffix, block = FORMATS[name]

    def quantized(_: str, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values, scale = quantize(weight, block)
        scale = scale.to(scale_dtype)
        meant = unpack(values, scale.float(), block)
        if name == "modelopt-block":
            scale = scale[:, None, :, None]
        elif name == "modelopt-channel":
            scale = scale[:, 0]
        if block[0] is not None:
            return meant, {"weight": values, suffix: scale}
        # A number, or a tensor of one; and a scale of activations, as far as they were seen.
        scale = scale.flatten() if name == "compressed-tensor" else scale[0, 0]
        seen = {} if name in _UNSEEN else {"input_scale": torch.tensor(0.01)}
        return meant, {"weight": values, suffix: scale} | seen

    return write_quantized(source, directory, config or standard, quantized, modules, change)
