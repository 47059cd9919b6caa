"""Linear layers with FP8 weights: their `LinearMethod` and their rows of the dispatch table.

A layer is computed in one of two ways, both from an `Fp8Weight`:

- weight-only: activations are not quantized. A CPU always computes this way, and a GPU does so for
  few tokens, when the time goes into reading the weights.
- W8A8: activations are quantized as well, with a scale of `amax / 448` per token and 128 columns
  (`fp8_block`) or per token (`fp8_channel`), so that FP8 tensor cores can multiply them.

`kernels.gemm.fp8_weight` specifies both in plain torch; `fp8_kernels` and `fp8_w8a8` have the
kernels. `layer_formats` sets the method of layers whose tensors are FP8.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.gemm import fp8_weight
from kernels.gemm.fp8_weight import BLOCK, E4M3, Fp8Weight, quantize_activations, weight_only_linear
from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation, Kernel, up_to
from services.common.nn.linear import FLOATS, Axis, Linear, TensorLayout
from services.common.nn.quantized import (
    ACTIVATIONS,
    QuantizedLinear,
    after_norm,
    few_or_many,
    gemv_after_norm,
    half_obstacle,
    of_layer,
)

# Largest numbers of tokens for which kernels are the fastest, measured by `benchmarks.kernels.fp8`
# on an H200 with the shapes of an 8B model. The first two are weight-only kernels. The third
# quantizes activations, which has been measured to be faster on Hopper only.
GEMV_TOKENS = 1
SKINNY_TOKENS = 32
SKINNY_W8A8_TOKENS = 64
# On Hopper, one token of a larger hidden size takes the skinny GEMM for quantized activations, too.
# A step of the 27B (5,120) with one row took 11.8 ms by GEMVs, and one with four rows 9.2 ms.
_MAX_GEMV_HIDDEN = 4096


def has_kernels(weight: Fp8Weight) -> bool:
    """Returns whether the kernels support the weight.

    They need a multiple of 16 rows, whole blocks of columns, and scales per 128 rows or per row.
    """
    rows, columns = weight.values.shape
    return rows % 16 == 0 and columns % BLOCK == 0 and weight.block_rows in (1, BLOCK)


def linear_rows(operation: str) -> Sequence[Implementation[Any]]:
    """Rows of a dispatch table for `fp8_block_linear` or `fp8_channel_linear`.

    The operations are `(x, weight)` → `[T, N]`, where `x` is `[T, K]` or `Quantized` and `weight`
    is an `Fp8Weight`. The rows read only `device` of the table's facts.
    """
    is_block = operation == "fp8_block_linear"

    def row(name: str, kernel: str, obstacle: Callable[[Any], str], most: int | None = None) -> Any:  # noqa: ANN401
        return Implementation(operation, name, partial(_linear, kernel), obstacle, up_to(most))

    return (
        row("gemv", "fp8_kernels.gemv", _triton, GEMV_TOKENS),
        row("skinny_w8a8", "fp8_w8a8.split_k_partials", _hopper, SKINNY_W8A8_TOKENS),
        row("skinny_gemm", "fp8_kernels.split_k_partials", _triton, SKINNY_TOKENS),
        row("scaled_mm", "fp8_w8a8.scaled_mm", _block_scales if is_block else _fp8_cores),
        *([row("triton_gemm", "fp8_w8a8.triton_gemm", _fp8_cores)] if is_block else []),
        Implementation(operation, "plain", lambda _: _weight_only(weight_only_linear)),
    )


def _linear(kernel: str, facts: Any) -> Kernel:  # noqa: ANN401 - the facts of any dispatch table
    from kernels.gemm.skinny_gemm import summed

    found = partial(summed, _bound(kernel, facts), device=facts.device)
    return found if kernel.startswith("fp8_w8a8") else _weight_only(found)


def _weight_only(kernel: Kernel) -> Kernel:
    """Wraps a weight-only kernel so that it also takes quantized activations.

    It gets these if the kernel for which they were quantized has failed.
    """
    return lambda x, weight: kernel(x if isinstance(x, Tensor) else x.dequantized(), weight)


def _bound(kernel: str, facts: Any) -> Kernel:  # noqa: ANN401
    """Imports `fp8_kernels` or `fp8_w8a8` and binds its function `kernel` to the device."""
    module, _, name = kernel.partition(".")
    found = getattr(importlib.import_module(f"kernels.gemm.{module}"), name)
    return partial(found, device=facts.device)


def _triton(facts: Any) -> str:  # noqa: ANN401
    return facts.device.triton_obstacle


def _fp8_cores(facts: Any) -> str:  # noqa: ANN401
    has_cores = facts.device.capability >= (8, 9)
    return _triton(facts) or ("" if has_cores else "needs FP8 tensor cores")


def _hopper(facts: Any) -> str:  # noqa: ANN401
    return _triton(facts) or ("" if facts.device.is_hopper else "needs Hopper")


def _block_scales(facts: Any) -> str:  # noqa: ANN401
    has_scales = hasattr(F, "scaled_mm")
    return _hopper(facts) or ("" if has_scales else "needs torch.nn.functional.scaled_mm")


def _fused_rows(weight_format: str) -> Sequence[Implementation[Any]]:
    """Rows for the operations of the decoder's layers. The facts are those of the decoder."""

    def fits(facts: Any) -> str:  # noqa: ANN401 - the decoder's
        if why := half_obstacle(facts):
            return why
        text = facts.text
        sizes = [text.hidden_size, facts.query_size, text.intermediate_size]
        if weight_format == "fp8_block":  # the rows of q, k, v, gate and up need whole blocks, too
            sizes.append(text.num_kv_heads * text.head_dim)
        odd = [size for size in sizes if size % BLOCK]
        return f"{odd[0]} is not a multiple of {BLOCK}" if odd else ""

    def reads(facts: Any) -> str:  # noqa: ANN401
        hidden = facts.text.hidden_size
        is_slower = hidden > _MAX_GEMV_HIDDEN and facts.device.is_hopper
        return fits(facts) or (
            f"the skinny GEMM reads {hidden} columns faster" if is_slower else ""
        )

    def adds(facts: Any) -> str:  # noqa: ANN401
        alone = "" if facts.num_ranks == 1 else "needs all of the layer on one rank"
        return reads(facts) or alone

    def hopper(facts: Any) -> str:  # noqa: ANN401
        return half_obstacle(facts) or _hopper(facts)

    norm_gemv = partial(_after_norm, "fp8_kernels.norm_gemv")
    norm_swiglu_gemv = partial(_after_norm, "fp8_kernels.norm_swiglu_gemv")
    gemv_add = partial(_of_layer, "fp8_kernels.gemv_add")
    partials = partial(_of_layer, "fp8_kernels.split_k_partials")
    gemv, w8a8, skinny = map(up_to, (GEMV_TOKENS, SKINNY_W8A8_TOKENS, SKINNY_TOKENS))
    return (
        Implementation("norm_linear", "fp8_gemv", norm_gemv, reads, gemv),
        Implementation("norm_linear", "fp8_norm", _norm_linear, hopper),
        Implementation("norm_swiglu", "fp8_gemv", norm_swiglu_gemv, reads, gemv),
        Implementation("norm_swiglu", "fp8_norm", _norm_swiglu, hopper),
        Implementation("linear_residual", "fp8_gemv", gemv_add, adds, gemv),
        Implementation("project", "fp8_skinny_w8a8", _project_w8a8, hopper, w8a8),
        Implementation("project", "fp8_skinny_gemm", partials, fits, skinny),
    )


def _after_norm(kernel: str, facts: Any) -> Kernel:  # noqa: ANN401
    return gemv_after_norm(_bound(kernel, facts))


def _of_layer(kernel: str, facts: Any) -> Kernel:  # noqa: ANN401
    return of_layer(_bound(kernel, facts))


def _project_w8a8(facts: Any) -> Kernel:  # noqa: ANN401
    kernel = _bound("fp8_w8a8.split_k_partials", facts)

    def project(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        return kernel(x, weight, layer.bias) if has_kernels(weight) else layer(x)

    return project


def _norm_linear(facts: Any) -> Kernel:  # noqa: ANN401
    skinny, many = _bound("fp8_w8a8.split_k_partials", facts), _bound("fp8_w8a8.scaled_mm", facts)
    multiply = few_or_many(skinny, many, SKINNY_W8A8_TOKENS)
    return after_norm(facts, E4M3, _block_columns, multiply, lambda x, layer: layer(x))


def _norm_swiglu(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import quantizing, silu_mul

    pdl = facts.device.supports_pdl
    activate = partial(silu_mul.silu_and_mul, pdl=pdl)

    def for_down(gate_up: Tensor, down: Linear) -> Any:  # noqa: ANN401 - a tensor or `Quantized`
        if isinstance(down.method, Fp8Linear) and (columns := _block_columns(down)):
            return quantizing.swiglu_quantize(gate_up, E4M3, columns, pdl=pdl)
        return activate(gate_up)

    skinny, many = _bound("fp8_w8a8.linear_swiglu", facts), _bound("fp8_w8a8.scaled_mm", facts)
    multiply = few_or_many(skinny, many, SKINNY_W8A8_TOKENS, for_down)
    return after_norm(facts, E4M3, _block_columns, multiply, lambda x, layer, _: activate(layer(x)))


def _block_columns(layer: Linear) -> int:
    weight = layer.method.weight(layer)
    return weight.block_columns if has_kernels(weight) else 0


class Fp8Linear(QuantizedLinear):
    """Method of a linear layer with an e4m3 `weight` `[N, K]` and a float32 `weight_scale`.

    `Fp8Weight` describes the scales.
    """

    multiply = staticmethod(weight_only_linear)
    dequantize = staticmethod(fp8_weight.dequantize)
    has_kernels = staticmethod(has_kernels)

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec.format)
        if spec.one_scale:
            scale_axes = (1,)
        elif spec.format == "fp8_channel":
            scale_axes = (Axis("out"), 1)
        else:
            scale_axes = (Axis("out", BLOCK), Axis("in", BLOCK))
        self._spec = spec
        self._layouts = (
            TensorLayout(
                name="weight",
                parameter="weight",
                axes=(Axis("out"), Axis("in")),
                stored=FLOATS if spec.at_load else (E4M3,),
                dtype=E4M3,
                dummy=(0.0, 100.0),
                quantize=_by_rows if spec.at_load else None,
            ),
            TensorLayout(
                name="" if spec.at_load else "weight_scale",
                other_ending="_inv",
                parameter="weight_scale",
                axes=scale_axes,
                dtype=torch.float32,
                dummy=(2e-4, 0.0),
            ),
            *ACTIVATIONS,
        )

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        return self._layouts

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Expands the scales to the form that the kernels read.

        The single scale of a module is repeated for each of its channels. Block scales are repeated
        if the modules of a merged layer do not consist of whole blocks, so that each scale covers
        rows of one module.
        """
        if self._spec.one_scale:
            rows = torch.tensor(list(layer.parts.values()), device=layer.weight_scale.device)
            scale = layer.weight_scale.data.repeat_interleave(rows, -1).unsqueeze(-1)
            layer.weight_scale = nn.Parameter(scale, requires_grad=False)
            return
        block_rows, scales = self._block_rows(layer), []
        if block_rows == BLOCK or self._spec.format != "fp8_block":
            return
        for part, start, stop in layer.regions(self._layouts[1]):
            repeats = BLOCK // block_rows
            scale = layer.weight_scale.narrow(-2, start, stop - start)
            rows = -(-layer.parts[part] // block_rows)
            scales.append(scale.repeat_interleave(repeats, -2).narrow(-2, 0, rows))
        layer.weight_scale = nn.Parameter(torch.cat(scales, -2), requires_grad=False)

    def apply(self, layer: Linear, x: Any) -> Tensor:  # noqa: ANN401 - or `Quantized`
        if isinstance(x, Tensor):
            return super().apply(layer, x)
        assert self.kernels is not None
        found = self.kernels.call(self.operation, x, self.weight(layer), num_tokens=x.num_tokens)
        return found if layer.bias is None else found + layer.bias

    def weight(self, layer: Linear) -> Fp8Weight:
        columns = layer.in_features
        if self._spec.format == "fp8_block":
            columns = BLOCK
        return Fp8Weight(layer.weight, layer.weight_scale, self._block_rows(layer), columns)

    def rows(self) -> Sequence[Implementation[Any]]:
        return (*_fused_rows(self.weight_format), *linear_rows(self.operation))

    def _block_rows(self, layer: Linear) -> int:
        if self._spec.format == "fp8_channel":
            return 1
        *before_last, _ = layer.parts.values()
        return math.gcd(BLOCK, *before_last)


def _by_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_activations(values, values.shape[1])
