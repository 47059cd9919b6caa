"""The weight formats: each is one `LinearMethod`, which brings its tensors and its kernels.

A format: one file and one line here; the file is imported by the checkpoints that need it.
"""

import importlib
from collections.abc import Mapping, Sequence

from torch import nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation
from services.common.nn.linear import Linear, LinearMethod, StoredLayers, UnquantizedLinear

METHODS: Mapping[str, tuple[str, str]] = {  # format → module and class
    "fp8_block": ("services.common.nn.fp8", "Fp8Linear"),
    "fp8_channel": ("services.common.nn.fp8", "Fp8Linear"),
    "int8": ("services.common.nn.int8", "Int8Linear"),
    "mxfp4": ("services.common.nn.packed", "PackedLinear"),
    "mxfp8": ("services.common.nn.packed", "PackedLinear"),
    "nvfp4": ("services.common.nn.packed", "PackedLinear"),
    "w4a16": ("services.common.nn.packed", "PackedLinear"),
    "w8a16": ("services.common.nn.packed", "PackedLinear"),
}


def method_of(group: QuantizationSpec) -> LinearMethod:
    """A new method for the modules of a group."""
    module, name = METHODS[group.format]
    return getattr(importlib.import_module(module), name)(group)


Rows = Mapping[str, Sequence[Implementation]]  # by weight format


def rows_of(weight_format: str) -> Rows:
    """What a format brings to a dispatch table, without a model."""
    if weight_format == UnquantizedLinear.weight_format:
        return {weight_format: ()}
    group = QuantizationSpec(format=weight_format)  # pyright: ignore[reportArgumentType]
    return {weight_format: method_of(group).rows()}


def rows_of_layers(module: nn.Module) -> Rows:
    """What the formats of a module's layers bring to a dispatch table."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    rows = {layer.weight_format: layer.method.rows() for layer in layers}
    mixed = {part.weight_format: () for part in module.modules() if isinstance(part, StoredLayers)}
    return mixed | rows
