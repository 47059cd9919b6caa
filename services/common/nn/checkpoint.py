"""Reads tensors and slices of a checkpoint's safetensors files by name.

The `safetensors` package maps a file into memory and checks its header. A tensor that is read is a
view of the mapped file, whose pages the operating system can drop. This module does not know the
meaning of a tensor. A malformed file raises `CheckpointError` with the file's name.
"""

import json
import logging
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.common.model_spec import INDEX, WHOLE, weight_files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HASH_BYTES = 16 << 20

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """The files are not a valid checkpoint of the model. The message names the cause."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header entry of a tensor.

    Attributes:
        path: file that holds the tensor.
        dtype: data type. A string, as in the header, if it is not in `DTYPES`.
        shape: shape of the whole tensor.
    """

    path: Path
    dtype: torch.dtype | str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a checkpoint directory.

    Attributes:
        directory: directory of the files.
        tensors: header entries by tensor name, sorted by name.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.directory = directory
        self.tensors = dict(sorted(tensors.items()))

    @classmethod
    def open(cls, directory: Path | str) -> "Checkpoint":
        """Reads the headers of the weight files. Logs a warning about files that are not used.

        Raises:
            ModelSpecError: a file is missing.
            CheckpointError: a file is malformed.
        """
        directory = Path(directory)
        names, tensors = weight_files(directory), dict[str, TensorInfo]()
        for path in (directory / name for name in names):
            file = _opened(path)
            for name in file.keys():  # noqa: SIM118 - `safe_open` does not return a mapping
                header = file.get_slice(name)
                kind: str = header.get_dtype()
                tensors[name] = TensorInfo(path, DTYPES.get(kind, kind), tuple(header.get_shape()))
        unused = {path.name for path in directory.glob("*.safetensors")} - set(names)
        if names == [WHOLE] and (directory / INDEX).exists():
            unused.add(INDEX)
        if unused:
            log.warning(
                "%s: weights are read from %s; not used: %s",
                directory,
                listed(names),
                listed(sorted(unused)),
            )
        return cls(directory, tensors)

    def reader(self) -> "closing[Reader]":
        """Returns a context manager whose value is a `Reader` of these files."""
        return closing(Reader(self))


class Reader:
    """Reads tensors, with one file open at a time. Reading file by file is the fastest order."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._path: Path | None = None
        self._file: Any = None

    def read(self, name: str, cut: tuple[int | slice, ...] = ()) -> Tensor:
        """Reads a tensor, or a part of it, as a view of the mapped file. Do not write to the view.

        Args:
            name: name of the tensor.
            cut: index of the part. Empty for the whole tensor.

        Raises:
            CheckpointError: the file has changed since its header was read.
        """
        path = self._checkpoint.tensors[name].path
        if path != self._path:
            self.close()
            self._file, self._path = _opened(path), path
        try:
            return self._file.get_slice(name)[cut] if cut else self._file.get_tensor(name)
        except (SafetensorError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from None

    def close(self) -> None:
        """Closes the file. It is unmapped when its last view is freed."""
        self._file = self._path = None


def fingerprint(checkpoint: Checkpoint, prefixes: str | tuple[str, ...] = "") -> str:
    """BLAKE3 hex digest over name, dtype, shape and bytes of each tensor whose name has one of the
    prefixes.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    with checkpoint.reader() as reader:
        for name, info in checkpoint.tensors.items():
            if not name.startswith(prefixes):
                continue
            values = reader.read(name).reshape(-1).view(torch.uint8)
            head = json.dumps([name, str(info.dtype), info.shape, values.numel()]).encode()
            hasher.update(struct.pack("<Q", len(head)) + head)
            for piece in values.split(_HASH_BYTES):
                hasher.update(piece.numpy().data)
    return hasher.hexdigest()


def listed(names: list[str], limit: int = 20) -> str:
    """Joins names for an error message. Only the first `limit` names are listed."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _opened(path: Path) -> Any:  # noqa: ANN401 - the package does not export the type
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
