"""A checkpoint's safetensors files, read by name without mapping them into memory.

Bytes go from the file straight into the memory they are meant for: mapped pages would count twice.
`weights` reads through it; what a tensor means is not known here. A malformed file is a
`CheckpointError`.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 << 20
_READ_BYTES = 1 << 30  # per system call; Linux caps one at 2 GiB
_HASH_BYTES = 16 << 20


class CheckpointError(ValueError):
    """The files are not a checkpoint of this model; the message names what is wrong."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    size_bytes: int


class Checkpoint:
    """The tensors of a model directory, by name.

    Attributes:
        directory: where the files lie.
        tensors: name → place, in name order.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.directory = directory
        self.tensors = dict(sorted(tensors.items()))

    @classmethod
    def open(cls, directory: Path | str) -> "Checkpoint":
        """Reads the headers of `model.safetensors`, or of the files its index names.

        Raises:
            CheckpointError: a file is missing or malformed.
        """
        directory = Path(directory)
        index_path = directory / "model.safetensors.index.json"
        if not index_path.exists():
            return cls(directory, _read_header(directory / "model.safetensors"))
        try:
            index: dict[str, str] = json.loads(index_path.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{index_path} is not a safetensors index: {error!r}") from None
        tensors: dict[str, TensorInfo] = {}
        for name in sorted(set(index.values())):
            if Path(name).name != name:
                raise CheckpointError(f"{index_path}: {name!r} is not a file name")
            tensors |= _read_header(directory / name)
        if absent := sorted(set(index) - set(tensors)):
            raise CheckpointError(f"{index_path} names tensors no file has: {listed(absent)}")
        return cls(directory, tensors)

    @contextmanager
    def reader(self) -> Iterator["Reader"]:
        """Opens the files for reading, once each."""
        reader = Reader(self)
        try:
            yield reader
        finally:
            reader.close()


class Reader:
    """Open files of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, int] = {}

    def read_into(self, name: str, target: memoryview, skip_bytes: int = 0) -> None:
        """Fills `target` with the tensor's bytes, from `skip_bytes` on.

        Raises:
            CheckpointError: the file ends early.
        """
        info = self._checkpoint.tensors[name]
        file = self._files.get(info.path)
        if file is None:
            file = self._files[info.path] = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
        offset, done = info.offset + skip_bytes, 0
        while done < len(target):
            count = os.preadv(file, [target[done : done + _READ_BYTES]], offset + done)
            if count == 0:
                raise CheckpointError(f"{info.path} ends within tensor {name}")
            done += count

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def fingerprint(checkpoint: Checkpoint, prefix: str = "") -> str:
    """BLAKE3 (hex) over name, dtype, shape and bytes of each tensor whose name has the prefix."""
    hasher = blake3(max_threads=blake3.AUTO)
    buffer = memoryview(bytearray(_HASH_BYTES))
    with checkpoint.reader() as reader:
        for name, info in checkpoint.tensors.items():
            if not name.startswith(prefix):
                continue
            head = json.dumps([name, str(info.dtype), info.shape, info.size_bytes]).encode()
            hasher.update(struct.pack("<Q", len(head)) + head)
            for done in range(0, info.size_bytes, _HASH_BYTES):
                piece = buffer[: min(_HASH_BYTES, info.size_bytes - done)]
                reader.read_into(name, piece, done)
                hasher.update(piece)
    return hasher.hexdigest()


def listed(names: list[str], limit: int = 20) -> str:
    """Names for an error message, capped."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
            file_bytes = os.fstat(file.fileno()).st_size
        header.pop("__metadata__", None)
        tensors = {
            name: _tensor_info(path, entry, 8 + length, file_bytes)
            for name, entry in header.items()
        }
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError,
            AttributeError) as error:  # fmt: skip
        raise CheckpointError(f"{path} is not a safetensors file: {error!r}") from None
    return tensors


def _tensor_info(path: Path, entry: Mapping, base: int, file_bytes: int) -> TensorInfo:
    start, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if end - start != math.prod(shape) * dtype.itemsize or start < 0:
        raise CheckpointError(f"{path}: a tensor's size does not match its shape {shape}")
    if base + end > file_bytes:
        raise CheckpointError(f"{path} is truncated")
    return TensorInfo(path, dtype, shape, base + start, end - start)
