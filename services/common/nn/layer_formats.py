"""Selects the weight format of each linear layer of a quantized checkpoint.

The tensors in the files decide: a layer with a floating-point `weight` is unquantized, and any
other layer gets the method of the checkpoint's `quantization_config`. Files and configuration must
agree, with one exception: a module that is not quantized although the configuration says so is
loaded as it is and reported in a warning, since some producers write such files.
"""

import logging
from collections.abc import Collection, Iterator

from torch import nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.checkpoint import Checkpoint, CheckpointError, listed
from services.common.nn.formats import method_of
from services.common.nn.linear import FLOATS, Linear, StoredLayers, UnquantizedLinear
from services.common.nn.weight_map import WeightMap, stored_files

log = logging.getLogger(__name__)

# Activations that layers of a format compute with. Layers of other formats leave them as they are.
_COMPUTED = {
    "fp8_block": "e4m3 with a scale per token and 128 columns, or not quantized",
    "fp8_channel": "e4m3 with a scale per token, or not quantized",
    "int8": "int8 with a scale per token",
}


def set_methods(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    quantization: QuantizationSpec | None,
    within: str = "",
) -> None:
    """Sets the method of each linear layer. Called before any tensor is read.

    Args:
        module: model whose layers are unquantized so far.
        checkpoint: the model's files.
        weight_map: names of the model's layers in the files.
        quantization: quantization of the checkpoint. None if all layers stay unquantized.
        within: path of the submodule whose layers get methods. Empty for all layers.

    Raises:
        CheckpointError: files and configuration disagree. The message names the modules.
    """
    if quantization is None:
        return
    methods = {group: method_of(group) for group in quantization.groups}
    unlisted: list[str] = []
    problems: list[str] = []
    declared: set[tuple[str, str]] = set()  # format, activations that the files declare
    for path, layer in _replaceable(module):
        if within and not path.startswith(f"{within}."):
            continue
        named = _checkpoint_modules(module, path, layer, weight_map, checkpoint)
        modules = list(named)
        wanted = {name: quantization.of(name) for name in modules}
        layouts = [each for method in methods.values() for each in method.layouts(layer)]
        names = {name for each in layouts for name in (each.name, each.name + each.other_ending)}
        is_plain = [_is_plain(checkpoint, *each, names, wanted[each[0]]) for each in named.items()]
        first, *others = set(wanted.values())
        group = None if others else first  # the quantization that all modules share
        if all(is_plain) and group is not None and group.at_load:
            layer.set_method(methods[group])
        elif all(is_plain):
            unlisted += [name for name, each in wanted.items() if each and not each.at_load]
        elif any(is_plain):
            problems.append(f"{listed(modules)} are one layer, and not all are quantized")
        elif None in wanted.values():
            problems.append(
                f"{listed(modules)}: quantized in the files, but not by quantization_config"
            )
        elif group is None:
            problems.append(f"{listed(modules)} are one layer, in different formats")
        else:
            layer.set_method(methods[group])
            declared.add((group.format, group.activations))
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems)}")
    for weight_format, activations in sorted(declared):
        if activations:
            log.warning(
                "%s: quantization_config declares activations that are not used (%s); those of "
                "%s weights are %s",
                checkpoint.directory,
                activations,
                weight_format,
                _COMPUTED.get(weight_format, "not quantized"),
            )
    if unlisted:
        log.warning(
            "%s: %d modules are not quantized, although quantization_config says they are: %s",
            checkpoint.directory,
            len(unlisted),
            listed(unlisted),
        )


def _is_plain(
    checkpoint: Checkpoint,
    module: str,
    weight: str,
    quantized: Collection[str],
    wanted: QuantizationSpec | None,
) -> bool:
    """Returns whether a module's weight is stored unquantized.

    If the files have no tensor of the module, the configuration decides: the loader reports the
    missing tensors later, and random weights need no files.

    Args:
        checkpoint: the model's files.
        module: checkpoint name of the module.
        weight: checkpoint name of its weight if the weight is unquantized.
        quantized: endings that the names of quantized tensors add to the module's name.
        wanted: quantization of the module in the configuration. None if it is unquantized there.
    """
    info = checkpoint.tensors.get(weight)
    if info is not None:
        return info.dtype in FLOATS
    # The scales of a fused tensor of experts are named after the tensor, see `experts`.
    fused = weight == module
    found = (
        module + name.removeprefix("weight") if fused else f"{module}.{name}" for name in quantized
    )
    if any(name in checkpoint.tensors for name in found):
        return False
    return wanted is None or wanted.at_load


def _replaceable(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yields path and layer of each linear layer whose method the model has not set itself."""
    for path, child in module.named_modules():
        if isinstance(child, Linear) and type(child.method) is UnquantizedLinear:
            yield path, child


def _checkpoint_modules(
    module: nn.Module, path: str, layer: Linear, weight_map: WeightMap, checkpoint: Checkpoint
) -> dict[str, str]:
    """Maps the checkpoint's modules that a layer merges to the names of their weights."""
    parent, _, stack = path.rpartition(".")
    stored = module.get_submodule(parent)
    if not isinstance(stored, StoredLayers):
        weights = [weight_map.tensor_name(path, part, "weight") for part in layer.parts]
        return {weight.removesuffix(".weight"): weight for weight in weights}
    prefix, layout = stored_files(stored, parent, weight_map, checkpoint)
    named = stored.modules_of(stack, layout)
    return {f"{prefix}.{name}": f"{prefix}.{weight}" for name, weight in named.items()}
