"""Reads the task of a checkpoint: generating text, or the vectors and scores of search.

The architectures `ColQwen3` and `ColQwen3_5` have one task, a vector of each token (`token_embed`).

The files of sentence-transformers say what a checkpoint is for. `modules.json` lists the modules
behind the language model: a pooling (`1_Pooling/config.json`) makes vectors, and a `LogitScore`
makes scores. Qwen's own rerankers have no such file; the front matter of their model card
(README.md) has `pipeline_tag: text-ranking`. Where the files say nothing, `--task` decides.

Any other architecture alone says nothing, because Qwen's models for search are checkpoints of
`Qwen3ForCausalLM` or `Qwen3VLForConditionalGeneration`, as its chat models are. A module or a
pooling that is not implemented is refused by its name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from services.common.model_spec import (
    ModelSpec,
    ModelSpecError,
    SearchSpec,
    UnsupportedOption,
    VisionSpec,
    read_json,
    read_json_list,
)

_MODULES, _SENTENCE = "modules.json", "config_sentence_transformers.json"
_POOLING = "1_Pooling/config.json"
# Architectures whose models for search have a prompt template here. Those of other families, such
# as the bidirectional models on Qwen2, compute their hidden states in other ways.
_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration", "Qwen3Model")
# The language model without a head, as sentence-transformers saves it.
_HEADLESS = ("Qwen3Model",)
# Least and most pixels of an image, and frames of a clip, in the reference code of the model cards
# of Qwen3-VL-Embedding and Qwen3-VL-Reranker. The processors' files are those of the chat models.
_PIXELS = {"embed": (4 * 32 * 32, 1800 * 32 * 32), "rank": (4 * 32 * 32, 1280 * 32 * 32)}
_FRAMES_PER_SECOND, _MAX_FRAMES = 1.0, 64
# The vectors of the 8,192 tokens that a step may have take 16 MiB, of the 32 MiB that a decoder
# keeps for a gateway. Longer vectors would fill them before the gateway can read.
_MAX_LATE_DIMENSIONS = 512


@dataclass(frozen=True, slots=True)
class _LateInteraction:
    """Facts about an architecture whose models make a vector of each token, and have no other task.

    Attributes:
        max_image_tokens: most tokens of an image, by the code or the card of the models.
        keys: keys of config.json for the length of a vector. The first one that is given counts.
        dimensions: length of a vector if config.json has none of the keys.
        projection: prefix of the tensors of the layer that makes the vectors.
    """

    max_image_tokens: int
    keys: tuple[str, ...]
    dimensions: int
    projection: str


_LATE = {
    "ColQwen3": _LateInteraction(1280, ("embed_dim",), 320, "embedding_proj_layer."),
    "ColQwen3_5": _LateInteraction(1792, ("dim", "embed_dim"), 128, "custom_text_proj."),
}
_CARD_TAG = re.compile(r"\A---\s*\n(?:(?!---).*\n)*?pipeline_tag:\s*text-ranking\s*\n")
_CARD_BYTES = 16 << 10
_FOUND = Literal["", "embed", "rank"]


def with_task(spec: ModelSpec, config: Mapping[str, Any], wanted: str) -> ModelSpec:
    """Returns the spec with the task of the checkpoint.

    Args:
        spec: spec of the checkpoint, as its family has read it.
        config: parsed config.json.
        wanted: task that the user has named: `generate`, `embed` or `rank`. Empty or `auto` if the
            files decide.

    Raises:
        UnsupportedOption: the files ask for something that is not implemented, or name another task
            than the user.
    """
    directory = spec.directory
    if spec.architecture in _LATE:
        return _with_vectors_of_tokens(spec, config, wanted)
    stated, score = _task_of_modules(directory)
    wanted = "" if wanted == "auto" else wanted
    if stated and wanted and stated != wanted:
        raise UnsupportedOption(
            f"the task {wanted!r} is not supported for a checkpoint whose modules are for the task "
            f"{stated!r}",
            _MODULES,
        )
    task = stated or wanted or ("rank" if _is_reranker_card(directory) else "generate")
    if task == "generate":
        if spec.architecture in _HEADLESS:
            raise UnsupportedOption(
                f"{spec.architecture} has no head and generates no text; for its vectors, name the "
                "task embed (--task)"
            )
        return spec
    if spec.architecture not in _ARCHITECTURES or (
        task == "rank" and spec.architecture in _HEADLESS
    ):
        served = ", ".join(_ARCHITECTURES)
        raise UnsupportedOption(
            f"the task {task!r} is not supported for {spec.architecture}; supported: {served}"
        )
    _check_causal(config)
    if spec.vision is not None:
        spec = replace(spec, vision=_as_on_the_card(spec.vision, task))
    search = SearchSpec(
        task=cast("Literal['embed', 'rank']", task), default_prompt=_default_prompt(directory)
    )
    if task == "rank":
        yes, no = score or _answer_tokens(directory)
        return replace(spec, search=replace(search, true_token_id=yes, false_token_id=no))
    # A vector is the hidden state before the head, so files with a head are read without it.
    names = spec.checkpoint
    names = replace(names, ignored=(*names.ignored, r"lm_head\."))
    return replace(spec, search=search, checkpoint=names)


def _check_causal(config: Mapping[str, Any]) -> None:
    for section in (config, config.get("text_config") or {}):
        for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
            if section.get(name) not in (None, causal):
                raise UnsupportedOption(f"{name} {section[name]!r} is not supported")


def _with_vectors_of_tokens(spec: ModelSpec, config: Mapping[str, Any], wanted: str) -> ModelSpec:
    """Returns the spec of a model for late interaction. Clips are not served."""
    if wanted not in ("", "auto"):
        raise UnsupportedOption(
            f"the task {wanted!r} is not supported for {spec.architecture}, whose task is "
            "token_embed"
        )
    _check_causal(config)
    late = _LATE[spec.architecture]
    key = next((name for name in late.keys if name in config), late.keys[0])
    dimensions = config.get(key, late.dimensions)
    most = min(_MAX_LATE_DIMENSIONS, spec.text.hidden_size)
    if not isinstance(dimensions, int) or not 0 < dimensions <= most:
        raise UnsupportedOption(f"{key} {dimensions!r} is not supported, but 1 to {most}")
    assert spec.vision is not None
    # A token of the tower is a square of 32 pixels.
    geometry = replace(spec.vision.geometry, max_pixels=late.max_image_tokens * 32 * 32)
    return replace(
        spec,
        vision=replace(spec.vision, geometry=geometry, video=None),
        search=SearchSpec(task="token_embed", dimensions=dimensions, projection=late.projection),
    )


def _as_on_the_card(vision: VisionSpec, task: str) -> VisionSpec:
    """Returns the vision part with the limits of the model cards."""
    low, high = _PIXELS[task]
    geometry, video = replace(vision.geometry, min_pixels=low, max_pixels=high), vision.video
    if video is not None:
        video = replace(video, fps=_FRAMES_PER_SECOND, num_frames=None, max_frames=_MAX_FRAMES)
    return replace(vision, geometry=geometry, video=video)


def _task_of_modules(directory: Path) -> tuple[_FOUND, tuple[int, int] | None]:
    """Returns the task that the files of sentence-transformers state, and the tokens of a
    `LogitScore`. The task is empty if there are no such files.
    """
    if not (directory / _MODULES).exists():
        if not (directory / _POOLING).exists():
            return "", None
        _check_pooling(directory, _POOLING)
        return "embed", None
    modules = read_json_list(directory / _MODULES)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    paths = {kind: str(module.get("path", "")) for kind, module in zip(kinds, modules, strict=True)}
    known = {"Transformer", "Pooling", "Normalize", "LogitScore"}
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UnsupportedOption(
            f"the module {unknown[0] or '(without a type)'} is not supported; supported: "
            f"{', '.join(sorted(known))}",
            _MODULES,
        )
    if "LogitScore" in kinds:
        if "Pooling" in kinds:
            raise UnsupportedOption("Pooling beside LogitScore is not supported", _MODULES)
        return "rank", _score_tokens(directory, f"{paths['LogitScore']}/config.json")
    if "Pooling" not in kinds:
        raise UnsupportedOption("modules without Pooling or LogitScore are not served", _MODULES)
    _check_pooling(directory, f"{paths['Pooling']}/config.json")
    if "Normalize" not in kinds:
        _check_similarity(directory)
    return "embed", None


def _check_pooling(directory: Path, file: str) -> None:
    """Raises UnsupportedOption unless the vector is the last token's hidden state."""
    config = read_json(directory / file)
    modes: list[str] = [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value
    ]
    if named := config.get("pooling_mode"):  # newer files have the mode's name
        modes += [named] if isinstance(named, str) else named
    if modes != ["lasttoken"]:
        raise UnsupportedOption(
            f"pooling {' and '.join(map(str, modes)) or '(none)'} is not supported; supported: "
            "lasttoken",
            file,
        )


def _check_similarity(directory: Path) -> None:
    """Raises UnsupportedOption if the lengths of vectors matter, because vectors are normalized."""
    path = directory / _SENTENCE
    similarity = read_json(path).get("similarity_fn_name") if path.exists() else None
    if similarity not in (None, "cosine"):
        raise UnsupportedOption(
            f"similarity_fn_name {similarity!r} of vectors without Normalize is not supported; "
            "vectors are normalized, which changes this similarity",
            _SENTENCE,
        )


def _score_tokens(directory: Path, file: str) -> tuple[int, int]:
    config = read_json(directory / file)
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int):
        raise UnsupportedOption(
            f"a score of true_token_id {yes} and false_token_id {no} is not supported; supported: "
            "the difference of two tokens' logits",
            file,
        )
    return yes, no


def _answer_tokens(directory: Path) -> tuple[int, int]:
    """Returns the ids of the tokens "yes" and "no", which Qwen's rerankers answer with."""
    vocab: dict[str, int] = (read_json(directory / "tokenizer.json").get("model") or {}).get(
        "vocab"
    ) or {}
    if not {"yes", "no"} <= vocab.keys():
        raise ModelSpecError(
            f'{directory}/tokenizer.json: a reranker needs the tokens "yes" and "no"'
        )
    return vocab["yes"], vocab["no"]


def _default_prompt(directory: Path) -> str:
    path = directory / _SENTENCE
    config = read_json(path) if path.exists() else {}
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts: dict[str, str] = config.get("prompts") or {}
    if not isinstance(prompts.get(name), str):
        raise UnsupportedOption(f"default_prompt_name {name!r} is not among the prompts", _SENTENCE)
    return prompts[name]


def _is_reranker_card(directory: Path) -> bool:
    """Returns whether the model card's front matter says that the model ranks texts."""
    try:
        with (directory / "README.md").open("rb") as file:
            card = file.read(_CARD_BYTES)
    except OSError:
        return False
    return _CARD_TAG.match(card.decode(errors="replace").replace("\r\n", "\n")) is not None
