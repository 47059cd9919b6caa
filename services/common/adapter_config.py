"""Reads the configuration of a LoRA adapter in PEFT's layout, and refuses what is not computed.

An adapter directory has `adapter_config.json` and `adapter_model.safetensors`. Options that change
what the adapter computes are served or refused by name, and never ignored. Options that only
training reads are not looked at. This file imports no torch, because the gateway has none.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from blake3 import blake3

from services.common.model_spec import ModelSpecError, read_json

NumberT = TypeVar("NumberT", int, float)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
PREFIX = "base_model.model."  # of the names of all tensors
TOWER = "visual."  # of the names of the vision tower's modules, without the wrappers
_WRAPPERS = re.compile(r"^(?:model\.|language_model\.)*")
_CHUNK_BYTES = 8 << 20  # enough for all threads of a hasher
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
ADAPTER_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
# Initializations that leave the base model as it is. Others, such as PiSSA, change the base weights
# when training begins, so that the adapter belongs to weights that the base checkpoint lacks.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
# Options that are refused unless they have one of these values, which mean "off".
_OFF: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "ensure_weight_tying": (False, None),
    "init_lora_weights": _PLAIN_INITS,
}
# Options that are read here, or that only training reads.
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora"),
    *("modules_to_save", "base_model_name_or_path", "task_type", "inference_mode", "revision"),
    *("peft_version", "auto_mapping", "target_modules", "exclude_modules", "target_parameters"),
    *("layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core", "megatron_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "parent_library"),
}


class AdapterError(ModelSpecError):
    """Raised if a directory is not an adapter that can be served. The message has the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The options of an adapter.

    Attributes:
        directory: directory of the adapter.
        rank: rank of modules that no pattern names.
        alpha: numerator of the scaling of modules that no pattern names.
        alpha_pattern: numerators of other modules, by regular expressions of their names.
        rank_pattern: ranks of other modules, by regular expressions of their names.
        uses_rslora: True if the scaling is alpha / sqrt(rank) instead of alpha / rank.
        uses_dora: True if the adapter has magnitudes (DoRA).
        saved_modules: names of modules whose weights the adapter replaces (`modules_to_save`).
        base_model: name of the model that the adapter was trained on. Empty if it is unknown.
    """

    directory: Path
    rank: int
    alpha: float
    alpha_pattern: Mapping[str, float]
    rank_pattern: Mapping[str, int]
    uses_rslora: bool
    uses_dora: bool
    saved_modules: tuple[str, ...]
    base_model: str = ""

    @classmethod
    def read(cls, directory: Path | str) -> "AdapterConfig":
        """Reads the configuration in an adapter's directory.

        Raises:
            AdapterError: the directory has no adapter, or the adapter needs an option that is not
                computed. The message names the option.
        """
        directory = Path(directory)
        for name in (CONFIG, WEIGHTS):
            if not (directory / name).is_file():
                raise AdapterError(f"no adapter at {directory}: it has no {name}")
        config = read_json(directory / CONFIG)
        try:
            return cls._of(directory, config)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, AdapterError):
                raise
            raise AdapterError(f"{directory}/{CONFIG} is malformed: {error}") from None

    @classmethod
    def _of(cls, directory: Path, config: Mapping[str, Any]) -> "AdapterConfig":
        where = f"{directory}/{CONFIG}"
        if (kind := config.get("peft_type")) != "LORA":
            raise AdapterError(f"{where}: peft_type {kind!r} is not supported; supported: 'LORA'")
        for name, values in _OFF.items():
            if name in config and config[name] not in values:
                raise AdapterError(
                    f"{where}: {name} {config[name]!r} is not supported; merge the adapter with "
                    "PEFT and serve the merged model"
                )
        unknown = sorted(k for k, v in config.items() if v and k not in _KNOWN and k not in _OFF)
        if unknown:
            raise AdapterError(
                f"{where}: {', '.join(unknown)} is not known, and may change answers"
            )
        found = cls(
            directory=directory,
            rank=int(config.get("r", 8)),
            alpha=float(config.get("lora_alpha", 8)),
            alpha_pattern=_patterns(config, "alpha_pattern", float),
            rank_pattern=_patterns(config, "rank_pattern", int),
            uses_rslora=bool(config.get("use_rslora")),
            uses_dora=bool(config.get("use_dora")),
            saved_modules=_names(config, "modules_to_save"),
            base_model=str(config.get("base_model_name_or_path") or ""),
        )
        for rank in (found.rank, *found.rank_pattern.values()):
            if not 1 <= rank <= MAX_RANK:
                raise AdapterError(f"{where}: rank {rank} is not supported; supported: 1 to 256")
        return found

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max(self.rank, *self.rank_pattern.values(), 1)

    def scaling(self, module: str) -> float:
        """Returns the factor of a module's low-rank product.

        Args:
            module: name of the module in the base model, as PEFT knows it.
        """
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / rank**0.5 if self.uses_rslora else alpha / rank

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module."""
        return int(_of_pattern(self.rank_pattern, module, self.rank))


def _patterns(
    config: Mapping[str, Any], name: str, kind: Callable[[Any], NumberT]
) -> dict[str, NumberT]:
    """Returns the numbers of an option by patterns, each of which is a regular expression.

    Raises:
        ValueError: a pattern is no regular expression.
    """
    found = cast("dict[str, Any]", config.get(name) or {})
    for pattern in found:
        try:
            _compiled(pattern)
        except re.error as error:
            raise ValueError(
                f"{name} has {pattern!r}, which is no regular expression: {error}"
            ) from None
    return {pattern: kind(value) for pattern, value in found.items()}


def _names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns an option that is a list of names.

    Raises:
        ValueError: the option is something else.
    """
    found: object = config.get(name) or []
    names = cast("list[object]", found) if isinstance(found, list) else [None]
    if not all(isinstance(each, str) for each in names):
        raise ValueError(f"{name} {found!r} is not a list of names")
    return tuple(cast("list[str]", names))


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Returns the expression for the end of a module's name, as PEFT's `get_pattern_key` has it."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _of_pattern(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """Returns the value of the first pattern that matches the end of a module's name. A pattern may
    also name the module's weight, which is what `target_parameters` name.
    """
    for name in (module, f"{module}.weight"):
        for pattern, value in patterns.items():
            if _compiled(pattern).match(name):
                return value
    return otherwise


def adapter_digest(directory: Path | str) -> bytes:
    """Returns a digest of 32 bytes over an adapter's configuration and weights.

    Raises:
        AdapterError: a file cannot be read.
    """
    hasher = blake3(b"triptych/adapter/v1", max_threads=blake3.AUTO)
    for name in (CONFIG, WEIGHTS):
        path = Path(directory) / name
        try:
            hasher.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:  # A mapped file that is cut meanwhile kills the process.
                while chunk := file.read(_CHUNK_BYTES):
                    hasher.update(chunk)
        except OSError as error:
            raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    return hasher.digest()


def named_digest(name: str, directory: Path) -> bytes:
    """Returns a digest of 32 bytes of an adapter's name and files, by which services call it.

    Raises:
        AdapterError: a file cannot be read.
    """
    return blake3(name.encode() + b"\0" + adapter_digest(directory)).digest()


def plain_name(name: str) -> str:
    """Returns a module's or tensor's name without the wrappers around the language model."""
    return _WRAPPERS.sub("", name)


def adapts_tower(directory: Path | str) -> bool:
    """Returns whether an adapter changes the vision tower, by the names of its tensors. False if
    the file is malformed, which the engine says when it reads the file.
    """
    try:
        with (Path(directory) / WEIGHTS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else None
    except (OSError, ValueError):
        return False
    names = cast("dict[str, object]", header if isinstance(header, dict) else {})
    return any(plain_name(name.removeprefix(PREFIX)).startswith(TOWER) for name in names)


def parse_adapters(value: str) -> dict[str, Path]:
    """Parses a comma-separated setting of adapters, `NAME=DIRECTORY,…`.

    Raises:
        ValueError: an entry is malformed, or a name occurs twice.
    """
    found: dict[str, Path] = {}
    for entry in filter(None, (part.strip() for part in value.split(","))):
        name, _, directory = entry.partition("=")
        if not ADAPTER_NAME.fullmatch(name) or not directory:
            raise ValueError(
                f"{entry!r} is not NAME=DIRECTORY, with a name of A-Z a-z 0-9 . _ / : -"
            )
        if name in found:
            raise ValueError(f"two adapters have the name {name}")
        found[name] = Path(directory)
    return found


def already_loaded(name: str) -> str:
    """Returns the error message for a name that is in use, which has vLLM's words."""
    return (
        f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )


def merged_fingerprint(fingerprint: bytes, adapter: Path | str | None) -> bytes:
    """Returns the fingerprint of a checkpoint with an adapter folded into its weights.

    Args:
        fingerprint: fingerprint of the checkpoint. An empty one stays empty.
        adapter: directory of the adapter. None if there is no adapter.
    """
    if adapter is None or not fingerprint:
        return fingerprint
    return blake3(fingerprint + adapter_digest(adapter)).digest()
