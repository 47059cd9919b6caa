"""Linear layers. What the weights look like and how they multiply is a method's business.

A quantization format is one `LinearMethod`; the layers, the models and the loader do not change.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.common.nn import cublaslt


def sum_parts(product: Tensor, dtype: torch.dtype) -> Tensor:
    """A product `[T, N]` as it is, or from its parts `[S, T, N]` float32, rounded to `dtype`."""
    return product if product.dim() == 2 else product.sum(0).to(dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, by a kernel of our choice where we know a better one."""
    if x.is_cuda and x.dim() == 2:
        found = cublaslt.linear(x, weight, bias)
        if found is not None:
            return found
    return F.linear(x, weight, bias)


def add_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """`residual += x @ weight.T + bias` as one kernel, where that takes less time than a product
    and a sum; else False, and nothing is done. It is as exact as these; whether the product is
    rounded before it is added is the library's business.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`.
        bias: `[N]`.
        residual: `[T, N]`, contiguous.
    """
    if not x.is_cuda or x.itemsize != 2 or not cublaslt.are_many(len(x)):
        return False
    if cublaslt.linear(x, weight, bias, residual=residual) is None:
        if bias is not None:
            return False
        residual.addmm_(x, weight.t())
    return True


class LinearMethod(Protocol):
    """How one linear layer stores and applies its weights."""

    def create_weights(self, layer: nn.Module, in_features: int, out_features: int) -> None:
        """Registers the layer's parameters (called while the model is built on `meta`)."""
        ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Brings loaded parameters into the form that `apply` wants; called once."""
        ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """`[..., in_features]` → `[..., out_features]`, without the bias."""
        ...


class UnquantizedLinear:
    """`weight` `[out_features, in_features]` in the model's dtype."""

    def create_weights(self, layer: nn.Module, in_features: int, out_features: int) -> None:
        """Registers `weight`."""
        weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: the weight is used as it is stored."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """`x @ weight.T`."""
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return multiply(x, weight)


class Linear(nn.Module):
    """`y = x @ W.T + b`."""

    weight: nn.Parameter  # where the method makes one: `UnquantizedLinear` does

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.method: LinearMethod = method or UnquantizedLinear()
        self.method.create_weights(self, in_features, out_features)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @property
    def is_plain(self) -> bool:
        """Whether `weight` is all there is to multiply with, so that a fused operation may."""
        return type(self.method) is UnquantizedLinear

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` → `[..., out_features]`."""
        if self.bias is not None and self.is_plain:
            return multiply(x, self.weight, self.bias)  # one kernel
        y = self.method.apply(self, x)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


class MergedLinear(Linear):
    """Several linear layers of the same input as one matrix product.

    Its parameters hold the parts' rows one after the other. The parts are named as the checkpoint
    names them, so the loader knows where each row comes from: with
    `self.qkv_proj = MergedLinear(hidden, {"q_proj": 2048, "k_proj": 1024, "v_proj": 1024})` under
    `self_attn`, the rows of `self_attn.qkv_proj.weight` are `self_attn.q_proj.weight`,
    `self_attn.k_proj.weight` and `self_attn.v_proj.weight`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, method)
        self.parts = dict(parts)
