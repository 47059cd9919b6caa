"""The model families, and the function that reads a checkpoint's configuration.

config.json names a model's architecture, such as `Qwen3ForCausalLM`. Each architecture has a line
in `FAMILIES`, and each family of similar architectures has a file in this package. The function
`read` in the file converts a checkpoint's configuration into a `ModelSpec`. All three services and
the command line call `read_spec`, which reads JSON files and never weights.
"""

import importlib
import os
from pathlib import Path

from services.common.families.task import with_task
from services.common.model_spec import ModelSpec, ModelSpecError, UnsupportedOption, read_json

FAMILIES = {
    "ColQwen3": "services.common.families.colqwen3",
    "ColQwen3_5": "services.common.families.colqwen3_5",
    "LlamaForCausalLM": "services.common.families.llama",
    "MistralForCausalLM": "services.common.families.mistral",
    "PaddleOCRVLForConditionalGeneration": "services.common.families.paddleocr_vl",
    "Qwen2ForCausalLM": "services.common.families.qwen2",
    "Qwen2VLForConditionalGeneration": "services.common.families.qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "services.common.families.qwen2_5_vl",
    "Qwen3ForCausalLM": "services.common.families.qwen3",
    "Qwen3Model": "services.common.families.qwen3",
    "Qwen3MoeForCausalLM": "services.common.families.qwen3_moe",
    "Qwen3_5ForCausalLM": "services.common.families.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "services.common.families.qwen3_5",
    "Qwen3_5MoeForCausalLM": "services.common.families.qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "services.common.families.qwen3_5",
    "Qwen3VLForConditionalGeneration": "services.common.families.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "services.common.families.qwen3_vl_moe",
}


def read_spec(directory: Path | str, task: str = "") -> ModelSpec:
    """Reads the JSON files of a checkpoint directory into a `ModelSpec`.

    Args:
        task: task that the user has named, see `with_task`. Empty if the files decide.

    Raises:
        UnsupportedOption: the model needs an option that is not implemented. The message names the
            option and its file.
        ModelSpecError: a file is missing or malformed, or the architecture is not supported.
    """
    directory = Path(directory).resolve()
    # `os.path.exists` returns False if a parent directory cannot be read. `Path.exists` would raise
    # a PermissionError, which this function does not promise.
    if not os.path.exists(directory / "config.json"):
        is_adapter = os.path.exists(directory / "adapter_config.json")
        adapter = "is an adapter: serve its model with --merge-adapter"
        why = adapter if is_adapter else "has no config.json"
        raise ModelSpecError(f"no model at {directory}: it {why}")
    config = read_json(directory / "config.json")
    named = config.get("architectures") or ["(none)"]
    architecture = named[0] if isinstance(named, list) else named
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ModelSpecError(
            f"{directory}: architecture {architecture} is not supported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    # `architectures` may be a string in the file. The families always get a list with one name.
    config["architectures"] = [architecture]
    family = importlib.import_module(FAMILIES[architecture])
    try:
        return with_task(family.read(directory, config), config, task)
    except UnsupportedOption as error:
        raise UnsupportedOption(f"{directory}/{error.file}: {error}", error.file) from None
    except ModelSpecError:
        raise
    except KeyError as error:
        raise ModelSpecError(f"{directory}: the config lacks {error}") from None
    except (AttributeError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelSpecError(f"{directory}: the config is malformed: {error}") from None
