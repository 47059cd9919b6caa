"""The weight formats: each is one `LinearMethod`, which brings its tensors and its kernels."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation
from services.common.nn.experts import Experts
from services.common.nn.fp8 import Fp8Linear
from services.common.nn.linear import Linear, LinearMethod, UnquantizedLinear

METHODS: Mapping[str, Callable[[QuantizationSpec], LinearMethod]] = {
    "fp8_block": Fp8Linear,
    "fp8_channel": Fp8Linear,
}


def methods_of(quantization: QuantizationSpec) -> dict[QuantizationSpec, LinearMethod]:
    """A method for each group of a checkpoint's modules."""
    return {group: METHODS[group.format](group) for group in quantization.groups}


Rows = Mapping[str, Sequence[Implementation]]  # by weight format


def rows_of(weight_format: str) -> Rows:
    """What a format brings to a dispatch table, without a model."""
    if weight_format == UnquantizedLinear.weight_format:
        return {weight_format: ()}
    return {weight_format: METHODS[weight_format](QuantizationSpec(format=weight_format)).rows()}  # pyright: ignore[reportArgumentType]


def rows_of_layers(module: nn.Module) -> Rows:
    """What the formats of a module's layers bring to a dispatch table."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    rows = {layer.weight_format: layer.method.rows() for layer in layers}
    mixed = {part.weight_format: () for part in module.modules() if isinstance(part, Experts)}
    return mixed | rows
