"""Writes quantized checkpoints from unquantized ones; a format says what becomes of a matrix."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

# Module and float32 matrix → the matrix that is meant, and the module's tensors by suffix.
Quantizer = Callable[[str, Tensor], tuple[Tensor, dict[str, Tensor]]]


def is_of_layers(module: str) -> bool:
    """Whether it is the language model's, but its head and embedding."""
    return "layers" in module and "visual" not in module


def unchanged(_: str, tensor: Tensor) -> Tensor | None:
    return tensor


def write_quantized(
    source: Path,
    directory: Path,
    config: dict,
    quantizer: Quantizer,
    modules: Callable[[str], bool] = is_of_layers,
    change: Callable[[str, Tensor], Tensor | None] = unchanged,
) -> dict[str, Tensor]:
    """Quantizes a checkpoint.

    Args:
        source: an unquantized checkpoint in one file.
        directory: to be made.
        config: its `quantization_config`; empty: there is none.
        quantizer: of a matrix.
        modules: which are quantized, of those with a matrix for a weight.
        change: a last change of each tensor, by name; None: it is left out.

    Returns:
        The float32 tensors that the checkpoint stands for, by name; without `change`.
    """
    shutil.copytree(source, directory)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    if config:
        raw["quantization_config"] = config
    path.write_text(json.dumps(raw))
    meant, written = {}, {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if tensor.ndim != 2 or module == key or not modules(module) or "embed" in module:
            meant[key] = written[key] = tensor
            continue
        meant[key], made = quantizer(module, tensor.float())
        written |= {f"{module}.{suffix}": values for suffix, values in made.items()}
    changed = {key: change(key, tensor) for key, tensor in written.items()}
    kept = {key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors")
    return meant


def writer(
    layouts: Mapping[str, dict],
    quantize: Callable[[Tensor, str], tuple[Tensor, dict[str, Tensor]]],
) -> Callable[..., dict[str, Tensor]]:
    """Of a format whose layouts are configurations, by name, and whose quantizer is told the name:
    `write_quantized` with a layout's name.
    """

    def write(
        source: Path, directory: Path, name: str, *, config: dict | None = None,
        modules: Callable[[str], bool] = is_of_layers,
        change: Callable[[str, Tensor], Tensor | None] = unchanged,
    ) -> dict[str, Tensor]:  # fmt: skip
        chosen = layouts[name] if config is None else config
        return write_quantized(
            source, directory, chosen, lambda _, weight: quantize(weight, name), modules, change
        )

    return write
