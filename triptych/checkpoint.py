"""Computes the size of a checkpoint's weights from the headers of its safetensors files.

`checks` and `fit` need it before a process is started. Files that a loader would refuse minutes
later (no weights, a missing or truncated file) raise `StackError` here.
"""

import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from services.common.model_spec import ModelSpec, ModelSpecError, QuantizationSpec, weight_files
from triptych.stack import StackError

_FLOATS = {"F64", "F32", "F16", "BF16"}
_PACKED = {"I32", "U8"}  # data types of words that hold several weights
# Parts of the names of tensors that quantization formats store beside the weights.
_BESIDE_WEIGHTS = ("scale", "zero", "g_idx", "weight_shape")


@dataclass(slots=True)
class Weights:
    """The weights of a part of a model.

    Attributes:
        floats: number of parameters that are stored as floats and are cast to the served precision.
        fixed_bytes: size of the tensors that keep their data type, such as FP8 weights.
        parameters: number of all parameters, without scales and zero points.
        stored: number of parameters by data type or quantization format in the files.
    """

    floats: int = 0
    fixed_bytes: int = 0
    parameters: int = 0
    stored: dict[str, int] = field(default_factory=dict[str, int])

    def bytes_in(self, itemsize: int) -> int:
        """Size in memory if a float has `itemsize` bytes."""
        return self.floats * itemsize + self.fixed_bytes


class _Tensor(NamedTuple):
    """A tensor of a file: name, data type, number of values and size in bytes."""

    name: str
    kind: str
    num_values: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a checkpoint.

    Attributes:
        text: weights of the language model.
        vision: weights of the vision tower.
        file_bytes: size of all weight files.
        num_files: number of weight files.
    """

    text: Weights
    vision: Weights
    file_bytes: int
    num_files: int


def read_checkpoint(spec: ModelSpec) -> Checkpoint:
    """Reads the headers of all weight files.

    Raises:
        StackError: a file is missing or truncated, or is not a safetensors file.
    """
    text, vision, num_bytes = Weights(), Weights(), 0
    try:
        names = weight_files(spec.directory)
    except ModelSpecError as error:
        raise StackError(str(error), 2) from error
    for name in names:
        path = spec.directory / name
        num_bytes += path.stat().st_size
        for tensor in _head(path):
            if spec.checkpoint.ignores(tensor.name):
                continue
            is_vision = tensor.name.startswith(spec.checkpoint.vision_prefixes)
            part = vision if is_vision else text
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


def _head(path: Path) -> list[_Tensor]:
    """Reads the tensors of a file's header. The package checks the size of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as data:
            if data.read(8) == b"version ":
                raise StackError(f"{path} is a pointer of Git LFS: run `git lfs pull` there", 2)
        with safe_open(path, framework="np") as file:
            return [_tensor(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        why = f"not a complete safetensors file (was its download interrupted?): {error}"
        raise StackError(f"{path} is {why}", 2) from error


def _tensor(name: str, found: Any) -> _Tensor:  # noqa: ANN401 - the package does not export the type
    kind, num_values = found.get_dtype(), prod(found.get_shape())
    bits = re.search(r"\d+", kind)  # None for BOOL
    return _Tensor(name, kind, num_values, num_values * int(bits[0] if bits else 8) // 8)
