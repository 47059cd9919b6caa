"""Scales of a KV cache in e4m3, per key head: read from the files, or measured.

All scales are rounded up to powers of two, see `kernels.attention.fp8_pages`. Scales are measured
in one forward pass over random tokens, with a factor above the largest value as headroom: e4m3
covers 15 octaves, and keys and values need fewer.
"""

import logging
import re
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.linear_attention.states import StateCache, StateLayout, prefill_pieces
from services.common.model_spec import ModelSpec, TextSpec
from services.common.nn.checkpoint import Checkpoint, CheckpointError, listed
from services.decoder.attention.base import AttentionMetadata
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.models.base import StepContext
from services.decoder.models.draft_head import DraftHead
from services.decoder.models.transformer import Attention, Transformer

# Names of the scales behind the name of a layer, of compressed-tensors and of ModelOpt.
_NAMES = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
# Number of tokens of the forward pass that measures scales.
_TOKENS = 512
# Factor above the largest measured value.
_HEADROOM = 8.0
# Largest number of e4m3.
_LARGEST = 448.0
# Scale of a head whose keys or values are always zero.
_LEAST = 2.0**-40

log = logging.getLogger(__name__)

# Scales of attention in FP8, as compressed-tensors, ModelOpt and Quark name them.
_OF_QUERIES = r"(?:(?:q|qkv)_proj\.)?q_scale|prob(?:_output)?_scale|q_zero_point"


def ignore_query_scales(model: Transformer, spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Leaves out the scales of queries and of attention's probabilities, which are not quantized,
    and names them in a warning.
    """
    stored = spec.checkpoint.quantization
    names = {re.escape(attention.name) for attention in _attentions(model)}
    layers = rf"{re.escape(spec.checkpoint.text_prefix)}layers\.\d+\.(?:{'|'.join(names)})\."
    pattern = re.compile(rf"{layers}(?:{_OF_QUERIES})")
    found = sorted(name for name in checkpoint.tensors if pattern.fullmatch(name))
    declared = stored.attention if stored else ""
    if not (found or declared):
        return
    log.warning(
        "%s: attention quantizes neither queries nor probabilities; what the files declare is not "
        "used: %s",
        checkpoint.directory,
        "; ".join(filter(None, (declared, listed(found)))),
    )
    model.weight_map = replace(model.weight_map, ignored=model.weight_map.ignored.union(found))


def read_scales(model: Transformer, spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Reads the scales of all layers; the loader of weights then ignores their tensors.

    Some checkpoints ask for a cache in e4m3 and have no scales at all. Their scales are measured
    later.

    Args:
        model: the model, whose attention layers get the scales.
        spec: the whole model.
        checkpoint: the files.

    Raises:
        CheckpointError: some scales are missing, or a tensor does not fit the model. The message
            names the tensors.
    """
    prefix = spec.checkpoint.text_prefix
    read: set[str] = set()
    missing: list[str] = []
    with checkpoint.reader() as reader:
        for layer, attention in zip(spec.text.attention_layers, _attentions(model), strict=True):
            base = f"{prefix}layers.{layer}.{attention.name}."
            pairs = [[base + name for name in pair] for pair in _NAMES]
            names = next(
                (pair for pair in pairs if any(name in checkpoint.tensors for name in pair)),
                pairs[0],
            )
            absent = [name for name in names if name not in checkpoint.tensors]
            missing += absent
            if not absent:
                parts = [
                    _of_heads(reader.read(name), name, attention, checkpoint, spec)
                    for name in names
                ]
                attention.kv_scales = _power_of_two(torch.stack(parts))
            read.update(names)
    if len(missing) == len(read):
        log.warning(
            "%s: quantization_config asks for a KV cache in e4m3, and the files hold no scales of "
            "it; they are measured",
            checkpoint.directory,
        )
        return
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory}: scales of the KV cache that quantization_config promises are "
            f"missing: {listed(missing)}"
        )
    model.weight_map = replace(model.weight_map, ignored=model.weight_map.ignored | read)


def _of_heads(
    found: Tensor, name: str, attention: Attention, checkpoint: Checkpoint, spec: ModelSpec
) -> Tensor:
    """Returns the scales `[heads]` of this rank's key heads.

    The tensor `found` has one scale for all key heads, or one for each of the whole model.
    """
    scales, heads = found.float().flatten(), spec.text.num_kv_heads
    if len(scales) not in (1, heads) or not bool((scales.isfinite() & (scales > 0)).all()):
        raise CheckpointError(
            f"{checkpoint.directory}: {name} {list(found.shape)} must hold one positive number, or "
            f"one for each of the {heads} key heads"
        )
    own = attention.kv_heads
    return scales.expand(heads)[own.start : own.stop]


@torch.inference_mode()
def finish_scales(
    model: Transformer, text: TextSpec, device: torch.device, dtype: torch.dtype, max_tokens: int
) -> None:
    """Measures the scales, unless the files had them, and moves them to the device.

    All ranks call the function together.

    Args:
        model: the model, with its weights.
        text: sizes of this rank's part of the model.
        device: the device that computes.
        dtype: data type of activations.
        max_tokens: the most tokens of a step.
    """
    layers = _attentions(model)
    head = next((each for each in model.children() if isinstance(each, DraftHead)), None)
    if head is not None:  # the files have no scales of this layer
        layers.append(head.attention)
    if any(layer.kv_scales is None for layer in layers):
        recorder = _Recorder()
        backends = [layer.backend for layer in layers]
        for layer in layers:
            layer.backend = recorder
        ids = _random_tokens(text, max_tokens).to(device)
        _forward(model, head, text, ids, dtype)
        for layer, backend, largest in zip(layers, backends, recorder.largest, strict=True):
            layer.backend = backend
            if layer.kv_scales is not None:
                continue
            layer.kv_scales = _power_of_two(largest.float().cpu() * (_HEADROOM / _LARGEST))
    for layer in layers:
        assert layer.kv_scales is not None
        layer.kv_scales = layer.kv_scales.to(device)


def _attentions(model: Transformer) -> list[Attention]:
    """Returns the full attention layers, in their order, without a layer that only drafts."""
    return [layer for layer in model.layers.modules() if isinstance(layer, Attention)]


def _power_of_two(scales: Tensor) -> Tensor:
    """Rounds scales up to powers of two."""
    mantissa, exponent = torch.frexp(scales.clamp(min=_LEAST))
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


class _Recorder(SdpaBackend):
    """Attends within one prompt, and keeps the largest keys and values.

    Attributes:
        largest: absolute maxima of keys and values of each layer so far, `[2, num_kv_heads]` each.
    """

    def __init__(self) -> None:
        self.largest: list[Tensor] = []

    def forward(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        keys_values: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        assert keys_values is not None
        parts = keys_values.unflatten(1, (2, -1))  # [T, 2, KVH, D]
        self.largest.append(parts.abs().amax(dim=(0, 3)))
        keys, values = parts.permute(1, 2, 0, 3)[:, None]
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1).contiguous()


def _random_tokens(text: TextSpec, max_tokens: int) -> Tensor:
    """Returns token ids `[T]`, which are the same at each start."""
    count = min(_TOKENS, max_tokens, text.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(text.vocab_size, (count,), generator=generator)


def _forward(
    model: Transformer, head: DraftHead | None, text: TextSpec, ids: Tensor, dtype: torch.dtype
) -> None:
    """Runs one prompt through the model and its draft head, if it has one. Only the backend gets
    the keys and values.
    """
    device, count = ids.device, len(ids)
    shape = len(text.attention_layers) + 1, 1, 2, 1, text.num_kv_heads, text.head_dim
    pool = torch.zeros(shape, dtype=dtype, device=device)
    starts, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    starts_device, lengths_device = (torch.from_numpy(x).to(device) for x in (starts, lengths))
    metadata = AttentionMetadata(
        num_decodes=0,
        cu_query_lens=starts,
        seq_lens=lengths,
        first_blocks=np.zeros(1, np.int32),
        slot_mapping=torch.full((count,), -1, device=device),
        block_ids=zero,
        first_blocks_device=zero,
        seq_lens_device=lengths_device,
        wants_keys_values=True,
    )
    if (linear := text.linear_attention) is not None:
        pieces = prefill_pieces(starts, 0, count)
        metadata.states = StateLayout(
            cache=StateCache.allocate(linear, len(text.linear_layers), 1, dtype, device),
            num_decodes=0,
            cu_query_lens=starts,
            seq_lens=lengths,
            slots=zero.long(),
            cu_query_lens_device=starts_device,
            seq_lens_device=lengths_device,
            work=torch.from_numpy(pieces).to(device),
        )
    positions = torch.arange(count, device=device).expand(3, -1)
    hidden = model.forward(ids, positions, pool, metadata)
    if head is None:
        return
    rope, kv_rows = model.ops.rope_and_rows(positions, metadata.slot_mapping, model.rope, dtype, 1)
    kernels = model.ops.for_tokens(count)
    context = StepContext(model.ops, kernels, rope, pool, kv_rows, metadata)
    embedded = F.embedding(ids.roll(-1), model.embed_tokens.weight)
    head(head.inputs(embedded, hidden, context), context)
