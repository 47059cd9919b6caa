"""What a checkpoint's files weigh, from the heads of its safetensors files; no weight is read.

`checks` and `fit` ask before a process is started. What a loader would refuse minutes later (no
weights, a missing or cut file) is a `StackError` here.
"""

import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from services.common.model_spec import ModelSpec, QuantizationSpec
from triptych.stack import StackError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEAD_BYTES = 100 << 20
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PACKED = {"I32", "U8"}  # dtypes of words that hold several weights
_BESIDE_WEIGHTS = ("scale", "zero", "g_idx", "weight_shape")  # in the names of what formats add
# Weights of other programs, which people download by mistake.
_FOREIGN = ("*.gguf", "pytorch_model*.bin", "consolidated*.pth", "adapter_model.safetensors")


@dataclass(slots=True)
class Weights:
    """Of one part of a model.

    Attributes:
        floats: parameters that are stored as floats, and take the served precision.
        fixed_bytes: of what is loaded as it is stored, as FP8.
        parameters: all, scales and zero points left out.
        stored: parameters by the dtype of the files.
    """

    floats: int = 0
    fixed_bytes: int = 0
    parameters: int = 0
    stored: dict[str, int] = field(default_factory=dict[str, int])

    def bytes_in(self, itemsize: int) -> int:
        """Memory with floats of a size."""
        return self.floats * itemsize + self.fixed_bytes


class _Tensor(NamedTuple):
    """A tensor of a file: its name, dtype, number of values and size."""

    name: str
    kind: str
    num_values: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a checkpoint: both parts' weights, and bytes on disk."""

    text: Weights
    vision: Weights
    file_bytes: int
    num_files: int


def read_checkpoint(spec: ModelSpec) -> Checkpoint:
    """Reads the heads of all weight files.

    Raises:
        StackError: a file is missing, cut or of another kind.
    """
    text, vision, num_bytes = Weights(), Weights(), 0
    names = _files(spec.directory)
    for name in names:
        path = spec.directory / name
        num_bytes += path.stat().st_size
        for tensor in _head(path):
            if spec.checkpoint.ignores(tensor.name):
                continue
            prefix = spec.checkpoint.vision_prefix
            part = vision if prefix and tensor.name.startswith(prefix) else text
            _add(part, tensor, spec.checkpoint.quantization)
    return Checkpoint(text, vision, num_bytes, len(names))


def _add(weights: Weights, tensor: _Tensor, quantization: QuantizationSpec | None) -> None:
    kind, count, num_bytes = tensor.kind, tensor.num_values, tensor.num_bytes
    module, _, what = tensor.name.rpartition(".")
    if any(word in what for word in _BESIDE_WEIGHTS):
        weights.fixed_bytes += num_bytes
        return
    group = None if quantization is None else quantization.of(module)
    if group is not None and kind in _PACKED:
        kind, count = group.format.upper(), num_bytes * 8 // group.bits
    weights.parameters += count
    weights.stored[kind] = weights.stored.get(kind, 0) + count
    if kind in _FLOATS:
        weights.floats += count
    else:
        weights.fixed_bytes += num_bytes


def _files(directory: Path) -> list[str]:
    """The weight files, in the order in which the loader looks for them."""
    if (directory / _WHOLE).is_file():
        return [_WHOLE]
    index = directory / _INDEX
    if not index.is_file():
        foreign = [path.name for kind in _FOREIGN for path in sorted(directory.glob(kind))]
        have = f"; {foreign[0]} is of a kind that is not read" if foreign else ""
        raise StackError(
            f"no weights at {directory}: it has no {_WHOLE} and no {_INDEX}{have}; "
            "--load-format dummy serves random ones",
            2,
        )
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
    ) as error:  # fmt: skip
        raise StackError(f"{index} is no index of weights: {error}", 2) from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StackError(
            f"weights are missing at {directory}: {missing[0]}{more} of {len(names)} files; "
            "the download did not end",
            2,
        )
    return names


def _head(path: Path) -> list[_Tensor]:
    """A file's tensors; checks that the file holds their bytes."""
    try:
        with path.open("rb") as file:
            first = file.read(8)
            if first == b"version ":
                raise StackError(f"{path} is a pointer of Git LFS: run `git lfs pull` there", 2)
            (length,) = struct.unpack("<Q", first)
            if length > _MAX_HEAD_BYTES:
                raise ValueError("its head has no sensible length")
            tensors = json.loads(file.read(length))
        tensors.pop("__metadata__", None)
        found: list[_Tensor] = []
        need = 8 + length
        for name, entry in tensors.items():
            start, end = entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (start, end, *entry["shape"])):
                raise ValueError(f"{name} has a size that is no whole number")
            num_values, num_bytes = prod(entry["shape"]), end - start
            if num_values > 8 * num_bytes:
                raise ValueError(f"{name} has fewer bytes than its shape takes")
            found.append(_Tensor(name, str(entry["dtype"]), num_values, num_bytes))
            need = max(need, 8 + length + end)
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error,
    ) as error:  # fmt: skip
        raise StackError(f"{path} is not a safetensors file: {error}", 2) from error
    if (have := path.stat().st_size) < need:
        raise StackError(
            f"{path} is cut short: {have:,} of {need:,} bytes; the download did not end", 2
        )
    return found
