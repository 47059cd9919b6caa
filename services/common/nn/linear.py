"""Linear layers, whose `LinearMethod` defines how weights are stored and multiplied.

Each weight format is a `LinearMethod`, which describes the tensors that a checkpoint holds for a
module. A layer makes its parameters from this description, and the loader fills them, with tensor
parallelism from a rank's share of the files. Layers and models are the same for all formats.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.nn.checkpoint import TensorInfo
from services.common.nn.collectives import Share
from services.common.nn.dispatch import Implementation, KernelTable

Dimension = Literal["out", "in"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of a stored tensor.

    Attributes:
        dimension: dimension of the weight matrix `[out, in]` to which the axis corresponds.
        per: matrix rows or columns per element, for example 1 for a weight, 128 for scales of
            blocks of 128, or 8 for eight packed values. The last element may cover fewer.
    """

    dimension: Dimension
    per: int = 1

    def count(self, size: int) -> int:
        """Number of elements for `size` matrix rows or columns."""
        return -(-size // self.per)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """A tensor that a checkpoint holds for each module of a format, and the parameter it fills.

    The parameter of a merged layer is the concatenation of the modules' tensors along the `out`
    axis, or along the first axis if there is no `out` axis.

    Attributes:
        name: name of the tensor within its module, such as `weight_scale_inv`. Empty if the files
            have no such tensor and the `quantize` function of another tensor fills the parameter.
        other_ending: ending that some producers add to the name.
        parameter: name of the layer's parameter. Empty if the tensor fills no parameter; it is then
            compared with `required`, or ignored if `required` is None.
        axes: axes of the tensor. A number is a size that does not depend on the matrix.
        stored: data types that the files may have.
        dtype: data type of the parameter. None if it is the model's.
        dummy: mean and standard deviation of random weights.
        required: function of a module's (rows, columns) that returns the only supported value of
            the tensor. None if any value is supported.
        otherwise: error message for another value than the required one.
        quantize: function that quantizes floats `[rows, columns]` of the files into values of the
            parameter and scales `[rows, 1]`, which fill the same rows of `weight_scale`. None if
            the tensor is copied.
    """

    name: str
    other_ending: str = ""
    parameter: str = ""
    axes: tuple[Axis | int, ...]
    stored: tuple[torch.dtype, ...] = FLOATS
    dtype: torch.dtype | None = None
    dummy: tuple[float, float] = (0.0, 0.02)
    required: Callable[[int, int], Tensor] | None = None
    otherwise: str = ""
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        sizes: dict[Dimension, int] = {"out": out_features, "in": in_features}
        return tuple(
            axis.count(sizes[axis.dimension]) if isinstance(axis, Axis) else axis
            for axis in self.axes
        )

    @property
    def merged_axis(self) -> int:
        """The tensor's dimension along which the modules of a merged layer are concatenated."""
        found = [
            i
            for i, axis in enumerate(self.axes)
            if isinstance(axis, Axis) and axis.dimension == "out"
        ]
        return found[0] if found else 0

    def cuts(self, rows: Share, columns: Share, what: str) -> list[tuple[slice, ...]]:
        """Indices of the pieces that a layer reads of a module's tensor.

        The pieces are in the order in which they follow each other along `merged_axis`. An empty
        index stands for the whole tensor.

        Args:
            rows: share of the module's rows that the layer holds.
            columns: share of the module's columns that the layer holds.
            what: name of the tensor for the error message.

        Raises:
            ValueError: a piece would cut through a block.
        """
        if rows.is_whole and columns.is_whole:
            return [()]
        if not any(isinstance(axis, Axis) for axis in self.axes):
            return [()]
        shares = {"out": rows, "in": columns}
        pieces = [
            shares[axis.dimension].elements(axis.per, what)
            if isinstance(axis, Axis)
            else [slice(None)]
            for axis in self.axes
        ]
        return [cut[::-1] for cut in itertools.product(*reversed(pieces))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in the files, or a rank's piece of a tensor, and the region that it fills.

    Attributes:
        name: name of the tensor within its module. The loader replaces it by the full name.
        part: name of the module, see `Linear.parts`.
        parameter: name of the parameter. Empty if the tensor fills no parameter and is at most
            compared with the value that its layout requires.
        layout: description of the tensor.
        shape: shape of the whole tensor in the file.
        module: rows and columns of the module.
        place: index of the region of the parameter that is filled.
        cut: index of the piece of the tensor that fills the region. Empty if it is the whole
            tensor.
        transposed: True if the tensor's last two axes have the opposite order of the region's.
        is_zero: True if the region is filled with zeros because the first rank holds the tensor.
    """

    name: str
    part: str = ""
    parameter: str
    layout: TensorLayout
    shape: tuple[int, ...]
    module: tuple[int, int]
    place: tuple[int | slice, ...]
    cut: tuple[int | slice, ...] = ()
    transposed: bool = False
    is_zero: bool = False

    @property
    def is_read(self) -> bool:
        """Returns whether the tensor is needed. A tensor that is not needed may be missing."""
        return bool(self.parameter) or self.layout.required is not None


def pieces_of(
    part: str, layout: TensorLayout, rows: Share, columns: Share, start: int = 0
) -> Iterator[StoredTensor]:
    """Yields the pieces of a module's tensor that a layer holds.

    Args:
        part: name of the module, see `Linear.parts`.
        layout: description of the tensor.
        rows, columns: shares of the module's rows and columns that the layer holds.
        start: index along the parameter's merged axis at which the module begins.

    Raises:
        ValueError: a piece would cut through a block.
    """
    axis, whole = layout.merged_axis, layout.shape(rows.size, columns.size)
    for cut in layout.cuts(rows, columns, f"{part}.{layout.name}".lstrip(".")):
        indices = range(whole[axis])[cut[axis]] if cut else range(whole[axis])
        stop = start + len(indices)
        yield StoredTensor(
            name=layout.name,
            part=part,
            parameter=layout.parameter,
            layout=layout,
            shape=whole,
            module=(rows.size, columns.size),
            place=(*[slice(None)] * axis, slice(start, stop)),
            cut=cut,
        )
        start = stop


class LinearMethod(ABC):
    """Storage and multiplication of a linear layer's weights. Many layers may share a method.

    Attributes:
        weight_format: name of the format in dispatch tables: `plain`, or a key of
            `formats.METHODS`.
        operation: name of the dispatch table's operation that multiplies by such weights.
        kernels: the model's dispatch table. None if the table has no rows for `operation`; plain
            torch multiplies then.
    """

    weight_format: str
    operation: str
    kernels: KernelTable | None = None

    @abstractmethod
    def layouts(self, layer: "Linear") -> tuple[TensorLayout, ...]:
        """The tensors that a checkpoint holds for each module, without the bias."""

    def process_weights_after_loading(self, layer: "Linear") -> None:  # noqa: B027 - nothing to do
        """Converts loaded parameters to the form that `apply` reads. Called once."""

    @abstractmethod
    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """Applies the layer, with its bias: `[..., in_features]` → `[..., out_features]`."""

    @abstractmethod
    def weight(self, layer: "Linear") -> Any:  # noqa: ANN401 - a type of the format
        """The layer's matrix in the form that kernels take. A stack of matrices can be indexed."""

    @abstractmethod
    def rows(self) -> Sequence[Implementation[Any]]:
        """Rows that the format adds to a dispatch table.

        The rows implement `operation`, and operations that fuse a multiplication with adjacent
        operations. They have precedence over the table's own rows, for layers of this format only.
        """


_WEIGHT = TensorLayout(name="weight", parameter="weight", axes=(Axis("out"), Axis("in")))
_BIAS = TensorLayout(name="bias", parameter="bias", axes=(Axis("out"),))


class UnquantizedLinear(LinearMethod):
    """Method of a layer with a `weight` `[out_features, in_features]` in the model's dtype."""

    weight_format = "plain"
    operation = "linear"

    def layouts(self, layer: "Linear") -> tuple[TensorLayout, ...]:
        return (_WEIGHT,)

    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        if self.kernels is None or x.dim() != 2:
            return F.linear(x, layer.weight, layer.bias)
        return self.kernels.call(self.operation, x, layer.weight, layer.bias)

    def weight(self, layer: "Linear") -> Tensor:
        return layer.weight

    def rows(self) -> Sequence[Implementation[Any]]:
        return ()  # dispatch tables have their own rows for unquantized layers


class Linear(nn.Module):
    """Linear layer `y = x @ W.T + b`. A merged layer computes several modules of one input at once.

    The parameters of a merged layer are the concatenation of those of the checkpoint's modules.
    For example, with
    `self.qkv_proj = Linear(hidden, {"q_proj": 2048, "k_proj": 1024, "v_proj": 1024})` under
    `self_attn`, the rows of `self_attn.qkv_proj.weight` are those of `self_attn.q_proj.weight`,
    `self_attn.k_proj.weight` and `self_attn.v_proj.weight`.

    Attributes:
        parts: number of rows of each of the checkpoint's modules in this layer, by module name. A
            layer that is not merged has one module, whose name is empty.
        method: storage and multiplication of the weights. The loader may change it before the
            parameters have memory (`set_method`).
        rows: share of each module's rows that the layer holds, by module name.
        columns: share of the modules' columns that the layer holds. If it is not the whole, the
            layer's output is a term of a sum over ranks, and only the first rank adds the bias.
    """

    stack: tuple[int, ...] = ()  # leading sizes of the parameters of stacked layers
    weight: nn.Parameter  # the method defines dtype and shape
    # Only some methods have these three parameters.
    weight_scale: nn.Parameter
    weight_zero: nn.Parameter
    weight_row_scale: nn.Parameter
    # Factors of adapters (`adapter_stack.AdapterStack`). None if no adapter changes the layer.
    adapters: Any = None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int | Share,
        out_features: int | Share | Mapping[str, int | Share],
        bias: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        given = out_features if isinstance(out_features, Mapping) else {"": out_features}
        self.rows = {part: Share.of(size) for part, size in given.items()}
        self.columns = Share.of(in_features)
        self.parts = {part: share.count for part, share in self.rows.items()}
        self.in_features, self.out_features = self.columns.count, sum(self.parts.values())
        self._has_bias = bias
        self.set_method(method or UnquantizedLinear())

    def set_method(self, method: LinearMethod) -> None:
        """Replaces the method and the parameters of the layer."""
        for name in list(self._parameters):
            del self._parameters[name]
        self.method: LinearMethod = method
        for layout in self.layouts():
            if not layout.parameter:
                continue
            shape = list(layout.shape(self.out_features, self.in_features))
            shape[layout.merged_axis] = max(stop for _, _, stop in self.regions(layout))
            shape = [*self.stack, *shape]
            made = torch.empty(shape, dtype=layout.dtype or torch.float32)
            self.register_parameter(layout.parameter, nn.Parameter(made, requires_grad=False))
        if not self._has_bias:
            self.register_parameter("bias", None)

    def layouts(self) -> tuple[TensorLayout, ...]:
        """The tensors that a checkpoint holds for each module, with the bias."""
        return self.method.layouts(self) + ((_BIAS,) if self._has_bias else ())

    def regions(self, layout: TensorLayout) -> Iterator[tuple[str, int, int]]:
        """Yields each module's name and the range (first, last + 1) that it fills.

        The range is along the parameter's merged axis.
        """
        start = 0
        for part, rows in self.parts.items():
            stop = start + layout.shape(rows, self.in_features)[layout.merged_axis]
            yield part, start, stop
            start = stop

    def pieces(self, layout: TensorLayout) -> Iterator[StoredTensor]:
        """Yields the modules' tensors, or a rank's pieces of these, that fill a parameter.

        Raises:
            ValueError: a piece would cut through a block.
        """
        is_zero = layout.parameter == "bias" and self.columns.ranges[0][0] > 0
        for part, start, _ in self.regions(layout):
            for piece in pieces_of(part, layout, self.rows[part], self.columns, start):
                yield replace(piece, is_zero=is_zero)

    @property
    def float32_parameters(self) -> frozenset[str]:
        """Parameters that stay float32 in a model of another dtype."""
        return frozenset(x.parameter for x in self.layouts() if x.dtype == torch.float32)

    @property
    def weight_format(self) -> str:
        return self.method.weight_format

    @property
    def is_plain(self) -> bool:
        """Returns whether the layer is unquantized, so that fused operations can read `weight`."""
        return self.weight_format == UnquantizedLinear.weight_format

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer: `[..., in_features]` → `[..., out_features]`."""
        return self.method.apply(self, x)


class StoredLayers(nn.Module, ABC):
    """Stacked layers, such as the experts of a mixture, which files hold in various layouts."""

    @property
    @abstractmethod
    def weight_format(self) -> str:
        """Weight format in dispatch tables. If the layers' formats differ, joined by `+`."""

    @abstractmethod
    def file_layout(self, prefix: str, tensors: Mapping[str, TensorInfo]) -> str:
        """Name of the layout of the files' tensors under `prefix`."""

    @abstractmethod
    def modules_of(self, layer: str, layout: str) -> dict[str, str]:
        """Maps a layer's modules in the files to their weights. Names are without the prefix."""

    @abstractmethod
    def tensors(self, layout: str) -> Iterator[StoredTensor]:
        """Yields the tensors that the files hold. Called once the layers have their methods.

        Tensor names are without the prefix, and parameter names are relative to this module.
        """


def set_kernels(module: nn.Module, kernels: KernelTable) -> None:
    """Makes the layers of a module call a dispatch table, if it has rows for their format."""
    for layer in module.modules():
        if isinstance(layer, Linear) and layer.method.operation in kernels.operations:
            layer.method.kernels = kernels
