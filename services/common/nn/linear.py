"""Linear layers. How weights are stored and multiplied is the business of a layer's method.

A weight format is one `LinearMethod`: it lays out the tensors that a checkpoint holds for a module.
From that layout a layer makes its parameters, and the loader fills them, with a rank's part of the
files where ranks share a model. Layers and models do not change.
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
    """One dimension of a stored tensor.

    Attributes:
        dimension: the dimension of the weight matrix `[out, in]` that it runs along.
        per: matrix rows or columns per element: 1 for a weight, 128 for scales of 128-blocks, 8 for
            eight packed values. The last element may cover fewer.
    """

    dimension: Dimension
    per: int = 1

    def count(self, size: int) -> int:
        """Elements that `size` matrix rows or columns take."""
        return -(-size // self.per)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """A tensor that a checkpoint holds for each module of a format, and the parameter it fills.

    A merged layer's parameter holds the modules' tensors one after the other along the `out` axis;
    where there is none, along the first.

    Attributes:
        name: what follows the module's name in the files, such as `weight_scale_inv`; "": the
            files hold none, and another's `quantize` fills the parameter.
        other_ending: what some producers add to the name.
        parameter: of the layer; "": the tensor fills none, and is what `required` says, or of no
            use, and may be missing.
        axes: of the tensor; a number is a size that does not depend on the matrix.
        stored: dtypes that the files may hold.
        dtype: of the parameter; None: the model's.
        dummy: mean and standard deviation of random values.
        required: the only value that is supported, for a module of (rows, columns).
        otherwise: what another value means, for the error.
        quantize: floats `[rows, columns]` of the files → the parameter's values, and their scales
            `[rows, 1]`, which go to the same rows of `weight_scale`.
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
        """The tensor's dimension along which the parts of a merged layer follow each other."""
        found = [
            i for i, axis in enumerate(self.axes)
            if isinstance(axis, Axis) and axis.dimension == "out"
        ]  # fmt: skip
        return found[0] if found else 0

    def cuts(self, rows: Share, columns: Share, what: str) -> list[tuple[slice, ...]]:
        """What a layer that holds these rows and columns of a module reads of its tensor, in the
        order in which the pieces follow each other along `merged_axis`; an empty index is all.

        Raises:
            ValueError: a piece would cut through a block; names `what`.
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
    """What the files hold of a parameter: a module's tensor, or a rank's piece of it.

    Attributes:
        name: of the tensor; what follows the module's name, until the loader has found it.
        part: the module, see `Linear.parts`.
        parameter: "": the tensor fills none, and must hold what its layout requires, if that is
            anything.
        shape: of the whole tensor in the file.
        module: rows and columns of the module.
        place: index of the parameter's part that is filled.
        cut: index of the file's tensor that fills it; empty: all of it.
        transposed: the tensor's last two axes are those of the part the other way round.
        is_zero: the part is zeros instead: the first rank has the tensor.
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
        """Whether the tensor is needed; one that is not may be missing."""
        return bool(self.parameter) or self.layout.required is not None


def pieces_of(
    part: str, layout: TensorLayout, rows: Share, columns: Share, start: int = 0
) -> Iterator[StoredTensor]:
    """The pieces of one module's tensor.

    Args:
        rows, columns: what is held of the module.
        start: where the module begins along the parameter's merged axis.

    Raises:
        ValueError: a piece would cut through a block.
    """
    axis, whole = layout.merged_axis, layout.shape(rows.size, columns.size)
    for cut in layout.cuts(rows, columns, f"{part}.{layout.name}".lstrip(".")):
        indices = range(whole[axis])[cut[axis]] if cut else range(whole[axis])
        stop = start + len(indices)
        yield StoredTensor(
            name=layout.name, part=part, parameter=layout.parameter, layout=layout, shape=whole,
            module=(rows.size, columns.size),
            place=(*[slice(None)] * axis, slice(start, stop)), cut=cut,
        )  # fmt: skip
        start = stop


class LinearMethod(ABC):
    """How a linear layer's weights are stored and applied. One value may serve many layers.

    Attributes:
        weight_format: for dispatch tables: `plain`, or a key of `formats.METHODS`.
        operation: the dispatch table's name of a multiplication by such weights.
        kernels: the model's dispatch table, if it has rows for `operation`; None: plain torch.
    """

    weight_format: str
    operation: str
    kernels: KernelTable | None = None

    @abstractmethod
    def layouts(self, layer: "Linear") -> tuple[TensorLayout, ...]:
        """The tensors of each module, without the bias."""

    def process_weights_after_loading(self, layer: "Linear") -> None:  # noqa: B027 - nothing to do
        """Brings loaded parameters into the form that `apply` wants; called once."""

    @abstractmethod
    def apply(self, layer: "Linear", x: Tensor) -> Tensor:
        """`[..., in_features]` → `[..., out_features]`, with the bias, if there is one."""

    @abstractmethod
    def weight(self, layer: "Linear") -> Any:  # noqa: ANN401 - the format's
        """The layer's matrix as its kernels take it; an index gives one of a stack."""

    @abstractmethod
    def rows(self) -> Sequence[Implementation[Any]]:
        """The rows that the format brings to a dispatch table: of `operation`, and of operations
        that fuse a multiplication with its neighbours. They come before the table's own, and are
        chosen for layers of this format alone.
        """


_WEIGHT = TensorLayout(name="weight", parameter="weight", axes=(Axis("out"), Axis("in")))
_BIAS = TensorLayout(name="bias", parameter="bias", axes=(Axis("out"),))


class UnquantizedLinear(LinearMethod):
    """`weight` `[out_features, in_features]` in the model's dtype."""

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
        return ()  # the table's own


class Linear(nn.Module):
    """`y = x @ W.T + b`; of several modules of the same input, one GEMM.

    Parameters of a merged layer hold the parts one after the other, named as the checkpoint names
    them: with `self.qkv_proj = Linear(hidden, {"q_proj": 2048, "k_proj": 1024, "v_proj": 1024})`
    under `self_attn`, the rows of `self_attn.qkv_proj.weight` are `self_attn.q_proj.weight`,
    `self_attn.k_proj.weight` and `self_attn.v_proj.weight`.

    Attributes:
        parts: the checkpoint's modules whose rows follow each other here → their rows. A layer
            that is not merged has one, named "".
        method: of storing and applying the weights; the loader may change it before the parameters
            have memory (`set_method`).
        rows: by part, what the layer holds of the module's rows.
        columns: what it holds of the modules' columns. Where that is not all, its output is a term
            of a sum over ranks, and the bias is the first rank's.
    """

    stack: tuple[int, ...] = ()  # leading sizes of its parameters
    weight: nn.Parameter  # its dtype and shape are the method's
    weight_scale: nn.Parameter  # where the method has one, as the next
    weight_zero: nn.Parameter
    weight_row_scale: nn.Parameter
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
        """Registers the method's parameters instead of those that there are."""
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
        """The tensors of each module, with the bias."""
        return self.method.layouts(self) + ((_BIAS,) if self._has_bias else ())

    def regions(self, layout: TensorLayout) -> Iterator[tuple[str, int, int]]:
        """Yields each part's name, and the first and last + 1 index that it fills along the
        parameter's merged axis.
        """
        start = 0
        for part, rows in self.parts.items():
            stop = start + layout.shape(rows, self.in_features)[layout.merged_axis]
            yield part, start, stop
            start = stop

    def pieces(self, layout: TensorLayout) -> Iterator[StoredTensor]:
        """What fills the parameter: the parts' tensors, or a rank's pieces of them.

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
        """Whether `weight` is all there is to multiply with, so that a fused operation may."""
        return self.weight_format == UnquantizedLinear.weight_format

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        return self.method.apply(self, x)


class StoredLayers(nn.Module, ABC):
    """Stacked layers that files hold in one of several layouts: the experts of a mixture."""

    @property
    @abstractmethod
    def weight_format(self) -> str:
        """Of all layers, for dispatch tables; the formats joined where they differ."""

    @abstractmethod
    def file_layout(self, prefix: str, tensors: Mapping[str, TensorInfo]) -> str:
        """How the files' tensors under `prefix` are laid out."""

    @abstractmethod
    def modules_of(self, layer: str, layout: str) -> dict[str, str]:
        """The files' modules of a layer → their weights' tensors; names without the prefix."""

    @abstractmethod
    def tensors(self, layout: str) -> Iterator[StoredTensor]:
        """All that the files hold, once the layers have their methods; names without the prefix,
        and parameters as this module calls them.
        """


def set_kernels(module: nn.Module, kernels: KernelTable) -> None:
    """Layers call a dispatch table from now on, where it has rows for their format."""
    for layer in module.modules():
        if isinstance(layer, Linear) and layer.method.operation in kernels.operations:
            layer.method.kernels = kernels
