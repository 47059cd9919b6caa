"""Registry of the weight formats. A format is a `LinearMethod` with its tensors and its kernels.

A new format needs one file and one line in `METHODS`. The file is imported when a checkpoint uses
the format.
"""

import importlib
from collections.abc import Mapping, Sequence

from torch import nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation
from services.common.nn.linear import Linear, LinearMethod, StoredLayers, UnquantizedLinear

METHODS: Mapping[str, tuple[str, str]] = {  # module and class by format
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
    """Makes the method for the modules of a quantization group."""
    module, name = METHODS[group.format]
    return getattr(importlib.import_module(module), name)(group)


Rows = Mapping[str, Sequence[Implementation]]  # rows of a dispatch table by weight format


def rows_of(weight_format: str) -> Rows:
    """Rows that a weight format adds to a dispatch table, made without a model."""
    if weight_format == UnquantizedLinear.weight_format:
        return {weight_format: ()}
    group = QuantizationSpec(format=weight_format)  # pyright: ignore[reportArgumentType]
    return {weight_format: method_of(group).rows()}


def rows_of_layers(module: nn.Module) -> Rows:
    """Rows that the weight formats of a module's layers add to a dispatch table."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    rows = {layer.weight_format: layer.method.rows() for layer in layers}
    mixed = {part.weight_format: () for part in module.modules() if isinstance(part, StoredLayers)}
    return mixed | rows
