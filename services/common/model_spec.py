"""The differences between models, as data.

A family's file in `services.common.families` reads a checkpoint directory into a `ModelSpec`, which
all three services use. This file imports no torch, because the gateway has none.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from services.common.frame_pairs import FramePairs
from services.common.geometry import Geometry
from services.common.tower_spec import TowerSpec

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# File names of other programs' weights, which people download by mistake.
_FOREIGN = ("*.gguf", "pytorch_model*.bin", "consolidated*.pth", "adapter_model.safetensors")


class ModelSpecError(ValueError):
    """Raised if a directory is not a model that can be served. The message has file and cause."""


class UnsupportedOption(ModelSpecError):
    """Raised if a model needs an option that is not implemented. The message has option and remedy.

    Attributes:
        file: name of the file with the option.
    """

    def __init__(self, message: str, file: str = "config.json") -> None:
        super().__init__(message)
        self.file = file


def expect(name: str, value: object, *served: object) -> None:
    """Checks the value of an option.

    Args:
        name: name of the option.
        value: value in the checkpoint.
        served: values that are supported.

    Raises:
        UnsupportedOption: the value is not supported.
    """
    if value not in served:
        raise UnsupportedOption(
            f"{name} {value!r} is not supported; supported: {' or '.join(map(repr, served))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        kind: scaling of the inverse frequencies, by transformers' names.
        theta: base of the frequencies.
        rotary_dim: number of leading elements of a head that are rotated. The others are unchanged.
        mrope_section: number of frequencies per axis (t, h, w) of M-RoPE. None if positions have
            one dimension.
        interleaved: True if the axes of M-RoPE take turns (t h w t h w …). False if the frequencies
            of an axis follow each other (t t … h h … w w …).
        factor: factor by which `llama3` and `yarn` extend the context.
        original_max_position_embeddings: longest context before the extension.
        low_freq_factor, high_freq_factor: parameters of `llama3`.
        beta_fast, beta_slow: parameters of `yarn`.
        truncate: True if `yarn` rounds the correction range to whole dimensions.
        attention_factor: factor by which `yarn` multiplies cos and sin.
    """

    kind: Literal["default", "llama3", "yarn"] = "default"
    theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int] | None = None
    interleaved: bool = True
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


LayerKind = Literal["full_attention", "linear_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Gated delta net layers (Yang et al., 2024). Each group of value heads shares a key head.

    Attributes:
        num_key_heads, num_value_heads: numbers of heads.
        key_head_dim, value_head_dim: sizes of a head.
        conv_width: number of taps of the causal convolution over queries, keys and values.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        """Number of elements of all keys of a token, which all queries have as well."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    def part(self, num_ranks: int) -> "LinearAttentionSpec":
        """Returns the sizes of one of several ranks, which divide the heads."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_value_heads=self.num_value_heads // num_ranks,
        )

    @property
    def num_channels(self) -> int:
        """Number of the convolution's channels: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def group_size(self) -> int:
        """Number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts in place of the MLP. An expert is a gated MLP (SiLU) without biases.

    Attributes:
        num_experts: number of experts of a layer.
        top_k: number of experts that compute a token.
        intermediate_size: intermediate size of an expert.
        norm_topk_prob: True if the probabilities of a token's experts are scaled to a sum of 1.
        shared_intermediate_size: intermediate size of the expert that computes every token, scaled
            by a sigmoid gate. 0 if the layers have no such expert.
        dense_layers: indices of the layers that have an MLP instead of experts.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool = True
    shared_intermediate_size: int = 0
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """The language model: pre-norm, grouped-query attention, gated MLP (SiLU) or experts.

    Attributes:
        intermediate_size: intermediate size of the MLP. In a mixture of experts it is that of the
            dense layers' MLP, or of the shared expert if all layers have experts.
        max_position_embeddings: longest context, which with `yarn` is the extended context.
        tie_word_embeddings: True if the head uses the weights of the token embeddings.
        qk_norm: True if each query and key head is normalized (RMSNorm) before its rotation.
        sliding_window: number of tokens that a layer attends to. None if the layers attend to the
            whole context. Windows are not implemented: the decoder refuses to serve a longer
            context than this.
        moe: mixture of experts. None if every layer has an MLP.
        output_gate: True if the query projection also computes a gate for each head's output.
        zero_centred_norms: True if RMSNorms multiply by 1 + weight, except in linear attention.
        linear_attention: sizes of the linear attention layers. None if the model has none.
        layer_kinds: kind of each layer. Empty if all layers have full attention.
        num_mtp_layers: number of layers for multi-token prediction in the files, which can draft
            tokens. 0 if the checkpoint has no such layer that can be used.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    moe: MoESpec | None = None
    output_gate: bool = False
    zero_centred_norms: bool = False
    linear_attention: LinearAttentionSpec | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    num_mtp_layers: int = 0

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts in place of the MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def group_size(self) -> int:
        """Number of query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the linear attention layers, which keep a recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "linear_attention")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full attention layers, which keep keys and values."""
        linear = set(self.linear_layers)
        return tuple(i for i in range(self.num_layers) if i not in linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A model's view of images and videos.

    Attributes:
        tower: the vision tower.
        geometry: division of images into units.
        video: sampling and division of videos. None if videos are not served.
        no_video: reason why videos are not served, if `video` is None.
    """

    tower: TowerSpec
    geometry: Geometry
    video: FramePairs | None = None
    no_video: str = "the checkpoint has no video processor"


WeightFormat = Literal[
    "fp8_block", "fp8_channel", "int8", "w4a16", "w8a16", "nvfp4", "mxfp4", "mxfp8"
]
Packing = Literal[
    "compressed-tensors", "int-quantized", "awq", "gptq", "gptq_v2", "auto-round", "modelopt"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """The quantization of a checkpoint's weights, as `quantization_config` describes it.

    The formats are

    - `fp8_block`: e4m3 with a scale per block of 128 x 128. Where the hardware multiplies FP8,
      activations are quantized per token and 128 columns.
    - `fp8_channel`: e4m3 with a scale per output channel. Where the hardware multiplies FP8,
      activations are quantized per token.
    - `int8`: integers with a scale per output channel. Activations are quantized per token.
    - `w4a16`, `w8a16`: integers with a scale per group of columns.
    - `nvfp4`: e2m1 with an e4m3 scale per 16 columns and one scale of the whole matrix.
    - `mxfp4`, `mxfp8`: e2m1 or e4m3 with a power of two per 32 columns.

    Attributes:
        format: a name of the list above.
        one_scale: True if the files of `fp8_channel` have one scale per module, which all channels
            share.
        packing: layout of integers and e2m1 values in the files.
        group_size: number of columns that share a scale. 0 if all columns do.
        symmetric: True if the files have no zero points, or only those of the middle.
        at_load: True if the files have floats, which are quantized while they are read.
        ignored: modules that are not quantized: checkpoint names of modules or of their parents, or
            `re:` patterns.
        has_whole_names: True if a name never stands for the modules within it. In some files the
            name of a parent stands for the parent's own parameters, and modules in it are
            quantized.
        targets: modules that are quantized, in the form of `ignored`. Empty if every linear layer
            is.
        others: specs of further groups of modules, where a checkpoint mixes formats.
        fp8_cache: True if the files ask for a KV cache in e4m3, whose scales they may contain.
        activations: description of the activations that the files declare. Empty if layers of the
            format compute with these.
        attention: description of the quantization of queries that the files declare. Empty if they
            declare none. Queries are never quantized.
    """

    format: WeightFormat
    one_scale: bool = False
    packing: Packing = "compressed-tensors"
    group_size: int = 0
    symmetric: bool = True
    at_load: bool = False
    ignored: frozenset[str] = frozenset()
    has_whole_names: bool = False
    targets: frozenset[str] = frozenset()
    others: tuple["QuantizationSpec", ...] = ()
    fp8_cache: bool = False
    activations: str = field(default="", compare=False)
    attention: str = field(default="", compare=False)

    @property
    def groups(self) -> tuple["QuantizationSpec", ...]:
        """Specs of all groups, in order of precedence."""
        return (replace(self, others=()), *self.others)

    @property
    def bits(self) -> int:
        """Largest number of bits of a weight in memory, without scales, over all groups."""
        return max(4 if "4" in group.format else 8 for group in self.groups)

    def of(self, module: str) -> "QuantizationSpec | None":
        """Returns the spec that applies to a linear layer, by its checkpoint name. None if the
        layer is not quantized.
        """
        return next((group for group in self.groups if group.applies_to(module)), None)

    def applies_to(self, module: str) -> bool:
        """Returns whether this spec applies to a linear layer, by its checkpoint name."""
        if self.targets and not self._is_named(self.targets, module):
            return False
        return not self._is_named(self.ignored, module)

    def _is_named(self, patterns: frozenset[str], module: str) -> bool:
        names, expressions = _split(patterns)
        if any(expression.match(module) for expression in expressions):
            return True
        return module in names if self.has_whole_names else _has_part(module, names)


def _has_part(module: str, names: frozenset[str]) -> bool:
    """Returns whether consecutive parts of a module's name are one of the names."""
    parts = module.split(".")
    ends = range(1, len(parts) + 1)
    return any(".".join(parts[start:end]) in names for end in ends for start in range(end))


@cache
def _split(patterns: frozenset[str]) -> tuple[frozenset[str], list[re.Pattern[str]]]:
    """Splits a set into names and `re:` patterns. The result is cached by the set, because
    checkpoints with experts have 10^5 modules, and a set may name each of them.
    """
    expressions = [re.compile(each[3:]) for each in patterns if each.startswith("re:")]
    return frozenset(each for each in patterns if not each.startswith("re:")), expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Names of the tensors in the safetensors files.

    Attributes:
        text_prefix: prefix of the language model's tensors.
        vision_prefix: prefix of the vision tower's tensors.
        projector_prefix: prefix of the tower's last layers, if it differs from `vision_prefix`.
        ignored: patterns of names of tensors that may be present and are not read.
        quantization: quantization of the weights. None if they have a floating-point dtype of
            torch.
    """

    text_prefix: str
    vision_prefix: str = ""
    projector_prefix: str = ""
    ignored: tuple[str, ...] = ()
    quantization: QuantizationSpec | None = None

    @property
    def vision_prefixes(self) -> tuple[str, ...]:
        """All prefixes of the vision tower's tensors. Empty for a text model."""
        return tuple(filter(None, (self.vision_prefix, self.projector_prefix)))

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor may be present and is not read."""
        return any(re.match(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSpec:
    """The form of a family's answers.

    Attributes:
        tool_parsers: forms of tool calls that the family's checkpoints are trained on, by their
            names in `services.gateway.answers.tool_parsers`. The first form that the chat template
            contains is used.
        thinks: True if checkpoints whose chat template has `</think>` reason before they answer.
    """

    tool_parsers: tuple[str, ...] = ()
    thinks: bool = False


Task = Literal["generate", "embed", "rank", "token_embed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """The task of a checkpoint that is trained for search and generates no text.

    Attributes:
        task: `embed` if the model computes the vector of an input, `rank` if it computes how well a
            document answers a query, `token_embed` if it computes a vector of each token.
        true_token_id, false_token_id: tokens whose logits a reranker compares, "yes" and "no" of
            Qwen's. Both are 0 with the other tasks.
        default_prompt: prompt of config_sentence_transformers.json for inputs without an
            instruction. Empty if the file names none.
        dimensions: length of a token's vector. 0 unless the task is `token_embed`.
        projection: prefix of the tensors of the layer that makes the vectors of tokens. Empty
            unless the task is `token_embed`.
    """

    task: Literal["embed", "rank", "token_embed"]
    true_token_id: int = 0
    false_token_id: int = 0
    default_prompt: str = ""
    dimensions: int = 0
    projection: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole checkpoint directory.

    Attributes:
        directory: absolute path of the directory.
        name: last component of the path, which is the served name unless a setting overrides it.
        architecture: name of the model class in config.json.
        text: the language model.
        vision: the vision part. None for a text model, which has no encoder.
        checkpoint: names and quantization of the tensors.
        eos_token_ids: end tokens of generation_config.json, config.json and the tokenizer together.
        generation: content of generation_config.json, for sampling defaults.
        conversation: form of the answers.
        search: the task of a model for search. None if the model generates text.
    """

    directory: Path
    name: str
    architecture: str
    text: TextSpec
    vision: VisionSpec | None
    checkpoint: CheckpointSpec
    eos_token_ids: tuple[int, ...]
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    conversation: ConversationSpec = ConversationSpec()
    search: SearchSpec | None = None

    @property
    def task(self) -> Task:
        """Task of the model: `generate`, `embed` or `rank`."""
        return "generate" if self.search is None else self.search.task

    @property
    def vision_part(self) -> VisionSpec:
        """The vision part.

        Raises:
            ModelSpecError: the model is a text model.
        """
        if self.vision is None:
            raise ModelSpecError(
                f"{self.name} ({self.architecture}) is a text model: it has no vision tower and is "
                "served without an encoder"
            )
        return self.vision


def longest_context(text: TextSpec, wanted: int | None) -> int:
    """Returns the number of tokens of the longest sequence.

    Args:
        wanted: number of tokens that the user has asked for. None for the model's limit.

    Raises:
        ValueError: `wanted` is over the model's limit.
        UnsupportedOption: some layers would attend to a window of the sequence only.
    """
    limit, window = text.max_position_embeddings, text.sliding_window
    if wanted is not None and wanted > limit:
        raise ValueError(f"max_model_len {wanted} is over the model's limit of {limit} tokens")
    length = wanted or limit
    if window is not None and window < length:
        raise UnsupportedOption(
            f"sliding_window {window} is smaller than the served context of {length} tokens, which "
            f"is not supported: set max_model_len to {window} or less"
        )
    return length


def undivided_size(text: TextSpec, num_ranks: int) -> str:
    """Returns the first size of a model that ranks cannot share equally, such as "14 attention
    heads". Empty if they can share the model. Ranks may hold copies of a key-value head.
    """
    sizes = [
        (text.num_heads, "attention heads"),
        (text.num_kv_heads, "key-value heads"),
        (text.intermediate_size, "columns of an MLP"),
        (text.vocab_size, "tokens of the vocabulary"),
    ]
    if text.moe is not None:
        sizes.append((text.moe.intermediate_size, "columns of an expert"))
        sizes.append((text.moe.shared_intermediate_size, "columns of the shared expert"))
    if text.linear_attention is not None:
        sizes.append((text.linear_attention.num_key_heads, "key heads of linear attention"))
    for size, name in sizes:
        is_copied = name == "key-value heads" and size < num_ranks and num_ranks % size == 0
        if size % num_ranks and not is_copied:
            return f"{size} {name}"
    return ""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object of a checkpoint directory.

    Raises:
        ModelSpecError: the file is missing, unreadable or not a JSON object.
    """
    value = _json(path)
    if not isinstance(value, dict):
        raise ModelSpecError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", value)


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON array of objects of a checkpoint directory.

    Raises:
        ModelSpecError: the file is missing, unreadable or not an array of objects.
    """
    value = _json(path)
    if not isinstance(value, list):
        raise ModelSpecError(f"{path} is not an array of JSON objects")
    found = cast("list[object]", value)
    if not all(isinstance(each, dict) for each in found):
        raise ModelSpecError(f"{path} is not an array of JSON objects")
    return cast("list[dict[str, Any]]", found)


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelSpecError(f"{path} is missing") from None
    except OSError as error:
        raise ModelSpecError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelSpecError(f"{path} is not JSON: {error}") from None


def weight_files(directory: Path) -> list[str]:
    """Returns the names of the files with a checkpoint's weights: the single file if it exists,
    else the files that the index names, as in transformers.

    Raises:
        ModelSpecError: there are no weights, or a file of the index is missing.
    """
    if (directory / WHOLE).is_file():
        return [WHOLE]
    index = directory / INDEX
    if not index.is_file():
        foreign = [path.name for kind in _FOREIGN for path in sorted(directory.glob(kind))]
        have = f"; {foreign[0]} has a format that is not supported" if foreign else ""
        raise ModelSpecError(f"no weights at {directory}: it has no {WHOLE} and no {INDEX}{have}")
    try:
        names = sorted({Path(name).name for name in read_json(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelSpecError(f"{index} is not an index of weights: {error!r}") from None
    if missing := [name for name in names if not (directory / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelSpecError(
            f"weights are missing at {directory}: {missing[0]}{more} of {len(names)} files; "
            "the download is not complete"
        )
    return names
