"""Reads the layer for multi-token prediction (`mtp.*`) with the language model's files."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from kernels.gemm.fp8_weight import Fp8Weight, quantize_activations
from kernels.gemm.packed_weight import TILE_COLUMNS, TILE_ROWS, quantize_in_4_bits, tiled
from services.common.families import read_spec
from services.common.model_spec import ModelSpec, QuantizationSpec, UnsupportedOption
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.formats import method_of
from services.common.nn.fp8 import has_kernels
from services.common.nn.layer_formats import set_methods
from services.common.nn.linear import Linear
from services.common.quantization import fp8_at_load
from services.decoder.attention.base import AttentionBackend
from services.decoder.models.base import DRAFT_HEAD
from services.decoder.models.draft_head import COARSE, DraftHead
from services.decoder.models.transformer import Transformer

_PREFIX = f"{DRAFT_HEAD}."
_ROWS = 1 << 14  # number of rows that are rounded at a time
_INSTEAD = "use --speculation lookup"
# Fields of `TextSpec` that the layer depends on.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope",
    "moe",
)


def with_draft_head(spec: ModelSpec, *, elsewhere: Path | None = None) -> ModelSpec:
    """Returns the spec of a model whose `mtp.*` tensors are read: each of them, or it is an error.

    Args:
        spec: the model.
        elsewhere: directory of another model, whose layer is read. None if it is the model's own.

    Raises:
        UnsupportedOption: the model has no such layer, or the engine cannot run it.
    """
    text = spec.text
    if elsewhere is not None:
        text = read_spec(elsewhere).text
        names = [name for name in _SIZES if getattr(text, name) != getattr(spec.text, name)]
        if names:
            differ = [f"{n} {getattr(text, n)}, not {getattr(spec.text, n)}" for n in names]
            raise UnsupportedOption(
                f"--speculation-head {elsewhere} is of a model of other sizes: {'; '.join(differ)}"
            )
    if text.num_mtp_layers != 1:
        raise UnsupportedOption(
            f"--speculation mtp: config.json has mtp_num_hidden_layers {text.num_mtp_layers}, "
            f"and 1 is supported; give another model's layer with --speculation-head, or {_INSTEAD}"
        )
    names = spec.checkpoint
    ignored = tuple(p for p in names.ignored if not p.startswith(DRAFT_HEAD))
    return replace(spec, checkpoint=replace(names, ignored=ignored))


def has_draft_head(checkpoint: Checkpoint) -> bool:
    """Returns whether files have tensors of the layer."""
    return any(name.startswith(_PREFIX) for name in checkpoint.tensors)


def read_elsewhere(checkpoint: Checkpoint, elsewhere: Path) -> None:
    """Replaces the `mtp.*` tensors of a checkpoint by those of another model's files."""
    own = {n: info for n, info in checkpoint.tensors.items() if not n.startswith(_PREFIX)}
    others = Checkpoint.open(elsewhere).tensors
    added = {n: info for n, info in others.items() if n.startswith(_PREFIX)}
    checkpoint.tensors = dict(sorted((own | added).items()))


def add_draft_head(
    model: Transformer,
    spec: ModelSpec,
    backend: AttentionBackend,
    checkpoint: Checkpoint | None,
    ranks: Ranks = ALONE,
) -> None:
    """Adds the layer to a language model on the device `meta`, before its weights are read.

    Args:
        model: the language model.
        spec: result of `with_draft_head`.
        backend: implementation of paged attention.
        checkpoint: the files. None if weights are random.
        ranks: ranks that share the model.

    Raises:
        UnsupportedOption: the files have no such layer, as those of many fine-tuned models.
    """
    if checkpoint is not None and not has_draft_head(checkpoint):
        raise UnsupportedOption(
            f"--speculation mtp: the files have no tensors {_PREFIX}*, which many fine-tuned "
            f"models lose; give the base model's layer with --speculation-head, or {_INSTEAD}"
        )
    model.add_module(DRAFT_HEAD, DraftHead(spec, backend, ranks))
    prefixes = dict(model.weight_map.prefixes) | {_PREFIX: _PREFIX}
    model.weight_map = replace(model.weight_map, prefixes=prefixes)


def quantize_layer(model: Transformer, checkpoint: Checkpoint | None) -> None:
    """Makes the loader quantize the layer's matrices to 8 bits, unless the files have done so.

    The layer is read for each draft. Rounding it changes how many drafts are right, and no answer.
    Called before weights are read, and after the other layers have their formats.

    Args:
        model: the language model with the layer.
        checkpoint: the files. None if weights are random.
    """
    files = Checkpoint(Path(), {}) if checkpoint is None else checkpoint
    set_methods(model, files, model.weight_map, fp8_at_load(), within=DRAFT_HEAD)


@torch.inference_mode()
def round_output(model: Transformer) -> None:
    """Gives the layer a copy of the model's output layer in 4 or 8 bits, which drafts alone read.

    Each of three drafts reads it. The output layer of the 27B has 2.54 GB in bf16, and its copy
    0.67 GB in 4 bits, or 1.27 GB in 8. Nothing is done if the model's own has 8 bits or fewer, or
    if the kernels do not support its sizes.
    """
    head, own = getattr(model, DRAFT_HEAD), model.lm_head
    assert isinstance(head, DraftHead)
    if own is not None and not own.is_plain:
        return
    weight = (model.embed_tokens if own is None else own).weight
    if model.ranks.count == 1 and not (len(weight) % TILE_ROWS or weight.shape[1] % TILE_COLUMNS):
        head.lm_head = _in_4_bits(weight)
    else:
        head.lm_head = _in_8_bits(weight)


def _in_4_bits(weight: Tensor) -> Linear:
    """Returns a layer with 4-bit integers that have a scale for each 128 columns of a row."""
    spec = QuantizationSpec(format=COARSE, group_size=TILE_COLUMNS)
    parts = [tiled(quantize_in_4_bits(part, TILE_COLUMNS)) for part in weight.split(_ROWS)]
    codes = torch.cat([part.codes for part in parts])
    return _layer(weight, spec, codes, torch.cat([part.scale for part in parts], 1))


def _in_8_bits(weight: Tensor) -> Linear | None:
    """Returns a layer with e4m3 values that have a scale for each row.

    Returns None if the kernels do not support the sizes.
    """
    parts = [quantize_activations(part, weight.shape[1]) for part in weight.split(_ROWS)]
    values, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if not has_kernels(Fp8Weight(values, scales, 1, weight.shape[1])):
        return None
    return _layer(weight, fp8_at_load(), values, scales)


def _layer(weight: Tensor, spec: QuantizationSpec, values: Tensor, scales: Tensor) -> Linear:
    with torch.device("meta"):
        rows, columns = weight.shape
        layer = Linear(columns, rows, method=method_of(spec))
    layer.weight = nn.Parameter(values, requires_grad=False)
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    return layer
