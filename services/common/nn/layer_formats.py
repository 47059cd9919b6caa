"""The format that each linear layer of a quantized checkpoint has.

For each linear layer the files decide how its weights are stored: a floating-point `weight` makes
it plain, anything else gets the method of the checkpoint's quantization. The two must agree, with
one exception: producers leave modules unquantized that their configuration does not list; these
are plain and reported.
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


def set_methods(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    quantization: QuantizationSpec | None,
) -> None:
    """Gives each linear layer the method that its tensors in the files call for; before they are
    read. None: all stay plain.

    Raises:
        CheckpointError: names the modules whose files and configuration disagree.
    """
    if quantization is None:
        return
    methods = {group: method_of(group) for group in quantization.groups}
    unlisted: list[str] = []
    problems: list[str] = []
    for path, layer in _replaceable(module):
        named = _checkpoint_modules(module, path, layer, weight_map, checkpoint)
        modules = list(named)
        wanted = {name: quantization.of(name) for name in modules}
        layouts = [each for method in methods.values() for each in method.layouts(layer)]
        names = {name for each in layouts for name in (each.name, each.name + each.other_ending)}
        is_plain = [_is_plain(checkpoint, *each, names, wanted[each[0]]) for each in named.items()]
        first, *others = set(wanted.values())
        group = None if others else first  # of all of them
        if all(is_plain) and group is not None and group.at_load:
            layer.set_method(methods[group])
        elif all(is_plain):
            unlisted += [name for name, each in wanted.items() if each and not each.at_load]
        elif any(is_plain):
            problems.append(f"{listed(modules)} are one layer, and not all are quantized")
        elif None in wanted.values():
            problems.append(f"{listed(modules)}: quantized, which the configuration denies")
        elif group is None:
            problems.append(f"{listed(modules)} are one layer, in different formats")
        else:
            layer.set_method(methods[group])
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems)}")
    if unlisted:
        log.warning(
            "%s: %d modules are not quantized though quantization_config does not say so: %s",
            checkpoint.directory, len(unlisted), listed(unlisted),
        )  # fmt: skip


def _is_plain(
    checkpoint: Checkpoint, module: str, weight: str, quantized: Collection[str],
    wanted: QuantizationSpec | None,
) -> bool:  # fmt: skip
    """Whether a module's weight is stored as it is. Where the files hold nothing of it, it is as it
    should be: the loader names what is missing, and random weights need no files.

    Args:
        weight: the name of an unquantized weight.
        quantized: what follows the names of modules in the names of quantized tensors.
        wanted: what should quantize the module.
    """
    info = checkpoint.tensors.get(weight)
    if info is not None:
        return info.dtype in FLOATS
    # Scales of a fused tensor of experts follow its name, see `experts`.
    fused = weight == module
    found = (
        module + name.removeprefix("weight") if fused else f"{module}.{name}" for name in quantized
    )
    if any(name in checkpoint.tensors for name in found):
        return False
    return wanted is None or wanted.at_load


def _replaceable(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Linear layers, but those with a method of the model's own."""
    for path, child in module.named_modules():
        if isinstance(child, Linear) and type(child.method) is UnquantizedLinear:
            yield path, child


def _checkpoint_modules(
    module: nn.Module, path: str, layer: Linear, weight_map: WeightMap, checkpoint: Checkpoint
) -> dict[str, str]:
    """The checkpoint's modules of a layer → their weights' tensors."""
    parent, _, stack = path.rpartition(".")
    stored = module.get_submodule(parent)
    if not isinstance(stored, StoredLayers):
        weights = [weight_map.tensor_name(path, part, "weight") for part in layer.parts]
        return {weight.removesuffix(".weight"): weight for weight in weights}
    prefix, layout = stored_files(stored, parent, weight_map, checkpoint)
    named = stored.modules_of(stack, layout)
    return {f"{prefix}.{name}": f"{prefix}.{weight}" for name, weight in named.items()}
