"""What a module's layers are called in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.nn.checkpoint import Checkpoint
from services.common.nn.linear import StoredLayers


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a module's parameters are called in a checkpoint.

    Attributes:
        prefixes: module prefix → checkpoint prefix; the longest module prefix that fits a
            parameter's name is replaced. A prefix may be a whole name.
        shapes: parameter name → shape in the checkpoint, where it differs (same elements in the
            same order, as a Conv3d's weight that is applied as a linear).
        ignored: full checkpoint names that may be present and are not read.
        others: prefix of another module's tensors, where this one owns all that are not; "": it
            owns all; None: it owns what its prefixes say.
    """

    prefixes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    others: str | None = None

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name for a parameter."""
        prefix = max((p for p in self.prefixes if name.startswith(p)), key=len, default=None)
        if prefix is None:
            raise KeyError(f"no prefix of the weight map fits parameter {name}")
        return self.prefixes[prefix] + name[len(prefix) :]

    def tensor_name(self, path: str, part: str, tensor: str) -> str:
        """The checkpoint's name for a tensor of a module, or of a part of a merged layer, which
        stands beside it there.
        """
        module = f"{path.rpartition('.')[0]}.{part}" if part else path
        return self.checkpoint_name(f"{module}.{tensor}".lstrip("."))

    def owns(self, name: str) -> bool:
        """Whether a checkpoint tensor belongs to the module: if no parameter wants it, it is an
        error.
        """
        if self.others is None:
            is_own = name.startswith(tuple(self.prefixes.values()))
        else:
            is_own = not self.others or not name.startswith(self.others)
        return is_own and name not in self.ignored


def stored_files(
    stored: StoredLayers, path: str, weight_map: WeightMap, checkpoint: Checkpoint
) -> tuple[str, str]:
    """The checkpoint's name for the layers, and their layout there."""
    prefix = weight_map.checkpoint_name(path)
    return prefix, stored.file_layout(prefix, checkpoint.tensors)
