"""Equal checkpoints have equal fingerprints; any training shows."""

import json
import shutil

import torch
from safetensors.torch import save_file

from services.common.checkpoint_fingerprint import checkpoint_fingerprint


def write(directory, scale: float = 1.0, **config: object):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer.{i}": torch.randn(64, 80, generator=generator) for i in range(4)}
    tensors["layer.2"] = tensors["layer.2"] * scale
    save_file({**tensors, "empty": torch.zeros(0)}, directory / "model.safetensors")
    return directory


def test_copies_are_equal_and_others_differ(tmp_path):
    first = checkpoint_fingerprint(write(tmp_path / "a"))
    assert len(first) == 32
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert checkpoint_fingerprint(tmp_path / "copy") == first
    assert checkpoint_fingerprint(write(tmp_path / "trained", scale=1.001)) != first
    assert checkpoint_fingerprint(write(tmp_path / "config", rope_theta=2)) != first


def test_without_weights_it_is_not_known(tmp_path):
    directory = write(tmp_path / "a")
    (directory / "model.safetensors").write_bytes(b"not a file of tensors")
    assert checkpoint_fingerprint(directory) == b""
    (directory / "model.safetensors").unlink()
    assert checkpoint_fingerprint(directory) == b""
