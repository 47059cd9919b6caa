"""Finds the tensor in a file that a client has sent, `.npy` or safetensors, by its header alone.

`embeds` reads the files of `image_embeds` with it. A file that would have to be unpickled is
refused: arrays of objects are, and nothing here imports pickle or torch. The sizes that a header
claims are compared with the number of bytes in the file before any memory is allocated for them.
"""

import ast
import json
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

from services.common.errors import InvalidRequest

_NPY_MAGIC = b"\x93NUMPY"
_NPY_DTYPES = {"<f4": "float32", "<f2": "float16", "<i8": "int64", "<i4": "int32"}
_SAFETENSORS_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}
FLOATS = frozenset(("float32", "float16", "bfloat16"))
INTEGERS = frozenset(("int64", "int32"))
# NumPy pads a header to 64 bytes, safetensors to 8. Metadata counts as part of the header.
MAX_HEADER_BYTES = 4096
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 1 << 63  # bounds the numbers that error messages show


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A dense tensor in a file, row-major, little-endian.

    Attributes:
        dtype: `float32`, `float16`, `bfloat16`, `int64` or `int32`.
        shape: sizes of the dimensions.
        offset: offset of the first byte. The tensor ends with the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


def find_tensor(data: bytes, dtypes: Set[str] = FLOATS) -> TensorPlace:
    """Returns the place of a file's only tensor.

    Args:
        data: the file.
        dtypes: data types that the tensor may have.

    Raises:
        InvalidRequest: the file has neither format, does not contain exactly one dense tensor of
            such a dtype, or has more or fewer bytes than its header says.
    """
    place = _in_npy(data) if data.startswith(_NPY_MAGIC) else _in_safetensors(data)
    if place.dtype not in dtypes:
        raise InvalidRequest(
            f"a tensor of {place.dtype} is not supported; supported: {', '.join(sorted(dtypes))}"
        )
    if len(place.shape) > _MAX_DIMENSIONS or min(place.shape, default=0) <= 0:
        raise InvalidRequest(f"a tensor of shape {_short(place.shape)} is not an embedding")
    wanted = math.prod(place.shape) * ITEM_BYTES[place.dtype]
    if wanted != len(data) - place.offset:
        raise InvalidRequest(
            f"a {place.dtype} tensor of shape {_short(place.shape)} has {wanted} bytes; "
            f"the file has {len(data) - place.offset}"
        )
    return place


def split_rows(data: bytes, place: TensorPlace, num_rows: Sequence[int]) -> list[bytes]:
    """Divides a file's tensor `[rows, width]` into safetensors files.

    Args:
        data: the file.
        place: place of the tensor in the file.
        num_rows: number of rows of each new file.
    """
    _, width = place.shape
    (name,) = (name for name, dtype in _SAFETENSORS_DTYPES.items() if dtype == place.dtype)
    files: list[bytes] = []
    offset = place.offset
    for rows in num_rows:
        size = rows * width * ITEM_BYTES[place.dtype]
        tensor = {"dtype": name, "shape": [rows, width], "data_offsets": [0, size]}
        header = json.dumps({"embedding": tensor}).encode()
        header += b" " * (-len(header) % 8)
        files.append(len(header).to_bytes(8, "little") + header + data[offset : offset + size])
        offset += size
    return files


def _in_npy(data: bytes) -> TensorPlace:
    """Reads an .npy header: magic, version, length, and a literal of a dictionary. See
    numpy.lib.format.
    """
    version = data[6:7]
    size = 2 if version == b"\1" else 4
    if version not in (b"\1", b"\2", b"\3") or len(data) < 8 + size:
        raise InvalidRequest("the header of the .npy file cannot be read")
    length = int.from_bytes(data[8 : 8 + size], "little")
    offset = 8 + size + length
    if length > MAX_HEADER_BYTES or offset > len(data):
        raise InvalidRequest("the header of the .npy file cannot be read")
    try:
        found = ast.literal_eval(data[8 + size : offset].decode("utf-8").strip())
        descr, is_fortran, shape = str(found["descr"]), found["fortran_order"], found["shape"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise InvalidRequest("the header of the .npy file cannot be read") from None
    dtype = _NPY_DTYPES.get(descr)
    if dtype is None:
        raise InvalidRequest(
            f"an .npy file of {descr[:40]!r} is not supported: use '<f4' or '<f2', or a "
            "safetensors file for bfloat16"
        )
    if is_fortran is not False:
        raise InvalidRequest("the .npy file is not in C order")
    return TensorPlace(dtype, _shape(shape), offset)


def _in_safetensors(data: bytes) -> TensorPlace:
    """Reads a safetensors header: 8 bytes with the length of a JSON object, and the JSON object
    with dtype, shape and place of each tensor.
    """
    length = int.from_bytes(data[:8], "little")
    offset = 8 + length
    if len(data) < 10 or length > MAX_HEADER_BYTES or offset > len(data) or data[8:9] != b"{":
        raise InvalidRequest("the file is neither .npy nor safetensors")
    try:
        found: Any = json.loads(data[8:offset], object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise InvalidRequest("the header of the safetensors file cannot be read") from None
    tensors = [value for name, value in found.items() if name != "__metadata__"]
    if len(tensors) != 1 or not isinstance(tensors[0], dict):
        raise InvalidRequest(f"the safetensors file has {len(tensors)} tensors instead of one")
    tensor = cast(dict[str, Any], tensors[0])
    name = tensor.get("dtype")
    dtype = _SAFETENSORS_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise InvalidRequest(
            f"a safetensors file of {str(name)[:40]!r} is not supported: use F32, F16 or BF16"
        )
    if tensor.get("data_offsets") != [0, len(data) - offset]:
        raise InvalidRequest(
            "the data_offsets of the safetensors file do not match its number of bytes"
        )
    return TensorPlace(dtype, _shape(tensor.get("shape")), offset)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest("the tensor's shape is not a list of numbers")
    items = cast(list[object] | tuple[object, ...], value)
    if not all(type(item) is int and abs(item) < _MAX_DIMENSION for item in items):
        raise InvalidRequest("the tensor's shape is not a list of numbers")
    return tuple(cast(tuple[int, ...], items))


def _short(shape: tuple[int, ...]) -> str:
    return str(list(shape))[:60]
