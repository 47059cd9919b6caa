"""Files with a tensor that clients bring: what is read of them, and what is refused unread."""

import io
import json
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from services.common.embeddings.tensor_file import ITEM_BYTES, find_tensor
from services.common.errors import InvalidRequest


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npy_of(header: str, data: bytes = b"", version: int = 1) -> bytes:
    text = header.encode()
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + length + text + data


def tensors_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_reads_what_numpy_writes(dtype: str):
    array = np.random.default_rng(0).normal(size=(5, 7)).astype(dtype)
    data = npy(array)
    place = find_tensor(data)
    assert (place.dtype, place.shape) == (dtype, (5, 7))
    np.testing.assert_array_equal(
        np.frombuffer(data, dtype, offset=place.offset).reshape(5, 7), array
    )


@pytest.mark.parametrize("version", [2, 3])
def test_reads_each_version_of_npy(version: int):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n"
    assert find_tensor(npy_of(header, bytes(8), version)).shape == (2,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_what_safetensors_writes(dtype: torch.dtype):
    tensor = torch.randn(5, 7).to(dtype)
    data = save({"any name": tensor}, metadata={"made_by": "somebody"})
    place = find_tensor(data)
    assert (place.dtype, place.shape) == (str(dtype).removeprefix("torch."), (5, 7))
    found = torch.frombuffer(bytearray(data[place.offset :]), dtype=dtype).reshape(5, 7)
    assert torch.equal(found, tensor)


FOUR_TIB = (1 << 20, 1 << 20)
REFUSED = {
    "an array of objects": npy(np.array([{}], object), allow_pickle=True),
    "a pickle": pickle.dumps([1.0]),
    "what torch.save writes": b"PK\x03\x04" + bytes(200),
    "integers": npy(np.ones((2, 2), np.int64)),
    "float64": npy(np.ones((2, 2))),
    "big-endian": npy(np.ones((2, 2), ">f4")),
    "Fortran order": npy(np.asfortranarray(np.ones((2, 3), np.float32))),
    "a record": npy(np.zeros(2, [("a", "<f4")])),
    "4 TiB in a header of .npy": npy_of(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': {FOUR_TIB}}}", bytes(1500)
    ),
    "a header of 4 GiB": b"\x93NUMPY\x02\x00" + b"\xff" * 4 + bytes(64),
    "a header that calls": npy_of("__import__('os').system('true')"),
    "a header of brackets": npy_of("(" * 4000),
    "a negative dimension": npy_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -1)}", bytes(4)
    ),
    "no dimension": npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", bytes(4)),
    "True as a dimension": npy_of(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 1)}", bytes(4)
    ),
    "a dimension of 4,700 digits": npy_of(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0x{'f' * 3900},)}}", bytes(4)
    ),
    "dimensions of 4,000 digits": tensors_of(
        {"a": {"dtype": "F32", "shape": [10**1000] * 4, "data_offsets": [0, 4]}}, bytes(4)
    ),
    "a dtype of 4,700 digits": npy_of(
        f"{{'descr': [0x{'f' * 3900}], 'fortran_order': False, 'shape': (1,)}}", bytes(4)
    ),
    "a truncated file": npy(np.ones((4, 4), np.float32))[:-1],
    "a byte too many": npy(np.ones((4, 4), np.float32)) + b"\0",
    "two tensors": save({"a": torch.ones(2), "b": torch.ones(2)}),
    "no tensor": tensors_of({}),
    "integers of safetensors": save({"a": torch.ones(2, dtype=torch.int64)}),
    "FP8": save({"a": torch.ones(2).to(torch.float8_e4m3fn)}),
    "4 TiB in a header of safetensors": tensors_of(
        {"a": {"dtype": "F32", "shape": FOUR_TIB, "data_offsets": [0, 1500]}}, bytes(1500)
    ),
    "offsets beyond the file": tensors_of(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)
    ),
    "offsets that leave bytes out": tensors_of(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(12)
    ),
    "a sparse tensor's parts": save({"indices": torch.ones(2, 2), "values": torch.ones(2)}),
    "a name twice": tensors_of(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', bytes(4)
    ),
    "a shape that is text": tensors_of(
        {"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, bytes(8)
    ),
    "a header of lists": tensors_of(b"{" + b'"a":' + b"[" * 4000, b""),
    "a header of 2^63 bytes": b"\xff" * 7 + b"\x7f" + b"{}" + bytes(64),
    "nothing": b"",
    "the magic alone": b"\x93NUMPY",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_refuses_before_memory_is_taken(data: bytes):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as refused:
            find_tensor(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert 0 < len(refused.value.message) < 300


WHOLE = (npy(np.ones((2, 3), np.float32)), save({"a": torch.ones(2, 3)}))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WHOLE), st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_read_as_it_is_or_refused(data: bytes, at: int, damage: bytes):
    damaged = data[:at] + damage + data[at + len(damage) :]
    try:
        place = find_tensor(damaged)
    except InvalidRequest:
        return
    size = ITEM_BYTES[place.dtype] * int(np.prod(place.shape))
    assert place.offset + size == len(damaged)
