"""Linear layers whose weights are integers or small floats with a scale per group of columns.

Integers of 4 or 8 bits, with groups of g columns, are in the files as follows:

| packing            | codes                           | scales          |
|--------------------|---------------------------------|-----------------|
| compressed-tensors | `weight_packed` `[out, in / 8]` | `[out, in / g]` |
| int-quantized      | `weight` `[out, in]`, int8      | `[out, in / g]` |
| awq                | `qweight` `[in, out / 8]`       | `[in / g, out]` |
| gptq, auto-round   | `qweight` `[in / 8, out]`       | `[in / g, out]` |

A 32-bit word holds eight codes of 4 bits or four codes of 8 bits, the lowest bits first; AWQ orders
the codes of a word differently. Zero points are packed along the outputs. Only the middle of the
range is supported as zero point of GPTQ files, which store it minus 1, except for gptq_v2.

e2m1 values are in bytes `[out, in / 2]`, the low half first, named `weight_packed` in
compressed-tensors files and `weight` in ModelOpt files. The scale of the whole module is a divisor
in the former and a factor in the latter. The e4m3 values of MXFP8 are `weight` `[out, in]`. The
scales of MX formats are exponents e of 2^(e - 127).

After loading, each rank repacks its tensors into a `PackedWeight`. Activations are not quantized.
`packed_weight` is the specification in plain torch, and the only implementation on a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.gemm import packed_weight
from kernels.gemm.fp8_weight import E4M3
from kernels.gemm.packed_weight import (
    PackedWeight,
    has_kernels,
    has_tiles,
    tiled,
    weight_only_linear,
)
from kernels.tuning import swiglu_gemm_config
from services.common.model_spec import QuantizationSpec
from services.common.nn.dispatch import Implementation, Kernel, up_to
from services.common.nn.linear import Axis, Linear, TensorLayout
from services.common.nn.quantized import ACTIVATIONS, QuantizedLinear, half_obstacle

_WORDS = (torch.int32,)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of the codes in a word, the lowest bits first
_HALVES = (torch.float16, torch.bfloat16)
# Largest number of tokens for the split-K kernel. With more tokens it would read the codes so often
# that dequantizing the weight first takes less time.
SKINNY_TOKENS = 192
BYTES_TOKENS = 16  # largest number of tokens for kernels of codes in bytes; not measured yet


class PackedLinear(QuantizedLinear):
    """Method of a linear layer whose matrix is a `PackedWeight`."""

    multiply = staticmethod(weight_only_linear)
    dequantize = staticmethod(packed_weight.dequantize)
    has_kernels = staticmethod(has_kernels)

    def __init__(self, spec: QuantizationSpec) -> None:
        super().__init__(spec.format)
        self._spec = spec
        self._per_word = 32 // spec.bits
        self._is_float = spec.format in ("nvfp4", "mxfp4", "mxfp8")
        self._is_mx = spec.format in ("mxfp4", "mxfp8")
        of_integers = {
            "compressed-tensors": self._compressed_tensors,
            "int-quantized": self._int_quantized,
            "awq": self._awq,
            "gptq": self._gptq,
            "gptq_v2": self._gptq,
            "auto-round": self._gptq,
        }
        own = self._floats() if self._is_float else of_integers[spec.packing]()
        self._layouts = (*own, *ACTIVATIONS)

    def layouts(self, layer: Linear) -> tuple[TensorLayout, ...]:
        return self._layouts

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Repacks the tensors of the files into a `PackedWeight`, in tiles if possible."""
        packing = self._spec.packing
        codes, scale = layer.weight.data, layer.weight_scale.data
        if self._is_float:
            scale = torch.exp2(scale - 127) if self._is_mx else scale
        elif packing == "compressed-tensors":
            codes = codes.view(torch.uint8)  # already packed along columns
        elif packing == "int-quantized":
            codes = _each(codes, self._from_signed)
            codes = _each(codes, _pack) if self._spec.bits == 4 else codes
        elif packing == "awq":
            codes = _each(self._of_parts(layer, "weight"), _pack)
            scale = scale.mT
        else:
            codes = _each(codes, _by_rows)
            scale = scale.mT
        made = {"weight": codes, "weight_scale": _narrowed(scale)}
        if not self._spec.symmetric:
            if packing == "int-quantized":
                made["weight_zero"] = self._from_signed(layer.weight_zero.data)
            else:
                made["weight_zero"] = self._of_parts(layer, "weight_zero")
        if self._spec.format == "nvfp4":
            of_part = layer.weight_row_scale.data
            of_part = of_part if packing == "modelopt" else 1.0 / of_part
            rows = torch.tensor(list(layer.parts.values()), device=of_part.device)
            made["weight_row_scale"] = of_part.repeat_interleave(rows, -1).unsqueeze(-1)
        _set(layer, made)
        weight = self.weight(layer)
        if has_tiles(weight):
            weight = tiled(weight)
            made = {"weight": weight.codes, "weight_scale": weight.scale}
            _set(layer, made if weight.zero is None else {**made, "weight_zero": weight.zero})

    def weight(self, layer: Linear) -> PackedWeight:
        zero = None if self._spec.symmetric else layer.weight_zero
        return PackedWeight(
            layer.weight,
            layer.weight_scale,
            zero,
            self._spec.bits,
            self._spec.group_size or layer.in_features,
            layer.in_features,
            self._is_float,
            layer.weight_row_scale if self._spec.format == "nvfp4" else None,
            layer.weight.dtype == torch.int16,
        )

    def rows(self) -> Sequence[Implementation[Any]]:
        plain = Implementation(self.operation, "plain", lambda _: weight_only_linear)
        if self._spec.format == "mxfp8":
            return (plain,)  # no kernel reads e4m3 in groups yet
        of_tiles, of_bytes = up_to(SKINNY_TOKENS), up_to(BYTES_TOKENS)
        if self._spec.format == "w4a16":
            return (
                Implementation("project", "tiles", _project, half_obstacle, of_tiles),
                Implementation("linear_swiglu", "tiles", _linear_swiglu, half_obstacle),
                Implementation(self.operation, "tiles", _linear, half_obstacle),
                plain,
            )
        return (
            Implementation("project", "packed_skinny_gemm", _project, half_obstacle, of_bytes),
            Implementation(self.operation, "skinny_gemm", _linear, half_obstacle, of_bytes),
            plain,
        )

    def _of_parts(self, layer: Linear, parameter: str) -> Tensor:
        """Unpacks a parameter that is packed along the outputs into codes `[..., N, columns]`.

        The last word of each module may be partly empty.
        """
        (layout,) = (each for each in self._layouts if each.parameter == parameter)
        words, axis, found = layer.get_parameter(parameter).data, layout.merged_axis, list[Tensor]()
        unpack = _awq_rows if self._spec.packing == "awq" else partial(_rows, self._spec.bits)
        for part, start, stop in layer.regions(layout):
            of_part = words.narrow(axis - len(layout.axes), start, stop - start)
            found.append(_each(of_part, unpack)[..., : layer.parts[part], :])
        return torch.cat(found, -2)

    def _from_signed(self, values: Tensor) -> Tensor:
        """Converts signed integers to codes, whose zero is the middle of the range."""
        middle = 1 << (self._spec.bits - 1)
        return (values.view(torch.uint8) + middle) & (2 * middle - 1)

    # Layouts of a module's tensors in the files.

    def _floats(self) -> tuple[TensorLayout, ...]:
        is_ours, is_mx = self._spec.packing == "compressed-tensors", self._is_mx
        number = {"axes": (1,), "stored": (torch.float32,)}
        per_byte = 8 // self._spec.bits
        kind, exponent = (torch.uint8, 119.0) if per_byte == 2 else (E4M3, 115.0)
        codes = TensorLayout(
            name="weight_packed" if is_ours and per_byte == 2 else "weight",
            parameter="weight",
            axes=(Axis("out"), Axis("in", per_byte)),
            stored=(kind,),
            dtype=kind,
            dummy=(0.0, 100.0),  # applies to e4m3 only, since random bytes are uniform
        )
        scale = TensorLayout(
            name="weight_scale",
            parameter="weight_scale",
            axes=(Axis("out"), self._groups),
            stored=(torch.uint8 if is_mx else E4M3,),
            dtype=torch.float32,
            dummy=(exponent if is_mx else 1.0, 0.0),
        )
        if is_mx:
            return codes, scale
        whole = TensorLayout(
            name="weight_global_scale" if is_ours else "weight_scale_2",
            parameter="weight_row_scale",
            dtype=torch.float32,
            dummy=(150.0 if is_ours else 7e-3, 0.0),
            **number,
        )
        return codes, scale, whole

    def _compressed_tensors(self) -> tuple[TensorLayout, ...]:
        out, per = Axis("out"), self._per_word
        layouts = [
            _words("weight_packed", "weight", out, Axis("in", per)),
            _scales("weight_scale", out, self._groups),
            TensorLayout(
                name="weight_shape",
                axes=(2,),
                stored=(torch.int64, torch.int32),
                required=lambda rows, columns: torch.tensor([rows, columns]),
                otherwise="the value is not the shape of the module",
            ),
        ]
        if not self._spec.symmetric:
            zeros = _words("weight_zero_point", "weight_zero", Axis("out", per), self._groups)
            layouts.append(zeros)
        return tuple(layouts)

    def _int_quantized(self) -> tuple[TensorLayout, ...]:
        out, layouts = Axis("out"), list[TensorLayout]()
        named = {"weight": Axis("in"), "weight_zero_point": self._groups}
        for name, columns in named.items():
            parameter = name.removesuffix("_point")
            layouts.append(
                TensorLayout(
                    name=name,
                    parameter=parameter,
                    axes=(out, columns),
                    stored=(torch.int8,),
                    dtype=torch.int8,
                )
            )
        weight, zero = layouts
        scale = _scales("weight_scale", out, self._groups)
        return (weight, scale) if self._spec.symmetric else (weight, scale, zero)

    def _awq(self) -> tuple[TensorLayout, ...]:
        packed = Axis("out", self._per_word)
        return (
            _words("qweight", "weight", Axis("in"), packed),
            _words("qzeros", "weight_zero", self._groups, packed),
            _scales("scales", self._groups, Axis("out")),
        )

    def _gptq(self) -> tuple[TensorLayout, ...]:
        spec, per = self._spec, self._per_word
        middle = (1 << (spec.bits - 1)) - (spec.packing != "gptq_v2")
        word = int.from_bytes(bytes([middle if spec.bits == 8 else 17 * middle] * 4), "little")
        zero = word - (1 << 32) if word >> 31 else word

        def zeros(rows: int, columns: int) -> Tensor:
            size = -(-columns // (spec.group_size or columns)), -(-rows // per)
            return torch.full(size, zero, dtype=torch.int32)

        def groups(rows: int, columns: int) -> Tensor:
            return torch.arange(columns) // (spec.group_size or columns)

        layouts = (
            _words("qweight", "weight", Axis("in", per), Axis("out")),
            _scales("scales", self._groups, Axis("out")),
            TensorLayout(
                name="qzeros",
                axes=(self._groups, Axis("out", per)),
                stored=_WORDS,
                required=zeros,
                otherwise=f"zero points are not those of symmetric {spec.packing} files; "
                "see checkpoint_format and sym in the configuration",
            ),
            TensorLayout(
                name="g_idx",
                axes=(Axis("in"),),
                stored=(torch.int32, torch.int64),
                required=groups,
                otherwise="columns are not in the order of their groups: act-order (desc_act) is "
                "not supported",
            ),
        )
        return layouts[:-1] if spec.packing == "auto-round" else layouts

    @property
    def _groups(self) -> Axis | int:
        """Axis of the groups of columns. A size of 1 if a group is a whole row."""
        size = self._spec.group_size
        return Axis("in", size) if size else 1


def _linear(facts: Any) -> Kernel:  # noqa: ANN401 - the facts of the decoder, as below
    """Kernel `(x, weight)` → `[T, N]`.

    For a weight that is not in tiles, a kernel of codes in bytes multiplies up to `BYTES_TOKENS`
    tokens; for more tokens the weight is dequantized.
    """
    from kernels.gemm import packed_kernels, packed_tiles, packed_weight
    from kernels.gemm.skinny_gemm import summed

    def multiply(x: Tensor, weight: packed_weight.PackedWeight) -> Tensor:
        if weight.is_tiled:
            if len(x) <= SKINNY_TOKENS:
                return summed(packed_tiles.split_k_partials, x, weight, device=facts.device)
            return packed_tiles.linear(x, weight, device=facts.device)
        if len(x) <= BYTES_TOKENS:
            return summed(packed_kernels.split_k_partials, x, weight, device=facts.device)
        return packed_weight.weight_only_linear(x, weight)

    return multiply


def _project(facts: Any) -> Kernel:  # noqa: ANN401
    """Kernel `(x, layer)` → `[T, N]` or split-K partials, for up to `SKINNY_TOKENS` tokens."""
    from kernels.gemm import packed_kernels, packed_tiles, packed_weight

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        if weight.is_tiled:
            return packed_tiles.split_k_partials(x, weight, layer.bias, device=facts.device)
        if len(x) <= BYTES_TOKENS and packed_weight.has_kernels(weight):
            return packed_kernels.split_k_partials(x, weight, layer.bias, device=facts.device)
        return layer(x)

    return multiply


def _linear_swiglu(facts: Any) -> Kernel:  # noqa: ANN401
    """Kernel `(x, layer of gate and up)` → `silu(gate) * up` `[T, N]`."""
    from kernels.gemm import packed_tiles, silu_mul, swiglu_gemm

    device = facts.device

    def multiply(x: Tensor, layer: Linear) -> Tensor:
        weight = layer.method.weight(layer)
        divides = weight.is_tiled and weight.rows % (2 * packed_tiles.TILE_ROWS) == 0
        if divides and len(x) <= SKINNY_TOKENS:
            return packed_tiles.linear_swiglu(x, weight, layer.bias, device=device)
        config = swiglu_gemm_config(device, weight.columns)
        fits = divides and device.is_hopper and not config.obstacle(weight.rows, weight.columns)
        if fits and layer.bias is None and config.is_faster(len(x), weight.rows):
            wide = packed_tiles.dequantized(weight, x.dtype, device=device)
            return swiglu_gemm.linear_swiglu(x, wide, config)
        return silu_mul.silu_and_mul(layer(x), pdl=facts.device.supports_pdl)

    return multiply


def _set(layer: Linear, tensors: Mapping[str, Tensor]) -> None:
    for name, values in tensors.items():
        layer.register_parameter(name, nn.Parameter(values.contiguous(), requires_grad=False))


def _words(name: str, parameter: str, *axes: Axis | int) -> TensorLayout:
    return TensorLayout(name=name, parameter=parameter, axes=axes, stored=_WORDS, dtype=torch.int32)


def _scales(name: str, *axes: Axis | int) -> TensorLayout:
    return TensorLayout(
        name=name, parameter="weight_scale", axes=axes, dtype=torch.float32, dummy=(4e-3, 0.0)
    )


def _narrowed(scale: Tensor) -> Tensor:
    """Converts scales to float16 or bfloat16 if that keeps each value exactly.

    It does if the files store the scales in this data type.
    """
    for dtype in _HALVES:
        if scale.to(dtype).float().equal(scale):
            return scale.to(dtype)
    return scale


def _each(stack: Tensor, repack: Callable[[Tensor], Tensor]) -> Tensor:
    """Repacks a matrix, or the matrices of a stack one at a time, which bounds the memory."""
    if stack.dim() == 2:
        return repack(stack)
    first = repack(stack[0]).contiguous()
    made = first.new_empty((len(stack), *first.shape))
    for index, words in enumerate(stack):
        made[index] = repack(words)
    return made


def _by_rows(words: Tensor) -> Tensor:
    """Converts words `[K / per, N]` along K to bytes `[N, K]`, or `[N, K / 2]` for 4 bits."""
    return words.contiguous().view(torch.uint8).view(*words.shape, 4).transpose(0, 1).flatten(1)


def _rows(bits: int, words: Tensor) -> Tensor:
    """Converts words `[N / per, G]` along N to codes `[N, G]`."""
    codes = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    codes = _halves(codes) if bits == 4 else codes
    return codes.transpose(1, 2).flatten(0, 1)


def _awq_rows(words: Tensor) -> Tensor:
    """Converts AWQ words `[R, N / 8]` to codes `[N, R]`."""
    codes = _halves(words.contiguous().view(torch.uint8).view(*words.shape, 4))
    order = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return codes[..., order].flatten(1).t()


def _halves(codes: Tensor) -> Tensor:
    """Splits bytes `[..., B]` into their low and high halves `[..., 2 * B]`."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def _pack(codes: Tensor) -> Tensor:
    """Packs codes of 4 bits `[N, K]` into bytes `[N, ceil(K / 2)]`."""
    if codes.shape[1] % 2:
        codes = nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4
