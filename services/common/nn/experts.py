"""The router and the experts of a mixture, and the layouts in which checkpoints hold experts.

| layout     | gate and up                        | down                           |
|------------|------------------------------------|--------------------------------|
| per expert | `N.{gate,up}_proj.weight` `[I, H]` | `N.down_proj.weight` `[H, I]`  |
| fused      | `gate_up_proj` `[E, 2 * I, H]`     | `down_proj` `[E, H, I]`        |
| transposed | `gate_up_proj` `[E, H, 2 * I]`     | `down_proj` `[E, I, H]`        |

Names tell the first from the others, shapes these from each other: where H = 2 * I gate and up have
the same shape in both, where H = I down has, never both. Scales of a fused tensor follow its name
(`down_proj_scale_inv`) and are transposed as it is. In memory the layout is `fused`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import plain
from services.common.nn.checkpoint import CheckpointError, TensorInfo
from services.common.nn.collectives import Share
from services.common.nn.linear import (
    Axis,
    Linear,
    StoredLayers,
    StoredTensor,
    TensorLayout,
    pieces_of,
)
from services.common.nn.quantized import QuantizedLinear

FileLayout = Literal["per expert", "fused", "transposed"]


class Router(Linear):
    """Scores the experts for each token.

    Args:
        hidden_size: of a token.
        num_experts: E.
        top_k: experts that a token goes to.
        normalize: their probabilities are scaled to a sum of 1.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, normalize: bool) -> None:
        super().__init__(hidden_size, num_experts)
        self.top_k = top_k
        self.normalize = normalize


class StackedLinear(Linear):
    """Merged layers of one shape as one, with a leading axis: what the experts of a mixture have.

    It is not called: an operation reads the matrices that its tokens need.
    """

    def __init__(
        self, count: int, in_features: int | Share, parts: Mapping[str, int | Share]
    ) -> None:
        self.stack = (count,)
        super().__init__(in_features, parts)

    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("a stack of layers is not called as one")


class Experts(StoredLayers):
    """Gated MLPs of one size, without biases.

    Args:
        count: of the experts, E.
        hidden_size: H.
        intermediate_size: I, or a rank's share of it.
    """

    def __init__(self, count: int, hidden_size: int, intermediate_size: int | Share) -> None:
        super().__init__()
        self.count = count
        size = intermediate_size
        self.gate_up_proj = StackedLinear(count, hidden_size, {"gate_proj": size, "up_proj": size})
        self.down_proj = StackedLinear(count, size, {"down_proj": hidden_size})

    @property
    def stacks(self) -> dict[str, StackedLinear]:
        return {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}

    @property
    def weight_format(self) -> str:
        return "+".join(dict.fromkeys(stack.weight_format for stack in self.stacks.values()))

    def file_layout(self, prefix: str, tensors: Mapping[str, TensorInfo]) -> FileLayout:
        found = [tensors.get(f"{prefix}.{name}") for name in self.stacks]
        if not any(found):
            return "per expert"
        for info, stack in zip(found, self.stacks.values(), strict=True):
            rows, columns = sum(each.size for each in stack.rows.values()), stack.columns.size
            if rows != columns and info is not None and info.shape[1:] == (columns, rows):
                return "transposed"
        return "fused"

    def modules_of(self, layer: str, layout: str) -> dict[str, str]:
        if layout != "per expert":
            return {layer: layer}
        parts = self.stacks[layer].parts
        names = [f"{expert}.{part}" for expert in range(self.count) for part in parts]
        return {name: f"{name}.weight" for name in names}

    def tensors(self, layout: str) -> Iterator[StoredTensor]:
        """Raises CheckpointError if a fused tensor has scales of blocks that gate and up share."""
        for name, stack in self.stacks.items():
            for tensor in filter(lambda layout: layout.name, stack.layouts()):
                parameter = f"{name}.{tensor.parameter}" if tensor.parameter else ""
                if layout == "per expert":
                    found = _of_experts(self.count, stack, tensor)
                else:
                    found = _fused(self.count, name, stack, tensor, layout == "transposed")
                yield from (replace(each, parameter=parameter) for each in found)


def _of_experts(count: int, stack: StackedLinear, layout: TensorLayout) -> Iterator[StoredTensor]:
    for expert in range(count):
        for piece in stack.pieces(layout):
            source = f"{expert}.{piece.part}.{layout.name}"
            yield replace(piece, name=source, place=(expert, *piece.place))


def _fused(
    count: int, name: str, stack: StackedLinear, layout: TensorLayout, transposed: bool
) -> Iterator[StoredTensor]:
    axes = [axis for axis in layout.axes if isinstance(axis, Axis) and axis.dimension == "out"]
    parts = [rows.size for rows in stack.rows.values()]
    if any(rows % axis.per for axis in axes for rows in parts[:-1]):
        raise CheckpointError(
            f"{name}: scales of {axes[0].per} rows are not supported where gate and up are one "
            f"tensor of {parts[0]} rows each"
        )
    source = f"{name}{layout.name.removeprefix('weight')}"
    way = -1 if transposed else 1
    pieces = pieces_of("", layout, Share.joined([*stack.rows.values()]), stack.columns)
    if layout.parameter and not axes:  # one number, which is that of gate and of up
        pieces = stack.pieces(layout)
    for piece in pieces:
        for expert in range(count):
            yield replace(
                piece, name=source, shape=(count, *piece.shape[::way]),
                place=(expert, *piece.place), cut=(expert, *piece.cut[::way]),
                transposed=transposed,
            )  # fmt: skip


def apply_one(stack: StackedLinear, index: int, x: Tensor) -> Tensor:
    """One of a stack's matrices, in plain torch: `[T, K]` → `[T, N]`."""
    weight = stack.method.weight(stack)[index]
    if isinstance(stack.method, QuantizedLinear):
        return stack.method.multiply(x, weight)
    return F.linear(x, weight)


def moe(x: Tensor, router: Router, experts: Experts, residual: Tensor) -> Tensor:
    """The sum of the outputs of each token's experts, weighted by their probabilities.

    A token's sum is in float32 and in the order of the experts, whatever the other tokens are.

    Args:
        x: `[T, hidden]`.
        router: of the layer.
        experts: of the layer.
        residual: not read: implementations may add to it in place and return None instead.

    Returns:
        `[T, hidden]`.
    """
    chosen, weights = plain.route(router(x), router.top_k, normalize=router.normalize)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    up, down = experts.gate_up_proj, experts.down_proj
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        hidden = plain.silu_and_mul(apply_one(up, expert, x[token]))
        out = apply_one(down, expert, hidden)
        total[token] += out.float() * weights[token, slot, None].float()
    return total.to(x.dtype)
