"""Names of a checkpoint's tensors, from the headers of its safetensors files."""

import json
from collections.abc import Iterator
from pathlib import Path

from services.common.model_spec import CheckpointSpec

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own bound


def text_prefix(directory: Path, names: CheckpointSpec) -> str:
    """The prefix of a text model's tensors: that of `names`, or that of the vision-language model
    it was cut out of, if the files hold no other.
    """
    cut_out = "model.language_model."
    if names.text_prefix != "model.":
        return names.text_prefix
    found = [name for name in _names(directory) if name.startswith("model.")]
    text = [name for name in found if not name.startswith("model.visual.")]
    return cut_out if text and all(name.startswith(cut_out) for name in text) else names.text_prefix


def _names(directory: Path) -> Iterator[str]:
    """Of all files; one that cannot be read is left to the loader's complaint."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else {}
        except (OSError, ValueError):
            continue
        yield from header
