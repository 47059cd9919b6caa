"""Reads the layer for multi-token prediction (`mtp.*`) with the language model's files."""

from dataclasses import replace

from services.common.model_spec import ModelSpec, UnsupportedOption
from services.common.nn.checkpoint import Checkpoint
from services.decoder.attention.base import AttentionBackend
from services.decoder.models.draft_head import DraftHead
from services.decoder.models.transformer import Transformer

DRAFT_HEAD = "mtp"  # name of the submodule, and of its tensors in the files
_PREFIX = f"{DRAFT_HEAD}."
_INSTEAD = "use --speculation lookup"


def with_draft_head(spec: ModelSpec, *, num_ranks: int, fp8_cache: bool) -> ModelSpec:
    """Returns the spec of a model whose `mtp.*` tensors are read: each of them, or it is an error.

    Raises:
        UnsupportedOption: the model has no such layer, or the engine cannot run it.
    """
    if spec.text.num_mtp_layers != 1:
        raise UnsupportedOption(
            f"--speculation mtp: config.json has mtp_num_hidden_layers {spec.text.num_mtp_layers}, "
            f"and 1 is supported; {_INSTEAD}"
        )
    if num_ranks > 1:
        raise UnsupportedOption(
            f"--speculation mtp runs on one device, not {num_ranks}; {_INSTEAD}"
        )
    if fp8_cache:
        raise UnsupportedOption(f"--speculation mtp needs a KV cache without FP8; {_INSTEAD}")
    names = spec.checkpoint
    ignored = tuple(p for p in names.ignored if not p.startswith(DRAFT_HEAD))
    return replace(spec, checkpoint=replace(names, ignored=ignored))


def add_draft_head(
    model: Transformer, spec: ModelSpec, backend: AttentionBackend, checkpoint: Checkpoint | None
) -> None:
    """Adds the layer to a language model on the device `meta`, before its weights are read.

    Args:
        model: the language model.
        spec: result of `with_draft_head`.
        backend: implementation of paged attention.
        checkpoint: the files. None if weights are random.

    Raises:
        UnsupportedOption: the files have no such layer, as those of many fine-tuned models.
    """
    if checkpoint is not None and not any(n.startswith(_PREFIX) for n in checkpoint.tensors):
        raise UnsupportedOption(
            f"--speculation mtp: the files have no tensors {_PREFIX}*, which many fine-tuned "
            f"models lose; {_INSTEAD}"
        )
    model.add_module(DRAFT_HEAD, DraftHead(spec, backend))
    prefixes = dict(model.weight_map.prefixes) | {_PREFIX: _PREFIX}
    model.weight_map = replace(model.weight_map, prefixes=prefixes)
