"""Fingerprints of model directories, which are equal for equal checkpoints in all services.

A gateway combines decoders and encoders of the same fingerprint only, so that an answer never mixes
the weights of two models. This file imports no torch, because a gateway has none.
"""

import json
import os
import struct
from pathlib import Path

from blake3 import blake3

# Number of bytes that are read at the beginning, the middle and the end of each tensor. Training
# changes nearly all of a tensor, and reading a whole checkpoint would take as long as loading it.
_SAMPLE_BYTES = 1024
_MAX_HEADER_BYTES = 100 << 20


def checkpoint_fingerprint(directory: Path) -> bytes:
    """Returns a digest of config.json, of the names, types and shapes of all tensors, and of
    samples of their bytes.

    Returns:
        32 bytes, or no bytes if the directory has no weights or the weights cannot be read.
    """
    hasher = blake3(b"triptych/checkpoint/v1")
    try:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            return b""
        config = json.loads((directory / "config.json").read_text())
        hasher.update(json.dumps(config, sort_keys=True).encode())
        for file in files:
            _add_file(hasher, file)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        struct.error,
        OverflowError,
        RecursionError,
    ):
        return b""  # the weight loader reports the error
    return hasher.digest()


def _add_file(hasher: blake3, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        if length > _MAX_HEADER_BYTES:
            raise ValueError("not a safetensors file")
        header = os.pread(descriptor, length, 8)
        hasher.update(struct.pack("<Q", length) + header)
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for entry in tensors.values():
            start, end = entry["data_offsets"]
            last = max(start, end - _SAMPLE_BYTES)
            for offset in (start, (start + last) // 2, last):
                size = min(_SAMPLE_BYTES, end - offset)
                hasher.update(os.pread(descriptor, size, 8 + length + offset))
    finally:
        os.close(descriptor)
