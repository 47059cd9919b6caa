"""Model families by their architecture in config.json. A family: one file and one line here."""

import importlib
from pathlib import Path

from services.common.model_spec import ModelSpec, ModelSpecError, read_json

FAMILIES = {
    "Qwen3VLForConditionalGeneration": "services.common.families.qwen3_vl",
}


def read_spec(directory: Path | str) -> ModelSpec:
    """Reads the JSON files of a checkpoint directory.

    Raises:
        ModelSpecError: a file is missing or malformed, or the model is not served; says why.
    """
    directory = Path(directory).resolve()
    config = read_json(directory / "config.json")
    architecture = (config.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        raise ModelSpecError(
            f"{directory}: architecture {architecture} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    family = importlib.import_module(FAMILIES[architecture])
    try:
        return family.read(directory, config)
    except KeyError as error:
        raise ModelSpecError(f"{directory}: the config lacks {error}") from None
