"""What differs between models, as data. No torch: the gateway has none.

A family's file in `services.common.families` reads a checkpoint directory into these values; all
three services use them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from services.common.frame_pairs import FramePairs
from services.common.geometry import Geometry

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Weights of other programs, which people download by mistake.
_FOREIGN = ("*.gguf", "pytorch_model*.bin", "consolidated*.pth", "adapter_model.safetensors")


class ModelSpecError(ValueError):
    """The directory is not a model that can be served; the message names the file and the cause."""


class UnsupportedOption(ModelSpecError):
    """The model needs what is not implemented; the message names the option and the remedy.

    Attributes:
        file: that holds the option.
    """

    def __init__(self, message: str, file: str = "config.json") -> None:
        super().__init__(message)
        self.file = file


def expect(name: str, value: object, *served: object) -> None:
    """Raises UnsupportedOption: an option's value is not among those that are served."""
    if value not in served:
        raise UnsupportedOption(
            f"{name} {value!r} is not supported; supported: {' or '.join(map(repr, served))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding.

    Attributes:
        kind: how inverse frequencies are scaled, by transformers' names.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that rotate; the others pass through.
        mrope_section: frequencies per axis (t, h, w) of interleaved M-RoPE; None: 1-D positions.
        factor: context extension of `llama3` and `yarn`.
        original_max_position_embeddings: context before the extension.
        low_freq_factor, high_freq_factor: of `llama3`.
        beta_fast, beta_slow: of `yarn`.
        truncate: of `yarn`: whether the correction range is rounded to whole dimensions.
        attention_factor: what `yarn` multiplies cos and sin by.
    """

    kind: Literal["default", "llama3", "yarn"] = "default"
    theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int] | None = None
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
        conv_width: taps of the causal convolution over queries, keys and values.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def key_size(self) -> int:
        """Elements of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    def part(self, num_ranks: int) -> "LinearAttentionSpec":
        """The sizes of one of several ranks, which divide the heads."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_value_heads=self.num_value_heads // num_ranks,
        )

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts in place of the MLP; an expert is a gated MLP (SiLU) without biases.

    Attributes:
        top_k: experts that a token goes to.
        norm_topk_prob: the probabilities of a token's experts are scaled to a sum of 1.
        shared_intermediate_size: of the expert that every token goes to, scaled by a sigmoid gate;
            0: there is none.
        dense_layers: layers that have an MLP instead.
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
        intermediate_size: of the MLP; of a mixture of experts, of its dense layers' MLP, or of the
            shared expert if all layers have experts.
        moe: None: every layer has an MLP.
        qk_norm: RMSNorm on each query and key head before rotation.
        output_gate: the query projection also gives a gate for each head's output.
        zero_centred_norms: RMSNorms multiply by 1 + weight, but for those of linear attention.
        linear_attention: sizes of the layers of that kind; None: there are none.
        layer_kinds: by layer; empty: all are full attention.
        max_position_embeddings: the longest context; with `yarn`, the extended one.
        sliding_window: tokens that a layer attends to; None: the whole context. Not implemented:
            the decoder refuses to serve a longer context than this.
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

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of the MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
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


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision tower: patches in, one embedding per `spatial_merge_size`² patches out. What only
    one kind has is in a class of the family's file.

    Attributes:
        kind: the name of the tower's file in `services/encoder/models`.
        pixel_mean, pixel_std: what pixels of 0 to 255 are normalized by, of each channel or of all.
    """

    kind: ClassVar[str]
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    pixel_mean: tuple[float, ...] = field(default=(127.5,), kw_only=True)
    pixel_std: tuple[float, ...] = field(default=(127.5,), kw_only=True)

    @property
    def num_features(self) -> int:
        """Tensors per unit, the merged output among them."""
        return 1

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """How a model sees images and videos.

    Attributes:
        video: None: videos are not served.
        no_video: why not.
    """

    tower: TowerSpec
    geometry: Geometry
    video: FramePairs | None = None
    no_video: str = "the checkpoint has no video processor"


WeightFormat = Literal[
    "fp8_block", "fp8_channel", "int8", "w4a16", "w8a16", "nvfp4", "mxfp4", "mxfp8"
]  # fmt: skip
Packing = Literal[
    "compressed-tensors", "int-quantized", "awq", "gptq", "gptq_v2", "auto-round", "modelopt"
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """What `quantization_config` says of the weights.

    Attributes:
        format: `fp8_block`: e4m3 with a scale per block of 128 x 128; `fp8_channel`: e4m3 with a
            scale per output channel. Activations are quantized per token (and per 128 of a block
            format's columns) where the hardware multiplies FP8. `int8`: with a scale per output
            channel; activations are quantized per token. `w4a16`, `w8a16`: integers with a scale
            per group of columns; `nvfp4`, `mxfp4`: e2m1 with a scale per 16 or 32 columns (e4m3,
            and one of the whole matrix; a power of two); `mxfp8`: e4m3 with a power of two per 32
            columns. Activations of these stay as they are.
        one_scale: files hold one for a module of `fp8_channel`, which its channels share.
        packing: how files hold integers and e2m1.
        group_size: columns that share a scale; 0: all of them.
        symmetric: files hold no zero points, or those of the middle alone.
        at_load: files hold floats, which are quantized while they are read.
        ignored: modules that stay unquantized: checkpoint names of modules or of their parents,
            or `re:` patterns.
        has_whole_names: names are those of modules, not of their parents: some files name a parent
            for its own parameters, and quantize modules in it.
        targets: modules that are quantized, in the same words; empty: every linear layer.
        others: of further groups of modules, where a checkpoint mixes formats.
        fp8_cache: the files ask for a KV cache in e4m3, and may hold its scales.
        activations: description of the activations that the files declare. Empty if layers of the
            format compute with these.
        attention: description of the quantization of queries that the files declare. Empty if
            they declare none; queries are never quantized.
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
        """Those of all groups, in order of precedence."""
        return (replace(self, others=()), *self.others)

    @property
    def bits(self) -> int:
        """Of a weight in memory, without scales; the most of all groups."""
        return max(4 if "4" in group.format else 8 for group in self.groups)

    def of(self, module: str) -> "QuantizationSpec | None":
        """What quantizes a linear layer of that checkpoint name; None: nothing does."""
        return next((group for group in self.groups if group.applies_to(module)), None)

    def applies_to(self, module: str) -> bool:
        """Whether a linear layer of that checkpoint name should be quantized."""
        if self.targets and not self._is_named(self.targets, module):
            return False
        return not self._is_named(self.ignored, module)

    def _is_named(self, patterns: frozenset[str], module: str) -> bool:
        names, expressions = _split(patterns)
        if any(expression.match(module) for expression in expressions):
            return True
        return module in names if self.has_whole_names else _has_part(module, names)


def _has_part(module: str, names: frozenset[str]) -> bool:
    """Whether consecutive parts of a module's name are one of the names."""
    parts = module.split(".")
    ends = range(1, len(parts) + 1)
    return any(".".join(parts[start:end]) in names for end in ends for start in range(end))


@cache
def _split(patterns: frozenset[str]) -> tuple[frozenset[str], list[re.Pattern[str]]]:
    """Names, and `re:` patterns. Files with experts have 10^5 modules, and lists may name each: of
    a frozenset the hash is known.
    """
    expressions = [re.compile(each[3:]) for each in patterns if each.startswith("re:")]
    return frozenset(each for each in patterns if not each.startswith("re:")), expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Names in the safetensors files.

    Attributes:
        ignored: patterns of names of tensors that may be present and are not read.
        quantization: None: weights are stored in a floating-point dtype of torch.
    """

    text_prefix: str
    vision_prefix: str = ""
    ignored: tuple[str, ...] = ()
    quantization: QuantizationSpec | None = None

    def ignores(self, name: str) -> bool:
        """Whether a tensor may be present and is not read."""
        return any(re.match(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSpec:
    """How a family's answers are read.

    Attributes:
        tool_parsers: forms of tool calls that its checkpoints are taught, by the names of
            `services.gateway.answers.tool_parsers`; the first that the chat template shows is used.
        thinks: checkpoints whose chat template names `</think>` reason before they answer.
    """

    tool_parsers: tuple[str, ...] = ()
    thinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole checkpoint directory.

    Attributes:
        directory: absolute path.
        name: last component of the path; the served name unless a setting overrides it.
        vision: None: a text model, which has no encoder.
        eos_token_ids: of generation_config.json, config.json and the tokenizer, together.
        generation: generation_config.json, for sampling defaults.
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

    @property
    def vision_part(self) -> VisionSpec:
        """`vision` of a model that has one.

        Raises:
            ModelSpecError: it is a text model.
        """
        if self.vision is None:
            raise ModelSpecError(
                f"{self.name} ({self.architecture}) is a text model: it has no vision tower and is "
                "served without an encoder"
            )
        return self.vision


def longest_context(text: TextSpec, wanted: int | None) -> int:
    """Tokens of the longest sequence: `wanted`, or the model's own limit.

    Raises:
        ValueError: `wanted` is more than the model's limit.
        UnsupportedOption: layers would attend to a window of it only.
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint directory.

    Raises:
        ModelSpecError: it is missing, unreadable or malformed.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelSpecError(f"{path} is missing") from None
    except OSError as error:
        raise ModelSpecError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelSpecError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelSpecError(f"{path} is not a JSON object")
    return cast("dict[str, Any]", value)


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold a checkpoint's weights: the whole one, else those that the index
    names, as in transformers.

    Raises:
        ModelSpecError: there are none, or one is missing.
    """
    if (directory / WHOLE).is_file():
        return [WHOLE]
    index = directory / INDEX
    if not index.is_file():
        foreign = [path.name for kind in _FOREIGN for path in sorted(directory.glob(kind))]
        have = f"; {foreign[0]} is of a kind that is not read" if foreign else ""
        raise ModelSpecError(f"no weights at {directory}: it has no {WHOLE} and no {INDEX}{have}")
    try:
        names = sorted({Path(name).name for name in read_json(index)["weight_map"].values()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelSpecError(f"{index} is no index of weights: {error!r}") from None
    if missing := [name for name in names if not (directory / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelSpecError(
            f"weights are missing at {directory}: {missing[0]}{more} of {len(names)} files; "
            "the download did not end"
        )
    return names
