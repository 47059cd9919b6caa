"""Maps the names of a module's parameters to tensor names in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.nn.checkpoint import Checkpoint
from services.common.nn.linear import StoredLayers


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The checkpoint names of a module's parameters.

    Attributes:
        prefixes: checkpoint prefix for each module prefix. The longest module prefix that matches a
            parameter's name is replaced. A prefix may be a whole name.
        shapes: shape in the checkpoint of each parameter whose shape differs there. The elements
            are the same and in the same order, for example a Conv3d weight that is applied as a
            linear layer.
        ignored: full checkpoint names of tensors that may be present and are not read.
        others: prefixes of another module's tensors; this module owns all tensors without them.
            Empty if this module owns all tensors. None if it owns the tensors under `prefixes`.
    """

    prefixes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    others: tuple[str, ...] | None = None

    def checkpoint_name(self, name: str) -> str:
        """Checkpoint name of a parameter."""
        prefix = max((p for p in self.prefixes if name.startswith(p)), key=len, default=None)
        if prefix is None:
            raise KeyError(f"no prefix of the weight map matches parameter {name}")
        return self.prefixes[prefix] + name[len(prefix) :]

    def tensor_name(self, path: str, part: str, tensor: str) -> str:
        """Checkpoint name of a tensor of a module.

        Args:
            path: path of the module.
            part: name of the checkpoint's module that is a part of a merged layer and takes the
                last component of `path`. Empty if the layer is not merged.
            tensor: name of the tensor within the module.
        """
        module = f"{path.rpartition('.')[0]}.{part}" if part else path
        return self.checkpoint_name(f"{module}.{tensor}".lstrip("."))

    def owns(self, name: str) -> bool:
        """Returns whether a checkpoint tensor belongs to the module.

        Loading fails if a tensor belongs to the module and no parameter is filled from it.
        """
        if self.others is None:
            is_own = name.startswith(tuple(self.prefixes.values()))
        else:
            is_own = not name.startswith(self.others)
        return is_own and name not in self.ignored


def stored_files(
    stored: StoredLayers, path: str, weight_map: WeightMap, checkpoint: Checkpoint
) -> tuple[str, str]:
    """Checkpoint prefix of stacked layers, and the layout of their tensors in the files."""
    prefix = weight_map.checkpoint_name(path)
    return prefix, stored.file_layout(prefix, checkpoint.tensors)
