"""Linear layers of FP8 weights: their plain twins, their dispatch rows, and the layers' method.

Two computations of a layer are in use, both of an `Fp8Weight`:

- weight-only: activations stay as they are. A CPU does nothing else, and a GPU does it for few
  tokens, where reading the weights takes the time.
- W8A8: activations are quantized, too, with scale `amax / 448` per token and 128 columns
  (`fp8_block`) or per token (`fp8_channel`), so that FP8 tensor cores can multiply them.

The functions here are the specification of both; `implementations` are the rows of a dispatch
table, whose kernels are in `fp8_kernels` and `fp8_w8a8`. `weights` gives layers the method where
the files hold FP8.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.device import DeviceFacts
from kernels.gemm import fp8_weight
from kernels.gemm.fp8_weight import BLOCK, E4M3, Fp8Weight, quantize_activations, weight_only_linear
from kernels.plain import reduce_split_k
from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation, Kernel, TokenRange
from services.common.nn.layers import RMSNorm
from services.common.nn.linear import Axis, Linear, TensorLayout
from services.common.nn.quantized import QuantizedLinear, after_norm, half_obstacle

# The most tokens for which they are the fastest, by `benchmarks.kernels.fp8` on an H200, 8B shapes:
# weight-only, and with quantized activations, which only Hopper is known to be faster with.
GEMV_TOKENS = 1
SKINNY_TOKENS = 32
SKINNY_W8A8_TOKENS = 64


def has_kernels(weight: Fp8Weight) -> bool:
    """Whether kernels other than plain ones take the weight: whole blocks of columns, and scales
    that cover 128 rows, or one.
    """
    rows, columns = weight.values.shape
    return rows % 16 == 0 and columns % BLOCK == 0 and weight.block_rows in (1, BLOCK)


def implementations(device_of: Callable[[Any], DeviceFacts]) -> Sequence[Implementation[Any]]:
    """Rows of a dispatch table: `fp8_block_linear` and `fp8_channel_linear`, `(x, weight)` →
    `[T, N]` with x `[T, K]` and `weight` an `Fp8Weight`.

    Args:
        device_of: the facts of the device, of the facts that the table is resolved for.
    """

    def triton(facts: Any) -> str:  # noqa: ANN401 - the table's
        return device_of(facts).triton_obstacle

    def fp8_cores(facts: Any) -> str:  # noqa: ANN401
        return triton(facts) or (
            "" if device_of(facts).capability >= (8, 9) else "needs FP8 tensor cores"
        )

    def blocks(facts: Any) -> str:  # noqa: ANN401
        return _hopper(device_of(facts)) or (
            "" if hasattr(F, "scaled_mm") else "needs torch.nn.functional.scaled_mm"
        )

    def kernel(name: str, facts: Any) -> Kernel:  # noqa: ANN401
        from kernels.gemm import fp8_kernels, fp8_w8a8

        device = device_of(facts)
        if name == "skinny_gemm":
            return partial(fp8_kernels.skinny_gemm, device=device)
        if name == "skinny_w8a8":
            return partial(fp8_w8a8.skinny_gemm, device=device)
        module = fp8_kernels if name == "gemv" else fp8_w8a8
        return partial(getattr(module, name), pdl=device.supports_pdl)

    rows: list[Implementation[Any]] = []
    for operation, scaled_mm in (("fp8_block_linear", blocks), ("fp8_channel_linear", fp8_cores)):
        choices: list[tuple[str, Callable[[Any], str], TokenRange]] = [
            ("gemv", triton, TokenRange(1, GEMV_TOKENS)),
            (
                "skinny_w8a8",
                lambda facts: _hopper(device_of(facts)),
                TokenRange(1, SKINNY_W8A8_TOKENS),
            ),
            ("skinny_gemm", triton, TokenRange(1, SKINNY_TOKENS)),
            ("scaled_mm", scaled_mm, TokenRange()),
        ]
        if operation == "fp8_block_linear":
            choices.append(("triton_gemm", fp8_cores, TokenRange()))
        rows += [
            Implementation(
                operation, name, partial(kernel, name), obstacle, lambda _, tokens=tokens: tokens
            )
            for name, obstacle, tokens in choices
        ]
        rows.append(Implementation(operation, "plain", lambda _: weight_only_linear))
    return rows


def _hopper(device: DeviceFacts) -> str:
    return device.triton_obstacle or ("" if device.is_hopper else "needs Hopper")


def _fused_rows(weight_format: str) -> Sequence[Implementation[Any]]:
    """Rows of the operations of the decoder's layers, whose facts these are."""

    def fits(facts: Any) -> str:  # noqa: ANN401 - the decoder's
        if why := half_obstacle(facts):
            return why
        text = facts.text
        sizes = [text.hidden_size, facts.query_size, text.intermediate_size]
        if weight_format == "fp8_block":  # rows, too; of q, k, v, gate and up one by one
            sizes.append(text.num_kv_heads * text.head_dim)
        odd = [size for size in sizes if size % BLOCK]
        return f"{odd[0]} is not a multiple of {BLOCK}" if odd else ""

    def adds(facts: Any) -> str:  # noqa: ANN401
        alone = "" if facts.num_ranks == 1 else "needs all of the layer on one rank"
        return fits(facts) or alone

    def hopper(facts: Any) -> str:  # noqa: ANN401
        return half_obstacle(facts) or _hopper(facts.device)

    def most(num_tokens: int) -> Callable[[Any], TokenRange]:
        return lambda _: TokenRange(1, num_tokens)

    few = most(GEMV_TOKENS)
    return (
        Implementation("norm_linear", "fp8_gemv", partial(_norm_gemv, "norm_gemv"), fits, few),
        Implementation("norm_linear", "fp8_norm", _norm_linear, hopper),
        Implementation(
            "norm_swiglu", "fp8_gemv", partial(_norm_gemv, "norm_swiglu_gemv"), fits, few
        ),
        Implementation("norm_swiglu", "fp8_norm", _norm_swiglu, hopper),
        Implementation("linear_residual", "fp8_gemv", _gemv_add, adds, few),
        Implementation("project", "fp8_skinny_w8a8", _project, hopper, most(SKINNY_W8A8_TOKENS)),
        Implementation("project", "fp8_skinny_gemm", _split_k, fits, most(SKINNY_TOKENS)),
    )


def _norm_gemv(name: str, facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import fp8_kernels

    fused, pdl = getattr(fp8_kernels, name), facts.device.supports_pdl

    def norm_linear(
        x: Tensor | None, residual: Tensor, norm: RMSNorm, layer: Linear
    ) -> tuple[Tensor, Tensor]:
        if x is not None:
            residual = residual + reduce_split_k(x, residual.dtype)
        weight = layer.method.weight(layer)
        return fused(residual, norm.weight, norm.eps, weight, layer.bias, pdl=pdl), residual

    return norm_linear


def _norm_linear(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import fp8_w8a8
    from kernels.gemm.quantizing import Quantized

    def multiply(x: Quantized, layer: Linear) -> Tensor:
        weight, device = layer.method.weight(layer), facts.device
        if x.num_tokens <= SKINNY_W8A8_TOKENS:
            return fp8_w8a8.split_k_partials(x, weight, layer.bias, device=device)
        found = fp8_w8a8.scaled_mm(x, weight, pdl=device.supports_pdl)
        return found if layer.bias is None else found + layer.bias

    return after_norm(facts, E4M3, _block_columns, multiply, lambda x, layer: layer(x))


def _norm_swiglu(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import fp8_w8a8, silu_mul
    from kernels.gemm.quantizing import Quantized

    activate = partial(silu_mul.silu_and_mul, pdl=facts.device.supports_pdl)

    def multiply(x: Quantized, layer: Linear) -> Tensor:
        weight, device = layer.method.weight(layer), facts.device
        if x.num_tokens <= SKINNY_W8A8_TOKENS:
            return fp8_w8a8.linear_swiglu(x, weight, layer.bias, device=device)
        found = fp8_w8a8.scaled_mm(x, weight, pdl=device.supports_pdl)
        return activate(found if layer.bias is None else found + layer.bias)

    return after_norm(facts, E4M3, _block_columns, multiply, lambda x, layer: activate(layer(x)))


def _block_columns(layer: Linear) -> int:
    weight = layer.method.weight(layer)
    return weight.block_columns if has_kernels(weight) else 0


def _gemv_add(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import fp8_kernels

    pdl = facts.device.supports_pdl

    def linear_residual(x: Tensor, layer: Linear, residual: Tensor) -> None:
        weight = layer.method.weight(layer)
        return fp8_kernels.gemv_add(x, weight, layer.bias, residual, pdl=pdl)

    return linear_residual


def _project(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import fp8_w8a8

    def project(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        if not has_kernels(weight):
            return layer(x)
        return fp8_w8a8.split_k_partials(x, weight, layer.bias, device=facts.device)

    return project


def _split_k(facts: Any) -> Kernel:  # noqa: ANN401
    from kernels.gemm import fp8_kernels

    def project(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        return fp8_kernels.split_k_partials(x, weight, layer.bias, device=facts.device)

    return project


class Fp8Linear(QuantizedLinear):
    """Method of a linear layer: `weight` e4m3 `[N, K]`, `weight_scale` float32, see `Fp8Weight`."""

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec.format)
        rows, columns = spec.block_size
        if spec.one_scale:
            scale_axes = (1,)
        elif spec.format == "fp8_channel":
            scale_axes = (Axis("out"), None)
        else:
            scale_axes = (Axis("out", rows), Axis("in", columns))
        self._spec = spec
        if spec.at_load:
            self._layouts = (
                TensorLayout(
                    name="weight", parameter="weight", axes=(Axis("out"), Axis("in")), dtype=E4M3,
                    dummy=(0.0, 100.0),
                    quantize=lambda rows: quantize_activations(rows, rows.shape[1]),
                ),
                TensorLayout(
                    name="", parameter="weight_scale", axes=scale_axes, dtype=torch.float32,
                    dummy=(2e-4, 0.0),
                ),
            )  # fmt: skip
            return
        self._layouts = (
            TensorLayout(
                name="weight", parameter="weight", axes=(Axis("out"), Axis("in")),
                stored=(E4M3,), dtype=E4M3, dummy=(0.0, 100.0),
            ),
            TensorLayout(
                name=spec.scale_name, parameter="weight_scale", axes=scale_axes,
                other_ending="_inv" if spec.packing == "modelopt" else "",
                dtype=torch.float32, dummy=(2e-4, 0.0),
            ),
        )  # fmt: skip
        if spec.has_input_scale:
            self._layouts += (TensorLayout(name="input_scale", axes=(1,)),)

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        return self._layouts

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Repeats block scales so that a scale covers rows of one part only, and the one scale of a
        part for its channels.
        """
        if self._spec.one_scale:
            rows = torch.tensor(list(layer.parts.values()), device=layer.weight_scale.device)
            scale = layer.weight_scale.data.repeat_interleave(rows, -1).unsqueeze(-1)
            layer.weight_scale = nn.Parameter(scale, requires_grad=False)
            return
        if self._block_rows(layer) == self._spec.block_size[0] or self._spec.format != "fp8_block":
            return
        block_rows, scales = self._block_rows(layer), []
        for part, start, stop in layer.regions(self._layouts[1]):
            repeats = self._spec.block_size[0] // block_rows
            scale = layer.weight_scale.narrow(-2, start, stop - start)
            rows = -(-layer.parts[part] // block_rows)
            scales.append(scale.repeat_interleave(repeats, -2).narrow(-2, 0, rows))
        layer.weight_scale = nn.Parameter(torch.cat(scales, -2), requires_grad=False)

    def weight(self, layer: Linear) -> Fp8Weight:
        columns = layer.in_features
        if self._spec.format == "fp8_block":
            columns = self._spec.block_size[1]
        return Fp8Weight(layer.weight, layer.weight_scale, self._block_rows(layer), columns)

    def multiply(self, x: Tensor, weight: Fp8Weight) -> Tensor:
        return weight_only_linear(x, weight)

    def dequantize(self, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        return fp8_weight.dequantize(weight, dtype)

    def has_kernels(self, weight: Fp8Weight) -> bool:
        return has_kernels(weight)

    def rows(self) -> Sequence[Implementation[Any]]:
        linear = implementations(lambda facts: facts.device)
        own = [row for row in linear if row.operation == self.operation]
        return (*_fused_rows(self.weight_format), *own)

    def _block_rows(self, layer: Linear) -> int:
        if self._spec.format == "fp8_channel":
            return 1
        *before_last, _ = layer.parts.values()
        return math.gcd(self._spec.block_size[0], *before_last)
