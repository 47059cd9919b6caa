"""What a module's layers are called in a checkpoint, and the format that each has there.

For each linear layer the files decide how its weights are stored: a floating-point `weight` makes
it plain, anything else gets the method of the checkpoint's quantization. The two must agree, with
one exception: producers leave modules unquantized that their configuration does not list; these
are plain and reported.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.checkpoint import Checkpoint, CheckpointError, listed
from services.common.nn.formats import methods_of
from services.common.nn.linear import FLOATS, Linear, StoredLayers, UnquantizedLinear

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a module's parameters are called in a checkpoint.

    Attributes:
        prefixes: module prefix → checkpoint prefix; the longest module prefix that fits a
            parameter's name is replaced. The checkpoint prefixes are what the module owns: a tensor
            under one of them that no parameter wants is an error. A prefix may be a whole name.
        shapes: parameter name → shape in the checkpoint, where it differs (same elements in the
            same order, as a Conv3d's weight that is applied as a linear).
        ignored: full checkpoint names that may be present and are not read.
    """

    prefixes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name for a parameter (or a part of a merged one)."""
        prefix = max((p for p in self.prefixes if name.startswith(p)), key=len, default=None)
        if prefix is None:
            raise KeyError(f"no prefix of the weight map fits parameter {name}")
        return self.prefixes[prefix] + name[len(prefix) :]

    def owns(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to the module."""
        return name not in self.ignored and name.startswith(tuple(self.prefixes.values()))


def set_methods(
    module: nn.Module,
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    quantization: QuantizationSpec,
) -> None:
    """Gives each linear layer the method that its tensors in the files call for."""
    methods = methods_of(quantization)
    unlisted: list[str] = []
    problems: list[str] = []
    for path, layer in _replaceable(module):
        named = _checkpoint_modules(module, path, layer, weight_map, checkpoint)
        modules = list(named)
        wanted = [quantization.of(name) for name in modules]
        names = {each.name for method in methods.values() for each in method.layouts(layer)}
        # What is missing is as it should be: `_check` names it.
        is_plain = [
            each is None or each.at_load if found is None else found
            for each, found in zip(
                wanted, (_is_plain(checkpoint, *each, names) for each in named.items()), strict=True
            )
        ]
        group = wanted[0]
        if all(is_plain) and group is not None and group.at_load and set(wanted) == {group}:
            layer.set_method(methods[group])
        elif all(is_plain):
            unlisted += [
                name
                for name, each in zip(modules, wanted, strict=True)
                if each and not each.at_load
            ]
        elif any(is_plain):
            problems.append(f"{listed(modules)} are one layer, and not all are quantized")
        elif None in wanted:
            problems.append(f"{listed(modules)}: quantized, which the configuration denies")
        elif len(set(wanted)) > 1:
            problems.append(f"{listed(modules)} are one layer, in different formats")
        else:
            assert group is not None
            layer.set_method(methods[group])
    if problems:
        raise CheckpointError(f"{checkpoint.directory}: {'; '.join(problems)}")
    if unlisted:
        log.warning(
            "%s: %d modules are not quantized though quantization_config does not say so: %s",
            checkpoint.directory, len(unlisted), listed(unlisted),
        )  # fmt: skip


def _is_plain(
    checkpoint: Checkpoint, module: str, weight: str, quantized: Collection[str]
) -> bool | None:
    """Whether a module's weight is stored as it is; None: the files hold nothing of it.

    Args:
        weight: the name of an unquantized weight.
        quantized: what follows the names of modules in the names of quantized tensors.
    """
    info = checkpoint.tensors.get(weight)
    if info is not None:
        return info.dtype in FLOATS
    # Scales of a fused tensor of experts follow its name, see `experts`.
    fused = weight == module
    found = (
        module + name.removeprefix("weight") if fused else f"{module}.{name}" for name in quantized
    )
    return False if any(name in checkpoint.tensors for name in found) else None


def set_configured_methods(
    module: nn.Module, weight_map: WeightMap, quantization: QuantizationSpec
) -> None:
    """Gives each linear layer its method as if the files held what the configuration says."""
    methods = methods_of(quantization)
    for path, layer in _replaceable(module):
        modules = _checkpoint_modules(module, path, layer, weight_map)
        group = quantization.of(next(iter(modules)))
        if group is not None and all(quantization.of(name) == group for name in modules):
            layer.set_method(methods[group])


def _replaceable(module: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Linear layers, but those with a method of the model's own."""
    for path, child in module.named_modules():
        if isinstance(child, Linear) and type(child.method) is UnquantizedLinear:
            yield path, child


def _checkpoint_modules(
    module: nn.Module,
    path: str,
    layer: Linear,
    weight_map: WeightMap,
    checkpoint: Checkpoint | None = None,
) -> dict[str, str]:
    """The checkpoint's modules of a layer → their weights' tensors."""
    parent, _, stack = path.rpartition(".")
    stored = module.get_submodule(parent)
    if not isinstance(stored, StoredLayers):
        parts = [part_path(path, part) + ".weight" for part in layer.parts]
        weights = map(weight_map.checkpoint_name, parts)
        return {weight.removesuffix(".weight"): weight for weight in weights}
    prefix, layout = stored_files(stored, parent, weight_map, checkpoint)
    named = stored.modules_of(stack, layout)
    return {f"{prefix}.{name}": f"{prefix}.{weight}" for name, weight in named.items()}


def stored_files(
    stored: StoredLayers, path: str, weight_map: WeightMap, checkpoint: Checkpoint | None
) -> tuple[str, str]:
    """The checkpoint's name for the layers, and their layout there."""
    prefix = weight_map.checkpoint_name(path)
    return prefix, stored.file_layout(prefix, {} if checkpoint is None else checkpoint.tensors)


def part_path(path: str, part: str) -> str:
    """A part of a merged layer stands beside it in the checkpoint."""
    if not part:
        return path
    parent = path.rpartition(".")[0]
    return f"{parent}.{part}" if parent else part
