"""The router and the experts of a mixture, and the layouts in which checkpoints hold experts.

| layout     | gate and up                        | down                           |
|------------|------------------------------------|--------------------------------|
| per expert | `N.{gate,up}_proj.weight` `[I, H]` | `N.down_proj.weight` `[H, I]`  |
| fused      | `gate_up_proj` `[E, 2 * I, H]`     | `down_proj` `[E, H, I]`        |
| transposed | `gate_up_proj` `[E, H, 2 * I]`     | `down_proj` `[E, I, H]`        |

`per expert` is recognized by the names, and `fused` and `transposed` are told apart by the shapes.
`gate_up_proj` has the same shape in both if H = 2 * I, and `down_proj` if H = I, so at least one of
the tensors always differs. The name of a fused tensor's scales is the tensor's own with an ending
(`down_proj_scale_inv`); they are transposed if the tensor is. In memory the layout is `fused`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import plain
from services.common.nn.adapter_stack import AdapterRows
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
    """Linear layer that scores the experts for each token.

    Args:
        hidden_size: elements of a token's hidden state.
        num_experts: number of experts, E.
        top_k: number of experts that a token goes to.
        normalize: True if the probabilities of a token's experts are scaled to a sum of 1.
    """

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, *, normalize: bool) -> None:
        super().__init__(hidden_size, num_experts)
        self.top_k = top_k
        self.normalize = normalize


class StackedLinear(Linear):
    """The same merged linear layer of all experts, stacked along a leading axis.

    A stack is not called as a layer. Operations read the matrices that their tokens need.
    """

    def __init__(
        self, count: int, in_features: int | Share, parts: Mapping[str, int | Share]
    ) -> None:
        self.stack = (count,)
        super().__init__(in_features, parts)

    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("StackedLinear cannot be called: it holds the layers of several experts")


class Experts(StoredLayers):
    """The experts of a layer: gated MLPs of the same size, without biases.

    Args:
        count: number of experts, E.
        hidden_size: elements of a token's hidden state, H.
        intermediate_size: elements of an expert's hidden layer, I, or this rank's share of these.
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
        """Yields the tensors that the files hold, see `StoredLayers.tensors`.

        Raises:
            CheckpointError: gate and up share a block of scales in a fused tensor.
        """
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
            f"{name}: scales per {axes[0].per} rows are not supported, because gate and up are one "
            f"tensor with {parts[0]} rows each"
        )
    source = f"{name}{layout.name.removeprefix('weight')}"
    way = -1 if transposed else 1
    pieces = pieces_of("", layout, Share.joined([*stack.rows.values()]), stack.columns)
    if layout.parameter and not axes:  # a single scale that gate and up share
        pieces = stack.pieces(layout)
    for piece in pieces:
        for expert in range(count):
            yield replace(
                piece,
                name=source,
                shape=(count, *piece.shape[::way]),
                place=(expert, *piece.place),
                cut=(expert, *piece.cut[::way]),
                transposed=transposed,
            )


def apply_one(stack: StackedLinear, index: int, x: Tensor) -> Tensor:
    """Multiplies by one matrix of a stack in plain torch: `[T, K]` → `[T, N]`."""
    weight = stack.method.weight(stack)[index]
    if isinstance(stack.method, QuantizedLinear):
        return stack.method.multiply(x, weight)
    return F.linear(x, weight)


def _adapted(stack: StackedLinear, index: int, x: Tensor, slots: Tensor | None) -> Tensor:
    """Applies one matrix of a stack, and the adapters in the tokens' `slots` `[T]`, if any."""
    out = apply_one(stack, index, x)
    if slots is None or stack.adapters is None:
        return out
    return stack.adapters.add(out, x, index, slots)


def moe(
    x: Tensor,
    router: Router,
    experts: Experts,
    residual: Tensor,
    adapters: AdapterRows | None = None,
) -> Tensor:
    """Computes a mixture of experts: the sum of the experts' outputs, weighted by probabilities.

    A token's sum is computed in float32 and in the order of the experts' indices, so that batch
    composition does not change it.

    Args:
        x: hidden states `[T, hidden]`.
        router: the layer's router.
        experts: the layer's experts.
        residual: residual stream `[T, hidden]`. This implementation does not read it. Kernels of
            the same operation may add their result to the stream and return None.
        adapters: adapters of the tokens. None if no token has one.

    Returns:
        Weighted sums `[T, hidden]`.
    """
    scores = router(x)
    if adapters is not None and router.adapters is not None:
        scores = router.adapters.add(scores, x, adapters)
    chosen, weights = plain.route(scores, router.top_k, normalize=router.normalize)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    up, down = experts.gate_up_proj, experts.down_proj
    for expert in chosen.unique().tolist():
        token, slot = torch.where(chosen == expert)
        slots = None if adapters is None else adapters.slots[token]
        hidden = plain.silu_and_mul(_adapted(up, expert, x[token], slots))
        out = _adapted(down, expert, hidden, slots)
        total[token] += out.float() * weights[token, slot, None].float()
    return total.to(x.dtype)
